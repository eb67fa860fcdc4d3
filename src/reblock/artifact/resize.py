"""Another block count for a compiled artifact: first planned, then applied.

Planning reads and computes; it writes nothing. Applying builds the resized artifact beside its
target, reads it back, and only then puts it in place.
"""

from __future__ import annotations

import errno
import os
import stat
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from reblock.artifact.count import CONFIG_NAME
from reblock.artifact.lock import edit_lock
from reblock.artifact.program import write_resized
from reblock.artifact.reader import open_artifact, program_path
from reblock.artifact.stage import check_destination, keep_mode, stage_beside
from reblock.block_count import parse_block_count
from reblock.budget import MemoryBudget
from reblock.errors import BadArtifact, BelowMinimum, DoesNotFit, EditFailed, NotResizable
from reblock.sizing import estimate, smallest_budget
from reblock.units import format_bytes, format_gib

if TYPE_CHECKING:
    from collections.abc import Iterator

    from reblock.artifact.lock import EditLock
    from reblock.artifact.reader import Artifact
    from reblock.artifact.stage import Stage
    from reblock.memory import Grid, MemoryPlan
    from reblock.sizing import Sizing

__all__ = ["ResizePlan", "apply_resize", "plan_resize"]


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
    plan = artifact.memory_plan()
    if not plan.has_resizable_cache:
        raise NotResizable(
            f"none of its {len(plan.caches)} caches can be resized: it was compiled with "
            f"{artifact.config.attn_impl!r} attention for exactly {plan.current_blocks} blocks. "
            "Compile it with attn_impl='flash_attn' to make the count changeable",
            path=artifact.directory,
        )
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
) -> str | None:
    """Carry out `plan`, on the artifact itself or on a copy of it at `output_dir`.

    In place, a plan that changes nothing writes nothing. A copy is always made.

    Args:
        artifact: The artifact that `plan` was made for.
        plan: What to do.
        output_dir: Where the copy goes; None for the artifact itself.
        lock: What `edit_lock` gave for the directory, where the artifact was opened under it.
            Without, the directory is locked now, which waits for other edits of it.

    Returns:
        The path of the old artifact, if the system did not let it be removed after the edit.

    Raises:
        InvalidDestination: `output_dir` is empty text, the artifact itself or inside it.
        DestinationExists: `output_dir` exists and is not an empty directory.
        EditFailed: The system refused a write, or the artifact is another one by now; it is left
            as it is.
    """
    if output_dir is not None:
        check_destination(output_dir, source=artifact.directory)
    elif not plan.is_change:
        return None
    if lock is not None:
        return _apply(artifact, plan, output_dir, lock)
    with _lock_opened(artifact) as lock_now:
        return _apply(artifact, plan, output_dir, lock_now)


@contextmanager
def _lock_opened(artifact: Artifact) -> Iterator[EditLock]:
    """Lock the directory of an artifact and check that it still is as it was opened."""
    directory = artifact.directory
    with edit_lock(directory) as lock:
        if open_artifact(directory) != artifact:
            raise EditFailed(
                f"{directory!r} was changed since it was opened, and is left as it is now; open it "
                "again",
                path=directory,
            )
        yield lock


def _apply(
    artifact: Artifact, plan: ResizePlan, output_dir: str | None, lock: EditLock
) -> str | None:
    with stage_beside(output_dir or artifact.directory) as stage:
        if output_dir is None and not os.access(stage.target, os.W_OK):
            # As the parent directory is what an exchange writes to, the system would not object.
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), stage.target)
        if not os.path.isdir(stage.target):
            # What is private stays private, from the first file on.
            mode = stat.S_IMODE(os.stat(artifact.directory).st_mode)
            os.chmod(stage.path, mode | stat.S_IRWXU)
        _fill(stage, artifact, plan.num_blocks_after, in_place=output_dir is None)
        _verify(stage, artifact, plan.num_blocks_after)
        lock.check()
        if output_dir is None:
            return stage.commit_replace()
        stage.commit_new()
        return None


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
    names = [name for name in os.listdir(artifact.directory) if name.endswith(".rbln")]
    return [
        f"{name} belongs to no program of this artifact and is carried over as it is"
        for name in sorted(names)
        if name not in known
    ]


def _warn_of_size(artifact: Artifact, plan: MemoryPlan, num_blocks: int) -> list[str]:
    warnings = []
    device, full = artifact.device(), artifact.bounds.full
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
    if num_blocks > full:
        unused = _largest_node(plan.kv_bytes_at(num_blocks)) - _largest_node(plan.kv_bytes_at(full))
        warnings.append(
            f"{num_blocks} blocks are more than the {full} that these programs can ever use; the "
            f"other {num_blocks - full} take {format_gib(unused)} for nothing"
        )
    return warnings


def _largest_node(grid: Grid) -> int:
    return max(map(sum, grid))


def _fill(stage: Stage, artifact: Artifact, num_blocks: int, *, in_place: bool) -> None:
    """Write the resized artifact into the stage."""
    config = artifact.config.with_num_blocks(num_blocks)
    plan = artifact.memory_plan()
    sizes = {c.name: c.bytes_at(num_blocks, plan.current_blocks) for c in plan.caches}
    written = [CONFIG_NAME, *(os.path.basename(program.path) for program in artifact.programs)]
    stage.carry_over(artifact.directory, leave_out=written, in_place=in_place)
    with open(os.path.join(stage.path, CONFIG_NAME), "x", encoding="utf-8", newline="\n") as file:
        file.write(config.to_json())
    for program in artifact.programs:
        write_resized(
            program.path,
            program_path(stage.path, program.name),
            dram={name: sizes[name] for name in program.memory.caches},
            num_blocks=num_blocks,
        )
    for name in written:
        keep_mode(os.path.join(artifact.directory, name), os.path.join(stage.path, name))


def _verify(stage: Stage, artifact: Artifact, num_blocks: int) -> None:
    """Read the stage back and check that it is the artifact, at `num_blocks`."""
    try:
        staged = open_artifact(stage.path)
        plan, expected = staged.memory_plan(), artifact.memory_plan()
    except BadArtifact as error:
        raise EditFailed(
            f"the resized artifact does not read back, so nothing was changed: {error}",
            path=stage.path,
        ) from error
    if (
        plan.current_blocks != num_blocks
        or plan.kv_unaligned_bytes_at(num_blocks) != expected.kv_unaligned_bytes_at(num_blocks)
        or plan.static != expected.static
    ):
        raise EditFailed(
            f"the resized artifact reads back with {plan.current_blocks} blocks instead of "
            f"{num_blocks} or with other sizes, so nothing was changed",
            path=stage.path,
        )
