"""The library is built for any instruction set, and what goes wrong is told."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch

from reblock.backends.torch import native
from reblock.backends.torch.host import host_isa
from reblock.backends.torch.native import library
from reblock.errors import CompileFailed

pytestmark = pytest.mark.full

CHECKS = Path(__file__).parent.parent / "native_checks.py"


def isas_below_the_host() -> list[str]:
    levels = ["x86-64", "x86-64-v2", "x86-64-v3", "x86-64-v4"]
    return levels[: levels.index(host_isa())][-1:] if host_isa() in levels else []


@pytest.mark.parametrize("isa", ["any", *isas_below_the_host()])
def test_a_library_for_less_than_this_machine_has_is_as_right(isa: str, tmp_path: Path) -> None:
    # "any" is no level of x86-64, so the compiler takes what every such machine has.
    path = library.build(str(tmp_path), isa)
    outcome = subprocess.run(
        [sys.executable, str(CHECKS), path], capture_output=True, text=True, check=False
    )
    assert outcome.returncode == 0, outcome.stderr[-2000:]


def test_a_compiler_that_fails_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = tmp_path / "compiler"
    compiler.write_text("#!/bin/sh\necho no such thing >&2\nexit 3\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    with pytest.raises(CompileFailed, match=r"(?s)status 3.*no such thing"):
        library.build(str(tmp_path), host_isa())


def test_a_compiler_that_is_not_there_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(CompileFailed, match=r"'no-such-compiler' cannot be run.*set CXX"):
        library.build(str(tmp_path), host_isa())


@pytest.mark.usefixtures("native_operators")
def test_a_second_library_is_not_loaded(tmp_path: Path) -> None:
    assert library.is_loaded()
    # It would be found to be no library.
    native.load(str(tmp_path / "absent.so"))


def test_what_is_no_library_is_refused_in_a_process_without_one(tmp_path: Path) -> None:
    path = tmp_path / "broken.so"
    path.write_bytes(b"no library")
    script = f"from reblock.backends.torch import native; native.load({str(path)!r})"
    outcome = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert outcome.returncode == 1
    assert "OSError" in outcome.stderr


def test_a_library_without_the_operators_is_refused_before_anything_runs() -> None:
    path = Path(torch.__file__).parent / "lib" / "libc10.so"
    script = (
        "from reblock.backends.torch.program import _load_operators\n"
        f"_load_operators({str(path)!r}, 'prefill.rbln')"
    )
    outcome = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert outcome.returncode == 1
    assert "HostMismatch: prefill.rbln: its native operators cannot be loaded" in outcome.stderr
    assert "has none of the operators" in outcome.stderr
