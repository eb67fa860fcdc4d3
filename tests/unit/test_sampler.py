from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest

np = pytest.importorskip("numpy")
torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

import reblock.engine.sampler as sampler_module  # noqa: E402
from fakes import FakeRunner, make_limits  # noqa: E402
from reblock.engine import Engine, SamplingParams  # noqa: E402
from reblock.engine.sampler import SamplerState, TorchSampler  # noqa: E402
from reblock.errors import InvalidLogits  # noqa: E402

pytestmark = pytest.mark.full

SAMPLER = TorchSampler()
# probabilities 0.5, 0.25, 0.15, 0.1
LOGITS = torch.tensor([0.5, 0.25, 0.15, 0.1]).log()


def sampler(**changes: Any) -> Any:
    """What chooses the tokens of one request from its logits and its tokens so far."""
    state = SAMPLER.start(SamplingParams(**{"max_new_tokens": 1, **changes}))
    return lambda logits, ids: SAMPLER.choose([logits], [state], [ids])[0].token_id


def drawn(num_draws: int = 400, **changes: Any) -> Counter[int]:
    choose = sampler(temperature=1.0, seed=3, **changes)
    return Counter(choose(LOGITS, [0]) for _ in range(num_draws))


def test_greedy_takes_the_most_probable_token() -> None:
    assert sampler()(torch.tensor([0.1, 0.9, 0.3]), [0]) == 1


def test_greedy_works_on_half_precision_logits() -> None:
    assert sampler()(torch.tensor([0.1, 0.9, 0.3], dtype=torch.bfloat16), [0]) == 1


def test_greedy_respects_the_repetition_penalty() -> None:
    choose = sampler(repetition_penalty=2.0)
    logits = torch.tensor([1.0, 0.9, -3.0])
    assert choose(logits, [2]) == 0
    assert choose(logits, [0]) == 1
    assert choose(logits, [2, 0, 1]) == 0


def test_sampling_follows_the_probabilities() -> None:
    counts = drawn(4000)
    for token_id, probability in enumerate([0.5, 0.25, 0.15, 0.1]):
        # four standard deviations of a binomial distribution
        margin = 4 * math.sqrt(4000 * probability * (1 - probability))
        assert abs(counts[token_id] - 4000 * probability) < margin


@pytest.mark.parametrize(
    ("changes", "token_ids"),
    [
        ({"top_k": 1}, {0}),
        ({"top_k": 2}, {0, 1}),
        ({"top_k": 99}, {0, 1, 2, 3}),
        ({"top_p": 0.4}, {0}),
        ({"top_p": 0.7}, {0, 1}),
        ({"top_p": 1.0}, {0, 1, 2, 3}),
        ({"min_p": 0.4}, {0, 1}),
        ({"min_p": 0.0}, {0, 1, 2, 3}),
        ({"top_k": 3, "min_p": 0.4}, {0, 1}),
    ],
)
def test_only_the_tokens_that_the_options_leave_are_drawn(
    changes: dict[str, Any], token_ids: set[int]
) -> None:
    assert set(drawn(**changes)) == token_ids


@pytest.mark.parametrize("temperature", [1e-5, 0.01])
def test_a_low_temperature_is_as_good_as_greedy(temperature: float) -> None:
    choose = sampler(temperature=temperature, seed=0)
    assert {choose(LOGITS * 100, [0]) for _ in range(50)} == {0}


def test_the_same_seed_draws_the_same_tokens_and_another_one_does_not() -> None:
    def draw(seed: int) -> list[int]:
        choose = sampler(temperature=1.5, seed=seed)
        return [choose(LOGITS, [0]) for _ in range(40)]

    assert draw(1) == draw(1)
    assert draw(1) != draw(2)


def test_without_a_seed_two_requests_draw_differently() -> None:
    first, second = (sampler(temperature=2.0) for _ in range(2))
    assert [first(LOGITS, [0]) for _ in range(60)] != [second(LOGITS, [0]) for _ in range(60)]


def test_requests_with_the_same_seed_do_not_disturb_each_other() -> None:
    first, second = (sampler(temperature=1.5, seed=5) for _ in range(2))
    mixed = [(first(LOGITS, [0]), second(LOGITS, [0])) for _ in range(40)]
    assert all(one == other for one, other in mixed)


def test_logits_are_left_as_they_were() -> None:
    logits = LOGITS.clone()
    sampler(temperature=0.7, top_k=2, repetition_penalty=1.3, seed=0)(logits, [0, 1])
    assert torch.equal(logits, LOGITS)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_a_number_raise_instead_of_giving_a_token(temperature: float) -> None:
    with pytest.raises(InvalidLogits, match="not a number"):
        sampler(temperature=temperature)(torch.tensor([0.1, math.nan, 0.3]), [0])


def states_of(*asked: dict[str, Any]) -> list[Any]:
    return [SAMPLER.start(SamplingParams(**{"max_new_tokens": 1, **one})) for one in asked]


def test_greedy_and_sampled_rows_of_one_call_are_chosen_as_each_would_be_alone() -> None:
    asked: list[dict[str, Any]] = [
        {},
        {"temperature": 1.0, "seed": 1},
        {"repetition_penalty": 3.0},
        {"temperature": 0.7, "top_k": 2, "seed": 2},
    ]
    generator = torch.Generator().manual_seed(0)
    logits = torch.rand((4, 50), generator=generator)
    ids = [[1], [2], [int(logits[2].argmax())], [4]]
    for rows in (logits, list(logits)):
        choices = SAMPLER.choose(rows, states_of(*asked), ids)
        alone = [sampler(**one)(logits[row], ids[row]) for row, one in enumerate(asked)]
        assert [choice.token_id for choice in choices] == alone
    assert choices[2].token_id != ids[2][0]


def test_of_equally_probable_tokens_greedy_takes_the_first() -> None:
    logits = torch.zeros((2, 1000))
    logits[1, [300, 700]] = 1.0
    choices = SAMPLER.choose(logits, states_of({}, {}), [[0], [0]])
    assert [choice.token_id for choice in choices] == [0, 300]


def test_log_probabilities_are_the_models_own_whatever_is_drawn_from() -> None:
    (state,) = states_of({"temperature": 5.0, "top_k": 1, "repetition_penalty": 9.0, "logprobs": 2})
    (choice,) = SAMPLER.choose([LOGITS], [state], [[0]])
    assert choice.logprobs is not None
    probabilities = [0.5, 0.25, 0.15, 0.1]
    assert math.exp(choice.logprobs.chosen) == pytest.approx(probabilities[choice.token_id])
    assert [token_id for token_id, _ in choice.logprobs.top] == [0, 1]
    assert [math.exp(value) for _, value in choice.logprobs.top] == pytest.approx([0.5, 0.25])


@pytest.mark.parametrize(("num_asked", "num_given"), [(0, 0), (3, 3), (4, 4), (20, 4)])
def test_no_more_log_probabilities_are_given_than_there_are_tokens(
    num_asked: int, num_given: int
) -> None:
    (choice,) = SAMPLER.choose([LOGITS], states_of({"logprobs": num_asked}), [[0]])
    assert choice.logprobs is not None
    assert len(choice.logprobs.top) == num_given
    assert math.exp(choice.logprobs.chosen) == pytest.approx(0.5)


def test_without_being_asked_for_there_are_no_log_probabilities() -> None:
    assert SAMPLER.choose([LOGITS], states_of({}), [[0]])[0].logprobs is None


def test_a_call_with_a_row_that_is_not_a_number_draws_for_no_row() -> None:
    states = states_of({"temperature": 1.5, "seed": 4}, {})
    bad = torch.stack([LOGITS, torch.full((4,), math.nan)])
    with pytest.raises(InvalidLogits, match="not a number"):
        SAMPLER.choose(bad, states, [[0], [0]])
    undisturbed = sampler(temperature=1.5, seed=4)
    for _ in range(20):
        (choice,) = SAMPLER.choose([LOGITS], states[:1], [[0]])
        assert choice.token_id == undisturbed(LOGITS, [0])


class TorchRunner(FakeRunner):
    """The fake runner with tensors, and with logits that leave something to draw from."""

    def prefill(self, *args: Any) -> Any:
        return torch.tensor(super().prefill(*args)) + torch.linspace(0, 1, 256)

    def decode(self, *args: Any) -> Any:
        return torch.tensor(super().decode(*args)) + torch.linspace(0, 1, 256)


def test_the_engine_draws_the_same_tokens_whatever_runs_beside_a_request() -> None:
    def params(seed: int) -> SamplingParams:
        return SamplingParams(max_new_tokens=8, temperature=0.5, top_k=50, seed=seed)

    prompts = [[1, 2, 3, 4], [5], [6, 7]]
    alone = []
    for seed, prompt in enumerate(prompts):
        engine = Engine(TorchRunner(make_limits()))
        alone.append(engine.generate([prompt], params(seed))[0].token_ids)
    engine = Engine(TorchRunner(make_limits()))
    together: dict[int, list[int]] = {
        engine.add(prompt, params(seed)): [] for seed, prompt in enumerate(prompts)
    }
    while engine.has_work:
        for output in engine.step():
            together[output.request_id].append(output.token_id)
    assert list(together.values()) == alone


@pytest.mark.parametrize("num_rows", [2, 3, 8, 33])
def test_no_bit_of_a_choice_depends_on_the_rows_beside_it(num_rows: int) -> None:
    generator = torch.Generator().manual_seed(num_rows)
    logits = torch.randn((num_rows, 5003), generator=generator) * 3
    asked: list[dict[str, Any]] = [
        {"temperature": 0.9},
        {"temperature": 1.3, "top_k": 40, "repetition_penalty": 1.2},
        {"temperature": 0.9, "top_p": 0.95},
        {},
        {"temperature": 1.0, "min_p": 0.01, "top_p": 0.9, "top_k": 500},
    ]
    rows = [{**asked[row % len(asked)], "seed": row, "logprobs": 3} for row in range(num_rows)]
    ids = [[row, 2 * row] for row in range(num_rows)]
    together, alone = states_of(*rows), states_of(*rows)
    for _ in range(3):
        choices = SAMPLER.choose(logits, together, ids)
        for row in range(num_rows):
            (choice,) = TorchSampler().choose([logits[row]], [alone[row]], [ids[row]])
            assert choice == choices[row]


@pytest.mark.parametrize("column", [0, 1, 7, 500, 999])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_single_nan_anywhere_in_a_batch_is_refused(column: int, temperature: float) -> None:
    logits = torch.randn((3, 1000), generator=torch.Generator().manual_seed(0))
    logits[1, column] = math.nan
    states = states_of(*[{"temperature": temperature}] * 3)
    with pytest.raises(InvalidLogits, match="not a number"):
        SAMPLER.choose(logits, states, [[0]] * 3)


@pytest.mark.parametrize("value", [math.inf, -math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_that_is_infinite_is_refused_before_any_row_draws(
    value: float, temperature: float
) -> None:
    states = states_of({"temperature": 1.5, "seed": 4}, {"temperature": temperature})
    bad = torch.stack([LOGITS, torch.full((4,), value)])
    with pytest.raises(InvalidLogits, match="infinite"):
        SAMPLER.choose(bad, states, [[0], [0]])
    undisturbed = sampler(temperature=1.5, seed=4)
    assert [SAMPLER.choose([LOGITS], states[:1], [[0]])[0].token_id for _ in range(20)] == [
        undisturbed(LOGITS, [0]) for _ in range(20)
    ]


@pytest.mark.parametrize("temperature", [1e-5, 1.0, 1e300])
@pytest.mark.parametrize("masked", [-math.inf, torch.finfo(torch.float32).min])
def test_tokens_that_the_model_rules_out_are_never_drawn(temperature: float, masked: float) -> None:
    logits = torch.full((300,), masked)
    logits[[7, 250]] = 1.0
    choose = sampler(temperature=temperature, seed=0, min_p=1e-300)
    drawn = {choose(logits, [0]) for _ in range(40)}
    # Dividing by an endless temperature makes all of a finite score alike.
    assert drawn == {7, 250} or (temperature > 1e30 and math.isfinite(masked))


def test_the_least_number_there_is_can_be_penalized() -> None:
    logits = torch.tensor([torch.finfo(torch.float32).min, 1.0, 1.0])
    choose = sampler(repetition_penalty=1.5, temperature=0.5, seed=0)
    assert {choose(logits, [0]) for _ in range(40)} == {1, 2}


class Given:
    """Stands in for random numbers."""

    def __init__(self, number: float) -> None:
        self.number = number

    def random(self) -> float:
        return self.number


@pytest.mark.parametrize("num_tokens", [5, 128, 129, 1000, 4096])
def test_a_token_is_drawn_where_the_sum_of_the_probabilities_passes_the_number(
    num_tokens: int,
) -> None:
    logits = torch.randn(num_tokens, generator=torch.Generator().manual_seed(1))
    logits[[1, num_tokens - 1]] = -math.inf
    sums = logits.double().softmax(dim=-1).cumsum(dim=-1)
    params = SamplingParams(max_new_tokens=1, temperature=1.0)
    for step in range(200):
        point = (step + 0.5) / 200
        state: Any = SamplerState(params, Given(1 - point))  # type: ignore[arg-type]
        (choice,) = SAMPLER.choose([logits], [state], [[0]])
        assert choice.token_id == int((sums < point).sum())
    for number in (0.0, 1 - 2**-53):  # the ends of what random() gives
        state = SamplerState(params, Given(number))  # type: ignore[arg-type]
        (choice,) = SAMPLER.choose([logits], [state], [[0]])
        assert choice.token_id == (num_tokens - 2 if number == 0 else 0)


def kept_by_transformers(logits: torch.Tensor, ids: list[int], **options: Any) -> torch.Tensor:
    """The probabilities of all tokens after transformers' own processors."""
    from transformers.generation import logits_process as hf

    scores = logits.unsqueeze(0).clone()
    classes = {
        "repetition_penalty": hf.RepetitionPenaltyLogitsProcessor,
        "temperature": hf.TemperatureLogitsWarper,
        "top_k": hf.TopKLogitsWarper,
        "top_p": hf.TopPLogitsWarper,
        "min_p": hf.MinPLogitsWarper,
    }
    for name, make in classes.items():
        if options.get(name) is not None:
            scores = make(options[name])(torch.tensor([ids]), scores)
    return scores[0].double().softmax(dim=-1)


def kept_here(logits: torch.Tensor, ids: list[int], **options: Any) -> torch.Tensor:
    """The same here: what every token weighs that could be drawn."""
    (state,) = states_of(options)
    tokens = sampler_module._Candidates(logits.numpy(), np.empty(len(logits), np.float32))
    kept = sampler_module._narrowed(tokens, state.params, ids)
    weights = torch.from_numpy(kept.weights(kept.scores.max()).astype(np.float64))
    probabilities = torch.zeros(len(logits), dtype=torch.float64)
    where = np.arange(len(logits)) if kept.token_ids is None else kept.token_ids
    probabilities[torch.from_numpy(where)] = weights / weights.sum()
    return probabilities


@settings(deadline=None, max_examples=200)
@given(
    seed=st.integers(0, 2**32),
    num_tokens=st.sampled_from([1, 2, 50, 1000, 5000, 20000]),
    scale=st.sampled_from([0.1, 1.0, 4.0, 10.0]),
    temperature=st.sampled_from([0.1, 0.8, 1.0, 2.0]),
    top_k=st.none() | st.sampled_from([1, 2, 50, 700, 3000]),
    top_p=st.none() | st.floats(0.01, 0.999),
    min_p=st.none() | st.floats(0.0001, 1.0),
    penalty=st.sampled_from([0.5, 1.0, 1.3]),
)
def test_tokens_are_drawn_by_the_probabilities_that_transformers_processors_leave(
    seed: int,
    num_tokens: int,
    scale: float,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    min_p: float | None,
    penalty: float,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(num_tokens, generator=generator) * scale
    ids = torch.randint(num_tokens, (9,), generator=generator).tolist()
    options: dict[str, Any] = {
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "repetition_penalty": penalty,
    }
    here = kept_here(logits, ids, **options)
    there = kept_by_transformers(logits, ids, **options)
    # Sums are rounded otherwise there, by parts in a million: so the limits a little lower, higher.
    lower = {"top_p": top_p and top_p - 1e-5, "min_p": min_p and min(1.0, min_p * 1.0001)}
    higher = {"top_p": top_p and top_p + 1e-5, "min_p": min_p and min_p * 0.9999}
    fewest = kept_by_transformers(logits, ids, **options | lower)
    most = kept_by_transformers(logits, ids, **options | higher)
    least = 1e-30  # below it a float32 is soon 0
    assert bool((here > 0)[fewest > least].all())
    assert bool((most > 0)[here > least].all())
    if torch.equal(here > least, there > least):
        torch.testing.assert_close(here, there, rtol=1e-4, atol=1e-9)
    else:
        assert not torch.equal(fewest > 0, most > 0)


def test_of_tokens_as_probable_as_the_last_one_kept_all_are_kept() -> None:
    logits = torch.tensor([2.0, 1.0, 0.0, 1.0, 1.0, -1.0])
    for options in ({"top_k": 2}, {"top_p": 0.6}):
        kept = kept_here(logits, [], temperature=1.0, **options)
        assert (kept > 0).tolist() == [True, True, False, True, True, False]


@pytest.mark.parametrize("num_top", [1, 5, 20])
def test_log_probabilities_of_a_large_vocabulary_are_those_of_torch(num_top: int) -> None:
    logits = torch.randn((2, 50_000), generator=torch.Generator().manual_seed(2)) * 3
    choices = SAMPLER.choose(logits, states_of({}, {"logprobs": num_top}), [[0], [0]])
    expected, ids = logits[1].log_softmax(dim=-1).topk(num_top)
    assert choices[0].logprobs is None
    assert choices[1].logprobs is not None
    assert choices[1].logprobs.chosen == pytest.approx(float(expected[0]), abs=1e-5)
    assert [token_id for token_id, _ in choices[1].logprobs.top] == ids.tolist()
    values = [value for _, value in choices[1].logprobs.top]
    assert values == pytest.approx(expected.tolist(), abs=1e-5)


def test_of_equally_probable_tokens_the_first_are_listed() -> None:
    logits = torch.randint(3, (40_000,), generator=torch.Generator().manual_seed(0)).float()
    logits[:1000] = 0.0
    logits[777] = 3.0
    (choice,) = SAMPLER.choose([logits], states_of({"logprobs": 20}), [[0]])
    assert choice.logprobs is not None
    expected = [777, *(logits == 2).nonzero().flatten()[:19].tolist()]
    assert [token_id for token_id, _ in choice.logprobs.top] == expected


@pytest.mark.parametrize(("num_tokens", "top_p"), [(40_000, 0.2), (40_000, 0.9), (4000, 0.9)])
def test_top_p_keeps_most_of_a_large_vocabulary_where_the_model_knows_little(
    num_tokens: int, top_p: float
) -> None:
    logits = torch.randn(num_tokens, generator=torch.Generator().manual_seed(0)) * 0.1
    options = {"temperature": 1.0, "top_p": top_p}
    here, there = kept_here(logits, [], **options), kept_by_transformers(logits, [], **options)
    assert abs(int((here > 0).sum()) - int((there > 0).sum())) <= 5
    assert int((here > 0).sum()) > top_p * num_tokens * 0.8
    torch.testing.assert_close(here, there, rtol=1e-3, atol=1.5 / num_tokens)


def test_a_token_that_the_model_reads_but_never_writes_has_nothing_to_penalize() -> None:
    assert sampler(repetition_penalty=2.0)(torch.tensor([1.0, 0.9]), [7, 0]) == 1
