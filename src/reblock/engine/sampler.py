"""Chooses tokens from logits, by the logits processors of transformers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from reblock.engine.choices import Choice, LogProbs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import LongTensor
    from transformers import LogitsProcessorList

    from reblock.engine.request import SamplingParams

__all__ = ["SamplerState", "TorchSampler"]


@dataclass(frozen=True, slots=True)
class SamplerState:
    """What is known of one request: what its logits go through, and its own random numbers."""

    processors: LogitsProcessorList | None
    generator: torch.Generator | None
    """None takes the most probable token."""
    num_logprobs: int | None

    @property
    def is_plain(self) -> bool:
        """Whether the most probable token is taken as the model says."""
        return self.processors is None and self.generator is None


class TorchSampler:
    """The `reblock.engine.choices.Sampler` for logits that are tensors of torch.

    Greedy tokens of all requests come from one pass over the logits. Whatever else a request asks
    for costs that request alone.
    """

    def start(self, params: SamplingParams) -> SamplerState:
        """Return the state of a new request; without a seed it draws one."""
        generator = None
        if params.temperature > 0:
            generator = torch.Generator()
            if params.seed is None:
                generator.seed()
            else:
                generator.manual_seed(params.seed)
        return SamplerState(_logits_processors(params), generator, params.logprobs)

    def choose(
        self,
        logits: Tensor | list[Tensor],
        states: Sequence[SamplerState],
        token_ids: Sequence[list[int]],
    ) -> list[Choice]:
        """Choose one token for each request; see `reblock.engine.choices.Sampler`."""
        rows = logits if isinstance(logits, Tensor) else torch.stack(logits)
        scores = rows.float()  # [B, vocab]
        best, greedy = scores.max(dim=-1)
        # The greatest of scores with a NaN among them is NaN; its index would pass for a token.
        if bool(best.isnan().any()):
            raise RuntimeError("the model returned logits that are not a number (NaN)")
        chosen = greedy.tolist()
        for row, state in enumerate(states):
            if not state.is_plain:
                chosen[row] = _choose_one(state, scores[row], token_ids[row])
        return [
            Choice(token_id=token_id, logprobs=_logprobs(state, scores[row], token_id))
            for row, (state, token_id) in enumerate(zip(states, chosen, strict=True))
        ]


def _choose_one(state: SamplerState, scores: Tensor, token_ids: list[int]) -> int:
    if state.processors is not None:
        ids = cast("LongTensor", torch.tensor([token_ids]))
        scores = state.processors(ids, scores.unsqueeze(0))[0]
    if state.generator is None:
        return int(scores.argmax())
    return int(torch.multinomial(scores.softmax(dim=-1), 1, generator=state.generator))


def _logprobs(state: SamplerState, scores: Tensor, token_id: int) -> LogProbs | None:
    if state.num_logprobs is None:
        return None
    logprobs = scores.log_softmax(dim=-1)
    values, ids = logprobs.topk(min(state.num_logprobs, len(logprobs)))
    return LogProbs(
        chosen=float(logprobs[token_id]),
        top=tuple(zip(ids.tolist(), values.tolist(), strict=True)),
    )


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
