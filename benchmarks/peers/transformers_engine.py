"""transformers: `generate` with a static cache, plain and compiled, and continuous batching."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

import torch
import transformers as library

from peers.serving import MAX_RUNNING, Request, Served

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Batching", "Compiled", "Static"]

transformers: Any = library
PAGE_TOKENS = 32


def read_model(directory: str) -> Any:
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    return model.eval()


class Static:
    """`generate` for requests that arrive together and are of one length."""

    def load(self, *, model: str, threads: int, **_: Any) -> None:
        torch.set_num_threads(threads)
        self._model = read_model(model)

    def _compiling(self) -> dict[str, Any]:
        return {"disable_compile": True}

    def serve(self, requests: Sequence[Request]) -> Served:
        moments: list[float] = []

        class Clock(transformers.StoppingCriteria):  # type: ignore[misc]
            def __call__(self, input_ids: Any, _scores: Any, **_: Any) -> Any:
                moments.append(time.perf_counter())
                return torch.zeros(len(input_ids), dtype=torch.bool)

        prompts = torch.tensor([request.prompt_ids for request in requests])
        (count,) = {request.num_new_tokens for request in requests}
        started = time.perf_counter()
        whole = self._model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            do_sample=False,
            max_new_tokens=count,
            min_new_tokens=count,
            eos_token_id=None,
            pad_token_id=0,
            cache_implementation="static",
            stopping_criteria=transformers.StoppingCriteriaList([Clock()]),
            **self._compiling(),
        )
        return Served(
            token_s=[[moment - started for moment in moments] for _ in requests],
            token_ids=whole[:, prompts.shape[1] :].tolist(),
        )


class Compiled(Static):
    """The same with its decoding steps compiled by torch, for weights that stay as they are."""

    def load(self, **options: Any) -> None:
        from torch._inductor import config

        config.freezing = True  # so that torch packs the weights
        super().load(**options)

    def _compiling(self) -> dict[str, Any]:
        # Its default is made for a GPU; on a CPU it compiles only where it is told to.
        config = transformers.CompileConfig(mode="default", fullgraph=True, dynamic=False)
        config._compile_all_devices = True
        return {"compile_config": config}


class Batching:
    """Continuous batching: a thread of its own serves from a paged cache."""

    def load(self, *, model: str, threads: int, pool_tokens: int, **_: Any) -> None:
        torch.set_num_threads(threads)
        if not hasattr(self, "_model"):
            self._model = read_model(model)
        else:
            self._manager.stop(block=True)
            self._manager.destroy()
        generation = transformers.GenerationConfig(
            do_sample=False, eos_token_id=-1, pad_token_id=0, max_new_tokens=pool_tokens
        )
        batching = transformers.ContinuousBatchingConfig(
            page_size=PAGE_TOKENS,
            num_blocks=pool_tokens // PAGE_TOKENS,
            max_batch_tokens=512,
            max_requests_per_batch=MAX_RUNNING,
            allow_block_sharing=False,
        )
        self._manager = self._model.init_continuous_batching(
            generation_config=generation, continuous_batching_config=batching
        )
        self._manager.start()

    def serve(self, requests: Sequence[Request]) -> Served:
        started = time.perf_counter()
        feeder = threading.Thread(target=self._feed, args=(requests, started))
        feeder.start()
        token_s: list[list[float]] = [[] for _ in requests]
        token_ids: list[list[int]] = [[] for _ in requests]
        missing = sum(request.num_new_tokens for request in requests)
        while missing > 0:
            output = self._manager.get_result(timeout=1)
            if output is None:
                if not self._manager.is_running():
                    raise RuntimeError("its thread has ended; see the log")
                continue
            if output.error is not None:
                raise RuntimeError(str(output.error))
            now, index = time.perf_counter() - started, int(output.request_id)
            new = output.generated_tokens[len(token_ids[index]) :]
            token_ids[index] += new
            token_s[index] += [now] * len(new)
            missing -= len(new)
        feeder.join()
        return Served(token_s=token_s, token_ids=token_ids)

    def _feed(self, requests: Sequence[Request], started: float) -> None:
        for index, request in enumerate(requests):
            time.sleep(max(0.0, started + request.arrival_s - time.perf_counter()))
            self._manager.add_request(
                request.prompt_ids,
                request_id=str(index),
                max_new_tokens=request.num_new_tokens,
                streaming=True,
            )
