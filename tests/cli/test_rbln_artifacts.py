"""Artifacts of optimum-rbln, with a stand-in for the closed compiler.

The numbers were worked out by hand from what `data/optimum_rbln_0_12` says:

    device         available per chiplet           not KV cache    one block, all 72 or 64 tensors
    4 x CA25       16 GiB - 288 MiB                4,612,161,536   72 x  4 MiB = 301,989,888
    CR13           (144 GiB / 4) - 1 GiB           5,107,613,696   72 x  4 MiB = 301,989,888
    4 x CA22       16 GiB - 288 MiB                3,772,776,448   64 x  8 MiB = 536,870,912
"""

from __future__ import annotations

import json
import os
import re
import sys
from typing import TYPE_CHECKING, Any

import pytest
from commands import assert_refused, optimum_here, reblock_here, run

from artifacts import fingerprint
from rbln_artifacts import (
    DATA,
    FLASH,
    LLAMA2_EAGER,
    LLAMA2_FLASH,
    QWEN3_CA25,
    QWEN3_CR13,
    STANDIN,
    add_alloc,
    caches,
    copy_artifact,
    make_old_compiler,
    programs,
    read_json,
)

if TYPE_CHECKING:
    from pathlib import Path

ALL = (*FLASH, LLAMA2_EAGER)
COUNTS = {QWEN3_CA25: 40, QWEN3_CR13: 107, LLAMA2_FLASH: 24, LLAMA2_EAGER: 1}
NUM_TENSORS = {QWEN3_CA25: 72, QWEN3_CR13: 72, LLAMA2_FLASH: 64}
# One block of one tensor on every chiplet of every node, in bytes.
PER_BLOCK = {
    QWEN3_CA25: [[4 * 2**20]] * 4,
    QWEN3_CR13: [[4 * 2**20] * 4],
    LLAMA2_FLASH: [[8 * 2**20]] * 4,
}


@pytest.fixture(autouse=True)
def compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    use_compiler(monkeypatch, STANDIN)


def use_compiler(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    monkeypatch.delitem(sys.modules, "rebel", raising=False)
    monkeypatch.syspath_prepend(path)


def remove_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rebel", None)


def held(per_block: list[list[int]], num_blocks: int) -> list[list[int]]:
    return [[size * num_blocks for size in node] for node in per_block]


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("is_installed", [True, False])
def test_get_prints_the_count_whether_the_compiler_is_there_or_not(
    name: str, is_installed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_installed:
        remove_compiler(monkeypatch)
    assert reblock_here("get", DATA / name).stdout == f"{COUNTS[name]}\n"
    result = optimum_here("--get-kvcache-num-blocks", "--model-id", DATA / name)
    assert (result.returncode, result.stdout) == (0, f"{COUNTS[name]}\n")


@pytest.mark.parametrize(
    ("name", "target"), [(QWEN3_CA25, 9), (QWEN3_CA25, 33), (QWEN3_CR13, 64), (LLAMA2_FLASH, 17)]
)
def test_set_gives_every_tensor_on_every_chiplet_its_bytes(
    name: str, target: int, tmp_path: Path
) -> None:
    directory = copy_artifact(name, tmp_path / "a")
    before, config = fingerprint(directory), read_json(directory / "rbln_config.json")
    for program in programs(directory):
        assert set(map(str, caches(directory, program).values())) == {
            str(held(PER_BLOCK[name], COUNTS[name]))
        }
    result = optimum_here("--set-kvcache-num-blocks", str(target), "--model-id", directory)
    assert result.returncode == 0, result.stderr
    assert f"{COUNTS[name]} -> {target}" in result.stdout
    for program in programs(directory):
        assert len(caches(directory, program)) == NUM_TENSORS[name]
        assert set(map(str, caches(directory, program).values())) == {
            str(held(PER_BLOCK[name], target))
        }
    assert read_json(directory / "rbln_config.json") == {**config, "kvcache_num_blocks": target}
    changed = {key for key, state in fingerprint(directory).items() if before.get(key) != state}
    written = {f"{program}.rbln" for program in programs(directory)}
    assert changed == {"rbln_config.json", ".reblock.json", *written}


def test_there_and_back_gives_the_same_bytes(tmp_path: Path) -> None:
    directory = copy_artifact(QWEN3_CA25, tmp_path / "a")
    before = fingerprint(directory)
    for target in ("9", "40", "13", "40"):
        assert reblock_here("set", directory, target).returncode == 0
    after = fingerprint(directory)
    del after[".reblock.json"]
    assert after == before
    assert reblock_here("set", directory, "--previous").returncode == 0
    assert reblock_here("get", directory).stdout == "13\n"


@pytest.mark.parametrize(
    ("name", "budget", "expected"),
    [
        # floor(0.8 x 16,877,879,296) = 13,502,303,436; less 4,612,161,536 it holds 29.4 blocks
        (QWEN3_CA25, "0.8", 29),
        (QWEN3_CA25, "80%", 29),
        (QWEN3_CA25, "10GB", 20),  # 6,125,256,704 / 301,989,888 = 20.3
        (QWEN3_CA25, "100%", 40),  # 40.6, and 40 are the full batch
        (QWEN3_CA25, "7330070528", 9),  # exactly what 9 take
        # 28 GiB of each chiplet; 24,957,157,376 / 301,989,888 = 82.6
        (QWEN3_CR13, "0.8", 82),
        (QWEN3_CR13, "100GB", 71),  # 25 GiB of each chiplet: 72.0 less 9 MiB
        (QWEN3_CR13, "1.0", 107),
        (LLAMA2_FLASH, "80%", 18),
        (LLAMA2_FLASH, "13GB", 18),  # 18.97
        (LLAMA2_FLASH, "1.0", 24),
    ],
)
def test_a_budget_gives_the_count_that_was_worked_out_by_hand(
    name: str, budget: str, expected: int, tmp_path: Path
) -> None:
    directory = copy_artifact(name, tmp_path / "a")
    for _ in range(2):  # the second time on an artifact that was resized before
        result = optimum_here("--set-memory-budget", budget, "--model-id", directory)
        assert result.returncode == 0, result.stderr
        assert read_json(directory / "rbln_config.json")["kvcache_num_blocks"] == expected
        assert "memory_budget" not in (directory / "rbln_config.json").read_text()
        assert caches(directory)["past_key_values_0"] == held(PER_BLOCK[name], expected)
        assert reblock_here("set", directory, "35" if name == QWEN3_CR13 else "17").returncode == 0


def test_the_chiplet_with_the_most_on_it_decides(tmp_path: Path) -> None:
    directory = copy_artifact(QWEN3_CR13, tmp_path / "a")
    add_alloc(directory, "Weight", 0, 2, 2 * 2**30)
    result = reblock_here("set", directory, "--memory-budget", "1.0", "--json")
    assert result.returncode == 0, result.stderr
    # (37,580,963,840 - 5,107,613,696 - 2,147,483,648) / 301,989,888 = 100.4
    assert json.loads(result.stdout)["kvcache_num_blocks"] == 100
    report = json.loads(reblock_here("inspect", directory, "--json").stdout)
    free = {chiplet["chiplet"]: chiplet["free_bytes"] for chiplet in report["chiplets"]}
    assert free[2] == 37_580_963_840 - 5_107_613_696 - 2_147_483_648 - 100 * 301_989_888
    assert free[0] == free[2] + 2_147_483_648
    assert "chiplet 2, the tightest of 4" in reblock_here("inspect", directory).stdout


@pytest.mark.parametrize(
    ("name", "smallest", "step", "minimum"),
    [
        (QWEN3_CA25, 9 * 301_989_888 + 4_612_161_536, 1, 9),
        (QWEN3_CR13, 4 * (33 * 301_989_888 + 5_107_613_696), 4, 33),
        (LLAMA2_FLASH, 17 * 536_870_912 + 3_772_776_448, 1, 17),
    ],
)
def test_a_budget_that_is_too_small_names_the_smallest_that_works(
    name: str, smallest: int, step: int, minimum: int, tmp_path: Path
) -> None:
    directory = copy_artifact(name, tmp_path / "a")
    before = fingerprint(directory)
    for budget in ("1GB", "10%", str(smallest - step)):
        result = optimum_here("--set-memory-budget", budget, "--model-id", directory)
        assert_refused(result, 3, f"{smallest:,} bytes")
    assert fingerprint(directory) == before
    assert reblock_here("set", directory, "--memory-budget", str(smallest)).returncode == 0
    assert reblock_here("get", directory).stdout == f"{minimum}\n"


@pytest.mark.parametrize("name", FLASH)
def test_a_budget_above_the_device_and_a_count_below_the_minimum_are_refused(
    name: str, tmp_path: Path
) -> None:
    directory = copy_artifact(name, tmp_path / "a")
    before = fingerprint(directory)
    result = optimum_here("--set-memory-budget", "200GB", "--model-id", directory)
    assert_refused(result, 3, "200.00 GiB")
    result = optimum_here("--set-kvcache-num-blocks", "8", "--model-id", directory)
    assert_refused(result, 3, "kvcache_num_blocks=8 is below")
    assert fingerprint(directory) == before


def test_above_the_device_and_the_full_batch_it_warns_and_goes_on(tmp_path: Path) -> None:
    directory = copy_artifact(QWEN3_CR13, tmp_path / "a")
    result = reblock_here("set", directory, "161")
    assert result.returncode == 0
    assert "warning: 161 blocks need" in result.stderr
    assert "the most that fit and can be used are 107" in result.stderr
    assert "more than the 160" in result.stderr


def test_an_artifact_of_a_fixed_count_is_refused_with_its_json_untouched(tmp_path: Path) -> None:
    directory = copy_artifact(LLAMA2_EAGER, tmp_path / "a")
    before = fingerprint(directory)
    for arguments in (["--set-kvcache-num-blocks", "2"], ["--set-memory-budget", "0.8"]):
        result = optimum_here(*arguments, "--model-id", directory)
        assert_refused(result, 4, "can be resized", "'eager'")
    assert fingerprint(directory) == before


def test_an_output_directory_gets_a_copy_and_the_source_stays(tmp_path: Path) -> None:
    directory = copy_artifact(QWEN3_CA25, tmp_path / "a")
    (directory / "tokenizer.json").write_text("{}")
    before = fingerprint(directory)
    out = tmp_path / "out"
    arguments = ["--set-memory-budget", "10GB", "--model-id", directory, "--output-dir", out]
    assert optimum_here(*arguments).returncode == 0
    assert fingerprint(directory) == before
    assert set(fingerprint(out)) == {*before, ".reblock.json"}
    assert reblock_here("get", out).stdout == "20\n"


def test_a_compiler_that_cannot_resize_is_to_be_upgraded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = copy_artifact(QWEN3_CA25, tmp_path / "a")
    before = fingerprint(tmp_path)
    use_compiler(monkeypatch, make_old_compiler(tmp_path.parent / f"{tmp_path.name}-old"))
    result = reblock_here("set", directory, "9")
    assert_refused(result, 1, "exp_rescale_buffer_size", "upgrade rebel-compiler")
    assert fingerprint(tmp_path) == before
    assert reblock_here("inspect", directory).returncode == 0


def test_without_the_compiler_all_that_needs_only_the_json_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    remove_compiler(monkeypatch)
    directory = copy_artifact(QWEN3_CR13, tmp_path / "a")
    before = fingerprint(tmp_path)
    result = reblock_here("inspect", directory, "--json")
    assert result.returncode == 0
    assert "rebel-compiler" in result.stderr
    report = json.loads(result.stdout)
    assert (report["kvcache_num_blocks"], report["num_min_blocks"]) == (107, 33)
    assert (report["device"], report["chiplets"]) == ("RBLN-CR13", [])
    assert report["caches"][0]["num_tensors"] == 72
    assert "Memory" not in reblock_here("inspect", directory).stdout
    assert_refused(reblock_here("set", directory, "40"), 1, "Install rebel-compiler")
    assert reblock_here("verify", directory).returncode == 0
    assert fingerprint(tmp_path) == before


@pytest.mark.parametrize("text", ["", "{", "[]", '{"alloc": {}}', '{"alloc": 1, "dram": {}}'])
def test_a_program_that_the_compiler_refuses_is_a_bad_artifact(tmp_path: Path, text: str) -> None:
    directory = copy_artifact(QWEN3_CA25, tmp_path / "a")
    (directory / "decoder_batch_8.rbln").write_text(text)
    before = fingerprint(directory)
    assert_refused(reblock_here("set", directory, "20"), 4, "decoder_batch_8.rbln")
    assert reblock_here("verify", directory).returncode == 4
    assert fingerprint(directory) == before


@pytest.mark.parametrize("factor", [(1, 2), (2, 1), (39, 40)])
def test_programs_that_hold_another_count_than_the_json_says_are_refused(
    tmp_path: Path, factor: tuple[int, int]
) -> None:
    directory = copy_artifact(QWEN3_CA25, tmp_path / "a")
    for program in programs(directory):
        plan = read_json(directory / f"{program}.rbln")
        for grid in plan["dram"].values():
            for node in grid:
                node[:] = [size * factor[0] // factor[1] for size in node]
        (directory / f"{program}.rbln").write_text(json.dumps(plan))
    before = fingerprint(directory)
    result = reblock_here("set", directory, "20")
    assert_refused(result, 4, "rbln_config.json says 671,088,640 for 40 blocks")
    assert fingerprint(directory) == before


def test_heads_that_several_devices_hold_are_no_contradiction(tmp_path: Path) -> None:
    directory = copy_artifact(QWEN3_CR13, tmp_path / "a")
    config = read_json(directory / "rbln_config.json")
    for meta in config["cache_metas"]:
        meta["shape"][1] = 2  # two heads on four chiplets: each is there twice
    (directory / "rbln_config.json").write_text(json.dumps(config))
    for program in programs(directory):
        plan = read_json(directory / f"{program}.rbln")
        plan["dram"] = {name: [[107 * 2 * 2**20] * 4] for name in plan["dram"]}
        (directory / f"{program}.rbln").write_text(json.dumps(plan))
    assert reblock_here("set", directory, "40").returncode == 0
    assert caches(directory)["past_key_values_7"] == [[40 * 2 * 2**20] * 4]


@pytest.mark.parametrize(
    "write",
    [
        lambda config: json.dumps(config),
        lambda config: json.dumps(config, indent=4) + "\n\n",
        lambda config: json.dumps(config, indent="\t").replace("\n", "\r\n"),
        lambda config: json.dumps(config, separators=(" , ", " :  ")),
        lambda config: json.dumps(
            config | {"caf\N{LATIN SMALL LETTER E WITH ACUTE}": 1.50},
            ensure_ascii=False,
        ),
    ],
)
def test_the_json_keeps_its_form_and_what_is_not_known_of_it(tmp_path: Path, write: Any) -> None:
    directory = copy_artifact(QWEN3_CA25, tmp_path / "a")
    path = directory / "rbln_config.json"
    config = read_json(path) | {"new_key": {"kvcache_num_blocks": 40, "a": [1, None]}}
    text = write(config)
    path.write_bytes(text.encode())
    assert reblock_here("set", directory, "9").returncode == 0
    changed = path.read_bytes().decode()
    assert json.loads(changed) == json.loads(text) | {"kvcache_num_blocks": 9}
    one, other = re.split(r"(?<=kvcache_num_blocks\") *: *", changed)[0], text
    assert other.startswith(one)
    assert len(changed) == len(text) - 1
    assert reblock_here("set", directory, "40").returncode == 0
    assert path.read_bytes().decode() == text


def test_an_artifact_that_names_no_device_is_resized_by_number_only(tmp_path: Path) -> None:
    directory = copy_artifact(QWEN3_CA25, tmp_path / "a")
    config = read_json(directory / "rbln_config.json")
    for program in config["_compile_cfgs"]:
        program["npu"] = None
    (directory / "rbln_config.json").write_text(json.dumps(config))
    result = reblock_here("set", directory, "33")
    assert result.returncode == 0
    assert "does not say which device" in result.stderr
    assert_refused(reblock_here("set", directory, "--memory-budget", "80%"), 4, "which device")
    assert reblock_here("set", directory, "--memory-budget", "80%").returncode == 4
    assert reblock_here("inspect", directory, "--json").returncode == 0


@pytest.mark.parametrize(
    ("config", "fragment"),
    [
        ({"cls_name": "RBLNBertModelConfig", "max_seq_len": 512}, "which has no KV cache"),
        ({"cls_name": "RBLNT5ForConditionalGenerationConfig"}, "an encoder-decoder model"),
        ({"cls_name": "RBLNXConfig", "dec_max_seq_len": 4}, "an encoder-decoder model"),
        ({"cls_name": "RBLNStableDiffusionPipelineConfig"}, "a diffusion pipeline"),
    ],
)
def test_models_without_a_kv_cache_are_refused_with_the_reason(
    tmp_path: Path, config: dict[str, object], fragment: str
) -> None:
    (tmp_path / "rbln_config.json").write_text(json.dumps(config))
    before = fingerprint(tmp_path)
    for arguments in (["get"], ["set", "9"], ["set", "--memory-budget=80%"], ["inspect"]):
        command, *rest = arguments
        assert_refused(reblock_here(command, tmp_path, *rest), 4, fragment, str(config["cls_name"]))
    assert reblock_here("verify", tmp_path).returncode == 4
    assert fingerprint(tmp_path) == before


def test_the_installed_commands_use_the_compiler_that_is_installed(tmp_path: Path) -> None:
    directory = copy_artifact(QWEN3_CA25, tmp_path / "a")
    env = {"PYTHONPATH": str(STANDIN)}
    result = run("reblock", "set", directory, "9", env=env)
    assert result.returncode == 0, result.stderr
    assert "writing prefill.rbln ..." in result.stderr
    result = run("optimum-rbln-cli", "--set-memory-budget=0.8", "--model-id", directory, env=env)
    assert result.returncode == 0, result.stderr
    assert run("reblock", "get", directory).stdout == "29\n"
    assert os.listdir(tmp_path) == ["a"]


@pytest.mark.parametrize("is_installed", [True, False])
def test_generate_says_who_runs_such_an_artifact(
    is_installed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from reblock.backends import loading

    monkeypatch.setattr(loading, "find_spec", lambda name: object())
    if not is_installed:
        remove_compiler(monkeypatch)
    result = reblock_here("generate", DATA / QWEN3_CR13, "--prompt", "hi")
    assert_refused(result, 4, "compiled by optimum-rbln for RBLN-CR13, and optimum-rbln runs it")


def test_a_fixed_count_is_said_before_a_compiler_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    remove_compiler(monkeypatch)
    assert_refused(reblock_here("set", DATA / LLAMA2_EAGER, "2"), 4, "can be resized")


def test_verify_of_an_artifact_that_names_no_device_is_no_failure(tmp_path: Path) -> None:
    directory = copy_artifact(QWEN3_CA25, tmp_path / "a")
    config = read_json(directory / "rbln_config.json")
    for program in config["_compile_cfgs"]:
        program["npu"] = None
    (directory / "rbln_config.json").write_text(json.dumps(config))
    result = reblock_here("verify", directory)
    assert result.returncode == 0
    assert "does not say which device" in result.stdout
