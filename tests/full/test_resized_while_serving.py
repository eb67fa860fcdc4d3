"""An engine answers on while its artifact is resized beneath it, and while it is resized itself."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from typing import TYPE_CHECKING, Any

import pytest
from installed import generate, reblock

from reblock.artifact.reader import open_artifact
from reblock.artifact.resize import apply_resize, plan_resize

if TYPE_CHECKING:
    from pathlib import Path

    from installed import Compiled

pytestmark = pytest.mark.full

NUM_RESIZES = 100
PROMPT = "The cache holds the keys"
# Loads an artifact once and answers one prompt for each line that it reads.
SERVE = """
import json, sys
from reblock.artifact.reader import open_artifact
from reblock.backends.torch import load_runner
from reblock.engine import Engine, SamplingParams
from reblock.engine.text import Tokenizer

directory = sys.argv[1]
tokenizer = Tokenizer.load(directory)
engine = Engine(load_runner(open_artifact(directory)), eos_token_ids=set())
print(json.dumps({"blocks": engine.limits.num_blocks, "bytes": engine.kv_bytes}), flush=True)
for line in sys.stdin:
    request = engine.add(tokenizer.encode(line.strip()), SamplingParams(max_new_tokens=24))
    tokens = []
    while engine.has_work:
        tokens += [output.token_id for output in engine.step()]
    state = {"tokens": tokens, "blocks": engine.limits.num_blocks, "bytes": engine.kv_bytes}
    print(json.dumps(state), flush=True)
"""

# Answers four prompts undisturbed, and again while the cache is resized before every third step.
RESIZE = """
import itertools, json, sys
from reblock.artifact.reader import open_artifact
from reblock.backends.torch import load_runner
from reblock.engine import Engine, SamplingParams
from reblock.engine.text import Tokenizer

directory, *sizes = sys.argv[1:]
tokenizer = Tokenizer.load(directory)
engine = Engine(load_runner(open_artifact(directory)), eos_token_ids=set())
cache = engine._runner.cache

def status(field):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(field + ":"))

def resize(num_blocks):
    largest = max(t.numel() * t.element_size() for t in cache.tensors.values())
    before = status("VmRSS")
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # VmHWM starts again from what is resident now
    engine.resize_kvcache(num_blocks)
    engine.check_integrity()
    largest = max(largest, *(t.numel() * t.element_size() for t in cache.tensors.values()))
    return status("VmHWM") - max(before, status("VmRSS")) - largest

def answer(sizes):
    prompts = [tokenizer.encode(text * 20) for text in ("The cache ", "holds ", "the keys ", "of")]
    ids = [engine.add(prompt, SamplingParams(max_new_tokens=60)) for prompt in prompts]
    tokens, excess = {request_id: [] for request_id in ids}, []
    for step in itertools.count():
        if not engine.has_work:
            return list(tokens.values()), excess
        if sizes and step % 3 == 0:
            excess.append(resize(next(sizes)))
        for output in engine.step():
            tokens[output.request_id].append(output.token_id)

undisturbed, _ = answer(None)
resized, excess = answer(itertools.cycle(map(int, sizes)))
state = {"undisturbed": undisturbed, "resized": resized, "excess": excess}
print(json.dumps({**state, "blocks": cache.num_blocks, "bytes": engine.kv_bytes}))
"""


class Server:
    """A process that serves an artifact."""

    def __init__(self, directory: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", SERVE, str(directory)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.loaded = self._read()

    def ask(self) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(PROMPT + "\n")
        self.process.stdin.flush()
        return self._read()

    def close(self) -> int:
        self.process.communicate(timeout=60)
        return self.process.returncode

    def _read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        answer: dict[str, Any] = json.loads(self.process.stdout.readline())
        return answer


def resize_often(directory: Path, errors: list[BaseException]) -> None:
    try:
        for number in range(NUM_RESIZES):
            count = 20 + number % 40
            if number % 10 == 0:
                result = reblock("set", directory, count)
                assert result.returncode == 0, result.stderr
                continue
            artifact = open_artifact(str(directory))
            apply_resize(artifact, plan_resize(artifact, count))
    except BaseException as error:  # noqa: BLE001  handed to the test, which raises it
        errors.append(error)


def test_an_engine_answers_on_while_its_artifact_is_resized_a_hundred_times(
    artifact: Path,
) -> None:
    before = open_artifact(str(artifact)).config.kvcache_num_blocks
    server = Server(artifact)
    try:
        first = server.ask()
        assert first["blocks"] == server.loaded["blocks"] == before
        assert len(set(first["tokens"])) > 1
        errors: list[BaseException] = []
        resizing = threading.Thread(target=resize_often, args=(artifact, errors))
        resizing.start()
        num_answers = 0
        while resizing.is_alive():
            assert server.ask() == first
            num_answers += 1
        resizing.join()
        if errors:
            raise errors[0]
        assert num_answers > 1
        # Long after the files that it was loaded from are gone.
        assert server.ask() == first
    finally:
        assert server.close() == 0
    after = generate(artifact, [PROMPT], "--max-new-tokens", 24)
    assert after["kvcache_num_blocks"] == 20 + (NUM_RESIZES - 1) % 40
    new = after["results"][0]["token_ids"]
    assert new == first["tokens"][: len(new)]
    assert [path.name for path in artifact.parent.iterdir()] == [artifact.name]


def test_answers_go_on_while_the_cache_of_the_engine_is_resized(compiled: Compiled) -> None:
    sizes = (12, 200, 17, 9, 64)
    result = subprocess.run(
        [sys.executable, "-c", RESIZE, str(compiled.artifact), *map(str, sizes)],
        capture_output=True,
        text=True,
        check=True,
    )
    state = json.loads(result.stdout)
    assert state["resized"] == state["undisturbed"]
    assert [len(set(tokens)) > 5 for tokens in state["resized"]] == [True] * 4
    assert len(state["excess"]) > 2 * len(sizes)
    # One tensor is there twice while it is copied; the rest is for the allocator.
    assert max(state["excess"]) < 4 * 2**20
    plan = open_artifact(str(compiled.artifact)).memory_plan()
    assert state["blocks"] in sizes
    assert state["bytes"] == plan.kv_unaligned_bytes_at(state["blocks"])[0][0]
