"""`reblock set`: another block count, as a number, as memory to fill, or as it was before."""

from __future__ import annotations

from typing import TYPE_CHECKING

from reblock.block_count import parse_block_count
from reblock.budget import parse_budget
from reblock.cli.parser import (
    Once,
    add_directory,
    add_json,
    add_module,
    add_output_dir,
    seconds,
)
from reblock.cli.resizing import LOCK_TIMEOUT_S, resize
from reblock.errors import InvalidOption

if TYPE_CHECKING:
    import argparse

    from reblock.budget import MemoryBudget


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `reblock set`."""
    add_directory(parser)
    add_module(parser)
    target = parser.add_mutually_exclusive_group(required=True)
    target.add_argument(
        "num_blocks",
        nargs="?",
        metavar="N",
        help="the new block count; exactly one of N, --memory-budget and --previous is needed",
    )
    target.add_argument(
        "--memory-budget",
        metavar="BUDGET",
        action=Once,
        help="as many blocks as fit into this much memory of one device, weights and workspace "
        "included: a fraction of what is available (0.8), 80%%, or a size (10GB, which is 10 GiB)",
    )
    target.add_argument(
        "--previous",
        action="store_true",
        help="go back to the block count before the last change",
    )
    add_output_dir(parser, "write a resized copy there and leave the artifact as it is")
    parser.add_argument(
        "--copy",
        action="store_true",
        help="with --output-dir: share no file with the artifact; by default large files are "
        "shared, as clones where the file system has them and else by hard links",
    )
    parser.add_argument(
        "--lock-timeout",
        metavar="SECONDS",
        action=Once,
        type=seconds,
        default=LOCK_TIMEOUT_S,
        help="how long to wait for another command that edits the artifact "
        f"(default: {LOCK_TIMEOUT_S:g}; 0: do not wait)",
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="show what would change and write nothing"
    )
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Resize the artifact and print what changed."""
    if args.copy and args.output_dir is None:
        raise InvalidOption("--copy needs --output-dir", option="--copy")
    return resize(
        args.directory,
        _target(args),
        module=args.module,
        output_dir=args.output_dir,
        is_dry_run=args.dry_run,
        as_json=args.json,
        is_copied=args.copy,
        lock_timeout_s=args.lock_timeout,
    )


def _target(args: argparse.Namespace) -> int | MemoryBudget | None:
    if args.previous:
        return None
    if args.memory_budget is not None:
        return parse_budget(args.memory_budget)
    return parse_block_count(args.num_blocks)
