"""An engine that has loaded an artifact answers on while the artifact is resized beneath it."""

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
