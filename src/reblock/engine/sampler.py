"""Chooses tokens from logits as the logits processors of transformers do, faster.

Those sort whole vocabularies for every token of every request, which takes 20 ms and more where
there are 128,000 tokens; `benchmarks/sampling.py` compares the two. Here

* what an option keeps are the tokens that reach some score, and to find that score no more than a
  thousand of them are ever sorted;
* a request is worked on by itself, row by row. So what runs beside it cannot change a bit of it,
  as another shape of the operands could, and the scores of one row stay in the processor's cache;
* numpy computes. It does what is needed here in one pass with vector instructions, where torch's
  `max` does not, and waits for no other threads.

Where several tokens are as probable as the last one that an option keeps, all of them are kept. For
top_k transformers does the same; for top_p it keeps as many of them as are needed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from random import Random
from typing import TYPE_CHECKING

import numpy as np
import torch

from reblock.engine.choices import Choice, LogProbs
from reblock.errors import InvalidLogits

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import TypeAlias

    from numpy.typing import NDArray
    from torch import Tensor

    from reblock.engine.request import SamplingParams

    Scores: TypeAlias = NDArray[np.float32]
    """Of all tokens of the vocabulary, or of some of them."""

__all__ = ["SamplerState", "TorchSampler"]

NUCLEUS = 256
"""About as many of the most probable tokens are mostly enough for top_p."""

MIN_GROUPS = 1024

RUN = 128
"""How many weights are added up at once."""

MAX_TEMPERATURE = 1e30
"""From far below it on all tokens are equally probable; above, scores would leave float32."""


# Models mask tokens by the least number there is. A little less is infinitely little, and as good.
_OVERFLOWS = np.errstate(over="ignore")


@dataclass(frozen=True, slots=True)
class SamplerState:
    """What is known of one request: what it asked for, and its own random numbers."""

    params: SamplingParams
    random: Random | None
    """None takes the most probable token."""

    @property
    def is_plain(self) -> bool:
        """Whether the most probable token is taken as the model says."""
        return self.random is None and self.params.repetition_penalty == 1


class TorchSampler:
    """The `reblock.engine.choices.Sampler` for logits that are tensors of torch.

    Greedy tokens of all requests come from one pass over the logits. Whatever else a request asks
    for costs that request alone.
    """

    def __init__(self) -> None:
        # Fresh memory of this size comes from the system page by page, which takes longer than
        # what is computed in it.
        self._scratch: Scores = np.empty(0, np.float32)

    def start(self, params: SamplingParams) -> SamplerState:
        """Return the state of a new request; without a seed it draws one."""
        random = Random(params.seed) if params.temperature > 0 else None  # noqa: S311 no secret
        return SamplerState(params, random)

    def choose(
        self,
        logits: Tensor | list[Tensor],
        states: Sequence[SamplerState],
        token_ids: Sequence[list[int]],
    ) -> list[Choice]:
        """Choose one token for each request; see `reblock.engine.choices.Sampler`."""
        rows = logits if isinstance(logits, torch.Tensor) else torch.stack(logits)
        scores: Scores = rows.float().numpy()  # [B, vocab]
        if len(self._scratch) < scores.shape[1]:
            self._scratch = np.empty(scores.shape[1], np.float32)
        greedy = scores.argmax(axis=-1)
        # Among scores with a NaN, the greatest is the NaN; its index would pass for a token.
        best = scores[np.arange(len(greedy)), greedy]
        if not np.isfinite(best).all():
            what = "not a number (NaN)" if np.isnan(best).any() else "infinite"
            raise InvalidLogits(
                f"the programs computed logits that are {what}, from which no token can be chosen; "
                "`reblock verify` finds weights that are damaged"
            )
        chosen = greedy.tolist()
        rows_of = [_Candidates(row, self._scratch) for row in scores]
        for row, state in enumerate(states):
            if not state.is_plain:
                kept = _narrowed(rows_of[row], state.params, token_ids[row])
                chosen[row] = kept.choose(state.random)
        return [
            Choice(token_id=token_id, logprobs=_logprobs(rows_of[row], token_id, state.params))
            for row, (state, token_id) in enumerate(zip(states, chosen, strict=True))
        ]


@dataclass(frozen=True, slots=True)
class _Candidates:
    """Tokens that one is chosen of."""

    scores: Scores
    scratch: Scores
    """At least as long as `scores`."""
    token_ids: NDArray[np.intp] | None = None
    """Whose scores these are, in ascending order; None where they are all of the vocabulary."""
    temperature: float = 1.0

    def reaching(self, floor: float) -> _Candidates:
        """Return those of at least this score."""
        kept = np.flatnonzero(self.scores >= np.float32(floor))
        return replace(self, scores=self.scores[kept], token_ids=self.ids_at(kept))

    def ids_at(self, indices: NDArray[np.intp]) -> NDArray[np.intp]:
        """Return the tokens at some places of `scores`."""
        return indices if self.token_ids is None else self.token_ids[indices]

    def choose(self, random: Random | None) -> int:
        """Draw one by its probability, or take the most probable one."""
        if random is None:
            index = int(self.scores.argmax())
        else:
            weights = self.weights(self.scores.max())
            # Above 0, so that what is found has a weight above 0.
            index = _where_sum_reaches(weights, (1.0 - random.random()) * float(weights.sum()))
        return int(index if self.token_ids is None else self.token_ids[index])

    def most_probable(self, count: int) -> _Candidates:
        """Return the most probable ones, and all that are as probable as the last of them."""
        if count >= len(self.scores):
            return self
        some = self.reaching(_reached_by(self.scores, count))
        last = len(some.scores) - count
        return some.reaching(float(np.partition(some.scores, last)[last]))

    def nucleus(self, top_p: float) -> _Candidates:
        """Return the fewest whose probabilities reach this sum, the most probable ones."""
        best = self.scores.max()
        missing = top_p * float(self.weights(best).sum())
        few = self.reaching(_reached_by(self.scores, NUCLEUS))
        if few.weights(best).sum() < missing:
            few = self
        # Down to a few, halves are told apart and not sorted: the last one is in one of them.
        scores = few.scores
        while len(scores) > 4 * NUCLEUS:
            middle = len(scores) // 2
            halves = np.partition(scores, middle)
            upper = float(replace(few, scores=halves[middle:]).weights(best).sum())
            if upper >= missing:
                scores = halves[middle:]
            else:
                missing -= upper
                scores = halves[:middle]
        ranked = np.sort(scores)[::-1]
        weights = replace(few, scores=ranked).weights(best)
        return few.reaching(float(ranked[_where_sum_reaches(weights, missing)]))

    @_OVERFLOWS
    def weights(self, best: np.float32) -> Scores:
        """Return their probabilities relative to that of a token with the score `best`.

        They are in `scratch`, where the next call overwrites them.
        """
        weights = np.subtract(self.scores, best, out=self.scratch[: len(self.scores)])
        if self.temperature != 1:
            weights /= np.float32(self.temperature)
        return np.exp(weights, out=weights)


def _reached_by(scores: Scores, count: int) -> float:
    """Return a score that at least `count` tokens reach, and mostly few more.

    The tokens are split into groups. As many groups as `count` have a greatest score from there on,
    which takes one fast pass over all scores to find, and a selection among a few.
    """
    # With too few groups the pass would be slow, with too many the selection.
    size = len(scores) // max(4 * count, MIN_GROUPS)
    if size < 2:
        return -math.inf
    num_groups = len(scores) // size
    greatest = scores[: num_groups * size].reshape(size, num_groups).max(axis=0)
    last = num_groups - count
    return float(np.partition(greatest, last)[last])


def _where_sum_reaches(weights: Scores, wanted: float) -> int:
    """Return where the sum of weights, from the first one on, comes to `wanted`, which is above 0.

    It is the last weight above 0 where rounding keeps the sum below. A running sum waits for each
    addition, so it is made of sums of many, and of the single weights only at the right place.
    """
    whole = len(weights) // RUN * RUN
    sums = weights[:whole].reshape(-1, RUN).sum(axis=1)
    cumulated = np.append(sums, weights[whole:].sum()).cumsum(dtype=np.float64)
    run = int(cumulated.searchsorted(min(wanted, cumulated[-1])))
    before = cumulated[run - 1] if run > 0 else 0.0
    inside = weights[run * RUN : (run + 1) * RUN].cumsum(dtype=np.float64)
    return run * RUN + int(inside.searchsorted(min(wanted - before, inside[-1])))


def _narrowed(kept: _Candidates, params: SamplingParams, token_ids: list[int]) -> _Candidates:
    """Return what the token is chosen of. The options come in the order of transformers."""
    if params.repetition_penalty != 1:
        scores = _penalized(kept.scores, token_ids, params.repetition_penalty)
        kept = replace(kept, scores=scores)
    if params.temperature == 0:
        return kept
    kept = replace(kept, temperature=min(params.temperature, MAX_TEMPERATURE))
    if params.top_k is not None:
        kept = kept.most_probable(params.top_k)
    if params.top_p is not None and params.top_p < 1:
        kept = kept.nucleus(params.top_p)
    if params.min_p:
        best = float(kept.scores.max())
        kept = kept.reaching(best + kept.temperature * math.log(params.min_p))
    return kept


@_OVERFLOWS
def _penalized(scores: Scores, token_ids: list[int], penalty: float) -> Scores:
    occurred = np.array(token_ids)
    occurred = occurred[occurred < len(scores)]  # a model may read tokens that it never writes
    some, factor = scores[occurred], np.float32(penalty)
    changed = scores.copy()
    changed[occurred] = np.where(some < 0, some * factor, some / factor)
    return changed


def _logprobs(tokens: _Candidates, token_id: int, params: SamplingParams) -> LogProbs | None:
    if params.logprobs is None:
        return None
    best = tokens.scores.max()
    log_sum = float(best) + math.log(float(tokens.weights(best).sum()))
    top: tuple[tuple[int, float], ...] = ()
    if params.logprobs > 0:
        few = tokens.most_probable(params.logprobs)
        order = np.argsort(-few.scores, kind="stable")[: params.logprobs]
        values = few.scores[order].astype(np.float64) - log_sum
        top = tuple(zip(few.ids_at(order).tolist(), values.tolist(), strict=True))
    return LogProbs(chosen=float(tokens.scores[token_id]) - log_sum, top=top)
