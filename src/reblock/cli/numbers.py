"""Numbers as they are typed: in ASCII, and no longer than anybody means."""

from __future__ import annotations

import argparse

from reblock.cli.parser import Once
from reblock.errors import UsageError

__all__ = ["MAX_THREADS", "add_threads", "check_threads", "number", "whole_number"]

MAX_THREADS = 1024

# More is no number that anybody means, and int() is slow on endless digits.
_MAX_DIGITS = 64


def whole_number(text: str) -> int:
    """Read ASCII digits; int() would also take other scripts' digits and 1_0.

    Raises:
        ArgumentTypeError: they are none, or too many.
    """
    if text.isascii() and text.isdecimal() and len(text) <= _MAX_DIGITS:
        return int(text)
    raise argparse.ArgumentTypeError(f"{text!r} is no whole number")


def number(text: str) -> float:
    """Read a number in ASCII; float() would also take other scripts' digits and 1_0.

    Raises:
        ArgumentTypeError: it is none.
    """
    if text.isascii() and "_" not in text:
        try:
            return float(text)
        except ValueError:
            pass  # refused below
    raise argparse.ArgumentTypeError(f"{text!r} is no number")


def add_threads(parser: argparse.ArgumentParser) -> None:
    """Add `--threads`."""
    parser.add_argument(
        "--threads",
        metavar="N",
        action=Once,
        type=whole_number,
        help=f"threads to compute with, from 1 to {MAX_THREADS:,}",
    )


def check_threads(num_threads: int | None) -> None:
    """Check what was given as `--threads`.

    Raises:
        UsageError: it is out of range.
    """
    if num_threads is not None and not 1 <= num_threads <= MAX_THREADS:
        raise UsageError(f"--threads must be from 1 to {MAX_THREADS:,}, not {num_threads}")
