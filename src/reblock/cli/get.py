"""`reblock get`: the block count alone. Its start is kept as cheap as Python allows."""

from __future__ import annotations

from reblock.artifact.count import read_num_blocks
from reblock.cli.parser import add_directory, add_json, add_module

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `reblock get`."""
    add_directory(parser)
    add_module(parser)
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Print the block count of the artifact."""
    num_blocks = read_num_blocks(args.directory, args.module)
    if args.json:
        import json

        content = {"directory": args.directory, "module": args.module}
        print(json.dumps({**content, "kvcache_num_blocks": num_blocks}))
    else:
        print(num_blocks)
    return 0
