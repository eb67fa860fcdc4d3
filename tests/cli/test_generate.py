from __future__ import annotations

import io
import json
import sys
from typing import TYPE_CHECKING, Any

import pytest

from fakes import (
    ByteTokenizer,
    FakeRunner,
    FakeSampler,
    continue_alone,
    make_limits,
)
from reblock.backends import loading
from reblock.cli import generate
from reblock.cli.main import main
from reblock.engine.detokenizer import Detokenizer
from reblock.engine.engine import Engine
from reblock.errors import CorruptArtifact, InvalidLogits

if TYPE_CHECKING:
    from pathlib import Path


class FakeModel:
    """Stands in for an artifact that was loaded, and remembers how it was asked for."""

    def __init__(self, **changes: Any) -> None:
        sizes: dict[str, Any] = {
            "max_seq_len": 64,
            "num_blocks": 12,
            "max_batch": 4,
            "prefill_chunk_size": 8,
        }
        self.runner = FakeRunner(make_limits(**{**sizes, **changes}))
        self.loaded: list[tuple[str, int | None]] = []

    def load(self, directory: str, num_threads: int | None) -> tuple[Engine, ByteTokenizer]:
        self.loaded.append((directory, num_threads))
        return Engine(self.runner, sampler=FakeSampler()), ByteTokenizer()


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> FakeModel:
    return install(monkeypatch, FakeModel())


def install(monkeypatch: pytest.MonkeyPatch, fake: FakeModel) -> FakeModel:
    monkeypatch.setattr(generate, "_load", fake.load)
    return fake


def answer_to(prompt: str, max_new_tokens: int) -> list[int]:
    return continue_alone(list(prompt.encode()), max_new_tokens)


def text_of(token_ids: list[int]) -> str:
    return bytes(token_ids).decode("utf-8", "replace")


def test_one_prompt_is_answered_on_stdout_and_the_numbers_go_to_stderr(
    model: FakeModel, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", "dir", "--prompt", "Hi", "--max-new-tokens", "5"]) == 0
    out, err = capsys.readouterr()
    assert out == text_of(answer_to("<Hi>", 5)) + "\n"
    assert err.startswith("5 tokens in ")
    assert "KV cache: 12 blocks of 4 tokens, 6.00 KiB" in err
    assert model.loaded == [("dir", None)]


def test_a_streamed_answer_is_the_same_as_one_printed_at_its_end(
    model: FakeModel, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["generate", "dir", "--prompt=Hi", "--max-new-tokens=20"]
    assert main(arguments) == 0
    streamed = capsys.readouterr().out
    assert main([*arguments, "--no-stream"]) == 0
    assert capsys.readouterr().out == streamed


def test_an_answer_is_streamed_token_by_token(
    model: FakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[int] = []

    class Stdout(io.StringIO):
        def write(self, text: str) -> int:
            written.append(len(model.runner.calls))
            return super().write(text)

    monkeypatch.setattr(sys, "stdout", Stdout())
    assert main(["generate", "dir", "--prompt=Hi", "--max-new-tokens=20"]) == 0
    assert len(set(written)) > 3


def test_raw_leaves_the_chat_template_out(
    model: FakeModel, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", "dir", "--prompt=Hi", "--raw", "--max-new-tokens=5"]) == 0
    assert capsys.readouterr().out == text_of(answer_to("Hi", 5)) + "\n"


def test_several_prompts_are_answered_side_by_side_under_headers_in_order(
    model: FakeModel, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text("long\nprompt", encoding="utf-8")
    arguments = ["generate", "dir", "--prompt=a", f"--prompt-file={file}", "--prompt=b"]
    assert main([*arguments, "--max-new-tokens=6"]) == 0
    out, err = capsys.readouterr()
    answers = [text_of(answer_to(f"<{text}>", 6)) for text in ("a", "long\nprompt", "b")]
    headers = ["--- 1 of 3: a", "--- 2 of 3: long prompt", "--- 3 of 3: b"]
    lines = zip(headers, answers, strict=True)
    assert out == "".join(f"{header}\n{answer}\n" for header, answer in lines)
    assert "18 tokens in" in err
    assert "3 side by side" in err


def test_a_long_prompt_is_shortened_in_its_header() -> None:
    headline = generate._headline("word " * 40)
    assert len(headline) == 60
    assert headline.endswith("...")


def test_json_holds_everything_in_one_object(
    model: FakeModel, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["generate", "dir", "--prompt=é", "--prompt=b", "--max-new-tokens=4", "--json"]
    assert main(arguments) == 0
    out, err = capsys.readouterr()
    report = json.loads(out)
    assert err == ""
    assert report.pop("seconds") >= 0
    assert report.pop("tokens_per_second") > 0
    assert report == {
        "results": [
            {
                "prompt": prompt,
                "answer_index": 0,
                "text": text_of(answer_to(f"<{prompt}>", 4)),
                "num_prompt_tokens": len(f"<{prompt}>".encode()),
                "token_ids": answer_to(f"<{prompt}>", 4),
                "finish_reason": "length",
            }
            for prompt in ("é", "b")
        ],
        "num_new_tokens": 8,
        "most_running": 2,
        "kvcache_num_blocks": 12,
        "kvcache_block_size": 4,
        "kv_bytes": 6144,
    }


SAMPLED = ("--max-new-tokens=6", "--temperature=1")


def test_several_answers_to_each_prompt_come_in_order_and_by_seeds_of_their_own(
    model: FakeModel, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = [f"--prompt={letter * 20}" for letter in "ab"]
    assert main(["generate", "dir", *prompts, "--n=3", "--seed=5", "--json", *SAMPLED]) == 0
    report = json.loads(capsys.readouterr().out)
    results = report["results"]
    expected = [(letter * 20, index) for letter in "ab" for index in range(3)]
    assert [(result["prompt"], result["answer_index"]) for result in results] == expected
    assert len({tuple(result["token_ids"]) for result in results}) == 6
    for result in results:
        seed = 5 + result["answer_index"]
        alone = ["generate", "dir", f"--prompt={result['prompt']}", f"--seed={seed}"]
        assert main([*alone, "--json", *SAMPLED]) == 0
        (single,) = json.loads(capsys.readouterr().out)["results"]
        assert single == {**result, "answer_index": 0}


def test_the_prompt_of_several_answers_is_read_once(
    model: FakeModel, capsys: pytest.CaptureFixture[str]
) -> None:
    # "<aaaaaaaaaaaaaaaaaaa>" are 21 tokens: five full blocks of four, and one token
    arguments = ["generate", "dir", f"--prompt={'a' * 19}", *SAMPLED]
    assert main([*arguments, "--n=2"]) == 0
    assert [call for call in model.runner.calls if call[0] == "prefill"] == [
        ("prefill", start) for start in (0, 8, 16, 20)
    ]


def test_a_heading_tells_which_answer_to_its_prompt_follows(
    model: FakeModel, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", "dir", "--prompt=a", "--prompt=b", "--n=2", *SAMPLED]) == 0
    out, err = capsys.readouterr()
    headings = [line for line in out.splitlines() if line.startswith("--- ")]
    assert headings == [
        "--- 1 of 4: a (answer 1 of 2)",
        "--- 2 of 4: a (answer 2 of 2)",
        "--- 3 of 4: b (answer 1 of 2)",
        "--- 4 of 4: b (answer 2 of 2)",
    ]
    assert "24 tokens in" in err
    assert "warning" not in err


def test_several_answers_without_a_temperature_are_warned_about_as_they_are_the_same(
    model: FakeModel, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["generate", "dir", "--prompt=a", "--max-new-tokens=5", "--n=2", "--json"]
    assert main(arguments) == 0
    out, err = capsys.readouterr()
    first, second = json.loads(out)["results"]
    assert first["token_ids"] == second["token_ids"]
    assert "warning: unless --temperature is above 0, all answers to a prompt are the same" in err


def test_several_answers_that_never_fit_exit_with_3_before_any_token(
    model: FakeModel, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", "dir", "--prompt=a", f"--prompt={'b' * 70}", "--n=2"]) == 3
    assert capsys.readouterr().out == ""
    assert model.runner.calls == []


@pytest.mark.parametrize("num_top", [0, 2])
def test_log_probabilities_stand_beside_the_tokens_that_were_chosen(
    model: FakeModel, capsys: pytest.CaptureFixture[str], num_top: int
) -> None:
    arguments = ["generate", "dir", "--prompt=Hi", "--max-new-tokens=3", "--json"]
    assert main([*arguments, f"--logprobs={num_top}"]) == 0
    (result,) = json.loads(capsys.readouterr().out)["results"]
    # What the fake sampler says of every token.
    assert result["logprobs"] == [
        {
            "token_id": token_id,
            "logprob": -1.0,
            "top": [
                {"token_id": token_id + rank, "logprob": -1.0 - rank} for rank in range(num_top)
            ],
        }
        for token_id in answer_to("<Hi>", 3)
    ]


def test_a_token_without_any_probability_is_valid_json() -> None:
    assert generate._logprob(7, float("-inf")) == {"token_id": 7, "logprob": None}


def test_the_token_that_ends_an_answer_is_counted_but_not_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    alone = answer_to("<Hi>", 9)
    install(monkeypatch, FakeModel(eos_token_ids=(alone[4],)))
    assert main(["generate", "dir", "--prompt=Hi", "--max-new-tokens=9", "--json"]) == 0
    (result,) = json.loads(capsys.readouterr().out)["results"]
    assert result["token_ids"] == alone[:5]
    assert result["text"] == text_of(alone[:4])
    assert result["finish_reason"] == "stop"


def test_an_answer_ends_before_the_first_of_the_texts_to_stop_at(
    model: FakeModel, capsys: pytest.CaptureFixture[str]
) -> None:
    text = text_of(answer_to("<Hi>", 30))
    late = [letter for letter in text[3:] if letter.isascii() and letter.isalnum()]
    arguments = ["generate", "dir", "--prompt=Hi", "--max-new-tokens=30", "--json"]
    assert main([*arguments, f"--stop={late[1]}", f"--stop={late[0]}"]) == 0
    (result,) = json.loads(capsys.readouterr().out)["results"]
    assert result["text"] == text[: min(map(text.index, late[:2]))]
    assert result["finish_reason"] == "stop"
    assert len(result["token_ids"]) < 30


@pytest.mark.parametrize(("num_blocks", "num_tokens"), [(12, 45), (3, 9), (99, 60)])
def test_without_a_number_the_answer_is_as_long_as_there_is_room(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    num_blocks: int,
    num_tokens: int,
) -> None:
    install(monkeypatch, FakeModel(num_blocks=num_blocks))
    assert main(["generate", "dir", "--prompt=Hi", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["num_new_tokens"] == num_tokens


def test_without_a_number_an_answer_has_a_default_length_though_there_is_more_room(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    install(monkeypatch, FakeModel(num_blocks=200, max_seq_len=800))
    assert main(["generate", "dir", "--prompt=Hi", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["num_new_tokens"] == generate.DEFAULT_NEW_TOKENS


@pytest.mark.parametrize("num_prompts", [1, 2])
def test_a_request_that_never_fits_exits_with_3_before_any_token(
    model: FakeModel, capsys: pytest.CaptureFixture[str], num_prompts: int
) -> None:
    prompts = ["--prompt=a", f"--prompt={'b' * 70}"][-num_prompts:]
    assert main(["generate", "dir", *prompts]) == 3
    out, err = capsys.readouterr()
    assert out == ""
    assert "the prompt has 72 tokens" in err
    assert "max_seq_len of 64" in err
    assert model.runner.calls == []


def test_a_tokenizer_with_tokens_that_the_model_does_not_know_is_refused_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = install(monkeypatch, FakeModel(vocab_size=ord("b")))
    assert main(["generate", "dir", "--prompt=aa", "--prompt=ab", "--raw"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("reblock: error: the prompt has the token id 98, but the model knows ")
    assert err.count("\n") == 1
    assert model.runner.calls == []


def test_logits_that_are_no_numbers_are_an_error_in_one_line(
    model: FakeModel, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_arguments: object) -> None:
        raise InvalidLogits("the programs computed logits that are not a number (NaN)")

    monkeypatch.setattr(FakeSampler, "choose", refuse)
    assert main(["generate", "dir", "--prompt=a"]) == 4
    message = "reblock: error: the programs computed logits that are not a number (NaN)\n"
    assert capsys.readouterr().err == message


def test_a_tokenizer_that_fails_on_an_answer_is_an_error_in_one_line(
    model: FakeModel, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_arguments: object) -> str:
        raise CorruptArtifact("its tokenizer fails on an answer", path="dir")

    monkeypatch.setattr(Detokenizer, "add", refuse)
    assert main(["generate", "dir", "--prompt=a", "--json"]) == 4
    out, err = capsys.readouterr()
    assert (out, err) == ("", "reblock: error: dir: its tokenizer fails on an answer\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--prompt"),
        (["--prompt=a", "--threads=0"], "--threads must be from 1 to 1,024, not 0"),
        (["--prompt=a", "--threads=10000000000"], "--threads must be from 1 to 1,024, not 1"),
        (["--prompt=a", "--max-new-tokens=0"], "max_new_tokens must be"),
        (["--prompt=a", "--temperature=nan"], "temperature must be"),
        (["--prompt=a", "--top-p=2"], "top_p must be"),
        (["--prompt=a", "--stop=x", "--stop="], "--stop is empty"),
        (["--prompt=a", "--n=0"], "--n must be from 1 to 1,024, not 0"),
        (["--prompt=a", "--n=1025"], "--n must be from 1 to 1,024, not 1025"),
        (["--prompt=a", "--logprobs=2"], "--logprobs are printed with --json only"),
        (["--prompt=a", "--logprobs=21", "--json"], "logprobs must be"),
        (["--prompt-file=/nowhere/at/all"], "cannot read the prompt file '/nowhere/at/all'"),
    ],
)
def test_options_that_make_no_sense_exit_with_2_before_anything_is_loaded(
    model: FakeModel, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert main(["generate", "dir", *arguments]) == 2
    assert message in capsys.readouterr().err
    assert model.loaded == []


@pytest.mark.parametrize("text", ["", "x", "1.5", "1_0", " 1", "+1", "-1", "\u0661", "1" * 65])
@pytest.mark.parametrize(
    "option", ["--max-new-tokens", "--n", "--top-k", "--seed", "--logprobs", "--threads"]
)
def test_whole_numbers_are_written_in_ascii_digits_alone(
    model: FakeModel, capsys: pytest.CaptureFixture[str], option: str, text: str
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["generate", "dir", "--prompt=a", f"{option}={text}"])
    assert caught.value.code == 2
    assert f"argument {option}: {text!r} is no whole number" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["", "warm", "1_0", "\u0661"])
@pytest.mark.parametrize("option", ["--temperature", "--top-p", "--min-p", "--repetition-penalty"])
def test_other_numbers_are_written_in_ascii_too(
    model: FakeModel, capsys: pytest.CaptureFixture[str], option: str, text: str
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["generate", "dir", "--prompt=a", f"{option}={text}"])
    assert caught.value.code == 2
    assert f"argument {option}: {text!r} is no number" in capsys.readouterr().err


def test_sampling_options_without_a_temperature_are_warned_about(
    model: FakeModel, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["generate", "dir", "--prompt=a", "--max-new-tokens=1"]
    assert main([*arguments, "--top-k=5", "--seed=1"]) == 0
    err = capsys.readouterr().err
    assert "warning: without effect unless --temperature is above 0: --top-k, --seed\n" in err
    assert main(arguments) == 0
    assert "warning" not in capsys.readouterr().err


def test_a_prompt_is_read_from_standard_input(
    model: FakeModel, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("né".encode())))
    assert main(["generate", "dir", "--prompt-file=-", "--max-new-tokens=3", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["results"][0]["prompt"] == "né"


def test_a_prompt_from_closed_standard_input_is_a_usage_error(
    model: FakeModel, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    assert main(["generate", "dir", "--prompt-file=-"]) == 2
    assert "standard input, which is closed" in capsys.readouterr().err


def test_a_prompt_file_that_is_not_utf_8_is_refused(
    model: FakeModel, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "prompt.txt"
    file.write_bytes(b"\xff\xfe")
    assert main(["generate", "dir", f"--prompt-file={file}"]) == 2
    assert "is not UTF-8" in capsys.readouterr().err


def test_a_prompt_file_that_is_too_large_is_refused(
    model: FakeModel,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(generate, "MAX_PROMPT_FILE_BYTES", 4)
    file = tmp_path / "prompt.txt"
    file.write_text("12345", encoding="utf-8")
    assert main(["generate", "dir", f"--prompt-file={file}"]) == 2
    assert "larger than 4 bytes" in capsys.readouterr().err


def test_characters_that_the_terminal_lacks_do_not_end_the_answer(
    model: FakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    assert main(["generate", "dir", "--prompt=Hi", "--max-new-tokens=9"]) == 0
    text = text_of(answer_to("<Hi>", 9))
    assert not text.isascii()
    assert raw.getvalue() == text.encode("ascii", "replace") + b"\n"


@pytest.mark.parametrize("package", ["torch", "transformers"])
def test_a_missing_package_is_named_with_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], package: str
) -> None:
    monkeypatch.setattr(loading, "find_spec", lambda name: None if name == package else object())
    assert main(["generate", "dir", "--prompt=Hi"]) == 1
    err = capsys.readouterr().err
    assert f"needs {package}" in err
    assert "pip install 'reblock[torch]'" in err


def test_a_bad_artifact_is_refused_before_torch_is_imported(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(loading, "find_spec", lambda package: package)
    monkeypatch.setitem(sys.modules, "reblock.backends.torch", None)
    assert main(["generate", str(tmp_path), "--prompt", "Hi"]) == 4
    assert str(tmp_path) in capsys.readouterr().err
