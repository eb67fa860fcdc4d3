"""`reblock generate`: answer prompts, as many side by side as the KV cache holds."""

from __future__ import annotations

import io
import json
import math
import sys
import time
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

from reblock.backends.loading import check_backend, require_torch
from reblock.cli.numbers import add_threads, check_threads, number, whole_number
from reblock.cli.parser import Once, add_directory, add_json
from reblock.engine.request import MAX_LOGPROBS, SamplingParams
from reblock.errors import UsageError
from reblock.units import format_gib

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterable

    from reblock.engine.choices import LogProbs
    from reblock.engine.engine import Engine
    from reblock.engine.outputs import TokenOutput
    from reblock.engine.request import FinishReason
    from reblock.engine.text import Tokenizer

DEFAULT_NEW_TOKENS = 256
MAX_PROMPT_FILE_BYTES = 64 * 2**20
MAX_ANSWERS = 1024


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `reblock generate`."""
    add_directory(parser)
    parser.add_argument(
        "--prompt",
        dest="prompts",
        metavar="TEXT",
        action="append",
        type=lambda text: ("text", text),
        help="a prompt; give it several times to answer several side by side",
    )
    parser.add_argument(
        "--prompt-file",
        dest="prompts",
        metavar="FILE",
        action="append",
        type=lambda path: ("file", path),
        help="a file that holds one prompt, or - for standard input",
    )
    parser.add_argument(
        "--raw",
        action="store_true",
        help="continue the prompt itself: leave the model's chat template out",
    )
    parser.add_argument(
        "--n",
        dest="num_answers",
        metavar="N",
        action=Once,
        type=whole_number,
        default=1,
        help=f"answers to each prompt, up to {MAX_ANSWERS:,} (default: 1)",
    )
    _add_sampling_arguments(parser)
    parser.add_argument(
        "--stop",
        metavar="TEXT",
        action="append",
        help="a text that ends an answer and is left out of it; may be given several times",
    )
    parser.add_argument(
        "--logprobs",
        metavar="N",
        action=Once,
        type=whole_number,
        help="with --json, tell how probable each token and the N most probable ones were: "
        f"natural logarithms, up to {MAX_LOGPROBS} tokens",
    )
    add_threads(parser)
    parser.add_argument(
        "--no-stream", action="store_true", help="print an answer only when it is complete"
    )
    add_json(parser)


def _add_sampling_arguments(parser: argparse.ArgumentParser) -> None:
    def add(option: str, kind: Callable[[str], float], text: str) -> None:
        metavar = "N" if kind is whole_number else "X"
        parser.add_argument(option, metavar=metavar, action=Once, type=kind, help=text)

    add(
        "--max-new-tokens",
        whole_number,
        f"tokens per answer, at most (default: {DEFAULT_NEW_TOKENS}, or what there is room for)",
    )
    add("--temperature", number, "0, the default, takes the most probable token each time")
    add("--top-k", whole_number, "sample from the N most probable tokens")
    add("--top-p", number, "sample from the fewest tokens whose probabilities reach this sum")
    add("--min-p", number, "sample from tokens at least this probable, relative to the best one")
    add("--repetition-penalty", number, "above 1 makes tokens that occurred less probable")
    add(
        "--seed",
        whole_number,
        "makes sampling repeatable; further answers to a prompt count on from it",
    )


@dataclass(slots=True, kw_only=True)
class _Answer:
    """One prompt and an answer to it as it grows."""

    prompt: str
    prompt_ids: list[int]
    index: int
    """Which of the answers to the prompt it is, from 0 on."""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[LogProbs] = field(default_factory=list)
    text: str = ""
    finish_reason: FinishReason | None = None

    def take(self, output: TokenOutput) -> None:
        """Add a token and the text that came of it."""
        self.token_ids.append(output.token_id)
        if output.logprobs is not None:
            self.logprobs.append(output.logprobs)
        self.finish_reason = output.finish_reason
        self.text += output.text


def run(args: argparse.Namespace) -> int:
    """Answer the prompts and print the answers."""
    prompts = [_read_prompt(kind, value) for kind, value in args.prompts or ()]
    if not prompts:
        raise UsageError("nothing to answer: give a --prompt or a --prompt-file")
    check_threads(args.threads)
    if not 1 <= args.num_answers <= MAX_ANSWERS:
        raise UsageError(f"--n must be from 1 to {MAX_ANSWERS:,}, not {args.num_answers}")
    params = _sampling_params(args)
    if isinstance(sys.stdout, io.TextIOWrapper):
        # a model may write characters that the terminal's encoding lacks
        sys.stdout.reconfigure(errors="replace")
    engine, tokenizer = _load(args.directory, args.threads)
    answers: dict[int, _Answer] = {}
    for prompt in prompts:
        prompt_ids = tokenizer.encode(prompt, raw=args.raw)
        if args.max_new_tokens is None:
            room = engine.limits.max_request_tokens - len(prompt_ids)
            params = replace(params, max_new_tokens=max(1, min(DEFAULT_NEW_TOKENS, room)))
        request_ids = engine.add_several(
            prompt_ids,
            params,
            args.num_answers,
            make_detokenizer=partial(tokenizer.detokenizer, prompt_ids, raw=args.raw),
        )
        for index, request_id in enumerate(request_ids):
            answers[request_id] = _Answer(prompt=prompt, prompt_ids=prompt_ids, index=index)
    _serve(engine, answers, args)
    return 0


def _read_prompt(kind: str, value: str) -> str:
    if kind == "text":
        return value
    if value == "-" and sys.stdin is None:
        raise UsageError("cannot read the prompt from standard input, which is closed")
    try:
        if value == "-":
            data = sys.stdin.buffer.read(MAX_PROMPT_FILE_BYTES + 1)
        else:
            with open(value, "rb") as file:
                data = file.read(MAX_PROMPT_FILE_BYTES + 1)
    except OSError as error:
        raise UsageError(f"cannot read the prompt file {value!r}: {error.strerror}") from error
    if len(data) > MAX_PROMPT_FILE_BYTES:
        raise UsageError(
            f"the prompt file {value!r} is larger than {MAX_PROMPT_FILE_BYTES:,} bytes"
        )
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"the prompt file {value!r} is not UTF-8: {error}") from error


def _sampling_params(args: argparse.Namespace) -> SamplingParams:
    if args.logprobs is not None and not args.json:
        raise UsageError("--logprobs are printed with --json only: add it")
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed", "logprobs")
    given = {name: value for name in names if (value := getattr(args, name)) is not None}
    max_new_tokens = 1 if args.max_new_tokens is None else args.max_new_tokens
    if "" in (args.stop or ()):
        raise UsageError("--stop is empty; name a text, or leave it out")
    params = SamplingParams(max_new_tokens=max_new_tokens, stop=tuple(args.stop or ()), **given)
    if params.temperature == 0:
        _warn_of_greedy([name for name in ("top_k", "top_p", "min_p", "seed") if name in given])
        if args.num_answers > 1:
            print(
                "warning: unless --temperature is above 0, all answers to a prompt are the same",
                file=sys.stderr,
            )
    return params


def _warn_of_greedy(idle: list[str]) -> None:
    if idle:
        options = ", ".join("--" + name.replace("_", "-") for name in idle)
        print(
            f"warning: without effect unless --temperature is above 0: {options}", file=sys.stderr
        )


def _load(directory: str, num_threads: int | None) -> tuple[Engine, Tokenizer]:
    require_torch("generating text")
    from reblock.artifact.reader import open_artifact, read_config

    # Before torch, which takes seconds to import: what cannot be run is refused at once.
    check_backend(read_config(directory), directory)
    artifact = open_artifact(directory)
    from reblock.backends.torch import load_runner
    from reblock.engine.engine import Engine
    from reblock.engine.text import Tokenizer

    tokenizer = Tokenizer.load(directory)
    runner = load_runner(artifact, num_threads)
    eos_token_ids = {*runner.limits.eos_token_ids, *tokenizer.eos_token_ids}
    return Engine(runner, eos_token_ids=eos_token_ids), tokenizer


def _serve(engine: Engine, answers: dict[int, _Answer], args: argparse.Namespace) -> None:
    """Run all requests to their end and print what `args` ask for."""
    streams = len(answers) == 1 and not args.no_stream and not args.json
    unprinted = list(answers.values())
    num_answers = len(unprinted)
    most_running = 0
    start_s = time.perf_counter()
    while engine.has_work:
        outputs = engine.step()
        # an answer that ended in this step ran until just now
        num_ended = sum(output.finished for output in outputs)
        most_running = max(most_running, engine.num_running + num_ended)
        for output in outputs:
            if output.error is not None:
                raise output.error
            answers[output.request_id].take(output)
            if streams and output.text:
                print(output.text, end="", flush=True)
        while not args.json and unprinted and unprinted[0].finish_reason is not None:
            number = num_answers - len(unprinted) + 1
            which = f"{number} of {num_answers}" if num_answers > 1 else ""
            _print_answer(unprinted.pop(0), which, args.num_answers, streamed=streams)
    seconds = time.perf_counter() - start_s
    report = _report(engine, answers.values(), seconds, most_running)
    if args.json:
        print(json.dumps(report))
    else:
        print(_summary(engine, report), file=sys.stderr)


def _print_answer(answer: _Answer, which: str, num_alike: int, *, streamed: bool) -> None:
    if streamed:
        print(flush=True)
        return
    if which:
        among = f" (answer {answer.index + 1} of {num_alike})" if num_alike > 1 else ""
        print(f"--- {which}: {_headline(answer.prompt)}{among}")
    print(answer.text, flush=True)


def _headline(prompt: str, width: int = 60) -> str:
    """The prompt on one line, shortened."""
    words = " ".join(prompt.split())
    return words if len(words) <= width else words[: width - 3] + "..."


def _result(answer: _Answer) -> dict[str, object]:
    result: dict[str, object] = {
        "prompt": answer.prompt,
        "answer_index": answer.index,
        "text": answer.text,
        "num_prompt_tokens": len(answer.prompt_ids),
        "token_ids": answer.token_ids,
        "finish_reason": answer.finish_reason,
    }
    if answer.logprobs:
        tokens = zip(answer.token_ids, answer.logprobs, strict=True)
        result["logprobs"] = [
            {**_logprob(token_id, one.chosen), "top": [_logprob(*pair) for pair in one.top]}
            for token_id, one in tokens
        ]
    return result


def _logprob(token_id: int, value: float) -> dict[str, object]:
    # JSON has no number for the logarithm of 0
    return {"token_id": token_id, "logprob": value if math.isfinite(value) else None}


def _report(
    engine: Engine, answers: Iterable[_Answer], seconds: float, most_running: int
) -> dict[str, object]:
    results = [_result(answer) for answer in answers]
    num_new_tokens = sum(len(answer.token_ids) for answer in answers)
    return {
        "results": results,
        "num_new_tokens": num_new_tokens,
        "seconds": round(seconds, 3),
        "tokens_per_second": round(num_new_tokens / seconds, 2),
        "most_running": most_running,
        "kvcache_num_blocks": engine.limits.num_blocks,
        "kvcache_block_size": engine.limits.block_size,
        "kv_bytes": engine.kv_bytes,
    }


def _summary(engine: Engine, report: dict[str, object]) -> str:
    return (
        f"{report['num_new_tokens']} tokens in {report['seconds']} s, "
        f"{report['tokens_per_second']} tokens/s, {report['most_running']} side by side; "
        f"KV cache: {engine.limits.num_blocks:,} blocks of {engine.limits.block_size:,} tokens, "
        f"{format_gib(engine.kv_bytes)}"
    )
