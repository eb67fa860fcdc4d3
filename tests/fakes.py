"""In-memory stand-ins for what the engine talks to. None of them needs torch."""

from __future__ import annotations

import zlib
from dataclasses import replace
from random import Random
from typing import TYPE_CHECKING, Any

from reblock.engine.choices import Choice, LogProbs
from reblock.engine.detokenizer import Detokenizer
from reblock.engine.limits import EngineLimits
from reblock.errors import DoesNotFit

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reblock.engine.engine import Engine
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
        "vocab_size": VOCAB_SIZE,
        "eos_token_ids": (),
        "has_rings": False,
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


def answer_alone(
    prompt_ids: list[int], params: SamplingParams, eos_token_ids: tuple[int, ...] = ()
) -> list[int]:
    """What a request is answered by the fake model and `FakeSampler` when nothing disturbs it."""
    random, answer = Random(params.seed), []
    while len(answer) < params.max_new_tokens:
        context = [*prompt_ids, *answer]
        token_id = next_token(context, context[-WINDOW:])
        answer.append(_drawn(token_id, params, random))
        if answer[-1] in eos_token_ids and not params.ignore_eos:
            break
    return answer


def _drawn(token_id: int, params: SamplingParams, random: Random) -> int:
    if params.temperature == 0:
        return token_id
    return (token_id + random.randrange(VOCAB_SIZE)) % VOCAB_SIZE


class FakeRunner:
    """A `Runner` whose keys and values are the token ids themselves, with their positions.

    Its answers depend on every token it reads back through the block table and, where the limits
    have rings, on a window of tokens kept per slot. So a block or a slot that two requests share
    wrongly shows in their answers, if it does not at once: it refuses calls that break the
    contract of `Runner`, and entries of a block that are of another position.
    """

    def __init__(self, limits: EngineLimits) -> None:
        self.limits = limits
        self.calls: list[tuple[str, int]] = []  # ("prefill", start) or ("decode", rows)
        self.fail_next = False
        self.most_blocks: int | None = None  # that the system has memory for
        self._blocks = [self._empty() for _ in range(limits.num_blocks)]
        self._windows: list[list[int]] = [[] for _ in range(limits.max_batch)]
        self._num_read = [0] * limits.max_batch  # tokens, per slot

    @property
    def kv_bytes(self) -> int:
        return 512 * self.limits.num_blocks

    def prefill(self, token_ids: list[int], start: int, block_table: list[int], slot: int) -> Any:
        self._maybe_fail()
        assert 1 <= len(token_ids) <= self.limits.prefill_chunk_size
        if start != self._num_read[slot]:
            # a new request, whose beginning is in full blocks that it shares
            assert start % self.limits.block_size == 0
            assert start == 0 or not self.limits.has_rings
        if start == 0:
            self._windows[slot] = []
        self._num_read[slot] = start
        self.calls.append(("prefill", start))
        self._check_table(block_table, start + len(token_ids))
        for position, token_id in enumerate(token_ids, start):
            self._store(token_id, position, block_table, slot)
        return self._answer(start + len(token_ids), block_table, slot)

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
        rows = list(zip(token_ids, positions, block_tables, slots, strict=True))
        for token_id, position, table, slot in rows:
            assert position == self._num_read[slot], "positions come in order, without gaps"
            self._check_table(table, position + 1)
            self._store(token_id, position, table, slot)
        return [self._answer(position + 1, table, slot) for _, position, table, slot in rows]

    def resize(self, num_blocks: int, moves: Sequence[tuple[int, int]]) -> None:
        if self.most_blocks is not None and num_blocks > self.most_blocks:
            raise DoesNotFit(f"the system has memory for {self.most_blocks} blocks")
        sources = [source for source, _ in moves]
        destinations = [destination for _, destination in moves]
        assert len({*sources, *destinations}) == 2 * len(moves)
        assert all(0 <= destination < num_blocks for destination in destinations)
        old = self._blocks
        self._blocks = [
            old[number] if number < len(old) and number not in sources else self._empty()
            for number in range(num_blocks)
        ]
        for source, destination in moves:
            self._blocks[destination] = old[source]
        self.limits = replace(self.limits, num_blocks=num_blocks)

    def read(self, block_table: list[int], num_tokens: int) -> list[int]:
        """The first tokens of a request, as they lie in its blocks."""
        size = self.limits.block_size
        entries = [self._blocks[block_table[p // size]][p % size] for p in range(num_tokens)]
        assert [position for _, position in entries] == list(range(num_tokens))
        return [token_id for token_id, _ in entries]

    def _empty(self) -> list[tuple[int, int]]:
        return [(-1, -1)] * self.limits.block_size

    def _check_table(self, block_table: list[int], num_tokens: int) -> None:
        assert num_tokens <= self.limits.max_seq_len
        assert len(block_table) >= self.limits.num_blocks_for(num_tokens)
        assert len(set(block_table)) == len(block_table)

    def _store(self, token_id: int, position: int, block_table: list[int], slot: int) -> None:
        size = self.limits.block_size
        self._blocks[block_table[position // size]][position % size] = (token_id, position)
        self._windows[slot] = [*self._windows[slot], token_id][-WINDOW:]
        self._num_read[slot] = position + 1

    def _answer(self, num_tokens: int, block_table: list[int], slot: int) -> list[float]:
        context = self.read(block_table, num_tokens)
        window = self._windows[slot] if self.limits.has_rings else context[-WINDOW:]
        logits = [0.0] * VOCAB_SIZE
        logits[next_token(context, window)] = 1.0
        return logits

    def _maybe_fail(self) -> None:
        if self.fail_next:
            self.fail_next = False
            raise OSError("the fake device has gone away")


class FakeSampler:
    """A `Sampler` on lists. With a temperature it changes tokens by random numbers of its own."""

    def start(self, params: SamplingParams) -> tuple[SamplingParams, Random]:
        return params, Random(params.seed)

    def choose(
        self, logits: Any, states: Sequence[tuple[SamplingParams, Random]], token_ids: Any
    ) -> list[Choice]:
        assert len(logits) == len(states) == len(token_ids)
        return [self._choose(*row) for row in zip(logits, states, strict=True)]

    def _choose(self, logits: list[float], state: tuple[SamplingParams, Random]) -> Choice:
        params, random = state
        token_id = _drawn(logits.index(max(logits)), params, random)
        if params.logprobs is None:
            return Choice(token_id=token_id)
        top = tuple((token_id + number, -1.0 - number) for number in range(params.logprobs))
        return Choice(token_id=token_id, logprobs=LogProbs(chosen=-1.0, top=top))


def check_contents(engine: Engine) -> None:
    """Read the blocks of every running request back, and compare them with its tokens."""
    runner: Any = engine._runner
    for sequence in engine._scheduler._running:
        num_stored = sequence.num_computed
        stored = runner.read(sequence.block_table, num_stored)
        assert stored == sequence.token_ids[:num_stored]


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
