"""The command `reblock`: finds the subcommand, runs it and turns errors into exit codes.

Only the module of the chosen subcommand is imported.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from importlib import import_module

from reblock.cli.parser import EXIT_CODES, CommandParser, Parser, add_version
from reblock.cli.streams import drop, prepare_streams, tell
from reblock.errors import ReblockError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any

COMMANDS = {
    "get": "print the KV-cache block count of an artifact",
    "set": "change the block count, by a number or a memory budget",
    "inspect": "show what an artifact holds and where its memory goes",
    "verify": "check a whole artifact, checksums included",
    "plan": "show how many blocks and requests would fit, before or after compiling",
    "compile": "compile a model into an artifact",
    "generate": "generate text with an artifact",
    "bench": "measure how an artifact serves a trace of requests",
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
    environment the traceback is printed too. SIGTERM and SIGHUP end the action as Ctrl-C does.
    """
    prepare_streams()
    before = _catch_signals()
    try:
        return _run_reported(prog, action)
    finally:
        for number, handler in before.items():
            if handler is not None:  # None: not set by Python, and so not its to set back
                signal.signal(number, handler)


def _run_reported(prog: str, action: Callable[[], int]) -> int:
    try:
        code = action()
        # Here and not at exit, so that a reader that has gone away is noticed here.
        sys.stdout.flush()
    except ReblockError as error:
        _report(prog, error)
        return error.exit_code
    except BrokenPipeError:
        drop(sys.stdout)
        return _READER_GONE
    except OSError as error:
        _report(prog, error)
        drop(sys.stdout)
        return 1
    except KeyboardInterrupt as interrupt:
        _tell_notes(prog, interrupt)
        return _INTERRUPTED
    except SystemExit as stop:
        _tell_notes(prog, stop)
        raise
    return code


def _catch_signals() -> dict[int, Any]:
    """Let signals that end the process end it by SystemExit, so that it cleans up.

    Returns:
        The handlers that were replaced. One that is not the system's own stays: `nohup` ignores
        SIGHUP, and a program that calls `main` may have its own. Only the main thread may set any.
    """
    process, before = os.getpid(), {}

    def stop(number: int, _frame: object) -> None:
        if os.getpid() != process:
            os._exit(128 + number)  # a fork of this process has nothing of its own to clean up
        raise SystemExit(128 + number)

    # An edit that is done leaves it ignored, and a program that calls this wants it back.
    if threading.current_thread() is threading.main_thread():
        before[int(signal.SIGINT)] = signal.getsignal(signal.SIGINT)
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:
            try:
                before[int(number)] = signal.signal(number, stop)
            except ValueError:
                break
    return before


def _report(prog: str, error: Exception) -> None:
    if os.environ.get("REBLOCK_DEBUG") == "1":
        import traceback

        traceback.print_exc()
    text = str(error)
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        text = f"{os.fsdecode(error.filename)}: {error.strerror}"
    tell(f"{prog}: error: {text}")
    _tell_notes(prog, error)


def _tell_notes(prog: str, error: BaseException) -> None:
    for note in getattr(error, "__notes__", ()):
        tell(f"{prog}: note: {note}")
