"""The argument parser of both command lines, and options that several commands share.

argparse itself is most of what `reblock get` costs, so this module adds nothing to it but a
stricter reading: no abbreviations, no option given twice.
"""

from __future__ import annotations

import argparse
import os

from reblock._version import __version__

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import NoReturn

EXIT_CODES = """\
exit codes:
  0  done
  1  failed
  2  usage: an option or a value makes no sense
  3  does not fit: there is no room for what was asked
  4  bad artifact: missing, damaged, contradictory or of another format
"""


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Help as wide as the terminal, found out without the modules that argparse loads for it."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=30, width=_terminal_width())


def _terminal_width() -> int:
    try:
        return min(100, int(os.environ.get("COLUMNS", "0")) or os.get_terminal_size(1).columns) - 2
    except (ValueError, OSError):
        return 78


class Parser(argparse.ArgumentParser):
    """A parser that wants every option by its full name, and once."""

    def __init__(self, **keywords: object) -> None:
        # Subparsers are made by argparse, which passes what add_parser() was given.
        super().__init__(**{"formatter_class": HelpFormatter, "allow_abbrev": False, **keywords})  # type: ignore[arg-type]
        self.register("action", "store_true", Flag)

    def error(self, message: str) -> NoReturn:
        """Print what is wrong and where help is, and exit with code 2."""
        self.exit(2, f"{self.prog}: error: {message}\nTry '{self.prog} --help'.\n")


class CommandParser(Parser):
    """The parser of one command, which lets options stand anywhere between its arguments."""

    def parse_known_args(  # type: ignore[override]  # one of the ways in which it is called
        self, args: Sequence[str], namespace: argparse.Namespace
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parse with the options moved to the front.

        Before Python 3.13 an optional argument counts as left out where an option comes before
        it: `set DIR --output-dir OUT N` would not find its N.
        """
        options: list[str] = []
        arguments: list[str] = []
        remaining = iter(args)
        for text in remaining:
            if text == "--":
                arguments += [text, *remaining]
            elif not text.startswith("-") or text == "-" or text[1].isdigit():
                arguments.append(text)
            else:
                options.append(text)
                action = self._option_string_actions.get(text)
                if action is not None and action.nargs is None:
                    value = next(remaining, None)
                    if value is None:
                        self.error(f"argument {text}: expected one argument")
                    options.append(value)
        namespace, unknown = super().parse_known_args(options + arguments, namespace)
        if unknown:
            # Here and not by the parser above, which knows none of this command's options.
            self.error(f"unrecognized arguments: {' '.join(unknown)}{self._nearest(unknown[0])}")
        return namespace, unknown

    def _nearest(self, text: str) -> str:
        if not text.startswith("--"):
            return ""
        from difflib import get_close_matches

        known = [option for option in self._option_string_actions if option.startswith("--")]
        written = text.partition("=")[0].replace("_", "-")
        close = get_close_matches(written, known, n=1)
        return f"; did you mean {close[0]}?" if close else ""


class Once(argparse.Action):
    """Stores the value of an option, and refuses the option where it is given again."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[object] | bool | None,
        option_string: str | None = None,
    ) -> None:
        """Store the value."""
        seen = namespace.__dict__.setdefault("_seen", set())
        if self.dest in seen:
            parser.error(f"option {option_string} is given twice")
        seen.add(self.dest)
        setattr(namespace, self.dest, values)


class Flag(Once):
    """An option without a value, which is refused where it is given again."""

    def __init__(
        self,
        option_strings: Sequence[str],
        dest: str,
        default: bool = False,
        required: bool = False,
        help: str | None = None,  # noqa: A002  argparse's name
    ) -> None:
        super().__init__(
            option_strings, dest, nargs=0, default=default, required=required, help=help
        )

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[object] | bool | None,  # noqa: ARG002  none
        option_string: str | None = None,
    ) -> None:
        """Store that it was given."""
        super().__call__(parser, namespace, True, option_string)


def non_empty(text: str) -> str:
    """Return `text`; an empty one, as `--output-dir=` gives it, is refused.

    Raises:
        ArgumentTypeError: it is empty.
    """
    if not text:
        raise argparse.ArgumentTypeError("the value is empty")
    return text


def seconds(text: str) -> float:
    """Return a length of time, zero or more.

    Raises:
        ArgumentTypeError: it is none.
    """
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds, 0 or more")
    return value


def add_version(parser: argparse.ArgumentParser) -> None:
    """Add `--version`."""
    parser.add_argument("--version", action="version", version=f"reblock {__version__}")


def add_json(parser: argparse.ArgumentParser) -> None:
    """Add `--json`."""
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def add_directory(parser: argparse.ArgumentParser) -> None:
    """Add the artifact's directory, the one positional argument of most commands."""
    parser.add_argument(
        "directory", metavar="DIR", type=non_empty, help="directory of a compiled artifact"
    )


def add_module(parser: argparse.ArgumentParser) -> None:
    """Add `--module`."""
    parser.add_argument(
        "--module",
        metavar="NAME",
        action=Once,
        type=module_name,
        default=None,
        help="the module with the KV cache, of an artifact of several, such as the language model "
        "behind a vision tower: its directory within the artifact",
    )


def module_name(text: str) -> str:
    """Return the path of a module as it is compared with those that are there.

    Raises:
        ArgumentTypeError: it is empty.
    """
    return os.path.normpath(non_empty(text))


def add_output_dir(parser: argparse.ArgumentParser, text: str) -> None:
    """Add `--output-dir`."""
    parser.add_argument(
        "--output-dir", metavar="OUT", action=Once, type=non_empty, default=None, help=text
    )
