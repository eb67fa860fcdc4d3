"""`reblock verify`: checks a whole artifact, its checksums and its memory included."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING

from reblock.artifact.verify import verify_artifact
from reblock.backends.loading import check_memory
from reblock.cli.parser import add_directory, add_json, add_module
from reblock.cli.progress import TerminalProgress

if TYPE_CHECKING:
    import argparse

    from reblock.artifact.verify import Verification

_WORDS = {"passed": "ok", "failed": "FAILED", "skipped": "skipped"}
_FAILED = 4


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `reblock verify`."""
    add_directory(parser)
    add_module(parser)
    parser.add_argument(
        "--quick",
        action="store_true",
        help="leave out what takes long: reading the weights, and loading the artifact, which runs "
        "its compiled code, to compare its memory with the plan",
    )
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Check the artifact and print what every check found."""
    found = verify_artifact(
        args.directory,
        module=args.module,
        is_quick=args.quick,
        check_memory=check_memory,
        progress=TerminalProgress(),
    )
    if args.json:
        print(json.dumps(_as_object(found)))
    else:
        _print_lines(found)
    return 0 if found.is_ok else _FAILED


def _as_object(found: Verification) -> dict[str, object]:
    return {
        "directory": found.directory,
        "is_quick": found.is_quick,
        "is_ok": found.is_ok,
        "kvcache_num_blocks": found.num_blocks,
        "checks": [asdict(check) for check in found.checks],
    }


def _print_lines(found: Verification) -> None:
    width = max(len(check.name) for check in found.checks)
    for check in found.checks:
        print(f"{_WORDS[check.outcome]:7}  {check.name:{width}}  {check.detail}")
    outcomes = [check.outcome for check in found.checks]
    if not found.is_ok:
        print(f"{_checks(outcomes.count('failed'))} failed: {found.directory}")
    elif "skipped" in outcomes:
        print(f"verified, with {_checks(outcomes.count('skipped'))} skipped: {found.directory}")
    else:
        print(f"verified: {found.directory}")


def _checks(count: int) -> str:
    return "1 check" if count == 1 else f"{count} checks"
