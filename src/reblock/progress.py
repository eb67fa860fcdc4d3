"""How long work tells what it is doing, without knowing whether anybody watches."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

__all__ = ["Progress", "SilentProgress"]


class Progress(Protocol):
    """Told about the stages of long work. Calls come from one thread; stages are not nested."""

    def stage(self, text: str) -> AbstractContextManager[None]:
        """Return a context that lasts as long as the stage; `text` says what is done in it."""
        ...

    def bytes_stage(
        self, text: str, total_bytes: int
    ) -> AbstractContextManager[Callable[[int], None]]:
        """Return a context as `stage` does, for work on that many bytes.

        It gives a function that is told how many bytes more were done.
        """
        ...

    def note(self, text: str) -> None:
        """Pass on one line that is worth knowing, such as a setting that was adjusted."""
        ...


class SilentProgress:
    """A `Progress` that shows nothing."""

    def stage(self, text: str) -> AbstractContextManager[None]:  # noqa: ARG002  the protocol's name
        """Return a context that does nothing."""
        return nullcontext()

    def bytes_stage(
        self,
        text: str,  # noqa: ARG002  the protocol's name
        total_bytes: int,  # noqa: ARG002  the protocol's name
    ) -> AbstractContextManager[Callable[[int], None]]:
        """Return a context whose function does nothing."""
        return nullcontext(_drop)

    def note(self, text: str) -> None:
        """Drop the line."""


def _drop(_num_bytes: int) -> None:
    """Forget the number."""
