"""The seeds' "How to test", on artifacts of the torch backend: the same calls, the same laws."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest

from artifacts import (
    BYTES_PER_BLOCK,
    NUM_FULL_BLOCKS,
    NUM_LAYERS,
    NUM_MIN_BLOCKS,
    PROGRAMS,
    fingerprint,
    make_artifact,
    read_description,
)
from reblock.artifact.reader import open_artifact
from reblock.errors import BelowMinimum, BudgetAboveDevice, CorruptArtifact
from reblock.rbln import (
    RBLNCompiledModel,
    RBLNDecoderOnlyFlashAttentionMixin,
    RBLNDecoderOnlyModelForCausalLMConfig,
)
from reblock.sizing import smallest_budget

if TYPE_CHECKING:
    from pathlib import Path

NUM_TENSORS = 2 * NUM_LAYERS
ALIGNED = 2 * 2**20


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return make_artifact(tmp_path / "artifact", num_blocks=16, sliding_layers=(0,))


def load(directory: Path) -> tuple[dict[str, RBLNCompiledModel], Any]:
    models = {path.stem: RBLNCompiledModel(path) for path in sorted(directory.glob("*.rbln"))}
    return models, RBLNDecoderOnlyModelForCausalLMConfig.load(str(directory))


def save(models: dict[str, RBLNCompiledModel], config: Any, target: int, directory: Path) -> None:
    for name, model in models.items():
        model.save(directory / f"{name}.rbln")
    config.kvcache_num_blocks = target
    config.save(str(directory))


def required(directory: Path, num_blocks: int) -> int:
    models, config = load(directory)
    total: int = RBLNDecoderOnlyFlashAttentionMixin._required_memory_at(models, config, num_blocks)
    return total


def estimated(directory: Path, budget: object) -> int:
    models, config = load(directory)
    current = config.kvcache_num_blocks
    config.kvcache_num_blocks = None
    config.memory_budget = budget
    return RBLNDecoderOnlyFlashAttentionMixin.estimate_num_kvcache_blocks(
        models, config, current_blocks=current
    )


def test_a_smaller_budget_gives_fewer_blocks_and_none_gives_them_all(directory: Path) -> None:
    plan = open_artifact(str(directory)).memory_plan()
    for num_blocks in (NUM_MIN_BLOCKS, 15, 21):
        # Two blocks of half of what is aligned come to the same.
        assert (
            estimated(directory, smallest_budget(plan, num_blocks)) == num_blocks + num_blocks % 2
        )
    assert estimated(directory, None) == NUM_FULL_BLOCKS
    counts = [estimated(directory, fraction) for fraction in (0.5, 0.8, 1.0)]
    assert counts == sorted(counts)
    with pytest.raises(BudgetAboveDevice):
        estimated(directory, 2**60)


def test_required_memory_is_monotonic_and_now_is_what_is_held(directory: Path) -> None:
    sizes = [required(directory, num_blocks) for num_blocks in range(1, 40)]
    assert sizes == sorted(sizes)
    models, _ = load(directory)
    assert required(directory, 16) == sum(
        map(sum, models["prefill"].get_alloc_per_chiplet_by_key()["DramTensor"])
    )
    # Two tensors with a window of 2 x 4 MiB, and two of 16 blocks of 1 MiB.
    window = 4 * 8 * 512 * 128 * 4
    assert required(directory, 16) == 2 * window + 2 * 16 * BYTES_PER_BLOCK
    assert required(directory, 17) == 2 * window + 2 * (16 * BYTES_PER_BLOCK + ALIGNED)


def test_rescale_and_save_is_what_the_commands_do_and_stays_right(
    directory: Path, tmp_path: Path
) -> None:
    before = [required(directory, num_blocks) for num_blocks in (9, 16, 31)]
    models, config = load(directory)
    RBLNDecoderOnlyFlashAttentionMixin.rescale_kvcache_num_blocks(models, config, 31)
    save(models, config, 31, directory)
    artifact = open_artifact(str(directory))
    assert artifact.config.kvcache_num_blocks == 31
    for name in PROGRAMS:
        dram = read_description(directory / f"{name}.rbln")["dram"]
        assert dram["past_key_values_3"] == [[31 * BYTES_PER_BLOCK]]
        assert dram["past_key_values_0"] == [[4 * 8 * 512 * 128 * 4]]
    assert [required(directory, num_blocks) for num_blocks in (9, 16, 31)] == before
    assert estimated(directory, None) == NUM_FULL_BLOCKS


def test_there_and_back_gives_the_same_bytes(directory: Path) -> None:
    save(*load(directory), 16, directory)  # as this class writes them
    before = fingerprint(directory)
    for target in (9, 32, 16):
        models, config = load(directory)
        RBLNDecoderOnlyFlashAttentionMixin.rescale_kvcache_num_blocks(models, config, target)
        save(models, config, target, directory)
        assert open_artifact(str(directory)).config.kvcache_num_blocks == target
    assert fingerprint(directory) == before


def test_rescale_below_the_minimum_changes_nothing(directory: Path) -> None:
    before = fingerprint(directory)
    models, config = load(directory)
    with pytest.raises(BelowMinimum):
        RBLNDecoderOnlyFlashAttentionMixin.rescale_kvcache_num_blocks(models, config, 8)
    assert models["prefill"].exp_get_dram_tensor_sizes()["past_key_values_3"] == [
        [16 * BYTES_PER_BLOCK]
    ]
    assert fingerprint(directory) == before


def test_terms_are_told_by_chiplet_and_by_node(directory: Path) -> None:
    models, _ = load(directory)
    model = models["prefill"]
    by_chiplet = model.get_alloc_per_chiplet_by_key()
    assert by_chiplet["Weight"] == [[1_000_000]]
    assert model.get_alloc_per_node_by_key() == {
        term: [sum(node) for node in nodes] for term, nodes in by_chiplet.items()
    }
    assert len(model.exp_get_dram_tensor_sizes()) == NUM_TENSORS


def test_caches_of_one_block_are_multiplied(tmp_path: Path) -> None:
    directory = make_artifact(tmp_path / "a", num_blocks=1)
    model = load(directory)[0]["prefill"]
    names = list(model.exp_get_dram_tensor_sizes())
    model.exp_multiply_buffer_size(dict.fromkeys(names, 20))
    assert set(map(str, model.exp_get_dram_tensor_sizes().values())) == {
        str([[20 * BYTES_PER_BLOCK]])
    }
    model.save(tmp_path / "saved.rbln")
    assert read_description(tmp_path / "saved.rbln")["kvcache_num_blocks"] == 20
    assert sorted(os.listdir(tmp_path)) == ["a", "saved.rbln"]


@pytest.mark.parametrize(
    ("ratios", "error"),
    [
        ({"past_key_values_2": (1, 3)}, ValueError),
        ({"past_key_values_2": (0, 1)}, ValueError),
        ({"past_key_values_2": (2, 1), "past_key_values_3": (3, 1)}, ValueError),
        ({"absent": (2, 1)}, KeyError),
    ],
)
def test_what_cannot_be_scaled_is_refused_and_nothing_is_changed(
    directory: Path, ratios: dict[str, tuple[int, int]], error: type[Exception]
) -> None:
    model = load(directory)[0]["prefill"]
    before = model.exp_get_dram_tensor_sizes()
    with pytest.raises(error):
        model.exp_rescale_buffer_size(ratios)
    assert model.exp_get_dram_tensor_sizes() == before


def test_a_file_of_another_compiler_is_refused() -> None:
    from rbln_artifacts import DATA, QWEN3_CR13

    with pytest.raises(CorruptArtifact):
        RBLNCompiledModel(DATA / QWEN3_CR13 / "prefill.rbln")
