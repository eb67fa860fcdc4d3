"""Starts workers and asks them, one at a time."""

from __future__ import annotations

import json
import os
import select
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

from peers.serving import Request, Served

if TYPE_CHECKING:
    from collections.abc import Sequence

    from peers.engines import EngineInfo

__all__ = ["Worker", "WorkerError"]

HERE = Path(__file__).resolve().parent.parent


class WorkerError(Exception):
    """An engine could not do what it was asked for."""


class Worker:
    """A process with an engine."""

    def __init__(self, info: EngineInfo, python: str, log: Path, threads: int) -> None:
        self._log = log
        environment = {
            **os.environ,
            "HF_HUB_OFFLINE": "1",
            "TQDM_DISABLE": "1",
            "OMP_NUM_THREADS": str(threads),
            "TORCHINDUCTOR_CACHE_DIR": str(log.parent / "inductor"),
        }
        with log.open("w") as errors:
            self._process = subprocess.Popen(
                [python, "-W", "ignore", "-m", "peers.worker", info.module, info.attribute],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                cwd=HERE,
                env=environment,
            )

    def ask(self, method: str, *, timeout_s: float = 900, **arguments: Any) -> Any:
        """Return what a method of the engine returns.

        Raises:
            WorkerError: it failed, or took too long; the process has ended then or is ended.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        question = json.dumps({"method": method, "arguments": arguments})
        try:
            self._process.stdin.write(question + "\n")
            self._process.stdin.flush()
        except OSError as error:
            raise WorkerError(f"its process has ended: {self._last_words()}") from error
        if not select.select([self._process.stdout], [], [], timeout_s)[0]:
            self._process.kill()
            raise WorkerError(f"no answer in {timeout_s:.0f} s")
        line = self._process.stdout.readline()
        if not line:
            status = self._process.wait()
            raise WorkerError(f"its process ended with status {status}: {self._last_words()}")
        answer = json.loads(line)
        if "error" in answer:
            raise WorkerError(answer["error"])
        return answer["result"]

    def serve(self, requests: Sequence[Request]) -> Served:
        """Have the engine answer requests.

        Raises:
            WorkerError: as `ask` does.
        """
        return Served(**self.ask("serve", requests=[request.to_json() for request in requests]))

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _last_words(self) -> str:
        lines = self._log.read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else "nothing in its log"
