"""Serves many requests side by side from one paged KV cache.

    engine = Engine(load_runner(open_artifact("./my_artifact")))    # of reblock.backends.torch
    request_id = engine.add(prompt_ids, SamplingParams(max_new_tokens=64))
    while engine.has_work:
        for output in engine.step():
            print(output.request_id, output.token_id, output.finish_reason)

request       what is asked, and the state of one request
outputs       what comes back
limits        the sizes of the programs and of the cache
block_pool    which blocks are free, used or cached
prefix_cache  which blocks hold which tokens
block_tables  both of them for running requests
scheduler     which requests run, and what the runner works on next
runner        the seam to a backend
choices       the seam to what chooses tokens
sampler       the next tokens from logits (needs torch)
stop          the text of an answer up to a stop string
counters      what was done, and how long it took
engine        all of these together
detokenizer   text from tokens as they come
text          the artifact's tokenizer (needs transformers)
"""

from __future__ import annotations

from reblock.engine.choices import LogProbs
from reblock.engine.counters import EngineCounters
from reblock.engine.engine import Engine
from reblock.engine.limits import EngineLimits
from reblock.engine.outputs import Completion, TokenOutput
from reblock.engine.request import FinishReason, SamplingParams
from reblock.engine.runner import Runner

__all__ = [
    "Completion",
    "Engine",
    "EngineCounters",
    "EngineLimits",
    "FinishReason",
    "LogProbs",
    "Runner",
    "SamplingParams",
    "TokenOutput",
]
