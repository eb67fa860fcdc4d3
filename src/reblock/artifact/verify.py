"""A whole artifact checked, the files that no other command reads in full included.

Each check is told by itself and the others go on, so that one run finds all there is to find.
Nothing here loads a program: whoever calls says how that is done.
"""

from __future__ import annotations

import os
import stat
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from reblock.artifact.checksum import check_digest, file_digest, program_digest
from reblock.artifact.location import locate
from reblock.artifact.previous import read_previous
from reblock.artifact.reader import (
    PATIENCE_S,
    Artifact,
    generation,
    load_programs,
    open_artifact,
    read_config,
)
from reblock.errors import (
    BadArtifact,
    CompilerTooOld,
    MissingDependency,
    NoPreviousCount,
    NotAnArtifact,
)
from reblock.units import format_gib

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from reblock.artifact.program import ProgramFile
    from reblock.config import CompiledProgram, RBLNConfig
    from reblock.errors import ReblockError
    from reblock.info import ReblockInfo, WeightsFile
    from reblock.progress import Progress

__all__ = ["Check", "Outcome", "Verification", "verify_artifact"]

Outcome = Literal["passed", "failed", "skipped"]

_NO_CONFIG = "rbln_config.json cannot be read"
_NO_CHECKSUMS = "optimum-rbln records none"
_NO_DEVICE = "running it takes an RBLN device and optimum-rbln"
_QUICK = "a quick check leaves it out"


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """What one check found; `detail` says what was right, what was wrong, or why it was skipped."""

    name: str
    outcome: Outcome
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """What all checks of one artifact found, in their order.

    `num_blocks` is None where `rbln_config.json` cannot be read.
    """

    directory: str
    is_quick: bool
    num_blocks: int | None
    checks: tuple[Check, ...]

    @property
    def is_ok(self) -> bool:
        """Whether no check failed."""
        return not any(check.outcome == "failed" for check in self.checks)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Structure:
    """How far an artifact can be read; None stands for what cannot."""

    config: RBLNConfig | None
    artifact: Artifact | None
    checks: tuple[Check, ...]


def verify_artifact(
    directory: str,
    *,
    module: str | None = None,
    is_quick: bool,
    check_memory: Callable[[str], Check],
    progress: Progress,
) -> Verification:
    """Check everything in an artifact.

    Where an edit moves files while they are checked, a fault may be of none but the mix that was
    read, so everything is checked again.

    Args:
        directory: The artifact; what an edit left that was cut off is cleaned up, nothing else
            is changed.
        module: The module to check, by its path within the artifact, where it has several.
        is_quick: Leave out what takes reading the weights.
        check_memory: Loads the artifact, which runs code out of it, and says whether it takes the
            memory that it should. Called where no check before has failed.
        progress: Told about what takes long.

    Raises:
        NotAnArtifact: `directory` is no directory or has no `rbln_config.json`.
        OSError: The system does not let one see whether it is.
    """
    deadline = time.monotonic() + PATIENCE_S
    while True:
        before = generation(directory, module)
        found = _verify_once(
            directory,
            module=module,
            is_quick=is_quick,
            check_memory=check_memory,
            progress=progress,
        )
        is_settled = found.is_ok or generation(directory, module) == before
        if is_settled or time.monotonic() > deadline:
            return found


def _verify_once(
    directory: str,
    *,
    module: str | None,
    is_quick: bool,
    check_memory: Callable[[str], Check],
    progress: Progress,
) -> Verification:
    structure = _read_structure(directory, module)
    config = structure.config
    found = Verification(
        directory=directory,
        is_quick=is_quick,
        num_blocks=None if config is None else config.kvcache_num_blocks,
        checks=(
            *structure.checks,
            _check_memory_plan(structure),
            *_check_contents(directory, config, is_quick=is_quick, progress=progress),
            _check_previous(directory, module),
        ),
    )
    if reason := _reason_not_to_load(found, structure):
        memory = _skipped("memory", reason)
    else:
        with progress.stage("loading the artifact"):
            memory = check_memory(directory)
    return replace(found, checks=(*found.checks, memory))


def _reason_not_to_load(found: Verification, structure: _Structure) -> str | None:
    if not found.is_ok:
        return "nothing is loaded from an artifact that failed a check"
    if structure.artifact is None or structure.artifact.config.reblock is None:
        return _NO_DEVICE
    return _QUICK if found.is_quick else None


def _read_structure(directory: str, module: str | None) -> _Structure:
    try:
        artifact = open_artifact(directory, module)
    except NotAnArtifact:
        raise
    except (BadArtifact, MissingDependency, CompilerTooOld) as error:
        return _read_what_can_be_read(directory, module, error)
    return _Structure(
        config=artifact.config,
        artifact=artifact,
        checks=(_check_configuration(artifact.config), _check_programs(artifact.config, [])),
    )


def _read_what_can_be_read(directory: str, module: str | None, reason: ReblockError) -> _Structure:
    """Look for every fault of an artifact that cannot be opened for a reason."""
    try:
        config = read_config(directory, module=module)
    except BadArtifact as error:
        skipped = _skipped("programs", _NO_CONFIG)
        failed = _judged("configuration", [str(error)], "")
        return _Structure(config=None, artifact=None, checks=(failed, skipped))
    if config.reblock is None:
        is_fault = isinstance(reason, BadArtifact)
        programs_check = (
            _check_programs(config, [str(reason)])
            if is_fault
            else _skipped("programs", str(reason))
        )
        checks = (_check_configuration(config), programs_check)
        return _Structure(config=config, artifact=None, checks=checks)
    programs: list[ProgramFile] = []
    faults: list[str] = []
    for program in config.programs:
        try:
            programs.append(_load_alone(directory, config, config.reblock, program))
        except BadArtifact as error:
            faults.append(str(error))
    artifact = Artifact(directory=directory, config=config, programs=tuple(programs))
    return _Structure(
        config=config,
        artifact=None if faults else artifact,
        checks=(_check_configuration(config), _check_programs(config, faults)),
    )


def _load_alone(
    directory: str, config: RBLNConfig, info: ReblockInfo, program: CompiledProgram
) -> ProgramFile:
    """Return one program, checked against the configuration as all are when they are opened."""
    # The files of weights have checks of their own.
    alone = replace(config, programs=(program,), reblock=replace(info, weights={}))
    (loaded,) = load_programs(directory, alone)
    return loaded


def _check_configuration(config: RBLNConfig) -> Check:
    blocks = f"{config.kvcache_num_blocks:,} blocks of {config.kvcache_block_size:,} tokens"
    return _judged("configuration", [], blocks)


def _check_programs(config: RBLNConfig, faults: list[str]) -> Check:
    return _judged("programs", faults, ", ".join(program.name for program in config.programs))


def _check_memory_plan(structure: _Structure) -> Check:
    name = "memory plan"
    if structure.config is None:
        return _skipped(name, _NO_CONFIG)
    if structure.artifact is None:
        return _skipped(name, "the programs cannot be read")
    if structure.config.npu is None:
        return _skipped(name, "it does not say which device it was compiled for")
    try:
        structure.artifact.device()
        plan = structure.artifact.memory_plan()
    except BadArtifact as error:
        return _judged(name, [str(error)], "")
    total = max(map(sum, plan.total_at(plan.current_blocks)))
    return _judged(name, [], f"{format_gib(total)} on each device")


def _check_contents(
    directory: str, config: RBLNConfig | None, *, is_quick: bool, progress: Progress
) -> tuple[Check, ...]:
    """Check the files themselves, against what was noted of them when they were compiled."""
    names = ("program checksums", "weights size", "weights checksum")
    if config is None or config.reblock is None:
        reason = _NO_CONFIG if config is None else _NO_CHECKSUMS
        return tuple(_skipped(name, reason) for name in names)
    programs, weights = config.reblock.programs, config.reblock.weights
    paths = {os.path.join(directory, name): file for name, file in weights.items()}
    faults = [_program_fault(directory, name, digest) for name, digest in programs.items()]
    size = _judged(
        names[1],
        [_size_fault(path, file) for path, file in paths.items()],
        format_gib(sum(file.num_bytes for file in weights.values())),
    )
    if is_quick:
        checksum = _skipped(names[2], _QUICK)
    elif size.outcome == "failed":
        checksum = _skipped(names[2], "a size is wrong already")
    else:
        wrong = [_weights_fault(path, file, progress) for path, file in paths.items()]
        checksum = _judged(names[2], wrong, _files(len(weights)))
    return _judged(names[0], faults, _files(len(programs))), size, checksum


def _program_fault(directory: str, name: str, sha256: str) -> str | None:
    path = locate(directory, f"{name}.rbln")
    try:
        check_digest(program_digest(path), sha256, path=path)
    except (BadArtifact, OSError) as error:
        return _described(error, path)
    return None


def _size_fault(path: str, file: WeightsFile) -> str | None:
    try:
        status = os.stat(path)
    except FileNotFoundError:
        return f"{path}: the file of weights is missing"
    except OSError as error:
        return _described(error, path)
    if not stat.S_ISREG(status.st_mode):
        return f"{path}: is not a regular file"
    if status.st_size != file.num_bytes:
        return f"{path}: holds {status.st_size:,} bytes, not the {file.num_bytes:,} it should"
    return None


def _weights_fault(path: str, file: WeightsFile, progress: Progress) -> str | None:
    text = f"computing the checksum of {os.path.basename(path)}"
    try:
        with progress.bytes_stage(text, file.num_bytes) as advance:
            check_digest(file_digest(path, advance), file.sha256, path=path)
    except (BadArtifact, OSError) as error:
        return _described(error, path)
    return None


def _check_previous(directory: str, module: str | None) -> Check:
    name = "previous count"
    try:
        return _judged(name, [], f"{read_previous(directory, module):,} blocks")
    except NoPreviousCount:
        return _judged(name, [], "none, as the count was never changed")
    except BadArtifact as error:
        return _judged(name, [str(error)], "")


def _described(error: BadArtifact | OSError, path: str) -> str:
    return f"{path}: cannot be read: {error.strerror}" if isinstance(error, OSError) else str(error)


def _judged(name: str, faults: Iterable[str | None], detail: str) -> Check:
    """Return a check that failed where there is any fault, and else passed with `detail`."""
    found = [fault for fault in faults if fault is not None]
    if found:
        return Check(name=name, outcome="failed", detail="; ".join(found))
    return Check(name=name, outcome="passed", detail=detail)


def _skipped(name: str, reason: str) -> Check:
    return Check(name=name, outcome="skipped", detail=reason)


def _files(count: int) -> str:
    return "1 file" if count == 1 else f"{count:,} files"
