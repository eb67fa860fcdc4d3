"""Serves many requests side by side from one paged KV cache.

request      what is asked, and the state of one request
limits       the fixed sizes of the programs and of the cache
block_pool   which blocks are free
scheduler    which requests run, and what the runner works on next
runner       the seam to a backend
sampler      the next token from logits (needs torch)
engine       all of these together
detokenizer  text from tokens as they come
text         the artifact's tokenizer (needs transformers)
"""

from __future__ import annotations

from reblock.engine.engine import Completion, Engine, TokenOutput
from reblock.engine.limits import EngineLimits
from reblock.engine.request import FinishReason, SamplingParams
from reblock.engine.runner import Runner

__all__ = [
    "Completion",
    "Engine",
    "EngineLimits",
    "FinishReason",
    "Runner",
    "SamplingParams",
    "TokenOutput",
]
