"""Which device programs are compiled for: the places where optimum-rbln writes its name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from reblock.errors import UsageError

__all__ = ["target_device"]


def target_device(rbln_config: object) -> str:
    """Return the name of the device that programs with this configuration are compiled for.

    That is its `npu` where it is set, else the one of the programs' own configurations, else
    that of a device attached to this machine, which the compiler tells where it is installed.

    Raises:
        UsageError: None of them says.
    """
    npu = getattr(rbln_config, "npu", None)
    if npu is None:
        names = (_npu(program) for program in _program_configs(rbln_config))
        npu = next((name for name in names if name is not None), None)
    if npu is None:
        npu = _attached_device()
    if not isinstance(npu, str):
        raise UsageError(
            "it is not known which device the programs are for: neither rbln_config.npu nor its "
            "compile_cfgs say, and no RBLN device is attached; set rbln_config.npu, to "
            "'RBLN-CA25' for example"
        )
    return npu


def _program_configs(rbln_config: object) -> Iterable[object]:
    for name in ("_compile_cfgs", "compile_cfgs"):
        found = getattr(rbln_config, name, None)
        if isinstance(found, (list, tuple)) and found:
            return found
    return ()


def _npu(program: object) -> object:
    return program.get("npu") if isinstance(program, Mapping) else getattr(program, "npu", None)


def _attached_device() -> object:
    try:
        import rebel
    except ImportError:
        return None
    name: object = rebel.get_npu_name()
    return name
