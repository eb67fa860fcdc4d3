"""How a process that loads the torch backend waits and allocates, as it says it does."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys

import pytest

WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
MEMORY = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_", "GLIBC_TUNABLES")

# Whether 16 MiB are cut out of the heap or had from the system alone: mallinfo2 counts the latter.
PROBE = """
import ctypes, json, os
from reblock.backends.torch.process import keep_freed_memory

class Mallinfo2(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in (
        "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost").split()]

libc = ctypes.CDLL(None)
libc.mallinfo2.restype = Mallinfo2
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
keep_freed_memory()
before = libc.mallinfo2().hblks
held = libc.malloc(16 << 20)
print(json.dumps(
    {"waiting": [os.environ.get(name) for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")],
     "regions": libc.mallinfo2().hblks - before}
))
"""


def probe(**environment: str) -> dict[str, object]:
    """Return what a process with that environment does."""
    plain = {k: v for k, v in os.environ.items() if k not in (*WAITING, *MEMORY)}
    output = subprocess.run(
        [sys.executable, "-c", PROBE], env=plain | environment, capture_output=True, check=True
    )
    answer: dict[str, object] = json.loads(output.stdout)
    return answer


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, ["passive", "1000"]),
        ({"OMP_WAIT_POLICY": "passive"}, ["passive", None]),
        ({"OMP_WAIT_POLICY": "active"}, ["active", None]),
        ({"GOMP_SPINCOUNT": "50"}, [None, "50"]),
    ],
)
def test_threads_spin_for_a_moment_unless_told(
    environment: dict[str, str], expected: list[str | None]
) -> None:
    assert probe(**environment)["waiting"] == expected


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc is told")
@pytest.mark.parametrize(
    ("environment", "regions"),
    [
        ({}, 0),
        ({"MALLOC_MMAP_THRESHOLD_": "131072"}, 1),
        ({"GLIBC_TUNABLES": "glibc.malloc.mmap_threshold=131072"}, 1),
        # Another tunable says nothing of memory.
        ({"GLIBC_TUNABLES": "glibc.rtld.optional_static_tls=1024"}, 0),
    ],
)
def test_freed_memory_is_kept_unless_told(environment: dict[str, str], regions: int) -> None:
    assert probe(**environment)["regions"] == regions
