"""The native operators are right on every kind of processor that they are written for.

A program without torch includes them, so it can be built for processors on which there is no torch
to test with. It compares them with plain loops, and says how many lanes its vectors have.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

pytest.importorskip("torch")

import reblock
from reblock.backends.torch.host import compiler_march, host_isa

pytestmark = pytest.mark.full

HERE = Path(__file__).parent
OPERATORS = Path(reblock.__file__).parent / "backends" / "torch" / "native"
LEVELS = ("x86-64", "x86-64-v2", "x86-64-v3", "x86-64-v4")
LANES = {"x86-64-v3": 8, "x86-64-v4": 16}  # 4 elsewhere

CROSS_COMPILER = "aarch64-linux-gnu-g++"
EMULATORS = ("qemu-aarch64-static", "qemu-aarch64")


def isas_of_this_machine() -> list[str]:
    host = host_isa()
    below = LEVELS[: LEVELS.index(host)] if host in LEVELS else ()
    return [*(isa for isa in ("x86-64", "x86-64-v3") if isa in below), host]


def build(compiler: str, *options: str, target: Path) -> Path:
    # The stand-in for torch's header comes first.
    includes = (f"-I{HERE / 'torch_stand_in'}", f"-I{OPERATORS}")
    source = HERE / "native_without_torch.cpp"
    command = (compiler, "-std=c++17", "-Wno-psabi", "-pthread", *options, *includes, source)
    outcome = subprocess.run([*command, "-o", target], capture_output=True, text=True, check=False)
    assert outcome.returncode == 0, outcome.stderr[-2000:]
    return target


def run(*command: str | Path) -> str:
    outcome = subprocess.run(command, capture_output=True, text=True, check=False)
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr
    return outcome.stdout


@pytest.mark.parametrize("isa", isas_of_this_machine())
def test_operators_built_for_a_level_of_this_machine_are_right(isa: str, tmp_path: Path) -> None:
    march = compiler_march(isa)
    # Built as they are shipped they are tested with torch; this is built in half the time.
    options = ("-O1", *([f"-march={march}"] if march else []))
    program = build(os.environ.get("CXX", "g++"), *options, target=tmp_path / "check")
    assert run(program) == f"{LANES.get(isa, 4)} lanes\n"


def test_operators_on_neon_under_emulation_are_right(tmp_path: Path) -> None:
    emulator = next(filter(None, map(shutil.which, EMULATORS)), None)
    if shutil.which(CROSS_COMPILER) is None or emulator is None:
        pytest.skip(f"needs {CROSS_COMPILER} and {' or '.join(EMULATORS)}")
    # As the library is built for anything but x86-64; static, so that no other file is needed.
    program = build(CROSS_COMPILER, "-O3", "-static", target=tmp_path / "check")
    assert run(emulator, program) == "4 lanes\n"
