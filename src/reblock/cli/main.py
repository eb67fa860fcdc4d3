"""The command `reblock`: finds the subcommand, runs it and turns errors into exit codes.

Only the module of the chosen subcommand is imported.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module

from reblock.cli.parser import EXIT_CODES, CommandParser, Parser, add_version
from reblock.errors import ReblockError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any

COMMANDS = {
    "get": "print the KV-cache block count of an artifact",
    "set": "change the block count, by a number or a memory budget",
    "inspect": "show what an artifact holds and where its memory goes",
    "compile": "compile a model into an artifact",
    "generate": "generate text with an artifact",
}

_INTERRUPTED = 130
_READER_GONE = 141


def main(argv: Sequence[str] | None = None) -> int:
    """Run `reblock` with `argv`, by default that of the process, and return its exit code."""
    return run_guarded("reblock", lambda: _run(sys.argv[1:] if argv is None else list(argv)))


def _run(argv: list[str]) -> int:
    parser = Parser(
        prog="reblock",
        description="Size, read and change the KV cache of compiled language models.",
        epilog=EXIT_CODES,
    )
    add_version(parser)
    # With `prog` given, argparse does not have to format a usage line to find it.
    subparsers = parser.add_subparsers(
        dest="command", metavar="COMMAND", prog="reblock", parser_class=CommandParser
    )
    chosen = next((argument for argument in argv if not argument.startswith("-")), None)
    command: Any = None
    for name, text in COMMANDS.items():
        subparser = subparsers.add_parser(name, help=text, description=text, epilog=EXIT_CODES)
        if name == chosen:
            command = import_module(f"reblock.cli.{name}")
            command.add_arguments(subparser)
    args = parser.parse_args(argv)
    if command is None:
        parser.error("a command is needed")
    code: int = command.run(args)
    return code


def run_guarded(prog: str, action: Callable[[], int]) -> int:
    """Run `action` and return its exit code, or the one of the error that it raises.

    This is the only place that turns errors into messages. With `REBLOCK_DEBUG=1` in the
    environment the traceback is printed too.
    """
    try:
        code = action()
        # Here and not at exit, so that a reader that has gone away is noticed here.
        if sys.stdout is not None:  # as it is where stdout was closed from the start
            sys.stdout.flush()
    except ReblockError as error:
        _report(prog, error)
        return error.exit_code
    except BrokenPipeError:
        _drop_stdout()
        return _READER_GONE
    except OSError as error:
        _report(prog, error)
        _drop_stdout()
        return 1
    except KeyboardInterrupt:
        return _INTERRUPTED
    return code


def _report(prog: str, error: Exception) -> None:
    if os.environ.get("REBLOCK_DEBUG") == "1":
        import traceback

        traceback.print_exc()
    print(f"{prog}: error: {error}", file=sys.stderr)


def _drop_stdout() -> None:
    """Let what is still buffered go nowhere: at exit Python would try to write it again."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
