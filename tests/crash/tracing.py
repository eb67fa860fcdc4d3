"""Finds every system call of a command that changes the file system, and kills or fails it there.

The calls are found by tracing. What is listed here by hand are the calls that are known *not* to
change a file system, so one that nobody thought of counts as changing. A call is known by its name
and by how many of that name came before it, which is what the option `inject` of strace wants.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import pytest
from namespaces import may_mount, namespace_prefix

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType

_HERE = os.path.dirname(os.path.abspath(__file__))

# Reading, asking, memory, signals, time, and the locks that end with their process.
_HARMLESS = frozenset(
    re.findall(
        r"\w+",
        """
    access brk clock_gettime clock_nanosleep close close_range dup dup2 dup3 epoll_create1
    epoll_ctl epoll_wait exit exit_group faccessat faccessat2 fadvise64 fcntl fgetxattr
    flistxattr flock fstat fstatfs futex get_robust_list getcwd getdents getdents64 getegid
    geteuid getgid getgroups getpgrp getpid getppid getrandom getresgid getresuid getrlimit
    getrusage gettid gettimeofday getuid getxattr lgetxattr listxattr llistxattr lseek lstat
    madvise membarrier mprotect mremap munmap nanosleep newfstatat pipe pipe2 poll ppoll prctl
    pread64 preadv preadv2 prlimit64 pselect6 read readahead readlink readlinkat readv
    restart_syscall rseq rt_sigaction rt_sigpending rt_sigprocmask rt_sigreturn rt_sigsuspend
    rt_sigtimedwait sched_getaffinity sched_yield select set_robust_list set_tid_address
    sigaltstack stat statfs statx sysinfo tgkill time times umask uname
    """,
    )
)
_WRITES = frozenset({"write", "writev", "pwrite64", "pwritev", "pwritev2", "sendfile"})
_OPENS = frozenset({"open", "openat", "openat2"})
_OPENS_TO_CHANGE = re.compile(r"O_(WRONLY|RDWR|CREAT|TRUNC|TMPFILE)")
_HARMLESS_REQUESTS = (
    "FS_IOC_GETFLAGS",
    "TCGETS",
    "TIOCGWINSZ",
    "FIOCLEX",
    "FIONCLEX",
    "FIONREAD",
    "FIONBIO",
)
# Other processes are not followed, so none may be started.
_STARTS_A_PROCESS = frozenset({"clone", "clone3", "fork", "vfork", "execve", "execveat"})

_LINE = re.compile(r"(\w+)\((.*)")
_RANDOM_PARTS = [
    (re.compile(r"-[0-9a-f]{8}\b"), "-XXXXXXXX"),  # of the names of stages
    (re.compile(r"0x[0-9a-f]+"), "0x"),  # addresses
    (re.compile(r"tv_n?sec=\d+( /\*.*?\*/)?"), "tv="),
    (re.compile(r"\b\d+<"), "<"),  # descriptors
    (re.compile(r"\[\d+\]( => \[\d+\])?"), "[]"),  # offsets
    (re.compile(r"\) += .*"), ")"),  # the result
    (re.compile(r" <unfinished \.\.\.>\)$"), ""),  # the end of what was killed
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """The `nth` call of `name` in a command, from 1; `arguments` without what is random."""

    name: str
    nth: int
    arguments: str
    has_succeeded: bool

    def __str__(self) -> str:
        return f"{self.name} number {self.nth} ({self.arguments[:160]}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a command exited with and printed, and the log of strace where it was traced."""

    code: int
    stdout: str
    stderr: str
    log: str


class HarnessError(Exception):
    """A test did not do what it should: not the fault of what it tests."""


@cache
def _why_not_traceable() -> str:
    try:
        probe = subprocess.run(
            ["strace", "-e", "inject=getpid:error=EIO:when=1", "-o", os.devnull, "true"],
            capture_output=True,
            text=True,
            check=False,
        )
    except FileNotFoundError:
        return "strace is not installed"
    return f"strace does not work here: {probe.stderr.strip()}" if probe.returncode else ""


def need_strace() -> None:
    """Skip the test where strace is missing or may not trace."""
    reason = _why_not_traceable()
    if reason:
        pytest.skip(reason)


def parse_log(log: str, base: str) -> list[Call]:
    """Return all calls in a log of strace, in their order; paths are shown relative to `base`."""
    calls, counts = [], Counter[str]()
    for line in log.splitlines():
        match = _LINE.match(line)
        if match is None:
            continue
        name, arguments = match.groups()
        counts[name] += 1
        has_succeeded = re.search(r"\) += -1 ", arguments) is None
        for pattern, replacement in _RANDOM_PARTS:
            arguments = pattern.sub(replacement, arguments)
        arguments = arguments.replace(base, "")
        calls.append(
            Call(name=name, nth=counts[name], arguments=arguments, has_succeeded=has_succeeded)
        )
    return calls


def changes_file_system(call: Call) -> bool:
    """Return whether a call may change what is on a file system; when in doubt, it does."""
    name, arguments = call.name, call.arguments
    if name in _HARMLESS:
        return False
    if name in _WRITES:
        return _is_of_a_file(arguments)
    if name in _OPENS:
        return _OPENS_TO_CHANGE.search(arguments) is not None and '"/dev/' not in arguments
    if name == "ioctl":
        return not any(request in arguments for request in _HARMLESS_REQUESTS)
    if name == "mmap":
        return "MAP_SHARED" in arguments and "PROT_WRITE" in arguments
    return True


def _is_of_a_file(arguments: str) -> bool:
    """Whether the first argument is a descriptor of something else than a pipe or a device."""
    return arguments.startswith("</") and not arguments.startswith(("</dev/", "</proc/"))


class CommandServer:
    """Runs `reblock` in children of one process that has imported it; see command_server.py.

    Commands work below `base`. Where mounts are allowed, the process has a mount namespace of its
    own. `mounts` is a script that mounts what is to be mounted there; in it, $1 is `base`. Another
    `prefix` runs the process in another way. System calls that are `refused` fail for all commands,
    with the error of each.
    """

    def __init__(
        self,
        base: Path,
        *,
        mounts: str = "",
        prefix: Sequence[str] | None = None,
        refused: Sequence[tuple[str, int]] = (),
    ) -> None:
        self._refused = list(refused)
        self._base = str(base)
        log = os.path.join(base, f"strace-{os.urandom(4).hex()}.log")
        command = [sys.executable, os.path.join(_HERE, "command_server.py"), log]
        if mounts:
            command = ["sh", "-euc", f'{mounts}\nshift; exec "$@"', "sh", self._base, *command]
        if prefix is None:
            prefix = namespace_prefix() if mounts or may_mount() else ()
        command = [*prefix, *command]
        environment = os.environ | {"PYTHONHASHSEED": "0", "PYTHONDONTWRITEBYTECODE": "1"}
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        self.warm_up()  # answered as soon as all is mounted

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._process.communicate()

    def seen(self, path: Path) -> Path:
        """Return where this process finds what the server finds at `path`, its mounts included."""
        return Path(f"/proc/{self._process.pid}/root{path}")

    def warm_up(self, *commands: Sequence[str | Path]) -> None:
        """Run commands once, so that what they import is there from then on."""
        self._ask({"warm_up": [[str(argument) for argument in argv] for argv in commands]})

    def run(
        self,
        *argv: str | Path,
        strace: Sequence[str] | None = None,
        read_only: Path | None = None,
    ) -> Outcome:
        """Run `reblock` with `argv`.

        Args:
            argv: The command and its arguments.
            strace: Options of strace, to be traced by it.
            read_only: A directory that the command finds mounted read-only.
        """
        answer = self._ask(
            {
                "argv": [str(argument) for argument in argv],
                "strace": strace,
                "read_only": None if read_only is None else str(read_only),
                "refused": self._refused,
            }
        )
        return Outcome(**answer)

    def _ask(self, request: dict[str, object]) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise HarnessError("the server of commands has ended")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def record(self, *argv: str | Path) -> tuple[list[Call], Outcome]:
        """Run a command and return its calls that change the file system, in their order."""
        outcome = self.run(*argv, strace=[])
        calls = parse_log(outcome.log, self._base)
        if started := [call for call in calls if call.name in _STARTS_A_PROCESS]:
            raise HarnessError(f"processes are not followed, but one is started: {started[0]}")
        return [call for call in calls if changes_file_system(call)], outcome

    def kill_at(self, call: Call, *argv: str | Path) -> Outcome:
        """Run a command that is killed (SIGKILL) instead of making `call`."""
        outcome = self._inject(call, "signal=KILL", argv)
        if outcome.code != -9:
            raise HarnessError(f"not killed but ended with {outcome.code} at {call}")
        return outcome

    def fail_at(self, call: Call, error: str, *argv: str | Path, for_good: bool) -> Outcome:
        """Run a command for which `call` fails with `error`, such as ENOSPC.

        Args:
            call: The call.
            error: The name of the error.
            argv: The command and its arguments.
            for_good: Whether all later calls of the name fail too, as on a disk that stays full.
        """
        outcome = self._inject(call, f"error={error}", argv, and_later=for_good)
        if "(INJECTED)" not in outcome.log:
            raise HarnessError(f"{error} was not injected at {call}:\n{outcome.log}")
        return outcome

    def delay_at(self, call: Call, seconds: float, *argv: str | Path) -> Outcome:
        """Run a command that waits before it makes `call`."""
        return self._inject(call, f"delay_enter={int(seconds * 1e6)}", argv)

    def _inject(
        self, call: Call, what: str, argv: Sequence[str | Path], *, and_later: bool = False
    ) -> Outcome:
        when = f"{call.nth}{'+' if and_later else ''}"
        options = ["-e", f"trace={call.name}", "-e", f"inject={call.name}:{what}:when={when}"]
        outcome = self.run(*argv, strace=options)
        made = parse_log(outcome.log, self._base)
        # Of a call that was killed, arguments that the system fills in are not shown.
        if len(made) < call.nth or not call.arguments.startswith(made[call.nth - 1].arguments):
            raise HarnessError(f"another call than in the recording was hit:\n{call}\n{made[-1:]}")
        return outcome
