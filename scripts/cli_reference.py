"""Writes docs/cli.md from the parsers of the command lines, so that it cannot fall behind them.

    python scripts/cli_reference.py            write docs/cli.md
    python scripts/cli_reference.py --check    exit with 1 where it is not what would be written

Tables and not the text of --help, whose layout differs between versions of Python.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from reblock import options
from reblock.cli import optimum_rbln
from reblock.cli.main import COMMANDS
from reblock.cli.parser import EXIT_CODES, CommandParser

if TYPE_CHECKING:
    from collections.abc import Iterable

TARGET = Path(__file__).resolve().parent.parent / "docs" / "cli.md"

INTRODUCTION = """\
# Command line reference

Written by `make docs` from the parsers of the commands; edit `scripts/cli_reference.py`.

Two commands do the same work. `optimum-rbln-cli` has the options that optimum-rbln gives it, and
`reblock` has subcommands. In both:

* `--option value` and `--option=value` are alike.
* Options are written out in full, stand in any order, and stand once (`--prompt`, `--prompt-file`
  and `--stop` of `generate`, and `--npu` and `--memory-budget` of `plan`, may stand several times).
  What is not known is an error, and never ignored.
* What was asked for goes to standard output. Warnings, notes, progress and errors go to standard
  error.
* An error leaves every artifact as it was. Once one is written, a failure to print that is a note, and
  the exit code is 0.
"""

BUDGETS = """\
## Memory budgets

`memory_budget`, `--memory-budget` and `--set-memory-budget` take

| written | means |
|---|---|
| `0.8`, `80%`, `80.5%`, `1.0`, `100%` | a share of the memory that is **available** on one device, which is what it has less the system's reserve |
| `10GB`, `10 GB`, `10GiB`, `1.5gb`, `512MB` | a size; B, KB, MB, GB, TB and KiB, MiB, GiB, TiB in any case, all binary: 10GB is 10 x 2^30 bytes |
| `10737418240` | bytes: a whole number without a unit. So `1.0` is the whole device, and `1` is one byte |

Everything else is refused: zero, negative numbers, shares above 1, `nan`, `inf`, exponents
(`1e10`), separators (`10,000MB`), single letters (`10G`), and an empty text. The budget covers
weights, workspace and KV cache together, and is not stored in the artifact. How it becomes a number
of blocks is in [memory-model.md](memory-model.md).
"""

ENVIRONMENT = """\
## Environment

| variable | effect |
|---|---|
| `REBLOCK_DEBUG=1` | errors come with their traceback |
| `CXX` | the C++ compiler that `compile` calls; without it, `g++` |
| `OMP_NUM_THREADS` | threads that `generate` and `bench` compute with, where `--threads` is not given |
| `OMP_WAIT_POLICY`, `GOMP_SPINCOUNT` | read by OpenMP; where neither is set, threads that wait spin for some 10 us and then sleep. On a machine that does other work, too, set `OMP_WAIT_POLICY=passive` |
| `MALLOC_TRIM_THRESHOLD_`, `GLIBC_TUNABLES` and the like | read by glibc; where none of them is set, 64 MiB that programs have freed are kept for the next one |
| `HF_HUB_OFFLINE=1` | models are taken from local files only (read by Hugging Face's libraries) |
"""


def main() -> int:
    """Write the reference, or check it; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--check", action="store_true", help="compare and write nothing")
    text = reference()
    if not parser.parse_args().check:
        TARGET.write_text(text, encoding="utf-8")
    elif not TARGET.exists() or TARGET.read_text(encoding="utf-8") != text:
        print("docs/cli.md is out of date: run make docs", file=sys.stderr)
        return 1
    return 0


def reference() -> str:
    """Return the text of docs/cli.md."""
    sections = [INTRODUCTION, exit_codes(), "## optimum-rbln-cli\n", optimum_section()]
    for name, summary in COMMANDS.items():
        parser = CommandParser(prog=f"reblock {name}")
        import_module(f"reblock.cli.{name}").add_arguments(parser)
        sections.append(f"## reblock {name}\n\n{sentence(summary)}\n\n{table_of(parser)}")
    sections += [keys_section(), BUDGETS, ENVIRONMENT]
    return "\n".join(sections)


def exit_codes() -> str:
    """Return the table of exit codes, which every --help shows too."""
    codes = [line.split(maxsplit=1) for line in EXIT_CODES.splitlines()[1:]]
    codes += [
        ["129", "ended by SIGHUP: the terminal was closed"],
        ["130", "interrupted (Ctrl-C)"],
        ["141", "the reader of the output has gone away"],
        ["143", "ended by SIGTERM"],
    ]
    return "## Exit codes\n\n" + table(("code", "meaning"), codes)


def optimum_section() -> str:
    """Return the part on `optimum-rbln-cli`."""
    forms = (optimum_rbln.__doc__ or "").split("\n\n")[1]
    return (
        f"{forms}\n\n{table_of(optimum_rbln._parser())}\nThe first three options exclude each "
        "other. Without any of them MODEL is compiled, and every other\n`--key value` is a key of "
        "[`rbln_config`](#keys-of-rbln_config).\n"
    )


def keys_section() -> str:
    """Return the part on the keys of `rbln_config`, those that are refused included."""
    compile_parser = CommandParser(prog="reblock compile")
    import_module("reblock.cli.compile").add_arguments(compile_parser)
    names = [field.name for field in fields(options.CompileOptions)]
    texts = {action.dest: help_of(action) for action in compile_parser._actions}
    known = table(("key", "meaning"), [[f"`{name}`", texts[name]] for name in names])
    refused = table(
        ("key", "why not"), [[f"`{key}`", why] for key, why in options._UNSUPPORTED.items()]
    )
    return (
        "## Keys of rbln_config\n\nWritten with dashes or underscores. `memory_budget` and "
        f"`kvcache_num_blocks` exclude each other.\n\n{known}\nKeys that optimum-rbln knows and "
        f"that are refused here, each with its reason:\n\n{refused}"
    )


def table_of(parser: argparse.ArgumentParser) -> str:
    """Return a table of all arguments of a parser but --help."""
    rows = [
        [f"`{name_of(action)}`", help_of(action)]
        for action in parser._actions
        if action.dest != "help"
    ]
    return table(("argument", "meaning"), rows)


def name_of(action: argparse.Action) -> str:
    """Return an argument as it is typed."""
    metavar = action.metavar if isinstance(action.metavar, str) else action.dest
    if not action.option_strings:
        return {"?": f"[{metavar}]", "+": f"{metavar} ..."}.get(str(action.nargs), metavar)
    option = action.option_strings[0]
    return option if action.nargs == 0 else f"{option} {metavar}"


def help_of(action: argparse.Action) -> str:
    """Return the help text of an argument as --help shows it."""
    return (action.help or "").replace("%%", "%")


def sentence(text: str) -> str:
    """Return a help text as a sentence."""
    return text[0].upper() + text[1:] + "."


def table(columns: tuple[str, str], rows: Iterable[list[str]]) -> str:
    """Return a table in Markdown."""
    lines = [columns, ("---", "---"), *rows]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


if __name__ == "__main__":
    sys.exit(main())
