"""Runs the installed commands on artifacts, as users do."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sysconfig
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

__all__ = ["Compiled", "generate", "inspect", "optimum", "reblock", "refused", "snapshot"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    """A model, its artifact, which no test may change, and what the compiler printed."""

    model: Path
    artifact: Path
    stdout: str
    stderr: str


def reblock(*arguments: object) -> subprocess.CompletedProcess[str]:
    """Run `reblock` and return what it printed and its exit code."""
    return _run("reblock", *arguments)


def optimum(*arguments: object) -> subprocess.CompletedProcess[str]:
    """Run `optimum-rbln-cli` and return what it printed and its exit code."""
    return _run("optimum-rbln-cli", *arguments)


def _run(command: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [os.path.join(sysconfig.get_path("scripts"), command), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


def generate(directory: Path, prompts: Sequence[str], *options: object) -> dict[str, Any]:
    """Return the report of `reblock generate --json`."""
    given = [argument for prompt in prompts for argument in ("--prompt", prompt)]
    result = reblock("generate", directory, "--json", *given, *options)
    assert result.returncode == 0, result.stderr
    report: dict[str, Any] = json.loads(result.stdout)
    return report


def inspect(directory: Path) -> dict[str, Any]:
    """Return the report of `reblock inspect --json`."""
    result = reblock("inspect", directory, "--json")
    assert result.returncode == 0, result.stderr
    report: dict[str, Any] = json.loads(result.stdout)
    return report


def refused(result: subprocess.CompletedProcess[str], code: int, *fragments: object) -> str:
    """Check that a command exited with `code`, with a message and no traceback; return it."""
    assert result.returncode == code, result.stderr
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    assert "error: " in result.stderr
    for fragment in fragments:
        assert str(fragment) in result.stderr
    return result.stderr


def snapshot(directory: Path) -> dict[str, tuple[int, str]]:
    """Return mode and digest of every file: two that are equal are equal byte for byte."""
    return {
        path.name: (path.stat().st_mode, hashlib.sha256(path.read_bytes()).hexdigest())
        for path in sorted(directory.iterdir())
    }
