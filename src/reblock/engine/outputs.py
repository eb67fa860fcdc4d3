"""What the engine gives back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from reblock.engine.choices import LogProbs
    from reblock.engine.request import FinishReason

__all__ = ["Completion", "TokenOutput"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenOutput:
    """One token that a request produced."""

    request_id: int
    token_id: int
    text: str
    """What the token adds to the text to be shown, "" where the request was added without a
    detokenizer. A character may take several tokens, and what may become a stop string is held
    back, so a token can add nothing or more than its own text."""
    logprobs: LogProbs | None
    """Where the request asked for them."""
    finish_reason: FinishReason | None
    """Set with the last token."""
    matched_stop: str | None
    """The stop string that ended the answer with this token."""
    error: Exception | None
    """What the request's detokenizer raised; it has ended the answer, and its text is not whole."""

    @property
    def finished(self) -> bool:
        """Whether this is the request's last token."""
        return self.finish_reason is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """The whole answer to one prompt, an end-of-sequence token included."""

    token_ids: list[int]
    finish_reason: FinishReason
    logprobs: list[LogProbs] | None
    """One for each token, where they were asked for."""
