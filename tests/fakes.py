"""In-memory stand-ins for what the engine talks to. None of them needs torch."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, Any

from reblock.engine.detokenizer import Detokenizer
from reblock.engine.limits import EngineLimits

if TYPE_CHECKING:
    from collections.abc import Callable

    from reblock.engine.request import SamplingParams

VOCAB_SIZE = 256
WINDOW = 5


def make_limits(**changes: Any) -> EngineLimits:
    """Small limits; every one of them can be changed."""
    sizes: dict[str, Any] = {
        "num_blocks": 8,
        "block_size": 4,
        "max_seq_len": 16,
        "max_batch": 2,
        "decoder_batch_sizes": None,
        "prefill_chunk_size": 3,
        "eos_token_ids": (),
    }
    sizes.update(changes)
    if sizes["decoder_batch_sizes"] is None:
        sizes["decoder_batch_sizes"] = (sizes["max_batch"],)
    return EngineLimits(**sizes)


def next_token(context: list[int], window: list[int]) -> int:
    """The fake model: any change of the context or of the window changes what follows."""
    return zlib.crc32(bytes([*context, *window])) % VOCAB_SIZE


def continue_alone(
    prompt_ids: list[int], max_new_tokens: int, eos_token_ids: tuple[int, ...] = ()
) -> list[int]:
    """What the fake model answers, without any paging or batching."""
    context = list(prompt_ids)
    while len(context) < len(prompt_ids) + max_new_tokens:
        context.append(next_token(context, context[-WINDOW:]))
        if context[-1] in eos_token_ids:
            break
    return context[len(prompt_ids) :]


class FakeRunner:
    """A `Runner` whose keys and values are the token ids themselves.

    Its answers depend on every position it reads back through the block table, and on a window of
    tokens kept per slot, so a block or a slot that two requests share shows in their answers. It
    refuses calls that break the contract of `Runner`.
    """

    kv_bytes = 4096

    def __init__(self, limits: EngineLimits) -> None:
        self.limits = limits
        self.calls: list[tuple[str, int]] = []  # ("prefill", start) or ("decode", rows)
        self.fail_next = False
        self._blocks = [[-1] * limits.block_size for _ in range(limits.num_blocks)]
        self._windows: list[list[int]] = [[] for _ in range(limits.max_batch)]
        self._num_read = [0] * limits.max_batch  # tokens, per slot

    def prefill(self, token_ids: list[int], start: int, block_table: list[int], slot: int) -> Any:
        self._maybe_fail()
        assert 1 <= len(token_ids) <= self.limits.prefill_chunk_size
        if start == 0:
            self._windows[slot] = []
            self._num_read[slot] = 0
        self.calls.append(("prefill", start))
        logits = []
        for position, token_id in enumerate(token_ids, start):
            logits = self._read(token_id, position, block_table, slot)
        return logits

    def decode(
        self,
        token_ids: list[int],
        positions: list[int],
        block_tables: list[list[int]],
        slots: list[int],
    ) -> Any:
        self._maybe_fail()
        assert 1 <= len(token_ids) <= max(self.limits.decoder_batch_sizes)
        assert len(set(slots)) == len(slots)
        self.calls.append(("decode", len(token_ids)))
        rows = zip(token_ids, positions, block_tables, slots, strict=True)
        return [self._read(*row) for row in rows]

    def _read(self, token_id: int, position: int, block_table: list[int], slot: int) -> list[float]:
        block_size = self.limits.block_size
        assert position == self._num_read[slot], "positions come in order, without gaps"
        assert position < self.limits.max_seq_len
        self._num_read[slot] += 1
        self._blocks[block_table[position // block_size]][position % block_size] = token_id
        self._windows[slot] = [*self._windows[slot], token_id][-WINDOW:]
        context = [
            self._blocks[block_table[past // block_size]][past % block_size]
            for past in range(position + 1)
        ]
        logits = [0.0] * VOCAB_SIZE
        logits[next_token(context, self._windows[slot])] = 1.0
        return logits

    def _maybe_fail(self) -> None:
        if self.fail_next:
            self.fail_next = False
            raise OSError("the fake device has gone away")


def make_greedy_sampler(params: SamplingParams) -> Callable[[Any, list[int]], int]:
    """The sampler of greedy requests, on lists."""
    assert params.temperature == 0
    return lambda logits, token_ids: max(range(len(logits)), key=logits.__getitem__)


class ByteTokenizer:
    """A tokenizer whose tokens are the bytes of UTF-8, with a chat template that wraps `<` `>`."""

    eos_token_ids: tuple[int, ...] = ()

    def encode(self, text: str, *, raw: bool = False) -> list[int]:
        return list((text if raw else f"<{text}>").encode())

    def detokenizer(self, prompt_ids: list[int], *, raw: bool = False) -> Detokenizer:
        return Detokenizer(
            lambda token_ids: bytes(token_ids).decode("utf-8", "replace"),
            context_ids=prompt_ids if raw else (),
        )
