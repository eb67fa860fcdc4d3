"""Lets every test import the helpers that lie beside this file, such as `fakes`.

After every test, the engines that it made are checked for lost blocks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from reblock.engine.engine import Engine

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(autouse=True)
def engines(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Engine]]:
    """All engines that the test makes; one that breaks them on purpose clears the list."""
    made: list[Engine] = []
    start = Engine.__init__

    def note(self: Engine, *arguments: Any, **keywords: Any) -> None:
        start(self, *arguments, **keywords)
        made.append(self)

    monkeypatch.setattr(Engine, "__init__", note)
    yield made
    for engine in made:
        engine.check_integrity()
        if not engine.has_work:
            assert engine.num_free_blocks == engine.limits.num_blocks
