"""Every architecture, compiled small, answers as transformers does.

Prompts are longer than a chunk, rows of a batch have different lengths, decoders run partly
empty, and there are more requests than slots.
"""

from __future__ import annotations

import itertools
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("torch")

import torch
from families import FAMILIES, VOCABULARY, save_model
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from reblock.artifact.reader import open_artifact
from reblock.backends.torch import compile_model, load_runner
from reblock.engine import Engine, SamplingParams
from reblock.errors import DoesNotFit, RequestTooLarge
from reblock.options import CompileOptions
from reblock.progress import SilentProgress

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from reblock.backends.torch import TorchRunner
    from reblock.options import Dtype

pytestmark = pytest.mark.full

OPTIONS = CompileOptions(
    batch_size=3,
    decoder_batch_sizes=(3, 1),
    prefill_chunk_size=32,
    max_seq_len=256,
    kvcache_block_size=16,
)
PROMPT_LENGTHS = (5, 75, 33, 64, 1)
STEPS = 64


class Case:
    """One family: the model in transformers, and its artifact loaded to run."""

    def __init__(
        self,
        family: str,
        directory: Path,
        *,
        dtype: Dtype = "float32",
        options: CompileOptions = OPTIONS,
    ) -> None:
        self.model = save_model(family, directory / "model").to(getattr(torch, dtype))
        options = replace(options, dtype=dtype)
        output = str(directory / "artifact")
        compile_model(str(directory / "model"), output, options, SilentProgress())
        self.runner: TorchRunner = load_runner(open_artifact(output))
        self._answers: dict[tuple[int, ...], list[int]] = {}

    def logits(self, ids: list[int]) -> Tensor:
        """Return what transformers answers after every one of `ids`."""
        with torch.no_grad():
            logits: Tensor = self.model(torch.tensor([ids])).logits[0].float()
        return logits

    def greedy(self, prompt: list[int]) -> list[int]:
        """Return what transformers generates."""
        if (known := self._answers.get(tuple(prompt))) is not None:
            return known
        output = self.model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones((1, len(prompt)), dtype=torch.int64),
            max_new_tokens=STEPS,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        tokens: list[int] = output[0, len(prompt) :].tolist()
        self._answers[tuple(prompt)] = tokens
        return tokens


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case(request.param, tmp_path_factory.mktemp(request.param))


def random_ids(seed: int, *lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, VOCABULARY, (n,), generator=generator).tolist() for n in lengths]


def run_side_by_side(runner: TorchRunner, rows: list[list[int]], prompt_lengths: list[int]) -> Any:
    """Read the prompts in chunks, then all rows token by token; return the logits of each row."""
    limits = runner.limits
    width = limits.num_blocks_for(max(map(len, rows)))
    # Blocks from the end and interleaved: nothing may rely on their order.
    ids = list(reversed(range(len(rows) * width)))
    tables = [ids[row :: len(rows)] for row in range(len(rows))]
    computed: list[list[Tensor]] = []
    for slot, (row, length) in enumerate(zip(rows, prompt_lengths, strict=True)):
        for start in range(0, length, limits.prefill_chunk_size):
            chunk = row[start : min(start + limits.prefill_chunk_size, length)]
            logits = runner.prefill(chunk, start, tables[slot], slot)
        computed.append([logits])
    for step in range(len(rows[0]) - prompt_lengths[0]):
        positions = [length + step for length in prompt_lengths]
        tokens = [row[position] for row, position in zip(rows, positions, strict=True)]
        answer = runner.decode(tokens, positions, tables, list(range(len(rows))))
        for row, logits in zip(computed, answer, strict=True):
            row.append(logits)
    return [torch.stack(row) for row in computed]


@pytest.mark.parametrize("num_rows", [1, 2, 3])
def test_logits_of_unequal_rows_side_by_side_equal_transformers(case: Case, num_rows: int) -> None:
    lengths = [75, 9, 40][:num_rows]
    rows = random_ids(num_rows, *(length + 40 for length in lengths))
    computed = run_side_by_side(case.runner, rows, lengths)
    for row, length, logits in zip(rows, lengths, computed, strict=True):
        expected = case.logits(row)[length - 1 :]
        torch.testing.assert_close(
            logits, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max())
        )


def test_64_greedy_tokens_of_more_requests_than_slots_equal_transformers(case: Case) -> None:
    prompts = random_ids(0, *PROMPT_LENGTHS)
    engine = Engine(case.runner, eos_token_ids=())
    answers = engine.generate(prompts, SamplingParams(max_new_tokens=STEPS))
    engine.check_integrity()
    expected = [case.greedy(prompt) for prompt in prompts]
    assert [answer.token_ids for answer in answers] == expected


def test_greedy_tokens_equal_transformers_though_requests_are_preempted_and_the_cache_resized(
    case: Case,
) -> None:
    num_blocks = case.runner.limits.num_blocks
    (stem,) = random_ids(5, 40)
    # Some begin alike, so that their blocks are shared where the layers allow it.
    prompts = [stem + rest for rest in random_ids(6, 1, 24, 9)] + random_ids(7, 20, 65)
    engine = Engine(case.runner, eos_token_ids=())
    engine.resize_kvcache(11)  # a request fills up to 9
    ids = [engine.add(prompt, SamplingParams(max_new_tokens=STEPS)) for prompt in prompts]
    tokens: dict[int, list[int]] = {request_id: [] for request_id in ids}
    sizes = itertools.cycle([11, 30, 9, 14])
    for step in itertools.count():
        if not engine.has_work:
            break
        if step % 40 == 0:
            engine.resize_kvcache(next(sizes))
        for output in engine.step():
            tokens[output.request_id].append(output.token_id)
        engine.check_integrity()
    counters = engine.counters()
    engine.resize_kvcache(num_blocks)
    assert list(tokens.values()) == [case.greedy(prompt) for prompt in prompts]
    # Where every layer has a window there is a ring for each, and nothing to make room for.
    limits = case.runner.limits
    assert counters.num_preemptions > 0 or limits.block_size == limits.max_seq_len
    assert (counters.num_reused_tokens == 0) == case.runner.limits.has_rings


# Some begin alike. A request of the longest, with its answer, fills 9 blocks.
(STEM,) = random_ids(5, 40)
PROMPTS = [STEM + rest for rest in random_ids(6, 1, 24, 9)] + random_ids(7, 20, 65, 1)
MOST_BLOCKS = 30
ACTIONS = st.one_of(
    st.tuples(st.just("add"), st.integers(0, len(PROMPTS) - 1), st.integers(1, STEPS)),
    st.tuples(st.just("step"), st.integers(1, 40)),
    st.tuples(st.just("resize"), st.integers(1, MOST_BLOCKS)),
    st.tuples(st.just("abort"), st.integers(0, 20)),
)


class Schedule:
    """An engine to which requests come, go and are aborted, while its cache is resized."""

    def __init__(self, case: Case, num_blocks: int) -> None:
        self.engine = Engine(case.runner, eos_token_ids=())
        self.engine.resize_kvcache(num_blocks)
        self.requests: list[tuple[int, int, int]] = []  # id, prompt, tokens that are wanted
        self.tokens: dict[int, list[int]] = {}
        self.aborted: set[int] = set()

    def add(self, prompt: int, num_new_tokens: int) -> None:
        params = SamplingParams(max_new_tokens=num_new_tokens)
        try:
            request_id = self.engine.add(PROMPTS[prompt], params)
        except RequestTooLarge:
            return
        self.requests.append((request_id, prompt, num_new_tokens))
        self.tokens[request_id] = []

    def step(self, count: int) -> None:
        for _ in range(count):
            for output in self.engine.step():
                self.tokens[output.request_id].append(output.token_id)

    def resize(self, num_blocks: int) -> None:
        # Too few for what was accepted: then all is as it was.
        with suppress(DoesNotFit):
            self.engine.resize_kvcache(num_blocks)

    def abort(self, index: int) -> None:
        if index < len(self.requests) and self.engine.abort(self.requests[index][0]):
            self.aborted.add(self.requests[index][0])


@settings(max_examples=6, deadline=None, suppress_health_check=list(HealthCheck))
@given(num_blocks=st.integers(9, MOST_BLOCKS), actions=st.lists(ACTIONS, min_size=4, max_size=24))
def test_greedy_tokens_equal_transformers_under_random_schedules(
    case: Case, num_blocks: int, actions: list[tuple[Any, ...]]
) -> None:
    before = case.runner.limits.num_blocks
    schedule = Schedule(case, num_blocks)
    try:
        for name, *arguments in actions:
            getattr(schedule, name)(*arguments)
            schedule.engine.check_integrity()
        while schedule.engine.has_work:
            schedule.step(1)
    finally:
        schedule.engine.resize_kvcache(before)
    for request_id, prompt, num_new_tokens in schedule.requests:
        tokens, expected = schedule.tokens[request_id], case.greedy(PROMPTS[prompt])
        wanted = len(tokens) if request_id in schedule.aborted else num_new_tokens
        assert tokens == expected[:wanted]


def test_a_batch_of_one_answers_as_transformers(tmp_path: Path) -> None:
    # Has layers of both kinds. With one row, export knows the number of rows.
    options = replace(OPTIONS, batch_size=1, decoder_batch_sizes=(1,))
    case = Case("gemma3_text", tmp_path, options=options)
    prompts = random_ids(0, *PROMPT_LENGTHS)
    engine = Engine(case.runner, eos_token_ids=())
    answers = engine.generate(prompts, SamplingParams(max_new_tokens=STEPS))
    assert [answer.token_ids for answer in answers] == [case.greedy(prompt) for prompt in prompts]


def test_bfloat16_stays_close_to_transformers(tmp_path: Path) -> None:
    case = Case("llama", tmp_path, dtype="bfloat16")
    (row,) = random_ids(3, 100)
    (logits,) = run_side_by_side(case.runner, [row], [75])
    expected = case.logits(row)[74:]
    error = torch.linalg.vector_norm(logits - expected) / torch.linalg.vector_norm(expected)
    assert float(error) < 0.05
    assert case.runner.cache.tensors["past_key_values_0"].dtype == torch.bfloat16
