from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from rbln_models import STANDIN, FakeModel, OldModel
from reference_plans import ALL, DATA, load_config, load_plan, load_programs

from reblock.artifact.rebel_model import (
    check_grids,
    program_memories,
    program_memory,
    require_method,
    rescale,
)
from reblock.errors import CompilerTooOld, CorruptArtifact
from reblock.memory import MemoryPlan


@pytest.mark.parametrize("name", ALL)
def test_compiled_models_report_what_their_files_hold(name: str) -> None:
    config = load_config(name)
    models = {
        program.name: STANDIN.RBLNCompiledModel(f"{DATA}/{name}/{program.name}.rbln")
        for program in config.programs
    }
    assert program_memories(models) == load_programs(name)
    assert [program_memory(key, model) for key, model in models.items()] == load_programs(name)
    plan = MemoryPlan.from_programs(
        program_memories(models),
        resizable=config.resizable,
        current_blocks=config.kvcache_num_blocks,
        source=name,
    )
    assert plan == load_plan(name)


def test_sum_of_the_caches_is_no_term() -> None:
    model = FakeModel({"Weight": [[1]]}, {"kv": [[2]]})
    assert "DramTensor" in model.get_alloc_per_chiplet_by_key()
    assert program_memory("prefill", model).alloc == {"Weight": ((1,),)}


def test_grids_of_different_shapes_are_filled_up_with_zeros() -> None:
    models = {
        "prefill": FakeModel({"Weight": [[1, 2], [3]]}, {"kv": [[4], [5], [6]]}),
        "decoder": FakeModel({"Weight": [[7, 8, 9]], "Command": [[]]}),
    }
    prefill, decoder = program_memories(models)
    assert prefill.alloc == {"Weight": ((1, 2, 0), (3, 0, 0), (0, 0, 0))}
    assert prefill.caches == {"kv": ((4, 0, 0), (5, 0, 0), (6, 0, 0))}
    nothing = (0, 0, 0)
    assert decoder.alloc == {
        "Weight": ((7, 8, 9), nothing, nothing),
        "Command": (nothing, nothing, nothing),
    }
    assert (prefill.name, decoder.name) == ("prefill", "decoder")


class Index:
    """A whole number of another library."""

    def __index__(self) -> int:
        return 5


def test_whole_numbers_of_other_libraries_become_ints() -> None:
    assert check_grids({"a": ([Index(), 2**70],)}, source="x", title="sizes") == {
        "a": ((5, 2**70),)
    }


@pytest.mark.parametrize(
    ("grids", "fault"),
    [
        ([[1]], "sizes must be a dictionary, not the type list"),
        (None, "sizes must be a dictionary, not the type NoneType"),
        ({1: [[1]]}, "sizes has the key 1, which is no text"),
        ({"a": 1}, r"sizes\['a'\] must hold lists, not the type int"),
        ({"a": [1]}, r"sizes\['a'\] must hold lists, not the type int"),
        ({"a": ["12"]}, r"sizes\['a'\] must hold lists, not the type str"),
        ({"a": [[1, -1]]}, r"sizes\['a'\] must hold numbers of bytes, not -1"),
        ({"a": [[1.0]]}, r"sizes\['a'\] must hold numbers of bytes, not 1.0"),
        ({"a": [[True]]}, r"sizes\['a'\] must hold numbers of bytes, not True"),
        ({"a": [[None]]}, r"sizes\['a'\] must hold numbers of bytes, not None"),
    ],
)
def test_what_are_no_sizes_is_refused(grids: Any, fault: str) -> None:
    with pytest.raises(CorruptArtifact, match=f"^prefill: {fault}"):
        check_grids(grids, source="prefill", title="sizes")


def test_report_that_is_none_is_refused_by_the_name_of_the_method() -> None:
    model = FakeModel({"Weight": [[-5]]})
    with pytest.raises(CorruptArtifact, match=r"^prefill: get_alloc_per_chiplet_by_key\(\)"):
        program_memory("prefill", model)


@pytest.mark.parametrize("method", ["get_alloc_per_chiplet_by_key", "exp_get_dram_tensor_sizes"])
def test_model_that_cannot_tell_its_sizes_asks_for_a_newer_compiler(method: str) -> None:
    model: Any = FakeModel({}, {})
    setattr(model, method, None)
    with pytest.raises(CompilerTooOld, match=f"no method '{method}'.*upgrade rebel-compiler"):
        program_memory("prefill", model)


def test_required_method_is_the_models_own() -> None:
    model = FakeModel({}, {"kv": [[6]]})
    assert require_method(model, "exp_get_dram_tensor_sizes")() == {"kv": [[6]]}
    with pytest.raises(CompilerTooOld) as caught:
        require_method(SimpleNamespace(), "save")
    assert caught.value.method == "save"


def test_rescale_hands_the_ratio_on() -> None:
    model = FakeModel({}, {"kv": [[6]], "window": [[6]]})
    rescale(model, ["kv"], 5, 3)
    assert model.dram == {"kv": [[10]], "window": [[6]]}
    with pytest.raises(CompilerTooOld, match="exp_rescale_buffer_size"):
        rescale(OldModel(model), ["kv"], 5, 3)
