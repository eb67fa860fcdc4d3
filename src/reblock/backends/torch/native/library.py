"""The library of native operators: built when a model is compiled, loaded when it is run."""

from __future__ import annotations

import hashlib
import os
import subprocess

import torch

from reblock.backends.torch.host import compiler_march
from reblock.backends.torch.native.ops import NAMESPACE, SCHEMAS
from reblock.backends.torch.native.pack import packed_shape
from reblock.errors import CompileFailed

__all__ = ["LIBRARY_NAME", "build", "interface_digest", "is_loaded", "load"]

LIBRARY_NAME = "reblock_ops.so"

_SOURCES = os.path.dirname(os.path.abspath(__file__))
_MAIN = "ops.cpp"
# The oldest torch whose stable interface has all that is used here (2.10).
_TARGET_TORCH = "0x020a000000000000"
_LINES_OF_AN_ERROR = 8
# Counts what the operators do that their signatures do not tell.
_INTERFACE_VERSION = 2


def interface_digest() -> str:
    """Return a digest of what a compiled program relies on: signatures and packed layout.

    Libraries of one digest can take each other's place.
    """
    interface = _INTERFACE_VERSION, sorted(SCHEMAS.items()), packed_shape(1, 1, torch.int8)
    return hashlib.sha256(repr(interface).encode()).hexdigest()


def _command(compiler: str, isa: str, target: str) -> list[str]:
    march = compiler_march(isa)
    torch_directory = os.path.dirname(torch.__file__)
    return [
        compiler,
        "-std=c++17",
        "-O3",
        *([f"-march={march}"] if march else []),
        "-fPIC",
        "-shared",
        # Passing vectors that the processor has not is of no concern: none leaves the library.
        "-Wno-psabi",
        f"-DTORCH_TARGET_VERSION={_TARGET_TORCH}",
        f"-I{os.path.join(torch_directory, 'include')}",
        os.path.join(_SOURCES, _MAIN),
        f"-L{os.path.join(torch_directory, 'lib')}",
        "-ltorch_cpu",
        "-s",
        "-o",
        target,
    ]


def build(directory: str, isa: str) -> str:
    """Build the library for an instruction set into `directory` and return its path.

    Args:
        directory: where it is put, as `LIBRARY_NAME`.
        isa: as `host.host_isa` names it. Anything but x86-64 gets the compiler's own choice.

    Raises:
        CompileFailed: the compiler gave up; the message has its last lines.
    """
    compiler = os.environ.get("CXX", "g++")
    target = os.path.join(directory, LIBRARY_NAME)
    try:
        outcome = subprocess.run(
            _command(compiler, isa, target), capture_output=True, text=True, check=False
        )
    except OSError as error:
        raise CompileFailed(
            f"the native operators need a C++ compiler, and {compiler!r} cannot be run: "
            f"{error.strerror}; set CXX to one that can"
        ) from error
    if outcome.returncode != 0:
        lines = outcome.stderr.strip().splitlines()[-_LINES_OF_AN_ERROR:]
        raise CompileFailed(
            f"{compiler!r} could not build the native operators for {isa} "
            f"(status {outcome.returncode}); set CXX to GCC 9, Clang 12 or newer"
            + "".join(f"\n    {line}" for line in lines)
        )
    return target


def is_loaded() -> bool:
    """Return whether this process has the operators already."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(f"{NAMESPACE}::linear", "CPU")


def load(path: str) -> None:
    """Load the library, unless this process has one.

    A process has one set of operators: a second library would take the place of the first in the
    programs that run on it. The file is not needed any more afterwards.

    Raises:
        OSError: it is no library that can be loaded here, or one without the operators.
    """
    if is_loaded():
        return
    torch.ops.load_library(path)
    # Else the first program to run would find out, in the middle of torch's code.
    if not is_loaded():
        raise OSError(f"{path}: has none of the operators")
