"""llama.cpp: one batch a step, of the next token of all that run and of what is left of prompts.

A request is let in when the cache has room for all that it may become, as llama.cpp takes nothing
back from a sequence that runs.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import llama_cpp as library
import numpy as np

from peers.serving import MAX_RUNNING, Request, Served, serve_steps

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Engine"]

llama: Any = library
BATCH_TOKENS = 512
TYPE_F32 = 0


@dataclass(slots=True, eq=False)
class Running:
    """A request that has a sequence of the cache."""

    index: int
    request: Request
    sequence: int
    num_read: int = 0
    answer: list[int] = field(default_factory=list)

    @property
    def room(self) -> int:
        return len(self.request.prompt_ids) + self.request.num_new_tokens


class Engine:
    """A context; a new one for every `load`."""

    def __init__(self) -> None:
        llama.llama_backend_init()
        self._model: Any = None
        self._context: Any = None

    def load(self, *, model: str, threads: int, pool_tokens: int, **_: Any) -> None:
        if self._model is None:
            parameters = llama.llama_model_default_params()
            self._model = llama.llama_model_load_from_file(model.encode(), parameters)
            if not self._model:
                raise RuntimeError("llama.cpp cannot load the model; see the log")
        if self._context is not None:
            llama.llama_free(self._context)
        parameters = llama.llama_context_default_params()
        parameters.n_ctx = pool_tokens
        parameters.n_batch = parameters.n_ubatch = BATCH_TOKENS
        parameters.n_seq_max = MAX_RUNNING
        parameters.n_threads = parameters.n_threads_batch = threads
        parameters.type_k = parameters.type_v = TYPE_F32
        parameters.kv_unified = True
        self._context = llama.llama_init_from_model(self._model, parameters)
        if not self._context:
            raise RuntimeError("llama.cpp cannot make a context; see the log")
        self._vocabulary = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(self._model))
        self._batch = llama.llama_batch_init(BATCH_TOKENS, 0, 1)
        self._pool_tokens = pool_tokens
        self._waiting: deque[tuple[int, Request]] = deque()
        self._running: list[Running] = []

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._running)

    def add(self, index: int, request: Request) -> None:
        self._waiting.append((index, request))

    def step(self) -> list[tuple[int, int]]:
        self._admit()
        self._batch.n_tokens = 0
        ends: list[tuple[Running, int]] = []
        # Those that are answered come first, so that no prompt takes their place.
        for running in sorted(self._running, key=lambda running: not running.answer):
            prompt = running.request.prompt_ids
            if running.answer:
                tokens = running.answer[-1:]
            else:
                left = BATCH_TOKENS - self._batch.n_tokens
                tokens = prompt[running.num_read : running.num_read + left]
            for token in tokens:
                self._put(token, running)
            if tokens and running.num_read >= len(prompt):
                last = self._batch.n_tokens - 1
                self._batch.logits[last] = 1
                ends.append((running, last))
        status = llama.llama_decode(self._context, self._batch)
        if status != 0:
            raise RuntimeError(f"llama_decode answered {status}")
        return [self._take(running, place) for running, place in ends]

    def serve(self, requests: Sequence[Request]) -> Served:
        return serve_steps(self, requests)

    def _admit(self) -> None:
        held = sum(running.room for running in self._running)
        free = set(range(MAX_RUNNING)) - {running.sequence for running in self._running}
        while self._waiting and free:
            running = Running(*self._waiting[0], sequence=min(free))
            if held + running.room > self._pool_tokens:
                return
            self._waiting.popleft()
            free.remove(running.sequence)
            held += running.room
            self._running.append(running)

    def _put(self, token: int, running: Running) -> None:
        batch, place = self._batch, self._batch.n_tokens
        batch.token[place] = token
        batch.pos[place] = running.num_read
        batch.n_seq_id[place] = 1
        batch.seq_id[place][0] = running.sequence
        batch.logits[place] = 0
        batch.n_tokens += 1
        running.num_read += 1

    def _take(self, running: Running, place: int) -> tuple[int, int]:
        logits = llama.llama_get_logits_ith(self._context, place)
        token = int(np.ctypeslib.as_array(logits, (self._vocabulary,)).argmax())
        running.answer.append(token)
        if len(running.answer) == running.request.num_new_tokens:
            memory = llama.llama_get_memory(self._context)
            llama.llama_memory_seq_rm(memory, running.sequence, -1, -1)
            self._running.remove(running)
        return running.index, token
