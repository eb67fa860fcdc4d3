"""The part that `reblock set` and `optimum-rbln-cli --set-...` share: resize, and say so."""

from __future__ import annotations

import json
import os
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

from reblock.artifact.previous import read_previous
from reblock.artifact.reader import open_artifact, read_config
from reblock.artifact.resize import apply_resize, check_resizable, plan_resize
from reblock.artifact.transaction import begin_edit, check_destination, undisturbed
from reblock.cli.progress import TerminalProgress
from reblock.cli.streams import drop, tell
from reblock.errors import MissingDependency
from reblock.units import format_gib

if TYPE_CHECKING:
    from collections.abc import Iterator

    from reblock.artifact.reader import Artifact
    from reblock.artifact.resize import ResizePlan
    from reblock.artifact.transaction import EditLock
    from reblock.budget import MemoryBudget

# An edit takes well under a second, unless weights have to be copied.
LOCK_TIMEOUT_S = 60.0


def resize(
    directory: str,
    target: int | MemoryBudget | None,
    *,
    module: str | None = None,
    output_dir: str | None,
    is_dry_run: bool,
    as_json: bool,
    is_copied: bool = False,
    lock_timeout_s: float = LOCK_TIMEOUT_S,
) -> int:
    """Resize the artifact in `directory` and print the count and the memory before and after.

    A `target` of None stands for the count before the last change.
    """
    if output_dir is not None:
        # Before the artifact is opened: this is the user's mistake that is cheapest to find.
        check_destination(output_dir, source=directory)
    # Asked before the edit, after which the working directory is the old one, already removed.
    real = os.path.realpath(directory)
    stands_somewhere = _has_working_directory()
    with _locked(directory, is_dry_run=is_dry_run, timeout_s=lock_timeout_s) as lock:
        artifact = _open(directory, module)
        plan = plan_resize(artifact, read_previous(directory, module) if target is None else target)
        for warning in plan.warnings:
            print(f"warning: {warning}", file=sys.stderr)
        notes = []
        if not is_dry_run:
            notes = apply_resize(
                artifact,
                plan,
                output_dir,
                lock=lock,
                is_copied=is_copied,
                progress=TerminalProgress(),
                is_last=True,
            )
    if as_json:
        text = json.dumps(_as_object(artifact, plan, output_dir, is_dry_run=is_dry_run))
    else:
        text = _as_text(artifact, plan, output_dir, is_dry_run=is_dry_run)
    if is_dry_run or not (plan.is_change or output_dir is not None):
        print(text)
        return 0
    with undisturbed():
        _print_done(text)
        for note in notes:
            tell(f"note: {note}")
        if stands_somewhere and not _has_working_directory():
            tell(f"note: this directory was replaced; enter it again: cd {real}")
    return 0


def _open(directory: str, module: str | None) -> Artifact:
    try:
        return open_artifact(directory, module)
    except MissingDependency:
        # What could not be resized with it either is not worth installing it.
        check_resizable(read_config(directory, module=module), directory)
        raise


@contextmanager
def _locked(directory: str, *, is_dry_run: bool, timeout_s: float) -> Iterator[EditLock | None]:
    """Lock what is to be edited: before it is read, so that nothing is planned on old sizes."""
    # What is no directory gets its message from the opening.
    if is_dry_run or not os.path.isdir(directory):
        yield None
        return

    def tell_holder(holder: str) -> None:
        tell(f"note: waiting for {holder}, which edits {directory}")

    with begin_edit(directory, timeout_s=timeout_s, on_wait=tell_holder) as lock:
        yield lock


def _print_done(text: str) -> None:
    """Print what was done; that it cannot be printed does not undo it and is no failure."""
    try:
        print(text, flush=True)
    except OSError as error:
        drop(sys.stdout)
        tell(f"note: the artifact was written, but that could not be printed: {error}")


def _has_working_directory() -> bool:
    try:
        os.getcwd()
    except FileNotFoundError:
        return False
    return True


def _as_object(
    artifact: Artifact, plan: ResizePlan, output_dir: str | None, *, is_dry_run: bool
) -> dict[str, object]:
    sizing = plan.sizing
    return {
        "directory": artifact.directory,
        "module": artifact.module,
        "output_dir": output_dir,
        "is_dry_run": is_dry_run,
        "is_written": not is_dry_run and (plan.is_change or output_dir is not None),
        "kvcache_num_blocks_before": plan.num_blocks_before,
        "kvcache_num_blocks": plan.num_blocks_after,
        "kv_bytes_before": plan.kv_bytes_before,
        "kv_bytes": plan.kv_bytes_after,
        "budget_bytes": None if sizing is None else sizing.budget_bytes,
        "limited_by": None if sizing is None else sizing.limited_by,
        "next_block_budget_bytes": None if sizing is None else sizing.next_block_budget_bytes,
        "warnings": list(plan.warnings),
    }


def _as_text(
    artifact: Artifact, plan: ResizePlan, output_dir: str | None, *, is_dry_run: bool
) -> str:
    lines = [] if artifact.module is None else [f"module              {artifact.module}"]
    if not plan.is_change:
        lines.append(f"kvcache_num_blocks  {plan.num_blocks_after}, unchanged")
    else:
        lines.append(f"kvcache_num_blocks  {plan.num_blocks_before} -> {plan.num_blocks_after}")
    lines.append(
        f"KV cache            {format_gib(plan.kv_bytes_before)} -> "
        f"{format_gib(plan.kv_bytes_after)} per device"
    )
    sizing = plan.sizing
    if sizing is not None:
        lines.append(f"limited by          {_reason(sizing.limited_by)}")
        if sizing.next_block_budget_bytes is not None:
            lines.append(f"one more block      {sizing.next_block_budget_bytes:,} bytes of budget")
    if is_dry_run:
        lines.append("dry run, nothing was written")
    elif output_dir is not None:
        lines.append(f"written to          {output_dir}")
    elif plan.is_change:
        lines.append(f"written in place    {artifact.directory}")
    return "\n".join(lines)


def _reason(limited_by: str) -> str:
    return {
        "budget": "the memory budget: one more block would not fit",
        "full_batch": "the full batch: these programs can never use more blocks",
    }[limited_by]
