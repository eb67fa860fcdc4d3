"""Runs the commands: installed, in processes of their own, as users do, or for long tables here.

What `reblock` and `optimum` start is what users start. `reblock_here` and `optimum_here` call the
same entry points in this process, which makes a table of many refusals quick.
"""

from __future__ import annotations

import atexit
import os
import subprocess
import sys
import sysconfig
import tempfile
from contextlib import chdir, redirect_stderr, redirect_stdout
from io import StringIO
from typing import TYPE_CHECKING

import pytest

from reblock.cli.main import main as reblock_main
from reblock.cli.optimum_rbln import main as optimum_main

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

# Commands keep their bytecode, as installed ones do, whatever the tests themselves are run with:
# compiling it again would be most of the time that a command takes.
_BYTECODE = tempfile.TemporaryDirectory(prefix="reblock-tests-")
atexit.register(_BYTECODE.cleanup)

HELPERS = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def run(
    command: str,
    *arguments: str | Path,
    cwd: Path | None = None,
    env: dict[str, str] | None = None,
    prefix: tuple[str, ...] = (),
) -> subprocess.CompletedProcess[str]:
    """Run `reblock` or `optimum-rbln-cli` and return what it printed and its exit code.

    `prefix` is a command line that runs the command, such as `nice`.
    """
    environment = os.environ | {"PYTHONPYCACHEPREFIX": _BYTECODE.name} | (env or {})
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    return subprocess.run(
        [*prefix, os.path.join(sysconfig.get_path("scripts"), command), *map(str, arguments)],
        capture_output=True,
        text=True,
        cwd=cwd,
        env=environment,
        timeout=60,
        check=False,
    )


def reblock(*arguments: str | Path, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return run("reblock", *arguments, cwd=cwd)


def optimum(*arguments: str | Path, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return run("optimum-rbln-cli", *arguments, cwd=cwd)


def reblock_here(
    *arguments: str | Path, cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    return _call(reblock_main, arguments, cwd)


def optimum_here(
    *arguments: str | Path, cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    return _call(optimum_main, arguments, cwd)


def _call(
    main: Callable[[list[str]], int], arguments: tuple[str | Path, ...], cwd: Path | None
) -> subprocess.CompletedProcess[str]:
    argv, stdout, stderr = [str(argument) for argument in arguments], StringIO(), StringIO()
    with chdir(cwd or "."), redirect_stdout(stdout), redirect_stderr(stderr):
        try:
            code: object = main(argv)
        except SystemExit as stop:
            code = stop.code
    assert isinstance(code, int)
    return subprocess.CompletedProcess(argv, code, stdout.getvalue(), stderr.getvalue())


def assert_refused(result: subprocess.CompletedProcess[str], code: int, *fragments: str) -> None:
    """Check that a command exited with `code`, printed a message and no traceback."""
    assert result.returncode == code, result.stderr
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    assert "error: " in result.stderr
    for fragment in fragments:
        assert fragment in result.stderr


def run_in_namespace(script: str, *arguments: str | Path) -> str:
    """Run Python code where it may mount file systems that nobody else sees; return its stdout.

    Skips the test where the system does not allow that.
    """
    probe = ["unshare", "--mount", "mount", "-t", "tmpfs", "tmpfs", "/mnt"]
    try:
        allowed = subprocess.run(probe, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        allowed = False
    if not allowed:
        pytest.skip("this system does not let the tests mount file systems of their own")
    result = subprocess.run(
        ["unshare", "--mount", sys.executable, "-c", script, *map(str, arguments)],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([HELPERS, os.path.dirname(__file__)])},
        timeout=60,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout
