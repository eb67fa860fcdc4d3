"""Models on the Hugging Face hub, of which a stand-in listens on this machine.

The stand-in speaks as much of the hub's protocol as huggingface_hub needs to fetch a file, and
counts the bytes that it sends. huggingface_hub reads its environment when it is imported, so every
question is asked in a process of its own.
"""

from __future__ import annotations

import hashlib
import http.server
import json
import os
import re
import struct
import subprocess
import sys
import threading
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("huggingface_hub")

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

COMMIT = "0123456789abcdef0123456789abcdef01234567"
CONFIG = b'{"model_type": "llama", "num_hidden_layers": 2, "num_attention_heads": 4}'
HEADERS_AT_ONCE = 100_001

ASK = """
import json, logging, sys
logging.basicConfig()
from reblock.errors import ReblockError
from reblock.planning.hub import read_hub_model
try:
    found = read_hub_model(sys.argv[1])
except ReblockError as error:
    answer = {"error": type(error).__name__, "message": str(error)}
else:
    weights = found.weights
    answer = {
        "config": found.config_text.decode(),
        "revision": found.revision,
        "weights": weights and [weights.num_bytes, weights.num_elements, weights.source],
        "notes": list(found.notes),
    }
print(json.dumps(answer))
"""


def safetensors(num_bytes: int, name: str = "w", dtype: str = "BF16") -> bytes:
    entry = {"dtype": dtype, "shape": [num_bytes // 2], "data_offsets": [0, num_bytes]}
    header = json.dumps({name: entry, "__metadata__": {"format": "pt"}}).encode()
    return struct.pack("<Q", len(header)) + header + bytes(num_bytes)


class StandIn(http.server.ThreadingHTTPServer):
    """A stand-in of the hub with the files of one model, `org/model`."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files = {"config.json": CONFIG}
        # A status and the code that the hub gives beside it, for every question.
        self.refusal: tuple[int, str] | None = None
        self.requests: list[str] = []
        self.authorizations: set[str | None] = set()
        self.num_sent: dict[str, int] = {}
        self.thread = threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True)
        self.thread.start()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def stop(self) -> None:
        self.shutdown()
        self.server_close()
        self.thread.join()


class Handler(http.server.BaseHTTPRequestHandler):
    server: StandIn

    def do_HEAD(self) -> None:
        self.answer(with_body=False)

    def do_GET(self) -> None:
        self.answer(with_body=True)

    def log_message(self, *arguments: object) -> None:
        pass

    def answer(self, *, with_body: bool) -> None:
        hub = self.server
        if "/resolve/" in self.path:  # what huggingface_hub asks besides is its own affair
            hub.requests.append(f"{self.command} {self.path}")
            hub.authorizations.add(self.headers.get("Authorization"))
        found = re.fullmatch(r"/org/model/resolve/[^/]+/(.+)", self.path)
        if hub.refusal is not None:
            self.refuse(*hub.refusal)
        elif found is None:
            self.refuse(404, "RepoNotFound")
        elif found[1] not in hub.files:
            self.refuse(404, "EntryNotFound")
        else:
            self.give(found[1], hub.files[found[1]], with_body=with_body)

    def refuse(self, status: int, code: str) -> None:
        self.send_response(status)
        if code:
            self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def give(self, name: str, data: bytes, *, with_body: bool) -> None:
        ranges = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        body = data[int(ranges[1]) : int(ranges[2]) + 1] if ranges else data
        self.send_response(206 if ranges else 200)
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("ETag", f'"{hashlib.sha256(data).hexdigest()}"')
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if with_body:
            self.server.num_sent[name] = self.server.num_sent.get(name, 0) + len(body)
            self.wfile.write(body)


@pytest.fixture
def hub() -> Iterator[StandIn]:
    stand_in = StandIn()
    yield stand_in
    stand_in.stop()


def ask(hub: StandIn, cache: Path, model_id: str = "org/model", **environment: str) -> Any:
    """Return what is said of a model of the stand-in; nothing else may be printed."""
    plain = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "TRA"))}
    settings = {"HF_HOME": str(cache), "HF_ENDPOINT": hub.endpoint, "NO_PROXY": "127.0.0.1"}
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", ASK, model_id],
        env={**plain, **settings, **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    return json.loads(result.stdout)


def test_config_and_size_of_one_file_are_read(hub: StandIn, tmp_path: Path) -> None:
    hub.files["model.safetensors"] = safetensors(4_000_000)
    assert ask(hub, tmp_path) == {
        "config": CONFIG.decode(),
        "revision": COMMIT,
        "weights": [4_000_000, 2_000_000, "headers"],
        "notes": [],
    }
    # Of the weights the start alone, in which huggingface_hub looks for the header.
    assert hub.num_sent["model.safetensors"] <= HEADERS_AT_ONCE
    assert hub.num_sent["config.json"] == len(CONFIG)


def test_header_longer_than_the_first_look_is_read(hub: StandIn, tmp_path: Path) -> None:
    hub.files["model.safetensors"] = safetensors(4_000_000, name="w" * 200_000)
    assert ask(hub, tmp_path)["weights"] == [4_000_000, 2_000_000, "headers"]
    assert hub.num_sent["model.safetensors"] <= HEADERS_AT_ONCE + 210_000


def test_several_files_are_summed(hub: StandIn, tmp_path: Path) -> None:
    names = [f"model-0000{index}-of-00002.safetensors" for index in (1, 2)]
    hub.files[names[0]] = safetensors(2_000_000, "a")
    hub.files[names[1]] = safetensors(1_000_000, "b")
    index = {"metadata": {"total_size": 1}, "weight_map": dict(zip("ab", names, strict=True))}
    hub.files["model.safetensors.index.json"] = json.dumps(index).encode()
    assert ask(hub, tmp_path)["weights"] == [3_000_000, 1_500_000, "headers"]
    assert sum(hub.num_sent[name] for name in names) <= 2 * HEADERS_AT_ONCE


def test_elements_of_packed_weights_are_not_counted(hub: StandIn, tmp_path: Path) -> None:
    hub.files["model.safetensors"] = safetensors(4_000, dtype="I32")
    assert ask(hub, tmp_path)["weights"] == [4_000, None, "headers"]


def test_model_without_safetensors_is_told_without_weights(hub: StandIn, tmp_path: Path) -> None:
    hub.files["pytorch_model.bin"] = bytes(100)
    answer = ask(hub, tmp_path)
    assert (answer["config"], answer["weights"]) == (CONFIG.decode(), None)
    assert answer["notes"] == [
        "How large the weights are in the files is not known: org/model has no safetensors files."
    ]


def test_weights_that_are_damaged_are_no_error(hub: StandIn, tmp_path: Path) -> None:
    hub.files["model.safetensors"] = struct.pack("<Q", 20) + b"x" * 20
    answer = ask(hub, tmp_path)
    assert answer["weights"] is None
    assert len(answer["notes"]) == 1
    assert answer["notes"][0].startswith("How large the weights are in the files is not known: ")


def test_model_that_was_looked_at_is_there_without_a_network(hub: StandIn, tmp_path: Path) -> None:
    hub.files["model.safetensors"] = safetensors(4_000)
    assert ask(hub, tmp_path)["weights"] is not None
    num_requests = len(hub.requests)
    answer = ask(hub, tmp_path, HF_HUB_OFFLINE="1")
    assert (answer["config"], answer["revision"]) == (CONFIG.decode(), COMMIT)
    assert answer["weights"] is None
    assert "not in the cache" in answer["notes"][0]
    assert len(hub.requests) == num_requests
    hub.stop()
    assert ask(hub, tmp_path) == answer


def test_weights_in_the_cache_are_read_there(hub: StandIn, tmp_path: Path) -> None:
    ask(hub, tmp_path)
    snapshot = next(tmp_path.glob("hub/models--org--model/snapshots/*"))
    (snapshot / "model.safetensors").write_bytes(safetensors(4_000))
    expected = [4_000, 2_000, "headers"]
    assert ask(hub, tmp_path, HF_HUB_OFFLINE="1")["weights"] == expected
    assert ask(hub, tmp_path)["weights"] == expected


def test_download_that_was_cut_off_leaves_it_to_the_hub(hub: StandIn, tmp_path: Path) -> None:
    hub.files["model.safetensors"] = safetensors(4_000)
    ask(hub, tmp_path)
    snapshot = next(tmp_path.glob("hub/models--org--model/snapshots/*"))
    (snapshot / "model.safetensors").write_bytes(safetensors(4_000)[:-1])
    assert ask(hub, tmp_path)["weights"] == [4_000, 2_000, "headers"]


def test_progress_bars_that_the_environment_asks_for_cause_no_warning(
    hub: StandIn, tmp_path: Path
) -> None:
    assert ask(hub, tmp_path, HF_HUB_DISABLE_PROGRESS_BARS="1")["revision"] == COMMIT


@pytest.mark.parametrize("status", [404, 401])
def test_model_that_is_not_there_is_refused(status: int, hub: StandIn, tmp_path: Path) -> None:
    hub.refusal = (status, "RepoNotFound")
    answer = ask(hub, tmp_path)
    assert answer["error"] == "UnsupportedModel"
    assert answer["message"] == (
        f"'org/model' is no file or directory here and no model at {hub.endpoint}, or a private "
        "one: check the name, log in with `hf auth login`, or give a directory"
    )


@pytest.mark.parametrize("status", [401, 403])
def test_gated_model_says_how_to_get_access(status: int, hub: StandIn, tmp_path: Path) -> None:
    hub.refusal = (status, "GatedRepo")
    answer = ask(hub, tmp_path)
    assert answer["error"] == "UnsupportedModel"
    assert f"ask for it at {hub.endpoint}/org/model, then log in with" in answer["message"]


@pytest.mark.parametrize("status", [401, 403])
def test_token_that_is_refused_is_told(status: int, hub: StandIn, tmp_path: Path) -> None:
    hub.refusal = (status, "")
    answer = ask(hub, tmp_path, HF_TOKEN="hf_made_up")  # noqa: S106  it is none
    assert answer["error"] == "UnsupportedModel"
    assert f"{hub.endpoint} answers {status}" in answer["message"]
    assert "log in with `hf auth login`" in answer["message"]


def test_gated_model_that_was_downloaded_before_is_read(hub: StandIn, tmp_path: Path) -> None:
    ask(hub, tmp_path)
    hub.refusal = (401, "GatedRepo")
    assert ask(hub, tmp_path)["config"] == CONFIG.decode()


def test_model_without_a_config_is_refused(hub: StandIn, tmp_path: Path) -> None:
    hub.files = {"model.gguf": b""}
    answer = ask(hub, tmp_path)
    assert answer["error"] == "UnsupportedModel"
    assert f"'org/model' has no config.json at {hub.endpoint}" in answer["message"]


def test_name_that_no_model_can_have_is_refused(hub: StandIn, tmp_path: Path) -> None:
    answer = ask(hub, tmp_path, "org/a..b")
    assert answer["error"] == "UnsupportedModel"
    assert "no name that a model can have" in answer["message"]
    assert not hub.requests


def test_hub_that_fails_is_no_fault_of_the_model(hub: StandIn, tmp_path: Path) -> None:
    hub.refusal = (500, "")
    answer = ask(hub, tmp_path)
    assert answer["error"] == "ReblockError"
    assert answer["message"].startswith(f"'org/model' cannot be read from {hub.endpoint}: ")
    assert answer["message"].endswith("; check the network, or give a directory")
    assert "\n" not in answer["message"]
    # It is asked once: whoever waits may ask again.
    assert len(hub.requests) == 1


def test_hub_that_is_down_is_told(hub: StandIn, tmp_path: Path) -> None:
    hub.stop()
    answer = ask(hub, tmp_path)
    assert answer["error"] == "ReblockError"
    assert f"{hub.endpoint} cannot be reached" in answer["message"]
    answer = ask(hub, tmp_path, HF_HUB_OFFLINE="1")
    assert answer["error"] == "ReblockError"
    assert "HF_HUB_OFFLINE is set" in answer["message"]


def test_cache_that_cannot_be_written_is_told(hub: StandIn, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    answer = ask(hub, tmp_path / "file")
    assert answer["error"] == "ReblockError"
    assert "Not a directory" in answer["message"]


def test_token_of_the_environment_is_sent(hub: StandIn, tmp_path: Path) -> None:
    ask(hub, tmp_path, HF_TOKEN="hf_made_up")  # noqa: S106  it is none
    assert hub.authorizations == {"Bearer hf_made_up"}
