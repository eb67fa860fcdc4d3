"""The text of an answer as it may be shown: up to the first stop string, and nothing of one."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reblock.engine.detokenizer import Detokenizer

__all__ = ["AnswerText", "StopStrings"]


class StopStrings:
    """Lets text pass up to the stop string that is complete first.

    What may become a stop string is held back until that is settled. Where two are complete at
    the same character, the longer one counts. So the result is the same however the text is
    cut into pieces.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = tuple(stop)
        self._held = ""
        self.matched: str | None = None
        """The stop string that was met; nothing passes any more."""

    def add(self, piece: str) -> str:
        """Take the next piece of text and return what may be shown now."""
        if self.matched is not None:
            return ""
        text = self._held + piece
        ends = [
            (start + len(stop), start, stop)
            for stop in self._stop
            if (start := text.find(stop)) >= 0
        ]
        if ends:
            _, start, self.matched = min(ends)
            self._held = ""
            return text[:start]
        num_held = max((_overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held]

    def flush(self) -> str:
        """Return the text still held back, when none follows."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Return how many characters at the end of `text` may be the beginning of `stop`."""
    lengths = range(min(len(text), len(stop) - 1), 0, -1)
    return next((length for length in lengths if text.endswith(stop[:length])), 0)


class AnswerText:
    """Turns the tokens of one answer into the text that is shown of it."""

    def __init__(self, detokenizer: Detokenizer, stop: Sequence[str]) -> None:
        self._detokenizer = detokenizer
        self._stop = StopStrings(stop)

    @property
    def matched(self) -> str | None:
        """The stop string that has ended the answer, or None."""
        return self._stop.matched

    def add(self, token_id: int) -> str:
        """Take the next token and return the text that may be shown now."""
        return self._stop.add(self._detokenizer.add(token_id))

    def finish(self) -> str:
        """Return the text still held back, when no token follows."""
        return self._stop.add(self._detokenizer.flush()) + self._stop.flush()
