"""`reblock bench` on a real artifact: a small trace is served, and every number is there."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from installed import reblock

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.full


def test_a_trace_is_served_and_measured_on_a_real_artifact(artifact: Path, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    lengths = [(0.0, 150, 5), (0.0, 20, 1), (0.1, 9, 6), (0.2, 2000, 100)]
    trace.write_text(
        "".join(
            json.dumps({"arrival_s": at, "num_prompt_tokens": prompt, "num_new_tokens": new}) + "\n"
            for at, prompt, new in lengths
        )
    )
    result = reblock("bench", artifact, "--trace", trace, "--threads", 1, "--json")
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    report = json.loads(result.stdout)
    assert [request["is_refused"] for request in report["requests"]] == [False] * 3 + [True]
    assert report["counters"]["num_prefilled_tokens"] == 150 + 20 + 9
    assert report["counters"]["num_decoded_tokens"] == 4 + 0 + 5
    assert report["num_new_tokens"] == 5 + 1 + 6
    assert report["counters"]["num_used_blocks"] == 0
    shares = [part["share_of_busy"] for part in report["time_in"].values()]
    assert all(share > 0 for share in shares)
    assert sum(shares) <= 1
    assert report["peak_bytes"] > report["kv_bytes"] > 0
