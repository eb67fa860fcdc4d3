"""The part that `reblock set` and `optimum-rbln-cli --set-...` share: resize, and say so."""

from __future__ import annotations

import json
import os
import sys
from typing import TYPE_CHECKING

from reblock.artifact.reader import open_artifact
from reblock.artifact.resize import apply_resize, plan_resize
from reblock.artifact.stage import check_destination
from reblock.units import format_gib

if TYPE_CHECKING:
    from reblock.artifact.resize import ResizePlan
    from reblock.budget import MemoryBudget


def resize(
    directory: str,
    target: int | MemoryBudget,
    *,
    output_dir: str | None,
    is_dry_run: bool,
    as_json: bool,
) -> int:
    """Resize the artifact in `directory` and print the count and the memory before and after."""
    if output_dir is not None:
        # Before the artifact is opened: this is the user's mistake that is cheapest to find.
        check_destination(output_dir, source=directory)
    artifact = open_artifact(directory)
    plan = plan_resize(artifact, target)
    for warning in plan.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    # Asked before the edit, after which the working directory is the old one, already removed.
    stands_inside = output_dir is None and _is_working_directory(directory)
    if not is_dry_run:
        apply_resize(artifact, plan, output_dir)
    if as_json:
        print(json.dumps(_as_object(directory, plan, output_dir, is_dry_run=is_dry_run)))
    else:
        print(_as_text(directory, plan, output_dir, is_dry_run=is_dry_run))
    if stands_inside and plan.is_change and not is_dry_run:
        print(f"note: this directory was replaced; enter it again: cd {directory}", file=sys.stderr)
    return 0


def _is_working_directory(directory: str) -> bool:
    return os.path.samefile(directory, os.curdir)


def _as_object(
    directory: str, plan: ResizePlan, output_dir: str | None, *, is_dry_run: bool
) -> dict[str, object]:
    sizing = plan.sizing
    return {
        "directory": directory,
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


def _as_text(directory: str, plan: ResizePlan, output_dir: str | None, *, is_dry_run: bool) -> str:
    if not plan.is_change:
        lines = [f"kvcache_num_blocks  {plan.num_blocks_after}, unchanged"]
    else:
        lines = [f"kvcache_num_blocks  {plan.num_blocks_before} -> {plan.num_blocks_after}"]
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
        lines.append(f"written in place    {directory}")
    return "\n".join(lines)


def _reason(limited_by: str) -> str:
    return {
        "budget": "the memory budget: one more block would not fit",
        "full_batch": "the full batch: these programs can never use more blocks",
    }[limited_by]
