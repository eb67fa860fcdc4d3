"""reblock: an artifact that was compiled, served by its engine."""

from __future__ import annotations

import resource
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from peers.serving import MAX_BATCH, Request, Served, serve_steps
from reblock.artifact.reader import open_artifact
from reblock.backends.torch import load_runner
from reblock.engine import Engine as ReblockEngine
from reblock.engine import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

__all__ = ["Engine"]


class Engine:
    """An engine on an artifact; a new one for every `load`."""

    def load(self, *, artifact: str, threads: int, **_: Any) -> None:
        self._engine: Any = None
        self._runner: Any = None  # its memory goes before more is taken
        self._runner = load_runner(open_artifact(artifact), threads)
        self._engine = ReblockEngine(self._runner)
        self._watched: list[Any] = []
        self._indices: dict[int, int] = {}

    @property
    def has_work(self) -> bool:
        return bool(self._engine.has_work)

    def add(self, index: int, request: Request) -> None:
        params = SamplingParams(max_new_tokens=request.num_new_tokens, ignore_eos=True)
        self._indices[self._engine.add(request.prompt_ids, params)] = index

    def step(self) -> list[tuple[int, int]]:
        indices = self._indices
        return [(indices[output.request_id], output.token_id) for output in self._engine.step()]

    def serve(self, requests: Sequence[Request]) -> Served:
        self._indices.clear()
        return serve_steps(self, requests)

    def num_preemptions(self) -> int:
        """Return how often a request lost its blocks since the artifact was loaded."""
        return int(self._engine.counters().num_preemptions)

    def parts(self, requests: Sequence[Request]) -> dict[str, int]:
        """Return the nanoseconds that went into each part while all requests were decoded."""
        self._watch_pieces()
        self._indices.clear()
        for index, request in enumerate(requests):
            self.add(index, request)
        counts = [0] * len(requests)
        first: Any = None
        while True:
            for index, _ in self.step():
                counts[index] += 1
            if first is None and min(counts):
                first = self._engine.counters(), time.perf_counter_ns(), self._pieces_ns
            ended = any(
                count == request.num_new_tokens
                for count, request in zip(counts, requests, strict=True)
            )
            if ended:
                break
        last, now, pieces = self._engine.counters(), time.perf_counter_ns(), self._pieces_ns
        while self.has_work:
            self.step()
        names = ("scheduler_ns", "programs_ns", "sampler_ns")
        spent = {name: getattr(last, name) - getattr(first[0], name) for name in names}
        return {**spent, "all_ns": now - first[1], "pieces_ns": pieces - first[2]}

    def _watch_pieces(self) -> None:
        """Count the time inside the compiled pieces of the decoders from now on."""
        self._pieces_ns = 0

        def watched(run: Any) -> Any:
            def call(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
                started = time.perf_counter_ns()
                outputs: list[torch.Tensor] = run(inputs)
                self._pieces_ns += time.perf_counter_ns() - started
                return outputs

            return call

        for program in self._runner._decoders.values():
            if program in self._watched:
                continue
            self._watched.append(program)
            program._prologue = watched(program._prologue)
            program._epilogue = watched(program._epilogue)
            program._layers = [replace(layer, run=watched(layer.run)) for layer in program._layers]

    def fill_cache(self) -> int:
        """Write random keys and values everywhere; return the peak of this process's memory."""
        for tensor in self._runner.cache.tensors.values():
            for block in tensor:
                block.normal_()
        return peak_bytes()

    def decode_at(self, *, context: int, steps: int) -> dict[str, Any]:
        """Decode one token of each row at the end of a context, again and again.

        What the blocks hold is of no matter to the time, so nothing was read into them before.
        """
        import torch  # not before reblock, which says how its threads wait

        limits = self._runner.limits
        width = limits.num_blocks_for(context)
        blocks = torch.randperm(limits.num_blocks, generator=torch.Generator().manual_seed(0))
        tables = blocks[: width * MAX_BATCH].reshape(MAX_BATCH, width).tolist()
        rows = list(range(MAX_BATCH))
        seconds = []
        for _ in range(steps):
            started = time.perf_counter()
            self._runner.decode(rows, [context - 1] * MAX_BATCH, tables, rows)
            seconds.append(time.perf_counter() - started)
        return {"seconds": seconds, "peak_bytes": peak_bytes()}


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
