"""Text from tokens as they come, though a token need not be whole characters."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

__all__ = ["Detokenizer"]

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"

MAX_HELD_TOKENS = 8
"""A character has at most four bytes, so at most four tokens. When more pass without a whole
character, the bytes are no text and waiting for better ones would only let the window grow."""

MAX_UNFINISHED_TOKENS = 3
"""An unfinished character has at most three bytes."""


class Detokenizer:
    """Turns the tokens of one answer into pieces of text that can be shown at once.

    Two things make this more than decoding token by token. A character may be spread over
    several tokens, and a decoder shows the unfinished part as U+FFFD: such an end is held back.
    And decoders may treat the first token of a text differently, dropping the space before a
    word: so a token is decoded behind those that came before it,

        window   [ tokens of the last complete piece | tokens since then ]
        text       shown already ............. | new | held back, U+FFFD

    and only as many as are needed, so that the cost of a token does not grow with the answer.

    The pieces joined are the answer's text; where the bytes are valid UTF-8, that is what
    decoding all tokens at once gives.
    """

    def __init__(
        self,
        decode: Callable[[list[int]], str],
        *,
        skipped_ids: Collection[int] = (),
        context_ids: Sequence[int] = (),
    ) -> None:
        """Start before the first token.

        Args:
            decode: text of token ids, as if they stood alone.
            skipped_ids: tokens that are no text, such as end-of-sequence.
            context_ids: tokens of the text that the answer continues. Without it the answer
                stands for itself, as a message in a chat does.
        """
        self._decode = decode
        self._skipped_ids = frozenset(skipped_ids)
        self._window: list[int] = []
        self._num_complete = 0  # tokens of the window that came before the ones held back
        self._num_shown = 0  # characters of the window's text that were returned
        self._restart([token_id for token_id in context_ids if token_id not in self._skipped_ids])

    def add(self, token_id: int) -> str:
        """Take the next token and return the text that it completes, often "" or one word."""
        if token_id in self._skipped_ids:
            return ""
        self._window.append(token_id)
        text = self._decode(self._window)
        whole = text.rstrip(REPLACEMENT)
        piece = whole[self._num_shown :]
        if piece:
            self._num_shown = len(whole)
            if whole == text:
                self._restart(self._window[self._num_complete :])
        elif len(self._window) - self._num_complete > MAX_HELD_TOKENS:
            piece = self._give_up(text)
        return piece

    def flush(self) -> str:
        """The text still held back, when no token follows."""
        piece = self._decode(self._window)[self._num_shown :]
        self._restart([])
        return piece

    def _restart(self, window: list[int]) -> None:
        self._window = window
        self._num_complete = len(window)
        self._num_shown = len(self._decode(window)) if window else 0

    def _give_up(self, text: str) -> str:
        # All but the last U+FFFD is final; that one may yet become a character.
        num_final = len(text) - text.endswith(REPLACEMENT)
        piece = text[self._num_shown : num_final]
        self._restart(self._window[-MAX_UNFINISHED_TOKENS:])
        self._num_shown -= text.endswith(REPLACEMENT)
        return piece
