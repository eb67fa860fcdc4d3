from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from fakes import FakeRunner, make_limits  # noqa: E402
from reblock.engine import Engine, SamplingParams  # noqa: E402
from reblock.engine.sampler import TorchSampler  # noqa: E402

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
    with pytest.raises(RuntimeError, match="not a number"):
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
    with pytest.raises(RuntimeError, match="not a number"):
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


def test_tokens_are_those_that_transformers_generate_samples() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        initializer_range=0.5,
        eos_token_id=None,
        bos_token_id=None,
    )
    torch.manual_seed(0)
    model: Any = LlamaForCausalLM(config).eval()  # type: ignore[no-untyped-call]
    options: dict[str, Any] = {
        "temperature": 0.8,
        "top_k": 20,
        "top_p": 0.9,
        "min_p": 0.02,
        "repetition_penalty": 1.2,
    }
    prompt = [5, 17, 42]
    torch.manual_seed(11)
    expected = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, 3, dtype=torch.long),
        do_sample=True,
        max_new_tokens=24,
        pad_token_id=0,
        **options,
    )[0].tolist()
    choose = sampler(seed=11, **options)
    token_ids = list(prompt)
    with torch.no_grad():
        while len(token_ids) < len(expected):
            token_ids.append(choose(model(torch.tensor([token_ids])).logits[0, -1], token_ids))
    assert token_ids == expected
    assert len(set(expected)) > 10
