"""What all configurations have: keywords of the runtime and the compiler, and `rbln_config.json`.

Of a file that was loaded, only what was changed since is written in another way: keys that are
not known here, the order of all and the final newline, or none, stay as they were.
"""

from __future__ import annotations

import difflib
import inspect
import json
import os
import tempfile
from typing import TYPE_CHECKING, ClassVar

from reblock.artifact.files import read_config_file, read_file
from reblock.artifact.location import CONFIG_NAME
from reblock.errors import CorruptArtifact, InvalidOption, UsageError
from reblock.json_fields import parse_json_object

if TYPE_CHECKING:
    from typing import Self

__all__ = ["RBLNModelConfig"]

_DTYPE_PREFIX = "torch."


class RBLNModelConfig:
    """The keywords that every configuration takes, and the file it is kept in."""

    _saved_names: ClassVar[tuple[str, ...]] = (
        "cls_name",
        "dtype",
        "optimum_rbln_version",
        "_compile_cfgs",
    )

    def __init__(
        self,
        cls_name: str | None = None,
        create_runtimes: bool | None = None,
        device: int | list[int] | None = None,
        device_map: dict[str, int | list[int]] | None = None,
        activate_profiler: bool | None = None,
        npu: str | None = None,
        num_devices: int | None = None,
        timeout: int | None = None,
        optimum_rbln_version: str | None = None,
        dtype: object = None,
        _compile_cfgs: list[object] | None = None,
        *,
        optimize_host_memory: bool | None = None,
        tensor_parallel_size: int | None = None,
        **unexpected: object,
    ) -> None:
        self._refuse(unexpected)
        self.cls_name = cls_name or type(self).__name__
        self.create_runtimes = create_runtimes
        self.device = device
        self.device_map = device_map
        self.activate_profiler = activate_profiler
        self.optimize_host_memory = optimize_host_memory
        self.timeout = timeout
        self.npu = npu
        self.num_devices = _one_of(num_devices, tensor_parallel_size)
        self.optimum_rbln_version = optimum_rbln_version
        self.dtype = _dtype_name(dtype)
        self._compile_cfgs: list[object] = []
        if _compile_cfgs:
            self.set_compile_cfgs(_compile_cfgs)
        # What the file had that this was loaded from, and what was made of it.
        self._file_values: dict[str, object] = {}
        self._loaded_values: dict[str, object] = {}
        self._file_ending = ""

    @property
    def tensor_parallel_size(self) -> int | None:
        """The older name of `num_devices`."""
        return self.num_devices

    @property
    def compile_cfgs(self) -> list[object]:
        """What each program was compiled with: its name, its inputs, its device."""
        return self._compile_cfgs

    def set_compile_cfgs(self, compile_cfgs: list[object]) -> None:
        """Set what each program is compiled with.

        Raises:
            InvalidOption: It is no list.
        """
        if not isinstance(compile_cfgs, list):
            raise InvalidOption(
                f"compile_cfgs={compile_cfgs!r} must be a list, with an entry for each program",
                option="_compile_cfgs",
            )
        self._compile_cfgs = compile_cfgs

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write `rbln_config.json`, into the directory `path` or as the file `path`.

        What belongs to a process and not to the artifact is left out: the device and its number,
        the runtime's keywords and the memory budget. The file is replaced in one step.
        """
        target = os.fspath(path)
        if os.path.isdir(target):
            target = os.path.join(target, CONFIG_NAME)
        text = json.dumps(self._prepare_for_serialization(), indent=2) + self._file_ending
        _replace(target, text)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Return the configuration in a directory, or in the file `path`.

        Raises:
            NotAnArtifact: No such directory is there, or it has no `rbln_config.json`.
            CorruptArtifact: The file is no configuration of a decoder-only model, or damaged.
        """
        source = os.fspath(path)
        if os.path.isfile(source):
            data = read_file(source)
        else:
            source, data = read_config_file(source)
        values = parse_json_object(data, path=source)
        try:
            config = cls._from_values(values)
        except UsageError as error:
            raise CorruptArtifact(str(error), path=source) from error
        config._file_values = values
        config._loaded_values = config._values()
        config._file_ending = "\n" if data.endswith(b"\n") else ""
        return config

    @classmethod
    def from_pretrained(cls, path: str | os.PathLike[str]) -> Self:
        """Return the configuration of the artifact in a directory, as `load` does."""
        return cls.load(path)

    @classmethod
    def _from_values(cls, values: dict[str, object]) -> Self:
        """Return the configuration that the values of a file stand for."""
        known = {name: values[name] for name in cls._saved_names if name in values}
        # Every keyword checks its own value.
        return cls(**known)  # type: ignore[arg-type]

    def _prepare_for_serialization(self) -> dict[str, object]:
        """Return what `rbln_config.json` holds."""
        values = self._values()
        if not self._file_values:
            return values
        changed = {
            name: value for name, value in values.items() if value != self._loaded_values.get(name)
        }
        return {**self._file_values, **changed}

    def _values(self) -> dict[str, object]:
        return {name: _plain(getattr(self, name)) for name in self._saved_names}

    def _refuse(self, unexpected: dict[str, object]) -> None:
        """Refuse keywords that are not known.

        Raises:
            InvalidOption: There is one.
        """
        if not unexpected:
            return
        known = [
            name
            for owner in type(self).__mro__[:-1]
            for name, parameter in inspect.signature(owner).parameters.items()
            if parameter.kind is not parameter.VAR_KEYWORD
        ]
        name = min(unexpected)
        close = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
        raise InvalidOption(
            f"{type(self).__name__} has no keyword {name!r}; the nearest it has is {close[0]!r}",
            option=name,
            nearest=close[0],
        )


def _one_of(num_devices: int | None, tensor_parallel_size: int | None) -> int | None:
    """Return the number of devices, which has two names."""
    if num_devices is None or tensor_parallel_size in (None, num_devices):
        return tensor_parallel_size if num_devices is None else num_devices
    raise InvalidOption(
        f"num_devices={num_devices} and tensor_parallel_size={tensor_parallel_size} are two names "
        "of one option; leave the second out",
        option="tensor_parallel_size",
    )


def _dtype_name(dtype: object) -> str:
    """Return the name of a dtype that was given as text or as torch's own."""
    if dtype is None:
        return "float32"
    name = str(dtype)
    if isinstance(dtype, str) or name.startswith(_DTYPE_PREFIX):
        return name.removeprefix(_DTYPE_PREFIX)
    raise InvalidOption(f"dtype={dtype!r} must be text such as 'bfloat16'", option="dtype")


def _plain(value: object) -> object:
    """Return a value as JSON can hold it."""
    for method in ("_prepare_for_serialization", "asdict"):
        if hasattr(value, method):
            return getattr(value, method)()
    return [_plain(item) for item in value] if isinstance(value, list) else value


def _replace(path: str, text: str) -> None:
    """Write a file beside `path` and put it in its place, so that no reader sees a part of it."""
    directory = os.path.dirname(path) or "."
    with tempfile.TemporaryDirectory(prefix=".rbln_config-", dir=directory) as staging:
        staged = os.path.join(staging, CONFIG_NAME)
        with open(staged, "x", encoding="utf-8", newline="\n") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(staged, path)
