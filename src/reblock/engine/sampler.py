"""Chooses tokens from logits, by the logits processors of transformers."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import LongTensor, Tensor
    from transformers import LogitsProcessorList

    from reblock.engine.request import SamplingParams

__all__ = ["make_sampler"]


def make_sampler(params: SamplingParams) -> Callable[[Tensor, list[int]], int]:
    """A function that chooses the next token of one request.

    It takes the logits [vocab] after the request's last token and all its token ids, prompt
    first. Every request has a random generator of its own, so that what runs beside it never
    changes what it draws. Raises RuntimeError on logits that are not a number.
    """
    processors = _logits_processors(params)
    if params.temperature == 0:
        return lambda logits, token_ids: int(_process(processors, logits, token_ids).argmax())
    generator = torch.Generator()
    if params.seed is None:
        generator.seed()
    else:
        generator.manual_seed(params.seed)

    def sample(logits: Tensor, token_ids: list[int]) -> int:
        probabilities = _process(processors, logits, token_ids).softmax(dim=-1)
        return int(torch.multinomial(probabilities, 1, generator=generator))

    return sample


def _process(
    processors: LogitsProcessorList | None, logits: Tensor, token_ids: list[int]
) -> Tensor:
    scores = logits.float()
    # max() of scores with a NaN among them is NaN; argmax would return its index as a token
    if bool(scores.max().isnan()):
        raise RuntimeError("the model returned logits that are not a number (NaN)")
    if processors is None:
        return scores
    processed: Tensor = processors(
        cast("LongTensor", torch.tensor([token_ids])), scores.unsqueeze(0)
    )
    return processed[0]


def _logits_processors(params: SamplingParams) -> LogitsProcessorList | None:
    """What `transformers.generate` would apply, in its order; None where it is nothing."""
    warps = params.temperature > 0 and (
        params.temperature != 1
        or params.top_k is not None
        or params.top_p is not None
        or params.min_p is not None
    )
    if params.repetition_penalty == 1 and not warps:
        return None
    # Importing these takes a second, which greedy decoding need not wait for.
    from transformers.generation import logits_process as hf

    processors = hf.LogitsProcessorList()
    if params.repetition_penalty != 1:
        processors.append(hf.RepetitionPenaltyLogitsProcessor(float(params.repetition_penalty)))
    if not warps:
        return processors
    if params.temperature != 1:
        processors.append(hf.TemperatureLogitsWarper(float(params.temperature)))
    if params.top_k is not None:
        processors.append(hf.TopKLogitsWarper(params.top_k))
    if params.top_p is not None and params.top_p < 1:
        processors.append(hf.TopPLogitsWarper(params.top_p))
    if params.min_p is not None:
        processors.append(hf.MinPLogitsWarper(params.min_p))
    return processors
