"""`reblock inspect`: every term of the memory, as tables and as JSON."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

from commands import reblock, reblock_here

from artifacts import BYTES_PER_BLOCK, make_artifact

if TYPE_CHECKING:
    from pathlib import Path


def test_inspect_prints_tables_of_at_most_80_columns(tmp_path: Path) -> None:
    directory = make_artifact(tmp_path / ("long" * 30), num_blocks=9, sliding_layers=(1,))
    result = reblock("inspect", directory)
    assert result.returncode == 0, result.stderr
    assert max(map(len, result.stdout.splitlines())) <= 80
    text = re.sub(r" +", " ", result.stdout)
    for line in (
        "device 1 x cpu",
        "programs prefill, decoder_batch_4, decoder_batch_1",
        "full_attention 1 2 8 x 256 x 128",
        "sliding_attention 1 2 8 x 512 x 128",
        "- Weight 976.56 KiB 1,000,000",
        "- Workspace 146.48 KiB 150,000",
        "- fixed KV cache 16.00 MiB 16,777,216",
        "- resizable KV cache, 9 blocks of 2.00 MiB 18.00 MiB 18,874,368",
        "- alignment 2.00 MiB 2,097,152",
        "now 9",
        "fewest that work 9",
        "most that can be used 32",
        "tokens held now 2,304",
        "full-length sequences side by side 1",
        "longest sequence, tokens 2,048",
    ):
        assert line in text


def test_inspect_shows_weights_of_a_type_of_their_own(tmp_path: Path) -> None:
    directory = make_artifact(tmp_path / "a")
    assert "float32\n" in reblock("inspect", directory).stdout.replace(" \n", "\n")
    path = directory / "rbln_config.json"
    config = json.loads(path.read_text())
    config["reblock"]["weight_dtype"] = "int8"
    path.write_text(json.dumps(config))
    assert "LlamaForCausalLM, float32, weights int8" in reblock("inspect", directory).stdout
    planned = json.loads(reblock("plan", directory, "--json").stdout)
    assert planned["plans"][0]["weights_dtype"] == "int8"


def test_inspect_json_has_terms_that_add_up(tmp_path: Path) -> None:
    directory = make_artifact(tmp_path / "a", num_blocks=9, sliding_layers=(1,))
    report = json.loads(reblock_here("inspect", directory, "--json").stdout)
    (use,) = report["chiplets"]
    used = (
        sum(use["static_bytes"].values())
        + use["fixed_cache_bytes"]
        + use["resizable_cache_bytes"]
        + use["alignment_bytes"]
    )
    assert used + use["free_bytes"] == use["budget_bytes"] == report["available_bytes"]
    assert use["resizable_cache_bytes"] == 9 * use["bytes_per_block"] == 18 * BYTES_PER_BLOCK
    assert [group["layer_type"] for group in report["caches"]] == [
        "full_attention",
        "sliding_attention",
    ]
    assert report["num_min_blocks"] == 9
    assert report["num_tokens"] == 9 * 256


def test_inspect_of_an_artifact_that_does_not_fit_says_so(tmp_path: Path) -> None:
    directory = make_artifact(tmp_path / "a", weight_bytes=2**60)
    result = reblock_here("inspect", directory)
    assert result.returncode == 0, result.stderr
    assert re.search(r"most that fit and can be used +none", result.stdout)
    assert re.search(r"= free +-1,073,7\d\d,\d\d\d\.\d\d GiB", result.stdout)
    assert (
        json.loads(reblock_here("inspect", directory, "--json").stdout)["num_fitting_blocks"]
        is None
    )


def test_capacity_after_set_is_the_capacity_that_is_there(tmp_path: Path) -> None:
    directory = make_artifact(tmp_path / "a", num_blocks=32)
    assert reblock("set", directory, "9").returncode == 0
    report = json.loads(reblock("inspect", directory, "--json").stdout)
    assert report["kvcache_num_blocks"] == 9
    assert report["num_tokens"] == 2_304
    assert report["chiplets"][0]["resizable_cache_bytes"] == 4 * 9 * BYTES_PER_BLOCK


def test_inspect_prints_names_as_they_are(tmp_path: Path) -> None:
    make_artifact(tmp_path / "[bold]a[")
    result = reblock_here("inspect", "[bold]a[", cwd=tmp_path)
    assert result.stdout.startswith("artifact   [bold]a[\n")


def test_inspect_warns_of_a_damaged_memory_of_the_last_change(tmp_path: Path) -> None:
    directory = make_artifact(tmp_path / "a")
    (directory / ".reblock.json").write_text("{")
    result = reblock_here("inspect", directory, "--json")
    assert result.returncode == 0
    assert ".reblock.json" in result.stderr
    assert json.loads(result.stdout)["previous_kvcache_num_blocks"] is None
