"""The comparison of planned with allocated memory, without loading anything."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest
from reference_plans import make_plan

from reblock.backends import loading
from reblock.backends.loading import check_memory, memory_faults

if TYPE_CHECKING:
    from pathlib import Path

MIB = 2**20
# The caches take 4 and 6 MiB where they lie, as each is aligned to 2 MiB. So all is 50 MiB.
PLAN = make_plan(static=[[40 * MIB]], resizable=[[[MIB]]], fixed=[[[5 * MIB]]], current_blocks=3)
CACHES = {"resizable_0": 3 * MIB, "fixed_0": 5 * MIB}


def test_memory_as_planned_has_no_fault() -> None:
    faults = memory_faults(PLAN, weight_bytes=40 * MIB, cache_bytes=CACHES, resident_bytes=50 * MIB)
    assert faults == []


@pytest.mark.parametrize("num_bytes", [40 * MIB - 1, 40 * MIB + 1, 0])
def test_weights_must_take_exactly_what_is_planned(num_bytes: int) -> None:
    (fault,) = memory_faults(
        PLAN, weight_bytes=num_bytes, cache_bytes=CACHES, resident_bytes=50 * MIB
    )
    assert fault.startswith("the weights: ")
    assert "the plan says 40.00 MiB (41,943,040 bytes)" in fault


@pytest.mark.parametrize("name", list(CACHES))
def test_every_cache_must_take_exactly_what_is_planned(name: str) -> None:
    for num_bytes in (CACHES[name] - 1, CACHES[name] + 1):
        (fault,) = memory_faults(
            PLAN,
            weight_bytes=40 * MIB,
            cache_bytes={**CACHES, name: num_bytes},
            resident_bytes=50 * MIB,
        )
        assert name in fault
        assert f"{num_bytes:,} bytes" in fault


def test_a_cache_that_is_not_there_is_a_fault() -> None:
    (fault,) = memory_faults(
        PLAN, weight_bytes=40 * MIB, cache_bytes={"fixed_0": 5 * MIB}, resident_bytes=0
    )
    assert "'resizable_0': 0 bytes" in fault


@pytest.mark.parametrize(
    ("resident_bytes", "is_fault"), [(0, False), (51 * MIB, False), (51 * MIB + 1, True)]
)
def test_the_process_may_take_two_percent_more_than_all_that_is_planned(
    resident_bytes: int, is_fault: bool
) -> None:
    faults = memory_faults(
        PLAN, weight_bytes=40 * MIB, cache_bytes=CACHES, resident_bytes=resident_bytes
    )
    assert [fault.partition(":")[0] for fault in faults] == ["the whole process"] * is_fault


@pytest.fixture
def has_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "find_spec", lambda _package: object())


def stand_in(monkeypatch: pytest.MonkeyPatch, path: Path, script: str) -> None:
    """Let a shell script be what loads the artifact."""
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(path))


def test_without_torch_nothing_is_loaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(loading, "find_spec", lambda _package: None)
    stand_in(monkeypatch, tmp_path / "python", f"touch {tmp_path / 'started'}")
    check = check_memory("/a")
    assert (check.name, check.outcome) == ("memory", "skipped")
    assert "pip install 'reblock[torch]'" in check.detail
    assert not (tmp_path / "started").exists()


@pytest.mark.usefixtures("has_torch")
def test_the_answer_of_the_process_is_the_outcome(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    answer = """echo noise >&2; echo '{"outcome": "failed", "detail": "'"$5"'"}'"""
    stand_in(monkeypatch, tmp_path / "python", answer)
    check = check_memory("/path/of/artifact")
    assert (check.name, check.outcome, check.detail) == ("memory", "failed", "/path/of/artifact")


@pytest.mark.usefixtures("has_torch")
@pytest.mark.parametrize(
    ("script", "end"),
    [
        ("kill -SEGV $$", "SIGSEGV"),
        ("echo first >&2; echo last words >&2; exit 3", "status 3: last words"),
    ],
)
def test_a_process_that_crashes_is_a_failed_check(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, script: str, end: str
) -> None:
    stand_in(monkeypatch, tmp_path / "python", script)
    check = check_memory("/a")
    assert (check.outcome, check.detail) == ("failed", f"loading it ended with {end}")
