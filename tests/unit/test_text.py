from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from reblock.engine.text import Tokenizer, read_eos_token_ids
from reblock.errors import CorruptArtifact, UsageError

if TYPE_CHECKING:
    from pathlib import Path

TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
UNKNOWN = "<unk>"
TEXT = "Once upon a time, 你好 — naïve 😀!"


def make_tokenizer(kind: str, *, chat_template: str | None = None) -> Any:
    """A real tokenizer, trained on nothing: every token is a byte or a character."""
    transformers = pytest.importorskip("transformers")
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, normalizers, pre_tokenizers

    special = ["<s>", "</s>", "<|user|>", "<|assistant|>", "<|end|>"]
    if kind == "byte_level":
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        vocabulary = {token: index for index, token in enumerate([*special, *alphabet])}
        backend = Backend(models.BPE(vocabulary, []))
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
    else:
        letters = ["▁", *"Onceupatim,v!"]
        fallback = [f"<0x{byte:02X}>" for byte in range(256)]
        tokens = [*special, UNKNOWN, *fallback, *dict.fromkeys(letters)]
        vocabulary = {token: index for index, token in enumerate(tokens)}
        backend = Backend(models.BPE(vocabulary, [], byte_fallback=True, unk_token=UNKNOWN))
        backend.normalizer = normalizers.Sequence(
            [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        )
        backend.decoder = decoders.Sequence(
            [
                decoders.Replace("▁", " "),
                decoders.ByteFallback(),
                decoders.Fuse(),
                decoders.Strip(" ", 1, 0),
            ]
        )
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=special[0],
        eos_token=special[1],
        clean_up_tokenization_spaces=False,
    )
    tokenizer.add_special_tokens({"additional_special_tokens": special[2:]})
    tokenizer.chat_template = chat_template
    return tokenizer


def wrap(tokenizer: Any) -> Tokenizer:
    return Tokenizer(tokenizer, directory="/artifact")


@pytest.mark.full
@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
def test_streamed_text_is_the_text_that_was_encoded(kind: str) -> None:
    tokenizer = wrap(make_tokenizer(kind))
    token_ids = tokenizer.encode(TEXT)
    assert len(token_ids) > len(TEXT)
    for num_prompt in (1, 5, 12):
        prompt_ids, answer_ids = token_ids[:num_prompt], token_ids[num_prompt:]
        detokenizer = tokenizer.detokenizer(prompt_ids)
        pieces = [detokenizer.add(token_id) for token_id in answer_ids]
        assert "\ufffd" not in "".join(pieces)
        prompt = tokenizer._decode(prompt_ids)
        assert prompt + "".join(pieces) + detokenizer.flush() == TEXT


@pytest.mark.full
def test_a_prompt_becomes_a_message_of_the_user_unless_it_is_raw() -> None:
    backend = make_tokenizer("byte_level", chat_template=TEMPLATE)
    tokenizer = wrap(backend)
    chat = backend.convert_ids_to_tokens(tokenizer.encode("Hi"))
    assert chat == ["<|user|>", "H", "i", "<|end|>", "<|assistant|>"]
    assert backend.convert_ids_to_tokens(tokenizer.encode("Hi", raw=True)) == ["H", "i"]


@pytest.mark.full
def test_an_answer_in_a_chat_is_a_text_of_its_own_and_a_raw_one_continues() -> None:
    tokenizer = wrap(make_tokenizer("byte_fallback", chat_template=TEMPLATE))
    prompt_ids = tokenizer.encode("One", raw=True)
    space, letter = tokenizer.encode("upon", raw=True)[:2]
    in_chat = tokenizer.detokenizer(prompt_ids)
    raw = tokenizer.detokenizer(prompt_ids, raw=True)
    assert [in_chat.add(space), in_chat.add(letter)] == ["", "u"]
    assert [raw.add(space), raw.add(letter)] == [" ", "u"]


@pytest.mark.full
def test_special_tokens_are_no_text() -> None:
    tokenizer = wrap(make_tokenizer("byte_level", chat_template=TEMPLATE))
    detokenizer = tokenizer.detokenizer([])
    token_ids = tokenizer.encode("Hi")
    assert "".join(detokenizer.add(token_id) for token_id in token_ids) == "Hi"
    assert tokenizer.eos_token_ids == (1,)


@pytest.mark.full
@pytest.mark.parametrize("text", ["", "\udcff"])
def test_prompts_that_are_no_text_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="the prompt"):
        wrap(make_tokenizer("byte_level")).encode(text)


@pytest.mark.full
@pytest.mark.parametrize(
    "chat_template",
    ["{% if %}", "{{ 1 / 0 }}", "{{ raise_exception('no\x1b[31m') }}", "{{ nothing.at.all }}"],
)
def test_a_chat_template_that_fails_is_a_fault_of_the_artifact(chat_template: str) -> None:
    tokenizer = wrap(make_tokenizer("byte_level", chat_template=chat_template))
    with pytest.raises(CorruptArtifact, match="chat template") as caught:
        tokenizer.encode("Hi")
    assert caught.value.path == "/artifact"
    assert str(caught.value).isprintable()
    assert len(tokenizer.encode("Hi", raw=True)) == 2


def test_a_tokenizer_that_fails_on_an_answer_is_a_fault_of_the_artifact(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hugging_face = make_tokenizer("byte_level")
    detokenizer = wrap(hugging_face).detokenizer([])

    def refuse(*_arguments: object, **_keywords: object) -> str:
        raise OverflowError("no such token")

    monkeypatch.setattr(hugging_face, "decode", refuse)
    with pytest.raises(CorruptArtifact, match="fails on an answer: OverflowError") as caught:
        detokenizer.add(9)
    assert caught.value.path == "/artifact"


@pytest.mark.full
@pytest.mark.parametrize("raw", [True, False])
def test_a_tokenizer_with_a_length_that_is_no_number_is_a_fault_of_the_artifact(
    tmp_path: Path, raw: bool
) -> None:
    make_tokenizer("byte_level", chat_template=TEMPLATE).save_pretrained(tmp_path)
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "model_max_length": "x"}))
    with pytest.raises(CorruptArtifact, match="tokenizer") as caught:
        Tokenizer.load(str(tmp_path)).encode("Hi", raw=raw)
    assert caught.value.path == str(tmp_path)


@pytest.mark.full
def test_a_tokenizer_is_read_from_the_files_of_an_artifact(tmp_path: Path) -> None:
    make_tokenizer("byte_level", chat_template=TEMPLATE).save_pretrained(tmp_path)
    tokenizer = Tokenizer.load(str(tmp_path))
    assert tokenizer.has_chat_template
    assert len(tokenizer.encode("Hi")) == 5


@pytest.mark.full
@pytest.mark.parametrize("content", [None, "{", '{"version": "1.0"}'])
def test_a_missing_or_broken_tokenizer_is_a_fault_of_the_artifact(
    tmp_path: Path, content: str | None
) -> None:
    pytest.importorskip("transformers")
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
        (tmp_path / "tokenizer_config.json").write_text(
            '{"tokenizer_class": "PreTrainedTokenizerFast"}'
        )
    with pytest.raises(CorruptArtifact, match="tokenizer") as caught:
        Tokenizer.load(str(tmp_path))
    assert caught.value.path == str(tmp_path)


@pytest.mark.parametrize(
    ("generation_config", "config", "eos_token_ids"),
    [
        (None, None, ()),
        ({"eos_token_id": 7}, {"eos_token_id": 1}, (7,)),
        ({"eos_token_id": [7, 8]}, None, (7, 8)),
        ({"eos_token_id": None}, {"eos_token_id": 1}, (1,)),
        ({}, {"eos_token_id": [1, 2]}, (1, 2)),
        (None, {"text_config": {"eos_token_id": 3}}, (3,)),
        (None, {"eos_token_id": 4, "text_config": {"eos_token_id": 3}}, (4,)),
        (None, {"limit": float("inf"), "eos_token_id": 5}, (5,)),
        ([], {}, ()),
    ],
)
def test_eos_tokens_come_from_the_generation_config_or_else_the_config(
    tmp_path: Path, generation_config: Any, config: Any, eos_token_ids: tuple[int, ...]
) -> None:
    for name, content in (("generation_config", generation_config), ("config", config)):
        if content is not None:
            (tmp_path / f"{name}.json").write_text(json.dumps(content))
    assert read_eos_token_ids(str(tmp_path)) == eos_token_ids


@pytest.mark.parametrize(
    "content", ["{", "[" * 100_000, '{"eos_token_id": "a"}', '{"eos_token_id": [1, -2]}']
)
def test_eos_tokens_that_are_none_are_a_fault_of_the_artifact(tmp_path: Path, content: str) -> None:
    (tmp_path / "generation_config.json").write_text(content)
    with pytest.raises(CorruptArtifact, match=r"generation_config\.json"):
        read_eos_token_ids(str(tmp_path))
