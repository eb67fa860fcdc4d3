"""8 writers and 8 readers on one artifact: no torn read, no lost update, nobody starves."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest
from bench import MOUNTED_ON_ITSELF
from namespaces import namespace_prefix, need_mounts
from trees import OLD, listing, make_small_artifact

from reblock.artifact.count import read_num_blocks
from reblock.cli.main import main

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

_NUM_WRITERS = _NUM_READERS = 8
_DEFAULT_SECONDS = 60.0
# In journal mode there is less that can come between two: it is shorter.
_JOURNAL_PART = 4
_WORKERS = os.path.join(os.path.dirname(os.path.abspath(__file__)), "side_by_side_workers.py")


_KILLS_PER_SECOND = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Logs:
    """What all have logged, by the name of each; see side_by_side_workers.py."""

    writers: dict[str, list[dict[str, int]]]
    readers: dict[str, list[dict[str, int]]]

    def edits(self) -> list[dict[str, int]]:
        return [item for items in self.writers.values() for item in items]

    def seen(self) -> set[int]:
        items = [item for items in self.readers.values() for item in items]
        return {item["count"] for item in items if "count" in item}

    def num_reads(self) -> int:
        return sum(items[-1]["reads"] for items in self.readers.values())


@pytest.fixture(params=["exchange", "journal"])
def way(request: pytest.FixtureRequest) -> str:
    chosen: str = request.param
    return chosen


@pytest.fixture
def seconds(way: str, pytestconfig: pytest.Config) -> float:
    """How long to go on."""
    option = float(pytestconfig.getoption("--side-by-side-seconds", default=_DEFAULT_SECONDS))
    return option / _JOURNAL_PART if way == "journal" else option


def run_workers(way: str, base: Path, seconds: float, *, kills_per_second: int = 0) -> Logs:
    """Let writers and readers loose on base/parent/artifact and return what they have logged."""
    command = [sys.executable, _WORKERS]
    if way == "journal":
        need_mounts()
        script = f'{MOUNTED_ON_ITSELF}; shift; exec "$@"'
        command = [*namespace_prefix(), "sh", "-euc", script, "sh", str(base), *command]
    logs = base / "logs"
    logs.mkdir()
    numbers = [seconds, _NUM_WRITERS, _NUM_READERS, kills_per_second]
    places = [base / "parent" / "artifact", logs]
    subprocess.run([*command, *map(str, [*places, *numbers])], check=True)
    items = {
        log.name: [json.loads(line) for line in log.read_text().splitlines()]
        for log in logs.iterdir()
    }
    errors = [f"{name}: {item}" for name in items for item in items[name] if "error" in item]
    assert not errors, f"{len(errors)} errors, the first of {errors[0]}"
    return Logs(
        writers={name: logged for name, logged in items.items() if name.startswith("writer")},
        readers={name: logged for name, logged in items.items() if name.startswith("reader")},
    )


def test_writers_and_readers_side_by_side_see_one_whole_artifact_after_another(
    way: str, seconds: float, tmp_path: Path, say: Callable[[str], None]
) -> None:
    artifact = make_small_artifact(tmp_path / "parent" / "artifact")
    files = set(listing(tmp_path / "parent"))
    logs = run_workers(way, tmp_path, seconds)
    numbers = [len(items) for items in logs.writers.values()]
    say(
        f"{way}, {seconds:.0f} s: {sum(numbers)} edits by {len(numbers)} writers, {min(numbers)} "
        f"at least by each; {logs.num_reads()} reads by {len(logs.readers)} readers"
    )
    assert (len(logs.writers), len(logs.readers)) == (_NUM_WRITERS, _NUM_READERS)
    assert min(numbers) > 0
    check_no_update_is_lost(logs.edits(), read_num_blocks(str(artifact)))
    assert logs.seen() <= {OLD, *(edit["after"] for edit in logs.edits())}
    assert set(listing(tmp_path / "parent")) - files == {"artifact/.reblock.json"}


def test_readers_see_a_whole_artifact_while_writers_are_killed(
    way: str, seconds: float, tmp_path: Path, say: Callable[[str], None]
) -> None:
    artifact = make_small_artifact(tmp_path / "parent" / "artifact")
    files = set(listing(tmp_path / "parent"))
    seconds /= _JOURNAL_PART
    logs = run_workers(way, tmp_path, seconds, kills_per_second=_KILLS_PER_SECOND)
    num_killed = len(logs.writers) - _NUM_WRITERS
    say(f"{way}, {seconds:.0f} s: {num_killed} writers killed, {logs.num_reads()} reads")
    assert num_killed > 0
    assert main(["get", str(artifact)]) == 0  # which cleans up
    assert set(listing(tmp_path / "parent")) - files == {"artifact/.reblock.json"}


def check_no_update_is_lost(edits: list[dict[str, int]], last: int) -> None:
    """Check that the edits can be put in one order in which each begins where one has ended."""
    after = {edit["before"]: edit["after"] for edit in edits}
    assert len(after) == len(edits), Counter(edit["before"] for edit in edits).most_common(1)
    count, num_steps = OLD, 0
    while count in after:
        count = after[count]
        num_steps += 1
    assert (count, num_steps) == (last, len(edits))
