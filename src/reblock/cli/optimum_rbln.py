"""The command `optimum-rbln-cli`, with the options that optimum-rbln gives it.

    optimum-rbln-cli --get-kvcache-num-blocks --model-id DIR
    optimum-rbln-cli --set-kvcache-num-blocks N --model-id DIR [--output-dir OUT]
    optimum-rbln-cli --set-memory-budget BUDGET --model-id DIR [--output-dir OUT]
    optimum-rbln-cli --model-id MODEL [--output-dir OUT] [--KEY VALUE ...]

In the last form, which compiles, every other option is a key of `rbln_config`.
"""

from __future__ import annotations

import sys
from itertools import pairwise

from reblock.cli.main import run_guarded
from reblock.cli.parser import (
    EXIT_CODES,
    Once,
    Parser,
    add_module,
    add_output_dir,
    add_version,
    non_empty,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

_PROG = "optimum-rbln-cli"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command with `argv`, by default that of the process, and return its exit code."""
    return run_guarded(_PROG, lambda: _run(sys.argv[1:] if argv is None else list(argv)))


def _parser() -> Parser:
    parser = Parser(
        prog=_PROG,
        usage="%(prog)s [--get-kvcache-num-blocks | --set-kvcache-num-blocks N |\n"
        f"       {' ' * len(_PROG)}  --set-memory-budget BUDGET] --model-id MODEL\n"
        f"       {' ' * len(_PROG)} [--output-dir OUT] [--KEY VALUE ...]",
        description="Compile a model, or read and change the KV cache of a compiled artifact.",
        epilog="Without --get-... or --set-..., MODEL is compiled, and every other --KEY VALUE is\n"
        f"a key of rbln_config, such as --batch-size 4 or --memory-budget 80%.\n\n{EXIT_CODES}",
    )
    action = parser.add_mutually_exclusive_group()
    action.add_argument(
        "--get-kvcache-num-blocks", action="store_true", help="print the block count"
    )
    action.add_argument(
        "--set-kvcache-num-blocks", metavar="N", action=Once, help="change the block count to N"
    )
    action.add_argument(
        "--set-memory-budget",
        metavar="BUDGET",
        action=Once,
        help="change the block count to the largest that fits: 0.8, 80%%, 10GB",
    )
    parser.add_argument(
        "--model-id",
        metavar="MODEL",
        action=Once,
        type=non_empty,
        required=True,
        help="directory of the artifact, or the model to compile: a directory, id or GGUF file",
    )
    add_module(parser)
    add_output_dir(parser, "where to write, leaving the artifact of --model-id as it is")
    add_version(parser)
    return parser


def _run(argv: list[str]) -> int:
    parser = _parser()
    args, rest = parser.parse_known_args(argv)
    is_set = args.set_kvcache_num_blocks is not None or args.set_memory_budget is not None
    if not is_set and not args.get_kvcache_num_blocks:
        from reblock.cli.compile import compile_to_artifact

        if args.module is not None:
            parser.error("--module goes with --get-... and --set-...; a compilation has no modules")
        _check_values(parser, argv)
        keys = _forwarded_keys(parser, rest)
        return compile_to_artifact(args.model_id, args.output_dir, keys, as_json=False)
    if rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if is_set:
        return _set(args)
    if args.output_dir is not None:
        parser.error("--output-dir goes with --set-..., not with --get-kvcache-num-blocks")
    from reblock.artifact.count import read_num_blocks

    print(read_num_blocks(args.model_id, args.module))
    return 0


def _set(args: argparse.Namespace) -> int:
    from reblock.block_count import parse_block_count
    from reblock.budget import parse_budget
    from reblock.cli.resizing import resize

    return resize(
        args.model_id,
        parse_block_count(args.set_kvcache_num_blocks)
        if args.set_memory_budget is None
        else parse_budget(args.set_memory_budget),
        module=args.module,
        output_dir=args.output_dir,
        is_dry_run=False,
        as_json=False,
    )


def _check_values(parser: Parser, argv: list[str]) -> None:
    """Refuse `--key --model-id m value`, where argparse takes out what stands in between."""
    known = parser._option_string_actions
    for option, following in pairwise([*argv, "--"]):
        is_key = option.startswith("--") and option != "--" and "=" not in option
        if is_key and option not in known and following.startswith("--"):
            parser.error(f"option {option} needs a value")


def _forwarded_keys(parser: Parser, rest: list[str]) -> dict[str, str]:
    """Return the keys and values in `--key value` and `--key=value`, as they were written."""
    keys: dict[str, str] = {}
    remaining = iter(rest)
    for option in remaining:
        name, equals, value = option.removeprefix("--").partition("=")
        if not option.startswith("--") or not name:
            parser.error(f"unexpected argument {option!r}")
        if not equals:
            following = next(remaining, None)
            if following is None or following.startswith("--"):
                parser.error(f"option --{name} needs a value")
            value = following
        if name in keys:
            parser.error(f"option --{name} is given twice")
        keys[name] = value
    return keys


# `python -m reblock.cli.optimum_rbln` is this command even where an installed optimum-rbln has put
# a script of the same name on the PATH.
if __name__ == "__main__":
    sys.exit(main())
