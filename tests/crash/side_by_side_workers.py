"""Many processes that read and edit one artifact at the same time, each keeping a log.

    python side_by_side_workers.py ARTIFACT LOGS SECONDS WRITERS READERS KILLS_PER_SECOND

A writer logs {"before", "after"} of each edit as `reblock set --json` prints them, and no two
edits set the same count. A reader logs {"count"} each time it sees another one than before, and
at its end {"reads"}. What goes wrong is logged as {"error"}. Where writers are killed, each of
them makes edits until it is, and another one takes its place.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import sysconfig
import time
import traceback
from contextlib import redirect_stderr, redirect_stdout
from importlib import import_module
from io import StringIO
from typing import TYPE_CHECKING

from reblock.artifact.reader import open_artifact
from reblock.cli.main import main

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

# Imported before children are forked, or each would spend its first moments on that.
for command in ("get", "set", "verify"):
    import_module(f"reblock.cli.{command}")

_FIRST_COUNT = 100
# Of so many commands one is the installed script, in a process of its own.
_INSTALLED_ONE_IN = 10
_SCRIPT = os.path.join(sysconfig.get_path("scripts"), "reblock")


def write(directory: str, number: int, step: int, deadline: float) -> Iterator[object]:
    """Edit until the deadline, at least once, to the counts `number`, `number + step`, ..."""
    turn = 0
    while not turn or time.monotonic() < deadline:
        argv = ["set", directory, str(_FIRST_COUNT + number + turn * step), "--json"]
        printed = json.loads(_run(argv, is_installed=turn % _INSTALLED_ONE_IN == number))
        before, after = printed["kvcache_num_blocks_before"], printed["kvcache_num_blocks"]
        yield {"before": before, "after": after}
        turn += 1


def read(directory: str, number: int, deadline: float) -> Iterator[object]:
    """Read until the deadline: by `get`, by opening all, and by a check of all but the weights."""
    last, reads = 0, 0
    readers = (_count_of_get, _count_of_opening, _count_of_verifying)
    while not reads or time.monotonic() < deadline:
        is_installed = reads % (_INSTALLED_ONE_IN * len(readers)) == number
        count = readers[reads % len(readers)](directory, is_installed)
        reads += 1
        if count not in {0, last}:
            last = count
            yield {"count": count}
    yield {"reads": reads}


def _count_of_get(directory: str, is_installed: bool) -> int:
    return int(_run(["get", directory], is_installed=is_installed))


def _count_of_opening(directory: str, _is_installed: bool) -> int:
    artifact = open_artifact(directory)
    counts = {
        artifact.memory_plan().current_blocks,
        *(p.kvcache_num_blocks for p in artifact.programs),
    }
    caches = [dict(program.memory.caches) for program in artifact.programs]
    (count,) = counts
    if any(other != caches[0] for other in caches):
        raise AssertionError(f"programs with other sizes: {caches}")
    return count


def _count_of_verifying(directory: str, is_installed: bool) -> int:
    _run(["verify", directory, "--quick"], is_installed=is_installed)
    return 0


def _run(argv: list[str], *, is_installed: bool) -> str:
    if is_installed:
        result = subprocess.run([_SCRIPT, *argv], capture_output=True, text=True, check=False)
        code, stdout, stderr = result.returncode, result.stdout, result.stderr
    else:
        with redirect_stdout(StringIO()) as out, redirect_stderr(StringIO()) as err:
            code = main(argv)
        stdout, stderr = out.getvalue(), err.getvalue()
    if code:
        raise AssertionError(f"{argv} ended with {code}: {stderr}")
    return stdout


def _start(log: str, work: Callable[[], Iterator[object]]) -> int:
    """Do work in a child of this process, with a log of what it yields."""
    child = os.fork()
    if child:
        return child
    with open(log, "w", buffering=1, encoding="utf-8") as file:
        try:
            file.writelines(json.dumps(item) + "\n" for item in work())
        except BaseException:  # noqa: BLE001 - whatever it is, it is logged
            file.write(json.dumps({"error": traceback.format_exc()}) + "\n")
    os._exit(0)


def run(
    directory: str, logs: str, seconds: float, num_writers: int, num_readers: int, kills: float
) -> None:
    """Start all and wait until they have ended."""
    deadline = time.monotonic() + seconds
    step = num_writers if not kills else num_writers + int(2 * seconds * kills)

    def start_writer(number: int) -> int:
        log = os.path.join(logs, f"writer-{number}")
        return _start(log, lambda: write(directory, number, step, deadline))

    def start_reader(number: int) -> int:
        log = os.path.join(logs, f"reader-{number}")
        return _start(log, lambda: read(directory, number, deadline))

    writers = [start_writer(number) for number in range(num_writers)]
    readers = [start_reader(number) for number in range(num_readers)]
    started = num_writers
    while kills and time.monotonic() < deadline and started < step:
        time.sleep(1 / kills)
        os.kill(writers[0], signal.SIGKILL)
        os.waitpid(writers.pop(0), 0)
        writers.append(start_writer(started))
        started += 1
    for child in [*writers, *readers]:
        os.waitpid(child, 0)


if __name__ == "__main__":
    run(
        sys.argv[1],
        sys.argv[2],
        float(sys.argv[3]),
        int(sys.argv[4]),
        int(sys.argv[5]),
        float(sys.argv[6]),
    )
