"""`reblock set`: another block count, given as a number or as the memory it may take."""

from __future__ import annotations

from typing import TYPE_CHECKING

from reblock.block_count import parse_block_count
from reblock.budget import parse_budget
from reblock.cli.parser import Once, add_directory, add_json, add_output_dir
from reblock.cli.resizing import resize

if TYPE_CHECKING:
    import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `reblock set`."""
    add_directory(parser)
    target = parser.add_mutually_exclusive_group(required=True)
    target.add_argument("num_blocks", nargs="?", metavar="N", help="the new block count")
    target.add_argument(
        "--memory-budget",
        metavar="BUDGET",
        action=Once,
        help="as many blocks as fit into this much memory of one device, weights and workspace "
        "included: a fraction of what is available (0.8), 80%%, or a size (10GB)",
    )
    add_output_dir(parser, "write a resized copy there and leave the artifact as it is")
    parser.add_argument(
        "--dry-run", action="store_true", help="show what would change and write nothing"
    )
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Resize the artifact and print what changed."""
    budget = args.memory_budget
    return resize(
        args.directory,
        parse_block_count(args.num_blocks) if budget is None else parse_budget(budget),
        output_dir=args.output_dir,
        is_dry_run=args.dry_run,
        as_json=args.json,
    )
