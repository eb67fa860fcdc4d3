"""Runs commands of reblock in forked children that have everything imported already.

A process of its own, spoken to in lines of JSON: `tracing.CommandServer` is the other end. A
child waits until `strace` has taken hold of it, so that a call can be counted, killed or failed.

    python command_server.py LOG

Request: {"argv": [...], "strace": [...] or null, "read_only": path or null, "refused": [...]}
Answer: {"code": ..., "stdout": ..., "stderr": ..., "log": ...}; the code of a child that was
killed is the number of the signal, negated.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress
from typing import Any

from namespaces import refuse_calls, remount_read_only

from reblock.cli.main import main

_TIME_LIMIT_S = 60
_PR_SET_PTRACER = 0x59616D61
_ANYBODY = -1


def serve(log: str) -> None:
    """Answer requests until there are none left."""
    for line in sys.stdin:
        request = json.loads(line)
        answer = _warm_up(request["warm_up"]) if "warm_up" in request else _run(request, log)
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


def _warm_up(commands: list[list[str]]) -> dict[str, Any]:
    """Run commands here, so that children have all modules that these import."""
    before = os.dup(1), os.dup(2)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    try:
        for argv in commands:
            with suppress(SystemExit):
                main(argv)
    finally:
        for saved, number in zip(before, (1, 2), strict=True):
            os.dup2(saved, number)
            os.close(saved)
        os.close(nowhere)
    gc.collect()
    gc.freeze()
    return {}


def _run(request: dict[str, Any], log: str) -> dict[str, Any]:
    ready_out, ready_in = os.pipe()
    gate_out, gate_in = os.pipe()
    stdout_out, stdout_in = os.pipe()
    stderr_out, stderr_in = os.pipe()
    child = os.fork()
    if not child:
        os.close(gate_in)
        _be_child(request, (ready_in, gate_out), (stdout_in, stderr_in))
    for descriptor in (ready_in, gate_out, stdout_in, stderr_in):
        os.close(descriptor)
    os.read(ready_out, 1)  # so that no call of what comes before is counted
    os.close(ready_out)
    tracer = None if request["strace"] is None else _attach(child, log, request["strace"])
    os.write(gate_in, b"x")
    os.close(gate_in)
    stdout, stderr = _read_both(child, stdout_out, stderr_out)
    status = os.waitpid(child, 0)[1]
    text = ""
    if tracer is not None:
        tracer.communicate()
        with open(log, encoding="utf-8", errors="replace") as file:
            text = file.read()
    code = os.waitstatus_to_exitcode(status)
    return {"code": code, "stdout": stdout, "stderr": stderr, "log": text}


def _be_child(
    request: dict[str, Any], ready_and_gate: tuple[int, int], outputs: tuple[int, int]
) -> None:
    code: object = 99
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PTRACER, ctypes.c_ulong(_ANYBODY), 0, 0, 0)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(outputs[0], 1)
        os.dup2(outputs[1], 2)
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
        sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
        if request["read_only"] is not None:
            remount_read_only(request["read_only"])
        refuse_calls(request["refused"])
        os.write(ready_and_gate[0], b"x")
        os.read(ready_and_gate[1], 1)
        code = main(request["argv"])
    except SystemExit as stop:
        code = stop.code
    except BaseException:  # noqa: BLE001 - shown as Python itself would
        sys.excepthook(*sys.exc_info())
    finally:
        with suppress(OSError):
            sys.stderr.flush()
        os._exit(code if isinstance(code, int) else 99)


def _attach(child: int, log: str, options: list[str]) -> subprocess.Popen[bytes]:
    tracer = subprocess.Popen(
        ["strace", "-p", str(child), "-y", "-s", "0", "-o", log, *options],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    assert tracer.stderr is not None
    line = tracer.stderr.readline()
    if b" attached" not in line:
        os.kill(child, signal.SIGKILL)
        raise RuntimeError(f"strace did not attach: {line!r}")
    return tracer


def _read_both(child: int, *descriptors: int) -> list[str]:
    """Return what comes through pipes until all are closed; a child that hangs is killed."""
    found = dict.fromkeys(descriptors, b"")
    still_open, deadline = set(descriptors), time.monotonic() + _TIME_LIMIT_S
    while still_open:
        ready = select.select(still_open, [], [], max(0.0, deadline - time.monotonic()))[0]
        if not ready:
            os.kill(child, signal.SIGABRT)
            deadline += _TIME_LIMIT_S
        for descriptor in ready:
            data = os.read(descriptor, 65536)
            found[descriptor] += data
            if not data:
                still_open.remove(descriptor)
                os.close(descriptor)
    return [data.decode(errors="backslashreplace") for data in found.values()]


if __name__ == "__main__":
    serve(sys.argv[1])
