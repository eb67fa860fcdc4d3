"""Gives one mutated artifact to the commands that users run, and says what was not as it must be.

Allowed is: an exit code of ours; one line of error where it is not 0; nothing on standard output
then; no exception, no control character, no long wait, no large memory; and an artifact that is as
it was after anything but a `set` that succeeded, and that opens after one that did.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import resource
import signal
import stat
import sys
import time
import traceback
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from reblock.cli.main import main

if TYPE_CHECKING:
    from random import Random
    from types import FrameType
    from typing import TextIO

    from cases import Case

# Of computing, which a busy machine does not lengthen. The alarm is for what waits.
MAX_COMPUTING_S = 5.0
ALARM_S = 60.0
MAX_BYTES = 256 * 2**20
MAX_LINE = 4_000
HAS_VERIFY = importlib.util.find_spec("reblock.cli.verify") is not None

_ERROR = re.compile(r"reblock: error: \S")
_TALK = re.compile(r"(reblock: )?(error|warning|note): \S")
_COUNTS = ("9", "16", "17", "24", "31", "33", "1", "1000", str(2**31 - 1))
_BUDGETS = ("80%", "1.0", "0.5", "100MB", "20MB", "1", "100GB")
# Of everything that the commands tell apart: what a case that is read at all goes through.
_SHARE_OF_ALL = 0.08
_SHARE_OF_ALL_WHERE_READ = 0.3


class TooSlow(BaseException):
    """Raised by the alarm; no command catches it."""


@dataclass(slots=True)
class Answer:
    """What a command did."""

    code: int
    out: str
    err: str


@dataclass(slots=True)
class Probe:
    """One case; `findings` is what was wrong, `outcome` what `inspect` exited with."""

    case: Case
    rng: Random
    findings: list[str] = field(default_factory=list)
    outcome: str = ""

    def run(self) -> None:
        """Give the artifact to the commands."""
        directory, rng = self.case.directory, self.rng
        before = _glance(directory)
        got = self.command("get", directory)
        seen = self.command("inspect", directory, "--json")
        self.outcome = str(seen.code)
        self._check_agreement(got, seen)
        count = rng.choice(_COUNTS)
        self.command("set", directory, count, "--dry-run")
        if not self.case.may_be_finished and _glance(directory) != before:
            self.findings.append("a command that only reads has changed the artifact")
        share = _SHARE_OF_ALL_WHERE_READ if seen.code == 0 else _SHARE_OF_ALL
        if self.case.may_be_finished or rng.random() < share:
            self.command("inspect", directory)
            self.command("get", directory, "--json")
            if HAS_VERIFY:
                self.command("verify", directory, "--quick")
            self._set(count)
            self._set("--memory-budget", rng.choice(_BUDGETS))
            if rng.random() < 0.3:
                self._set("--previous")

    def _check_agreement(self, got: Answer, seen: Answer) -> None:
        if got.code == 0 and not re.fullmatch(r"[1-9][0-9]{0,9}\n", got.out):
            self.findings.append(f"get printed {got.out[:80]!r}")
        if seen.code == 0:
            report = json.loads(seen.out)
            if got.out != f"{report['kvcache_num_blocks']}\n":
                self.findings.append("get and inspect do not agree")

    def _set(self, *target: str) -> None:
        directory = self.case.directory
        before, beside = _content(directory), _beside(directory)
        done = self.command("set", directory, *target)
        if beside != _beside(directory) and not self.case.may_be_finished:
            self.findings.append(f"set left {sorted(_beside(directory) - beside)} behind")
        if done.code == 0:
            read = self.command("inspect", directory, "--json")
            if _content(directory) == before and self.outcome != "0":
                pass  # nothing was to be done, and so nothing was written
            elif read.code != 0:
                self.findings.append(f"what set wrote cannot be opened: {read.err[:300]}")
            elif target[0].isdecimal():
                count = json.loads(read.out)["kvcache_num_blocks"]
                if count != int(target[0]):
                    self.findings.append(f"set {target[0]} wrote {count}")
        elif not self.case.may_be_finished and _content(directory) != before:
            self.findings.append(f"set was refused and has changed the artifact: {done.err[:300]}")

    def command(self, *argv: str) -> Answer:
        """Run one command and check what it said."""
        answer, fault = _call(list(argv))
        label = " ".join(("reblock", *(a for a in argv if a != self.case.directory)))
        faults = [fault] if fault else _check_answer(answer, self.case.directory, argv[0])
        self.findings += [f"{label}: {text}" for text in faults]
        return answer


def _call(argv: list[str]) -> tuple[Answer, str]:
    """Run a command in this process, with files as its streams, as a shell would give it."""
    # Not StringIO: the commands may close the descriptors of their streams.
    out, err = _stream("out"), _stream("err")
    code, fault, started = 1, "", time.process_time()
    keep = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = out, err
    # One that is raised within a callback of C code would be lost, so it comes again.
    signal.setitimer(signal.ITIMER_REAL, ALARM_S, 1.0)
    try:
        code = main(argv)
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 1
    except BaseException as error:  # noqa: BLE001  finding these is what this is for
        kept = traceback.format_exception(error, limit=-6)
        fault = f"raised {type(error).__name__}\n{''.join(kept)[-3000:]}"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        sys.stdout, sys.stderr = keep
    seconds = time.process_time() - started
    if seconds > MAX_COMPUTING_S and not fault:
        fault = f"computed for {seconds:.1f} s"
    return Answer(code, _take(out), _take(err)), fault


def _stream(name: str) -> TextIO:
    descriptor = os.memfd_create(name)
    return open(descriptor, "w+", encoding="utf-8", newline="\n")


def _take(stream: TextIO) -> str:
    with stream:
        stream.flush()
        size = os.fstat(stream.fileno()).st_size
        if not stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
            return ""  # what is dropped goes to /dev/null
        return os.pread(stream.fileno(), min(size, 2**20), 0).decode()


def _check_answer(answer: Answer, directory: str, command: str) -> list[str]:
    faults = []
    if answer.code not in (0, 1, 2, 3, 4):
        faults.append(f"exited with {answer.code}")
    lines = answer.err.splitlines()
    errors = [line for line in lines if _ERROR.match(line)]
    # verify prints its report whatever it finds.
    reports = command == "verify" and answer.code == 4 and not errors
    if not reports and len(errors) != (answer.code != 0):
        faults.append(f"exited with {answer.code} and said {answer.err[:500]!r}")
    faults += [f"said {line[:200]!r}" for line in lines if not _TALK.match(line)]
    if answer.code != 0 and answer.out and not reports:
        faults.append(f"failed and printed {answer.out[:200]!r}")
    for line in (*lines, *answer.out.splitlines()):
        text = line.replace(directory, "")
        if not text.isprintable():
            faults.append(f"printed a character that does not show: {text[:200]!r}")
        if len(text) > MAX_LINE and not text.startswith("{"):
            faults.append(f"printed a line of {len(text)} characters: {text[:200]!r}")
    return faults


def _glance(directory: str) -> list[tuple[object, ...]]:
    """What tells whether anything was written, without reading any file."""
    found = []
    for root, names, files in os.walk(directory):
        for name in (*names, *files):
            status = os.lstat(os.path.join(root, name))
            found.append((root, name, status.st_ino, status.st_size, status.st_mtime_ns))
    return sorted(found, key=repr)


def _content(directory: str) -> list[tuple[object, ...]]:
    """Everything in the directory: names, kinds, modes, and the content of what is small."""
    found: list[tuple[object, ...]] = []
    for root, names, files in os.walk(directory):
        for name in (*names, *files):
            path = os.path.join(root, name)
            status = os.lstat(path)
            content: object = status.st_size, status.st_mtime_ns
            if stat.S_ISLNK(status.st_mode):
                content = os.readlink(path)
            elif stat.S_ISREG(status.st_mode) and status.st_size < 2**24:
                with open(path, "rb") as file:
                    content = hash(file.read())
            elif stat.S_ISDIR(status.st_mode):
                content = None
            found.append((os.path.relpath(path, directory), status.st_mode, content))
    return sorted(found, key=repr)


def _beside(directory: str) -> set[str]:
    return set(os.listdir(os.path.dirname(directory)))


def prepare() -> None:
    """Set the alarm up and let no command take more memory than it may."""

    def stop(_number: int, _frame: FrameType | None) -> None:
        raise TooSlow

    signal.signal(signal.SIGALRM, stop)


def limit_memory(is_on: bool) -> None:
    """Let the process take `MAX_BYTES` more address space than now, or again all it wants."""
    soft = _status("VmSize") + MAX_BYTES if is_on else resource.RLIM_INFINITY
    resource.setrlimit(resource.RLIMIT_AS, (soft, resource.RLIM_INFINITY))


def reset_peak() -> None:
    """Let `peak_bytes` count from now on."""
    with open("/proc/self/clear_refs", "w", encoding="ascii") as file:
        file.write("5")


def peak_bytes() -> int:
    """Return the most memory that the process has had, in bytes."""
    return _status("VmHWM")


def _status(name: str) -> int:
    with open("/proc/self/status", encoding="ascii") as file:
        line = next(line for line in file if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024
