"""OpenVINO GenAI: continuous batching, in float32, from a paged cache in float32."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import openvino as ov
import openvino_genai as genai

from peers.serving import MAX_RUNNING, Request, Served, serve_steps

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Engine"]

BLOCK_TOKENS = 32  # what its CPU plugin has


class Engine:
    """A pipeline; a new one for every `load`."""

    def load(self, *, model: str, threads: int, pool_tokens: int, **_: Any) -> None:
        config = genai.SchedulerConfig()
        config.num_kv_blocks = pool_tokens // BLOCK_TOKENS
        config.max_num_seqs = MAX_RUNNING
        config.max_num_batched_tokens = 512
        config.enable_prefix_caching = False
        properties = {
            "INFERENCE_PRECISION_HINT": "f32",
            "KV_CACHE_PRECISION": "f32",
            "INFERENCE_NUM_THREADS": threads,
        }
        self._pipeline: Any = None
        self._pipeline = genai.ContinuousBatchingPipeline(model, config, "CPU", properties)
        self._handles: dict[int, Any] = {}
        self._num_requests = 0

    @property
    def has_work(self) -> bool:
        return bool(self._pipeline.has_non_finished_requests())

    def add(self, index: int, request: Request) -> None:
        config = genai.GenerationConfig()
        config.max_new_tokens = request.num_new_tokens
        config.ignore_eos = True
        config.do_sample = False
        config.set_eos_token_id(0)  # one that there is; it ends nothing
        prompt = ov.Tensor(np.array([request.prompt_ids], dtype=np.int64))
        self._num_requests += 1
        self._handles[index] = self._pipeline.add_request(self._num_requests, prompt, config)

    def step(self) -> list[tuple[int, int]]:
        self._pipeline.step()
        outputs = []
        for index, handle in self._handles.items():
            while handle.can_read():
                for output in handle.read().values():
                    outputs += [(index, token_id) for token_id in output.generated_ids]
        return outputs

    def serve(self, requests: Sequence[Request]) -> Served:
        self._handles.clear()
        return serve_steps(self, requests)
