"""Another block count for a compiled artifact: first planned, then applied.

Planning reads and computes; it writes nothing. Applying builds the resized artifact beside its
target, reads it back, and only then puts it in place.
"""

from __future__ import annotations

import os
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

from reblock.artifact.checksum import check_digest, program_digest
from reblock.artifact.location import CONFIG_NAME
from reblock.artifact.previous import PREVIOUS_NAME, previous_text
from reblock.artifact.program import write_resized
from reblock.artifact.reader import open_artifact, read_artifact
from reblock.artifact.rebel import write_compiled
from reblock.artifact.transaction import (
    Sharing,
    begin_edit,
    check_destination,
    copy_with,
    replace_files,
)
from reblock.block_count import parse_block_count
from reblock.budget import MemoryBudget
from reblock.errors import BadArtifact, BelowMinimum, DoesNotFit, EditFailed, NotResizable
from reblock.progress import SilentProgress
from reblock.sizing import estimate, smallest_budget
from reblock.units import format_bytes, format_gib

if TYPE_CHECKING:
    from collections.abc import Iterator

    from reblock.artifact.program import ProgramFile
    from reblock.artifact.reader import Artifact
    from reblock.artifact.transaction import EditLock
    from reblock.config import RBLNConfig
    from reblock.info import ReblockInfo
    from reblock.memory import Grid, MemoryPlan
    from reblock.progress import Progress
    from reblock.sizing import Sizing

__all__ = ["ResizePlan", "apply_resize", "check_resizable", "plan_resize"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ResizePlan:
    """What a resize would change; bytes are of one device.

    `sizing` says how a memory budget was turned into the count, and is None where the count was
    given. Nothing in `warnings` keeps the resize from being done.
    """

    num_blocks_before: int
    num_blocks_after: int
    kv_bytes_before: int
    kv_bytes_after: int
    sizing: Sizing | None
    warnings: tuple[str, ...]

    @property
    def is_change(self) -> bool:
        """Whether the count would be another one."""
        return self.num_blocks_before != self.num_blocks_after


def check_resizable(config: RBLNConfig, directory: str) -> None:
    """Check that the artifact in `directory` has a cache that can be resized.

    Raises:
        NotResizable: It has none.
    """
    if not any(config.resizable.values()):
        raise NotResizable(
            f"none of its {len(config.cache_metas)} caches can be resized: it was compiled with "
            f"{config.attn_impl!r} attention for a fixed count, {config.kvcache_num_blocks}. "
            "Compile it with attn_impl='flash_attn' to make the count changeable",
            path=directory,
        )


def plan_resize(artifact: Artifact, target: int | MemoryBudget) -> ResizePlan:
    """Return what it takes to give `artifact` another block count.

    Args:
        artifact: The artifact; it is not changed.
        target: The new count, or a budget into which as many blocks as possible are to fit.

    Raises:
        NotResizable: It has no cache that can be resized.
        InvalidBlockCount: The count is no whole number from 1 to 2,147,483,647.
        BelowMinimum: The count is below what its programs need.
        BudgetAboveDevice: The budget is more than the device has.
        BudgetTooSmall: Not even the fewest blocks that the programs need fit into the budget.
    """
    check_resizable(artifact.config, artifact.directory)
    plan = artifact.memory_plan()
    warnings = _warn_of_left_over_programs(artifact)
    sizing: Sizing | None = None
    if isinstance(target, MemoryBudget):
        sizing = estimate(plan, artifact.bounds, device=artifact.device(), budget=target)
        num_blocks = sizing.num_blocks
    else:
        num_blocks = parse_block_count(target)
        _check_minimum(artifact, num_blocks)
        warnings += _warn_of_size(artifact, plan, num_blocks)
    return ResizePlan(
        num_blocks_before=plan.current_blocks,
        num_blocks_after=num_blocks,
        kv_bytes_before=_largest_node(plan.kv_bytes_at(plan.current_blocks)),
        kv_bytes_after=_largest_node(plan.kv_bytes_at(num_blocks)),
        sizing=sizing,
        warnings=tuple(warnings),
    )


def apply_resize(
    artifact: Artifact,
    plan: ResizePlan,
    output_dir: str | None = None,
    *,
    lock: EditLock | None = None,
    is_copied: bool = False,
    progress: Progress | None = None,
    is_last: bool = False,
) -> list[str]:
    """Carry out `plan`, on the artifact itself or on a copy of it at `output_dir`.

    In place, a plan that changes nothing writes nothing. A copy is always made.

    Args:
        artifact: The artifact that `plan` was made for.
        plan: What to do.
        output_dir: Where the copy goes; None for the artifact itself.
        lock: What `begin_edit` gave for the directory, where the artifact was opened under it.
            Without, the directory is locked now, which waits for other edits of it.
        is_copied: Whether a copy shares no file with the artifact. By default large files are
            shared, as clones where the file system has them and else by hard links.
        progress: Is told of large files that have to be copied.
        is_last: Whether Ctrl-C, SIGTERM and SIGHUP stay ignored once the change is made, for a
            command that then has only to say so and to end.

    Returns:
        Notes on what the edit, which is done, has left over.

    Raises:
        InvalidDestination: `output_dir` is empty text, the artifact itself or inside it.
        DestinationExists: `output_dir` exists and is not an empty directory.
        EditFailed: The system refused a write, or the artifact is another one by now; it is left
            as it is.
    """
    if output_dir is not None:
        check_destination(output_dir, source=artifact.directory)
    elif not plan.is_change:
        return []
    progress = progress or SilentProgress()
    edit = _Edit(artifact, plan, progress)
    with nullcontext(lock) if lock is not None else _lock_opened(artifact) as held:
        if output_dir is None:
            return replace_files(
                held,
                names=edit.names,
                write=edit.write,
                check=edit.check,
                progress=progress,
                is_last=is_last,
            )
        return copy_with(
            held,
            output_dir,
            names=edit.names,
            write=edit.write,
            check=edit.check,
            sharing=Sharing.COPY if is_copied else Sharing.SHARE,
            progress=progress,
            is_last=is_last,
        )


@contextmanager
def _lock_opened(artifact: Artifact) -> Iterator[EditLock]:
    """Lock the directory of an artifact and check that it still is as it was opened."""
    directory = artifact.directory
    with begin_edit(directory) as lock:
        if open_artifact(directory, artifact.module) != artifact:
            raise EditFailed(
                f"{directory!r} was changed since it was opened, and is left as it is now; open it "
                "again",
                path=directory,
            )
        yield lock


def _check_minimum(artifact: Artifact, num_blocks: int) -> None:
    minimum = artifact.bounds.minimum
    if num_blocks < minimum:
        raise BelowMinimum(
            f"kvcache_num_blocks={num_blocks} is below the {minimum} blocks that the programs in "
            f"{artifact.directory} need (max_seq_len {artifact.config.max_seq_len}, block size "
            f"{artifact.config.kvcache_block_size}, batch size {artifact.config.batch_size}); "
            f"use {minimum} or more, or compile with a lower max_seq_len or batch_size",
            num_blocks=num_blocks,
            num_min_blocks=minimum,
        )


def _warn_of_left_over_programs(artifact: Artifact) -> list[str]:
    known = {os.path.basename(program.path) for program in artifact.programs}
    place = os.path.join(artifact.directory, artifact.module or "")
    names = [name for name in os.listdir(place) if name.endswith(".rbln")]
    return [
        f"{name} belongs to no program of this artifact and is carried over as it is"
        for name in sorted(names)
        if name not in known
    ]


def _warn_of_size(artifact: Artifact, plan: MemoryPlan, num_blocks: int) -> list[str]:
    warnings = _warn_of_device(artifact, plan, num_blocks)
    full = artifact.bounds.full
    if num_blocks > full:
        unused = _largest_node(plan.kv_bytes_at(num_blocks)) - _largest_node(plan.kv_bytes_at(full))
        warnings.append(
            f"{num_blocks} blocks are more than the {full} that these programs can ever use; the "
            f"other {num_blocks - full} take {format_gib(unused)} for nothing"
        )
    return warnings


def _warn_of_device(artifact: Artifact, plan: MemoryPlan, num_blocks: int) -> list[str]:
    if artifact.config.npu is None:
        warning = "the artifact does not say which device it was compiled for, so whether "
        return [f"{warning}{num_blocks} blocks fit was not checked"]
    warnings = []
    device = artifact.device()
    needed, available = smallest_budget(plan, num_blocks), device.available_bytes
    if needed > available:
        try:
            count = estimate(plan, artifact.bounds, device=device).num_blocks
            largest = f"the most that fit and can be used are {count}"
        except DoesNotFit:
            largest = f"not even the minimum of {artifact.bounds.minimum} fits"
        warnings.append(
            f"{num_blocks} blocks need {format_bytes(needed)} of each device, but {device.name} "
            f"has {format_bytes(available)} available; {largest}"
        )
    return warnings


def _largest_node(grid: Grid) -> int:
    return max(map(sum, grid))


class _Edit:
    """What a resize writes, and the check of what was written; names are within the artifact."""

    def __init__(self, artifact: Artifact, plan: ResizePlan, progress: Progress) -> None:
        self._artifact = artifact
        self._plan = plan
        self._progress = progress
        self._programs = {
            self._name(f"{program.name}.rbln"): program for program in artifact.programs
        }

    @property
    def names(self) -> list[str]:
        """The files that are written."""
        outer = [config.name for config in self._artifact.outer]
        names = [*self._programs, self._name(CONFIG_NAME), *outer]
        return [*names, self._name(PREVIOUS_NAME)] if self._plan.is_change else names

    def write(self, directory: str) -> None:
        """Write the files that a resize changes into `directory`.

        Raises:
            CorruptArtifact: A program of the artifact is not the one that was compiled.
            CompilerTooOld: It takes the RBLN compiler, which is too old.
        """
        num_blocks = self._plan.num_blocks_after
        write = self._write_compiled if self._info is None else self._write_program
        for name, program in self._programs.items():
            write(program, os.path.join(directory, name))
        config = self._artifact.config.with_num_blocks(num_blocks)
        _write_text(os.path.join(directory, self._name(CONFIG_NAME)), config.text)
        for outer in self._artifact.outer:
            _write_text(os.path.join(directory, outer.name), outer.with_num_blocks(num_blocks))
        if self._plan.is_change:
            text = previous_text(self._plan.num_blocks_before)
            _write_text(os.path.join(directory, self._name(PREVIOUS_NAME)), text)

    def check(self, directory: str, changed_in: str | None) -> None:
        """Read the artifact back and check that it is the same, at the new count.

        Raises:
            EditFailed: It is not.
        """
        num_blocks = self._plan.num_blocks_after
        try:
            staged = read_artifact(directory, changed_in, module=self._artifact.module)
            plan, expected = staged.memory_plan(), self._artifact.memory_plan()
            for program in staged.programs:
                self._check_digest(program)
        except BadArtifact as error:
            raise EditFailed(
                f"the resized artifact does not read back, so nothing was changed: {error}",
                path=directory,
            ) from error
        if (
            plan.current_blocks != num_blocks
            or plan.kv_unaligned_bytes_at(num_blocks) != expected.kv_unaligned_bytes_at(num_blocks)
            or plan.static != expected.static
        ):
            raise EditFailed(
                f"the resized artifact reads back with {plan.current_blocks} blocks instead of "
                f"{num_blocks} or with other sizes, so nothing was changed",
                path=directory,
            )

    @property
    def _info(self) -> ReblockInfo | None:
        return self._artifact.config.reblock

    def _name(self, name: str) -> str:
        return os.path.join(self._artifact.module or "", name)

    def _write_program(self, program: ProgramFile, destination: str) -> None:
        # A program that is another one is not to be passed on as if it were in order.
        self._check_digest(program)
        memory, num_blocks = self._artifact.memory_plan(), self._plan.num_blocks_after
        sizes = {c.name: c.bytes_at(num_blocks, memory.current_blocks) for c in memory.caches}
        write_resized(
            program.path,
            destination,
            dram={cache: sizes[cache] for cache in program.memory.caches},
            num_blocks=num_blocks,
        )

    def _write_compiled(self, program: ProgramFile, destination: str) -> None:
        resizable = self._artifact.config.resizable
        # The weights lie in the program, so this can take a while.
        with self._progress.stage(f"writing {os.path.basename(destination)}"):
            write_compiled(
                program.path,
                destination,
                caches=[name for name in program.memory.caches if resizable.get(name)],
                target=self._plan.num_blocks_after,
                current=self._artifact.config.kvcache_num_blocks,
            )

    def _check_digest(self, program: ProgramFile) -> None:
        """Check that a program is the one that was compiled, where a digest was recorded.

        Raises:
            CorruptArtifact: It is not.
        """
        if self._info is not None:
            expected = self._info.programs[program.name]
            check_digest(program_digest(program.path), expected, path=program.path)


def _write_text(path: str, text: str) -> None:
    # No newline is translated: a file keeps those that it had.
    with open(path, "x", encoding="utf-8", newline="") as file:
        file.write(text)
