"""`RBLNAutoModelForCausalLM` on a real artifact: all ways to generate, beside transformers' own."""

from __future__ import annotations

import gc
import os
import threading
from typing import TYPE_CHECKING, Any

import pytest
from installed import reblock, snapshot

from reblock.errors import (
    CorruptArtifact,
    DestinationExists,
    InvalidDestination,
    InvalidOption,
    RequestTooLarge,
    UnsupportedModel,
    UsageError,
)
from reblock.rbln import RBLNAutoModelForCausalLM, RBLNDecoderOnlyModelForCausalLMConfig
from tiny_models import write_model

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from installed import Compiled

pytestmark = pytest.mark.full

NEW = 12
# Of different lengths, one longer than a chunk of 128 tokens and than the window of 64.
TEXTS = ["The cache holds the keys", "in blocks. " * 60, "and"]
SAMPLING = {"do_sample": True, "temperature": 1.4, "top_k": 60, "top_p": 0.95, "min_p": 0.001}


@pytest.fixture(scope="module")
def model(compiled: Compiled) -> Any:
    return RBLNAutoModelForCausalLM.from_pretrained(compiled.artifact)


@pytest.fixture(scope="module")
def reference(compiled: Compiled) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    loaded: Any = AutoModelForCausalLM.from_pretrained(compiled.model, dtype=torch.float32)
    return loaded.eval()


@pytest.fixture(scope="module")
def tokenizer(compiled: Compiled) -> Any:
    from transformers import AutoTokenizer

    loaded: Any = AutoTokenizer.from_pretrained(compiled.artifact, padding_side="left")
    loaded.pad_token = loaded.eos_token
    return loaded


@pytest.fixture(scope="module")
def batch(tokenizer: Any) -> Any:
    encoded = tokenizer(TEXTS, return_tensors="pt", padding=True)
    assert encoded["input_ids"].shape[1] > 128
    assert (encoded["attention_mask"] == 0).any()
    return encoded


@pytest.fixture(autouse=True)
def all_blocks_come_back(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "model" in request.fixturenames:
        model = request.getfixturevalue("model")
        assert model._pool.num_used == 0
        model._pool.check_integrity()


def both(model: Any, reference: Any, *arguments: Any, seed: int = 0, **keywords: Any) -> Any:
    """Generate with both models from the same state of torch; they must agree."""
    import torch

    torch.manual_seed(seed)
    ours = model.generate(*arguments, **keywords)
    state = torch.get_rng_state()
    torch.manual_seed(seed)
    theirs = reference.generate(*arguments, **keywords)
    assert torch.equal(state, torch.get_rng_state())
    if torch.is_tensor(ours):
        assert ours.tolist() == theirs.tolist()
    return ours, theirs


def test_greedy_answers_are_those_of_transformers_alone_and_in_a_padded_batch(
    model: Any, reference: Any, tokenizer: Any, batch: Any
) -> None:
    together, _ = both(model, reference, **batch, max_new_tokens=NEW)
    for row, text in enumerate(TEXTS):
        ids = tokenizer(text, return_tensors="pt")["input_ids"]
        alone, _ = both(model, reference, ids, max_new_tokens=NEW)
        assert alone[0, ids.shape[1] :].tolist() == together[row, -NEW:].tolist()
    assert len({tuple(answer) for answer in together[:, -NEW:].tolist()}) == len(TEXTS)


def test_logits_of_a_padded_row_are_those_of_the_row_alone(
    model: Any, reference: Any, tokenizer: Any, batch: Any
) -> None:
    import torch

    asked = {"return_dict_in_generate": True, "output_logits": True, "output_scores": True}
    padded = model.generate(**batch, max_new_tokens=4, **asked)
    ids = tokenizer(TEXTS[0], return_tensors="pt")["input_ids"]
    alone, theirs = both(model, reference, ids, max_new_tokens=4, **asked)
    assert type(alone) is type(theirs)
    assert alone.sequences.tolist() == theirs.sequences.tolist()
    assert len(alone.scores) == len(alone.logits) == len(padded.logits) == 4
    for step in range(4):
        torch.testing.assert_close(padded.logits[step][0], alone.logits[step][0])
        torch.testing.assert_close(alone.logits[step], theirs.logits[step], rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(alone.scores[step], theirs.scores[step], rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(
        model.compute_transition_scores(alone.sequences, alone.scores, normalize_logits=True),
        reference.compute_transition_scores(theirs.sequences, theirs.scores, normalize_logits=True),
        rtol=1e-3,
        atol=1e-3,
    )


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_sampling_draws_the_tokens_that_transformers_draws(
    model: Any, reference: Any, batch: Any, seed: int
) -> None:
    first, _ = both(model, reference, **batch, max_new_tokens=NEW, seed=seed, **SAMPLING)
    greedy = model.generate(**batch, max_new_tokens=NEW)
    assert first.tolist() != greedy.tolist()


@pytest.mark.parametrize(
    "settings",
    [
        {"repetition_penalty": 1.4},
        {"no_repeat_ngram_size": 2},
        {"bad_words_ids": [[5], [6, 7]], "suppress_tokens": [8]},
        {"sequence_bias": {(9,): 50.0}},
        {"max_length": 300},
        {"use_cache": False},
        {"renormalize_logits": True, "typical_p": 0.9, **SAMPLING},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_settings_work_as_in_transformers(
    model: Any, reference: Any, batch: Any, settings: dict[str, Any]
) -> None:
    length = {} if "max_length" in settings else {"max_new_tokens": NEW}
    answer, _ = both(model, reference, **batch, **length, **settings)
    if "max_length" in settings:
        assert answer.shape[1] == settings["max_length"]


def test_a_generation_config_is_taken_as_an_object(model: Any, reference: Any, batch: Any) -> None:
    from transformers import GenerationConfig

    config = GenerationConfig(max_new_tokens=NEW, repetition_penalty=1.3, pad_token_id=0)
    both(model, reference, **batch, generation_config=config)


def test_a_row_that_ends_is_padded_while_the_others_go_on(
    model: Any, reference: Any, batch: Any
) -> None:
    plain = model.generate(**batch, max_new_tokens=NEW)[:, -NEW:].tolist()
    ending = [plain[0][2], plain[1][5]]
    ended, _ = both(
        model, reference, **batch, max_new_tokens=NEW, eos_token_id=ending, pad_token_id=3
    )
    answer = ended[0, batch["input_ids"].shape[1] :].tolist()
    last = next(index for index, token in enumerate(plain[0]) if token in ending)
    assert answer[: last + 1] == plain[0][: last + 1]
    assert set(answer[last + 1 :]) == {3}
    both(model, reference, **batch, max_new_tokens=NEW, eos_token_id=plain[2][1], pad_token_id=3)


def test_an_answer_goes_on_past_its_end_for_min_new_tokens(
    model: Any, reference: Any, tokenizer: Any
) -> None:
    ids = tokenizer(TEXTS[0], return_tensors="pt")["input_ids"]
    eos = model.generate(ids, max_new_tokens=1)[0, -1].item()
    short, _ = both(model, reference, ids, max_new_tokens=NEW, eos_token_id=eos)
    assert short.shape[1] == ids.shape[1] + 1
    longer, _ = both(model, reference, ids, max_new_tokens=NEW, min_new_tokens=5, eos_token_id=eos)
    assert longer.shape[1] >= ids.shape[1] + 5


def test_several_sequences_of_one_prompt_fill_the_batch(
    model: Any, reference: Any, tokenizer: Any
) -> None:
    ids = tokenizer(TEXTS[0], return_tensors="pt")["input_ids"]
    answers, _ = both(model, reference, ids, max_new_tokens=NEW, num_return_sequences=4, **SAMPLING)
    assert len({tuple(answer) for answer in answers.tolist()}) > 1
    assert len(answers) == 4


def test_criteria_and_stop_strings_end_an_answer(
    model: Any, reference: Any, tokenizer: Any
) -> None:
    from transformers import StoppingCriteria, StoppingCriteriaList

    class Three(StoppingCriteria):
        def __call__(self, input_ids: Any, scores: Any, **_keywords: Any) -> Any:
            import torch

            return torch.full((len(input_ids),), input_ids.shape[1] >= length + 3)

    ids = tokenizer(TEXTS[0], return_tensors="pt")["input_ids"]
    length = ids.shape[1]
    criteria = StoppingCriteriaList([Three()])
    answer, _ = both(model, reference, ids, max_new_tokens=NEW, stopping_criteria=criteria)
    assert answer.shape[1] == length + 3
    text = tokenizer.decode(model.generate(ids, max_new_tokens=NEW)[0, length:])
    stopped, _ = both(
        model, reference, ids, max_new_tokens=NEW, stop_strings=[text[2:4]], tokenizer=tokenizer
    )
    assert length < stopped.shape[1] < length + NEW


def test_processors_and_allowed_tokens_of_the_caller_are_heeded(
    model: Any, reference: Any, batch: Any
) -> None:
    from transformers import LogitsProcessor, LogitsProcessorList

    class Backwards(LogitsProcessor):
        def __call__(self, input_ids: Any, scores: Any) -> Any:
            return -scores

    processors = LogitsProcessorList([Backwards()])
    both(model, reference, **batch, max_new_tokens=4, logits_processor=processors)
    allowed, _ = both(
        model,
        reference,
        **batch,
        max_new_tokens=4,
        prefix_allowed_tokens_fn=lambda row, _ids: [10 + row, 20 + row],
    )
    assert set(allowed[1, -4:].tolist()) <= {11, 21}


def test_streamers_are_fed_as_by_transformers(
    model: Any, reference: Any, tokenizer: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import TextIteratorStreamer, TextStreamer

    ids = tokenizer(TEXTS[0], return_tensors="pt")["input_ids"]
    model.generate(ids, max_new_tokens=NEW, streamer=TextStreamer(tokenizer, skip_prompt=True))
    ours = capsys.readouterr().out
    reference.generate(ids, max_new_tokens=NEW, streamer=TextStreamer(tokenizer, skip_prompt=True))
    assert ours == capsys.readouterr().out
    assert len(ours) > 5

    streamer: Any = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=60)
    thread = threading.Thread(
        target=model.generate, args=(ids,), kwargs={"max_new_tokens": NEW, "streamer": streamer}
    )
    thread.start()
    assert "".join(streamer) == ours.removesuffix("\n")
    thread.join()


def test_a_pipeline_of_transformers_runs_the_model(
    model: Any, reference: Any, tokenizer: Any
) -> None:
    from transformers import pipeline

    # A pipeline samples if it is not told otherwise.
    settings = {"max_new_tokens": NEW, "do_sample": False}
    ours, theirs = (
        pipeline("text-generation", model=each, tokenizer=tokenizer)(TEXTS[:1], **settings)
        for each in (model, reference)
    )
    assert ours == theirs
    assert len(ours[0][0]["generated_text"]) > len(TEXTS[0])


def test_two_threads_take_turns_and_have_their_own_answers(model: Any, tokenizer: Any) -> None:
    prompts = [tokenizer(text, return_tensors="pt")["input_ids"] for text in TEXTS]
    expected = [model.generate(ids, max_new_tokens=NEW).tolist() for ids in prompts]
    found: dict[int, list[list[int]]] = {}

    def answer(index: int) -> None:
        found[index] = model.generate(prompts[index], max_new_tokens=NEW).tolist()

    threads = [threading.Thread(target=answer, args=(index,)) for index in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[index] for index in range(len(prompts))] == expected


def test_without_a_length_an_answer_ends_at_that_of_transformers_or_of_the_artifact(
    model: Any, reference: Any, tokenizer: Any
) -> None:
    ids = tokenizer(TEXTS[0], return_tensors="pt")["input_ids"]
    with pytest.warns(UserWarning, match="default `max_length`"):
        both(model, reference, ids)
    nearly_full = ids.repeat(1, 500)[:, :2045]
    with pytest.warns(UserWarning, match="default `max_length`"):
        assert model.generate(nearly_full).shape[1] == 2048


def test_a_prompt_padded_on_the_right_is_read_as_if_it_were_not_padded(
    model: Any, tokenizer: Any
) -> None:
    import torch

    ids = tokenizer(TEXTS[0], return_tensors="pt")["input_ids"]
    padding = torch.zeros((1, 7), dtype=torch.long)
    padded = model.generate(
        torch.cat([ids, padding], dim=1),
        attention_mask=torch.cat([torch.ones_like(ids), padding], dim=1),
        max_new_tokens=NEW,
    )
    assert padded[0, -NEW:].tolist() == model.generate(ids, max_new_tokens=NEW)[0, -NEW:].tolist()


REFUSED: dict[str, Callable[[Any], dict[str, Any]]] = {
    "beam_search": lambda _: {"num_beams": 2},
    "beam_sample": lambda _: {"num_beams": 2, "do_sample": True},
    "contrastive_search": lambda _: {"penalty_alpha": 0.5, "top_k": 4},
    "assisted_generation": lambda _: {"prompt_lookup_num_tokens": 3},
    "dola_generation": lambda _: {"dola_layers": "low"},
    "constrained_beam_search": lambda _: {"force_words_ids": [[[5]]], "num_beams": 2},
    "assistant_model": lambda model: {"assistant_model": model},
    "custom_generate": lambda _: {"custom_generate": "somebody/repository"},
    "inputs_embeds": lambda _: {"inputs_embeds": [[0.5]]},
    "past_key_values": lambda _: {"past_key_values": object()},
    "position_ids": lambda _: {"position_ids": [[0]]},
    "guidance_scale": lambda _: {"guidance_scale": 1.5},
    "token_healing": lambda _: {"token_healing": True},
    "cache_implementation": lambda _: {"cache_implementation": "static"},
    "prefill_chunk_size": lambda _: {"prefill_chunk_size": 64},
    "output_attentions": lambda _: {"output_attentions": True},
    "output_hidden_states": lambda _: {"output_hidden_states": True},
    "max_new_token": lambda _: {"max_new_token": 4},
    "is_causal": lambda _: {"is_causal": False},
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_honoured_is_refused_by_name_with_the_reason(
    model: Any, batch: Any, name: str
) -> None:
    with pytest.raises(InvalidOption, match=rf"{name}\b.* is not supported") as caught:
        model.generate(**batch, **REFUSED[name](model))
    assert isinstance(caught.value, ValueError)


def test_more_rows_tokens_or_blocks_than_there_are_is_refused_before_anything_runs(
    artifact: Path, tokenizer: Any, batch: Any
) -> None:
    assert reblock("set", artifact, 17).returncode == 0
    small: Any = RBLNAutoModelForCausalLM.from_pretrained(artifact)
    assert small.get_kvcache_num_blocks() == 17
    assert small.rbln_config.kvcache_num_blocks == 17
    runs: list[str] = []
    prefill = small._runner.prefill
    small._runner.prefill = lambda *arguments: runs.append("prefill") or prefill(*arguments)
    ids = tokenizer(["and"] * 5, return_tensors="pt")["input_ids"]
    with pytest.raises(RequestTooLarge, match=r"5 sequences.* batch_size=4"):
        small.generate(ids, max_new_tokens=2)
    with pytest.raises(RequestTooLarge, match=r"6 sequences.* batch_size=4"):
        small.generate(**batch, max_new_tokens=2, num_return_sequences=2, do_sample=True)
    prompt_length = batch["input_ids"].shape[1]
    with pytest.raises(RequestTooLarge, match=r"2,049 tokens, but max_seq_len=2,048") as caught:
        small.generate(**batch, max_new_tokens=2049 - prompt_length)
    assert (caught.value.num_tokens, caught.value.max_tokens) == (2049, 2048)
    with pytest.raises(RequestTooLarge, match=r"kvcache_num_blocks=17.* reblock set DIR"):
        small.generate(**batch, max_new_tokens=2048 - prompt_length)
    assert runs == []
    # One sequence has room for its whole length, 16 blocks.
    one = small.generate(batch["input_ids"][1:2].repeat(1, 16)[:, :2040], max_new_tokens=8)
    assert one.shape[1] == 2048
    assert runs == ["prefill"] * 16


@pytest.mark.parametrize(
    ("inputs", "fault"),
    [
        ({"input_ids": [[1, 2]]}, "'list' and must be a tensor"),
        ({"input_ids": (3,)}, r"shape \(3,\).* whole numbers of shape"),
        ({"input_ids": (0, 3)}, "with one row at least"),
        ({"input_ids": (1, 3), "offset": 5000}, "token ids go from 5000 to 5000"),
        ({"input_ids": (1, 3), "attention_mask": (1, 4)}, r"attention_mask of shape \(1, 4\)"),
        ({"input_ids": (1, 3), "attention_mask": (1, 3), "shown": 2}, "must have a 0 or a 1"),
        ({"input_ids": (2, 3), "attention_mask": (2, 3), "shown": 0}, "a prompt has no tokens"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_inputs_that_make_no_sense_are_refused_by_what_they_are(
    model: Any, inputs: dict[str, Any], fault: str
) -> None:
    import torch

    ids, mask = inputs["input_ids"], inputs.get("attention_mask")
    if isinstance(ids, tuple):
        ids = torch.full(ids, inputs.get("offset", 5))
    if mask is not None:
        mask = torch.full(mask, inputs.get("shown", 1))
        mask[:, -1] = inputs.get("shown", 0)
    with pytest.raises(UsageError, match=fault):
        model.generate(ids, attention_mask=mask, max_new_tokens=2, pad_token_id=0)


def test_a_call_that_fails_midway_leaves_the_model_as_it_was(model: Any, batch: Any) -> None:
    from transformers import StoppingCriteria, StoppingCriteriaList

    class Broken(StoppingCriteria):
        def __call__(self, input_ids: Any, scores: Any, **_keywords: Any) -> Any:
            raise OSError("the disk of the log is full")

    class Nested(StoppingCriteria):
        def __call__(self, input_ids: Any, scores: Any, **_keywords: Any) -> Any:
            return model.generate(input_ids, max_new_tokens=1)

    before = model.generate(**batch, max_new_tokens=NEW).tolist()
    with pytest.raises(OSError, match="log is full"):
        model.generate(
            **batch, max_new_tokens=NEW, stopping_criteria=StoppingCriteriaList([Broken()])
        )
    with pytest.raises(UsageError, match="from within generate"):
        model.generate(
            **batch, max_new_tokens=NEW, stopping_criteria=StoppingCriteriaList([Nested()])
        )
    assert model.generate(**batch, max_new_tokens=NEW).tolist() == before


def test_the_model_says_of_itself_what_scripts_ask(model: Any, compiled: Compiled) -> None:
    import torch

    assert model.can_generate()
    assert model.eval() is model.to("cpu") is model.to(torch.float32) is model
    assert (model.device, model.dtype) == (torch.device("cpu"), torch.float32)
    assert model.config.model_type == "gemma3_text"
    assert model.generation_config.eos_token_id == 0
    assert isinstance(model.rbln_config, RBLNDecoderOnlyModelForCausalLMConfig)
    assert (model.rbln_config.batch_size, model.rbln_config.max_seq_len) == (4, 2048)
    assert model.rbln_config.decoder_batch_sizes == [4, 1]
    assert model.get_kvcache_num_blocks() == model.rbln_config.kvcache_num_blocks == 64
    for elsewhere in ("cuda", torch.bfloat16):
        with pytest.raises(InvalidOption, match=r"compiled for the cpu and torch\.float32"):
            model.to(elsewhere)
    with pytest.raises(UsageError, match="run by generate alone"):
        model(torch.tensor([[1]]))
    with pytest.raises(UsageError, match=r"reblock\.engine"):
        model.generate_batch([[1]])


def test_a_saved_copy_answers_alike_and_keeps_a_changed_generation_config(
    artifact: Path, tmp_path: Path, batch: Any
) -> None:
    model: Any = RBLNAutoModelForCausalLM.from_pretrained(artifact)
    before = snapshot(artifact)
    model.save_pretrained(tmp_path / "same")
    assert snapshot(tmp_path / "same") == before
    model.generation_config.repetition_penalty = 1.3
    model.save_pretrained(tmp_path / "changed")
    assert snapshot(artifact) == before
    changed = snapshot(tmp_path / "changed")
    assert {name for name in changed if changed[name] != before[name]} == {"generation_config.json"}
    expected = model.generate(**batch, max_new_tokens=NEW).tolist()
    copy: Any = RBLNAutoModelForCausalLM.from_pretrained(tmp_path / "changed")
    assert copy.generate(**batch, max_new_tokens=NEW).tolist() == expected
    same: Any = RBLNAutoModelForCausalLM.from_pretrained(tmp_path / "same", export=False)
    assert same.generate(**batch, max_new_tokens=NEW).tolist() != expected


def test_a_copy_goes_neither_over_the_artifact_nor_over_anything_else(
    artifact: Path, tmp_path: Path
) -> None:
    model: Any = RBLNAutoModelForCausalLM.from_pretrained(artifact, rbln_create_runtimes=False)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "note").write_text("mine")
    with pytest.raises(DestinationExists):
        model.save_pretrained(tmp_path / "full")
    with pytest.raises(InvalidDestination):
        model.save_pretrained(artifact)
    with pytest.raises(InvalidOption, match="push_to_hub is not supported"):
        model.save_pretrained(tmp_path / "new", push_to_hub=True)
    with pytest.raises(UsageError, match="create_runtimes=False"):
        model.generate(None)
    assert model.get_kvcache_num_blocks() == 64
    # A copy that cannot be completed is not there at all.
    os.remove(artifact / "prefill.rbln")
    with pytest.raises(Exception, match=r"prefill\.rbln"):
        model.save_pretrained(tmp_path / "new")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["artifact", "full"]


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("text", ["{", '{"model_type": 3, "max_length": "long"}'])
def test_a_description_that_cannot_be_read_is_a_damaged_artifact(
    artifact: Path, name: str, text: str
) -> None:
    (artifact / name).write_text(text)
    with pytest.raises(CorruptArtifact, match=name):
        RBLNAutoModelForCausalLM.from_pretrained(artifact)


@pytest.fixture(scope="module")
def hub_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache as the hub's client keeps it, with one model at the revision v1."""
    cache = tmp_path_factory.mktemp("hub")
    repository = cache / "models--tiny--llama"
    write_model("llama", repository / "snapshots" / ("0" * 40) / "inner", num_layers=1)
    (repository / "refs").mkdir()
    (repository / "refs" / "v1").write_text("0" * 40)
    return cache


def test_a_model_is_compiled_loaded_and_gone_with_its_temporary_artifact(
    hub_cache: Path, tmp_path: Path
) -> None:
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging as transformers_logging

    verbosity = transformers_logging.get_verbosity()
    where: dict[str, Any] = {
        "revision": "v1",
        "cache_dir": str(hub_cache),
        "local_files_only": True,
        "subfolder": "inner",
    }
    model: Any = RBLNAutoModelForCausalLM.from_pretrained(
        "tiny/llama",
        export=True,
        rbln_config={"batch_size": 2, "max_seq_len": 64, "kvcache_partition_len": 16},
        rbln_memory_budget="90%",
        torch_dtype=torch.float32,
        **where,
    )
    assert transformers_logging.get_verbosity() == verbosity
    assert transformers_logging.is_progress_bar_enabled()
    assert (model.rbln_config.batch_size, model.get_kvcache_num_blocks()) == (2, 8)
    reference: Any = AutoModelForCausalLM.from_pretrained("tiny/llama", **where)
    both(model, reference, torch.tensor([[5, 6, 7], [8, 9, 10]]), max_new_tokens=40)
    model.save_pretrained(tmp_path / "kept")
    temporary = model.model_save_dir
    assert os.path.isdir(temporary)
    del model
    gc.collect()
    assert not os.path.exists(os.path.dirname(temporary))
    kept: Any = RBLNAutoModelForCausalLM.from_pretrained(tmp_path / "kept", rbln_batch_size=2)
    both(kept, reference, torch.tensor([[5, 6, 7]]), max_new_tokens=40)


def test_a_model_that_cannot_be_fetched_or_compiled_leaves_nothing(
    hub_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(UnsupportedModel, match="'tiny/llama' cannot be fetched"):
        RBLNAutoModelForCausalLM.from_pretrained(
            "tiny/llama", revision="v2", cache_dir=hub_cache, local_files_only=True
        )
    with pytest.raises(UnsupportedModel, match=r"no config\.json"):
        RBLNAutoModelForCausalLM.from_pretrained(hub_cache, model_save_dir=tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
