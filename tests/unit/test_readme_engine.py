"""The README's example of the engine, as it stands there, on a fake model."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

import reblock.artifact.reader
import reblock.engine.engine
import reblock.engine.text
from fakes import ByteTokenizer, FakeRunner, FakeSampler, continue_alone, make_limits

if TYPE_CHECKING:
    from collections.abc import Sequence

README = Path(__file__).resolve().parents[2] / "README.md"
BLOCK_TOKENS = 128


def example() -> str:
    """The indented lines around the call that makes the engine."""
    blocks: list[list[str]] = [[]]
    for line in README.read_text(encoding="utf-8").splitlines():
        if line.startswith("    ") or not line:
            blocks[-1].append(line[4:])
        else:
            blocks.append([])
    (code,) = ["\n".join(block) for block in blocks if any("Engine(" in line for line in block)]
    return code


class Runner(FakeRunner):
    """Of the sizes of the README's artifact. It remembers when it was resized."""

    def __init__(self) -> None:
        sizes = {"block_size": BLOCK_TOKENS, "max_seq_len": 2048, "prefill_chunk_size": 128}
        super().__init__(make_limits(max_batch=4, num_blocks=64, **sizes))
        self.resized_after: list[int] = []

    def resize(self, num_blocks: int, moves: Sequence[tuple[int, int]]) -> None:
        self.resized_after.append(len(self.calls))
        super().resize(num_blocks, moves)


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> Runner:
    fake = Runner()
    backend = SimpleNamespace(load_runner=lambda artifact: fake)
    monkeypatch.setitem(sys.modules, "reblock.backends.torch", backend)  # type: ignore[arg-type]
    monkeypatch.setattr(reblock.artifact.reader, "open_artifact", lambda directory: directory)
    monkeypatch.setattr(reblock.engine.engine, "_default_sampler", FakeSampler)
    monkeypatch.setattr(reblock.engine.text.Tokenizer, "load", lambda directory: ByteTokenizer())
    return fake


def test_the_example_of_the_engine_does_what_its_comments_say(
    runner: Runner, capsys: pytest.CaptureFixture[str]
) -> None:
    names: dict[str, Any] = {}
    exec(example(), names)  # noqa: S102  our own README
    out = capsys.readouterr().out
    prompt = names["prompt"]
    num_shared = (len(prompt) - 1) // BLOCK_TOKENS * BLOCK_TOKENS
    assert num_shared > 0
    streamed = bytes(continue_alone(prompt, 48)).decode("utf-8", "replace")
    lines = [line for line in out.splitlines() if ": length, last token LogProbs(" in line]
    assert [line.partition(":")[0] for line in lines] == ["1", "2", "3"]
    for line in lines:
        out = out.replace(f"\n{line}\n", "", 1)
    assert out.startswith(streamed)
    engine, first, second = names["engine"], names["first"], names["second"]
    assert out[len(streamed) :].strip().startswith(str(first.token_ids))
    # three that run beside the first, and two that find its blocks cached
    assert engine.counters().num_reused_tokens == 5 * num_shared
    assert engine.limits.num_blocks == runner.limits.num_blocks == 48
    assert runner.resized_after == [1]  # the first request was being read, the others waited
    assert first.token_ids != second.token_ids
    assert [len(one.top) for one in first.logprobs] == [3] * 32
