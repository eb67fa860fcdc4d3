"""The seam between the engine and what chooses tokens from logits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from reblock.engine.request import SamplingParams

__all__ = ["Choice", "LogProbs", "Sampler"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LogProbs:
    """How probable a token was to the model: natural logarithms, of its own logits in float32."""

    chosen: float
    top: tuple[tuple[int, float], ...]
    """The most probable tokens and how probable they were, the best first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A token that was chosen; `logprobs` where the request asked for them."""

    token_id: int
    logprobs: LogProbs | None = None


class Sampler(Protocol):
    """Chooses the next tokens of several requests at once.

    What it knows of a request is in a state that `start` returns, so that what runs beside a
    request, in what order, and how often it is preempted never changes what it draws.
    """

    def start(self, params: SamplingParams) -> Any:
        """Return the state of a new request, which nobody else looks into."""
        ...

    def choose(
        self, logits: Tensor | list[Tensor], states: Sequence[Any], token_ids: Sequence[list[int]]
    ) -> list[Choice]:
        """Choose one token for each request.

        Args:
            logits: one row [vocab] for each request, after its last token.
            states: their states.
            token_ids: all their tokens so far, prompt first.

        Raises:
            InvalidLogits: logits are not a number, or the greatest of a row is infinite. No state
                has changed then.
        """
        ...
