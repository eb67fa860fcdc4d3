"""Pieces of programs compiled side by side, each in one of a few worker processes.

The workers are plain subprocesses that are handed tasks as lines of JSON. (A process pool of
`multiprocessing` would run the user's own script again in every worker, unless it is guarded.)
"""

from __future__ import annotations

import json
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import threading
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from reblock.errors import CompileFailed, MissingDependency

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from reblock.backends.torch.pieces import PieceShapes
    from reblock.options import Dtype, WeightDtype

__all__ = ["CompiledPiece", "PieceTask", "check_compiler", "compile_pieces", "package_program"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PieceTask:
    """A piece to compile: "prologue", "epilogue", "layer_<index>" or "last_<index>"."""

    piece: str
    config_dir: str
    dtype: Dtype
    weight_dtype: WeightDtype
    isa: str
    shapes: PieceShapes


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledPiece:
    """The shared library of a piece and what AOTInductor notes beside it."""

    files: tuple[str, ...]
    seconds: float


def check_compiler() -> None:
    """Check that there is a C++ compiler.

    Raises:
        MissingDependency: there is none.
    """
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        raise MissingDependency(
            f"compiling needs a C++ compiler, and {compiler!r} is not on the PATH; install g++ "
            "(Debian: apt-get install g++), or set CXX to one that is there",
            package="g++",
            install="apt-get install g++",
        )


class _Worker:
    """A subprocess that compiles one piece at a time."""

    def __init__(self, log_path: str) -> None:
        self._log_path = log_path
        self._log = open(log_path, "wb")  # noqa: SIM115  closed in `close`
        self._process = subprocess.Popen(
            [sys.executable, "-m", "reblock.backends.torch.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            # Python's own pool of compilers in every worker would only crowd the machine.
            env={**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": "1"},
        )

    def run(self, task: PieceTask) -> CompiledPiece:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        answer = ""
        try:
            self._process.stdin.write(json.dumps(asdict(task)) + "\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
        except BrokenPipeError:
            pass
        where = f"compiling {task.piece}"
        if not answer:
            code = self._process.wait()
            hint = " (killed: is there enough memory?)" if code == -9 else ""
            raise CompileFailed(f"{where}: the worker ended with status {code}{hint}{self._tail()}")
        reply = json.loads(answer)
        if "error" in reply:
            raise CompileFailed(f"{where} failed: {reply['error']}{self._tail()}")
        return CompiledPiece(files=tuple(reply["files"]), seconds=reply["seconds"])

    def _tail(self) -> str:
        with open(self._log_path, encoding="utf-8", errors="replace") as file:
            lines = file.read().strip().splitlines()[-8:]
        return "".join(f"\n    {line}" for line in lines)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            with suppress(BrokenPipeError):
                stream.close()
        self._log.close()


def compile_pieces(
    tasks: Sequence[PieceTask], *, num_workers: int, on_done: Callable[[PieceTask, float], None]
) -> dict[str, CompiledPiece]:
    """Compile all tasks and return the pieces by name.

    Args:
        tasks: in the order in which to start them.
        num_workers: how many to compile at once; each takes up to 1 GiB of memory.
        on_done: called in this thread with every task that is done, and its seconds.

    Raises:
        CompileFailed: the first failure; everything else is stopped.
    """
    waiting: queue.SimpleQueue[PieceTask] = queue.SimpleQueue()
    for task in tasks:
        waiting.put(task)
    finished: queue.SimpleQueue[tuple[PieceTask, CompiledPiece | BaseException]] = (
        queue.SimpleQueue()
    )

    def serve(worker: _Worker) -> None:
        while True:
            try:
                task = waiting.get_nowait()
            except queue.Empty:
                return
            try:
                finished.put((task, worker.run(task)))
            except Exception as error:  # noqa: BLE001  raised again in the calling thread
                finished.put((task, error))
                return

    compiled: dict[str, CompiledPiece] = {}
    with tempfile.TemporaryDirectory(prefix="reblock-build-") as logs:
        workers = [
            _Worker(os.path.join(logs, f"worker{i}.log"))
            for i in range(min(num_workers, len(tasks)))
        ]
        try:
            for worker in workers:
                threading.Thread(target=serve, args=(worker,), daemon=True).start()
            while len(compiled) < len(tasks):
                task, result = finished.get()
                if isinstance(result, BaseException):
                    raise result
                compiled[task.piece] = result
                on_done(task, result.seconds)
        finally:
            for worker in workers:
                worker.close()
    return compiled


def package_program(
    path: str, pieces: Mapping[str, CompiledPiece], description: dict[str, object]
) -> None:
    """Write one program as a PT2 archive: a model for each piece, and `extra/reblock.json`."""
    import zipfile

    from torch._inductor.package.package import package_aoti

    # package_aoti insists on its own ending.
    archive = path + ".pt2"
    package_aoti(archive, {name: list(piece.files) for name, piece in pieces.items()})
    with zipfile.ZipFile(archive, "a") as file:
        root = file.namelist()[0].split("/", 1)[0]
        file.writestr(f"{root}/extra/reblock.json", json.dumps(description, indent=1))
    os.rename(archive, path)
