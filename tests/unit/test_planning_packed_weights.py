"""Weights of linear layers in a type of their own, planned for the cpu."""

from __future__ import annotations

import json
from typing import Any

import pytest

from reblock.budget import parse_budget
from reblock.errors import InvalidOption, UnsupportedModel
from reblock.model_spec import parse_model_config
from reblock.planning import Plan, PlanSettings, make_plan, parse_target
from reblock.planning.sources import ModelSource

LAYERS, HIDDEN, WIDTH, VOCABULARY = 2, 48, 70, 100


def make_source(**values: Any) -> ModelSource:
    """Return a Llama whose sizes fill neither panels of 16 outputs nor words of 4 inputs."""
    content = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": LAYERS,
        "hidden_size": HIDDEN,
        "intermediate_size": WIDTH,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 10,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
        "dtype": "float32",
    }
    spec = parse_model_config(json.dumps(content | values), path="config.json")
    return ModelSource(name="tiny", kind="directory", spec=spec, stored=None, notes=())


def plan_source(source: ModelSource, npu: str = "cpu:8GB", **values: Any) -> Plan:
    settings = PlanSettings(**({"batch_size": 1, "max_seq_len": 512} | values))
    return make_plan(source, settings, parse_target(npu), parse_budget("100%"))


def weight_term(found: Plan) -> Any:
    return next(term for term in found.waterfall.terms if term.name == "Weight")


def weight_bytes(**values: Any) -> int:
    return int(weight_term(plan_source(make_source(), **values)).num_bytes)


# Outputs of queries, keys, values, attention, gate, up and down: as they are, and in panels of 16.
OUTPUTS = 40 + 20 + 20 + 48 + 70 + 70 + 48
NORMS = (2 * LAYERS + 1) * HIDDEN


def elements(down: int) -> int:
    """Return the elements of all packed weights, with `down` inputs of the last projection."""
    of_hidden = 48 + 32 + 32 + 80 + 80
    return LAYERS * (of_hidden * HIDDEN + 48 * 40 + 48 * down) + 112 * HIDDEN


def test_packed_weights_are_counted_filled_up_to_panels_and_words() -> None:
    assert weight_bytes() == 4 * (elements(70) + NORMS)
    assert weight_bytes(dtype="bfloat16") == 2 * (elements(70) + NORMS)


def test_int8_weights_have_a_scale_for_each_output_and_norms_stay_as_they_are() -> None:
    scales = 4 * (LAYERS * OUTPUTS + VOCABULARY)
    assert weight_bytes(weight_dtype="int8") == elements(72) + scales + 4 * NORMS
    both = weight_bytes(dtype="bfloat16", weight_dtype="int8")
    assert both == elements(72) + scales + 2 * NORMS
    assert weight_bytes(weight_dtype="bf16") == 2 * elements(70) + 4 * NORMS


def test_an_embedding_that_is_not_tied_stays_in_the_type_of_the_programs() -> None:
    apart = plan_source(make_source(tie_word_embeddings=False), weight_dtype="int8")
    more = weight_term(apart).num_bytes - weight_bytes(weight_dtype="int8")
    assert more == 4 * VOCABULARY * HIDDEN


def test_a_tied_embedding_with_a_class_of_its_own_is_a_copy_where_the_types_differ() -> None:
    def of_type(**values: Any) -> int:
        gemma = make_source(model_type="gemma", head_dim=10, **values)
        return int(weight_term(plan_source(gemma, weight_dtype="int8")).num_bytes)

    assert of_type() == of_type(tie_word_embeddings=False)


def test_biases_are_float32_whatever_the_weights_are() -> None:
    values = {"attention_bias": True, "mlp_bias": True}
    found = plan_source(make_source(**values), dtype="bfloat16", weight_dtype="int8")
    without = weight_bytes(dtype="bfloat16", weight_dtype="int8")
    assert weight_term(found).num_bytes == without + 4 * LAYERS * OUTPUTS


def test_experts_stay_in_the_type_of_the_programs() -> None:
    values = {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
    found = plan_source(make_source(**values), weight_dtype="int8")
    experts = LAYERS * 4 * 3 * HIDDEN * WIDTH
    assert weight_term(found).num_bytes > 4 * experts
    assert plan_source(make_source(**values)).weights_dtype == "float32"


def test_a_plan_says_what_the_weights_are_and_its_command_carries_it() -> None:
    found = plan_source(make_source(), weight_dtype="int8")
    assert (found.weights_dtype, found.model.kv_dtype) == ("int8", "float32")
    assert "int8 in linear layers, else float32" in weight_term(found).source
    assert weight_term(found).error_bytes == 0
    assert " --weight-dtype int8 " in found.commands[0].line
    assert "--dtype" not in found.commands[0].line.replace("--weight-dtype", "")
    assert "--weight-dtype" not in plan_source(make_source()).commands[0].line


def test_linear_layers_that_are_not_counted_cannot_be_planned_in_another_type() -> None:
    source = make_source(model_type="falcon", num_kv_heads=2, new_decoder_architecture=True)
    assert source.spec.num_parameters is not None
    with pytest.raises(UnsupportedModel, match=r"'falcon' are not counted.*or give weight_bytes"):
        plan_source(source, weight_dtype="int8")
    # Without it there is an answer, whose error is not known: packing fills up a little.
    assert weight_term(plan_source(source)).basis == "estimate"
    given = plan_source(source, weight_dtype="int8", weight_bytes=123_456)
    assert weight_term(given).num_bytes == 123_456
    assert given.weights_dtype == "int8"


@pytest.mark.parametrize(
    ("values", "npu", "fault"),
    [
        ({"weight_dtype": "float16"}, "cpu:8GB", "weight_dtype='float16' is not known"),
        ({"weight_dtype": "int3"}, "cpu:8GB", "weight_dtype='int3' is not known"),
        ({"weight_dtype": "float32", "dtype": "bfloat16"}, "cpu:8GB", "wider than dtype"),
        ({"dtype": "int8"}, "cpu:8GB", "for weights of 8 bits give weight_dtype=int8"),
        ({"weight_dtype": "int8"}, "RBLN-CA25", "is for the cpu; on RBLN-CA25 dtype is the type"),
    ],
)
def test_types_that_do_not_go_together_or_with_the_device_are_refused(
    values: dict[str, Any], npu: str, fault: str
) -> None:
    with pytest.raises(InvalidOption, match=fault):
        plan_source(make_source(), npu, **values)


def test_smaller_weights_are_advised_where_they_make_the_model_fit() -> None:
    source = make_source(hidden_size=4096, intermediate_size=8192, vocab_size=256)
    large = plan_source(source, "cpu:8GB")
    assert large.fits
    needed = weight_term(large).num_bytes + weight_term(large).num_bytes // 50
    settings = PlanSettings(batch_size=1, max_seq_len=512)
    tight = make_plan(source, settings, parse_target("cpu:8GB"), parse_budget(str(needed)))
    assert not tight.fits
    assert "choose weight_dtype=int8" in tight.advice
