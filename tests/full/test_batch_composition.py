"""What a request is answered does not depend on the requests beside it, to the last bit."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("torch")

import torch

from reblock.artifact.reader import open_artifact
from reblock.backends.torch.runner import load_runner

if TYPE_CHECKING:
    from installed import Compiled

    from reblock.backends.torch.runner import TorchRunner

pytestmark = pytest.mark.full

# Within a block and a window, past both, and at their very edges.
LENGTHS = (5, 128, 129, 700)


def read_prompts(runner: TorchRunner, tables: list[list[int]], rng: random.Random) -> list[int]:
    """Read a random prompt into every table and return the most probable next tokens."""
    chosen = []
    for slot, (length, table) in enumerate(zip(LENGTHS, tables, strict=True)):
        ids = [rng.randrange(50) for _ in range(length)]
        chunk = runner.limits.prefill_chunk_size
        for start in range(0, length, chunk):
            logits = runner.prefill(ids[start : start + chunk], start, table, slot)
        chosen.append(int(logits.argmax()))
    return chosen


def test_decoders_give_a_request_the_same_bits_alone_and_beside_others(compiled: Compiled) -> None:
    runner = load_runner(open_artifact(compiled.artifact))
    width = runner.limits.num_blocks_for(max(LENGTHS) + 1)
    tables = [list(range(row * width, (row + 1) * width)) for row in range(len(LENGTHS))]
    tokens = read_prompts(runner, tables, random.Random(0))
    alone = [
        runner.decode([tokens[row]], [LENGTHS[row]], [tables[row]], [row])[0]
        for row in range(len(LENGTHS))
    ]
    for rows in ([0, 1], [3, 2], [1, 3, 0], [0, 1, 2, 3], [3, 1, 0, 2]):
        together = runner.decode(
            [tokens[row] for row in rows],
            [LENGTHS[row] for row in rows],
            [tables[row] for row in rows],
            rows,
        )
        for index, row in enumerate(rows):
            assert torch.equal(together[index], alone[row]), (rows, row)


def test_a_chunk_gives_the_same_bits_with_and_without_padding(compiled: Compiled) -> None:
    from reblock.backends.torch.program import ProgramInputs

    runner = load_runner(open_artifact(compiled.artifact))
    ids = [3, 1, 4, 1, 5, 9, 2, 6] * 3
    expected = runner.prefill(ids, 0, [0], 0)
    padded = ProgramInputs(
        input_ids=torch.tensor([ids + [9] * 20]),
        start=torch.tensor([0]),
        num_tokens=torch.tensor([len(ids)]),
        num_rows=torch.tensor([1]),
        block_tables=torch.tensor([[0]]),
        slots=torch.tensor([0]),
    )
    assert torch.equal(runner._prefill.run(padded)[0], expected)
