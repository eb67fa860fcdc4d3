"""`reblock bench`: serve a trace of requests, and print how fast, how soon, and with what."""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

from reblock.backends.loading import check_backend, require_torch
from reblock.bench.trace import (
    MAX_REQUESTS,
    TokenRange,
    Trace,
    format_trace,
    make_trace,
    read_trace,
)
from reblock.cli.numbers import add_threads, check_threads, number, whole_number
from reblock.cli.parser import Once, add_directory, add_json, non_empty
from reblock.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from reblock.engine.engine import Engine
    from reblock.engine.limits import EngineLimits

DEFAULT_REQUESTS = 16

# Of a trace that is made; where it is read, they say nothing.
_MADE = ("requests", "rate", "prompt_tokens", "new_tokens")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `reblock bench`."""
    add_directory(parser)
    parser.add_argument(
        "--trace",
        metavar="FILE",
        action=Once,
        type=non_empty,
        help="read the requests from a file, in place of the next four options: JSON objects "
        "with arrival_s, num_prompt_tokens and num_new_tokens, one a line or in an array",
    )
    _add_making(parser)
    parser.add_argument(
        "--seed",
        metavar="N",
        action=Once,
        type=whole_number,
        default=0,
        help="of all that is drawn: lengths, arrivals and the tokens of prompts (default: 0)",
    )
    parser.add_argument(
        "--save-trace",
        metavar="FILE",
        action=Once,
        type=non_empty,
        help="write the requests to a new file, which --trace reads",
    )
    add_threads(parser)
    add_json(parser)


def _add_making(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--requests",
        metavar="N",
        action=Once,
        type=whole_number,
        help=f"how many requests to make, up to {MAX_REQUESTS:,} (default: {DEFAULT_REQUESTS})",
    )
    parser.add_argument(
        "--rate",
        metavar="X",
        action=Once,
        type=number,
        help="requests that arrive in a second on average, at random (default: all arrive at once)",
    )
    for option, what in (("--prompt-tokens", "prompt"), ("--new-tokens", "answer")):
        parser.add_argument(
            option,
            metavar="A-B",
            action=Once,
            type=_token_range,
            help=f"tokens of each {what}, drawn from A to B, or A alone (default: up to half of "
            "what one request can have)",
        )


def _token_range(text: str) -> TokenRange:
    fewest, dash, most = text.partition("-")
    try:
        return TokenRange(fewest=whole_number(fewest), most=whole_number(most if dash else fewest))
    except argparse.ArgumentTypeError:
        fault = f"{text!r} is no range of whole numbers, as in 100-200"
    except ValueError as error:
        fault = str(error)
    raise argparse.ArgumentTypeError(fault)


def run(args: argparse.Namespace) -> int:
    """Serve the requests and print what was measured."""
    trace = _check(args)
    engine = _load(args.directory, args.threads)
    if trace is None:
        trace = _make_trace(args, engine.limits)
    if args.save_trace is not None:
        _save(trace, args.save_trace)
    from reblock.bench.clock import SkippingClock
    from reblock.bench.replay import replay

    with _progress(len(trace.requests)) as on_step:
        report = replay(engine, trace, clock=SkippingClock(), seed=args.seed, on_step=on_step)
    if args.json:
        from reblock.bench.document import as_document

        print(json.dumps(as_document(report)))
    else:
        from reblock.cli.bench_tables import report_text

        print(report_text(report))
    return 0


def _check(args: argparse.Namespace) -> Trace | None:
    """Refuse what makes no sense before anything is loaded; return the trace that is read."""
    check_threads(args.threads)
    if args.save_trace is not None and os.path.lexists(args.save_trace):
        raise UsageError(f"--save-trace {args.save_trace!r} is there already; name a new file")
    if args.trace is None:
        if args.requests is not None and not 1 <= args.requests <= MAX_REQUESTS:
            raise UsageError(f"--requests must be from 1 to {MAX_REQUESTS:,}, not {args.requests}")
        if args.rate is not None and not 0 < args.rate < math.inf:
            raise UsageError(f"--rate must be above 0, not {args.rate}")
        return None
    idle = [name for name in _MADE if getattr(args, name) is not None]
    if idle:
        options = ", ".join("--" + name.replace("_", "-") for name in idle)
        raise UsageError(f"--trace holds the requests; leave it out, or {options}")
    return read_trace(args.trace)


def _make_trace(args: argparse.Namespace, limits: EngineLimits) -> Trace:
    return make_trace(
        seed=args.seed,
        num_requests=DEFAULT_REQUESTS if args.requests is None else args.requests,
        limits=limits,
        rate_per_s=args.rate,
        prompt_tokens=args.prompt_tokens,
        new_tokens=args.new_tokens,
    )


def _save(trace: Trace, path: str) -> None:
    try:
        with open(path, "x", encoding="ascii") as file:
            file.write(format_trace(trace))
    except OSError as error:
        raise UsageError(f"cannot write the trace {path!r}: {error.strerror}") from error


def _load(directory: str, num_threads: int | None) -> Engine:
    require_torch("running an artifact")
    from reblock.artifact.reader import open_artifact, read_config

    # Before torch, which takes seconds to import: what cannot be run is refused at once.
    check_backend(read_config(directory), directory)
    artifact = open_artifact(directory)
    from reblock.backends.torch import load_runner
    from reblock.engine.engine import Engine

    return Engine(load_runner(artifact, num_threads))


@contextmanager
def _progress(num_requests: int) -> Iterator[Callable[[int], None]]:
    """Show on a terminal how many requests have ended, while it lasts."""
    if not sys.stderr.isatty():
        yield lambda _num_ended: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("requests"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as display:
        task = display.add_task("requests", total=num_requests)
        yield lambda num_ended: display.update(task, completed=num_ended)
