"""Plans as JSON: what the schema says of them is what is there, no more and no less."""

from __future__ import annotations

import copy
import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import pytest
from jsonschema import Draft202012Validator
from jsonschema.exceptions import ValidationError

from artifacts import make_artifact
from rbln_artifacts import DATA, FLASH, LLAMA2_EAGER, QWEN3_CR13, STANDIN
from reblock.options import AttnImpl
from reblock.planning import PlanSettings, plan, plan_together
from reblock.planning.document import SCHEMA_VERSION, Refused, plan_document, read_schema
from reblock.planning.result import Basis
from reblock.sizing import Limit

if TYPE_CHECKING:
    from collections.abc import Iterator

    from reblock.planning import Plan

CONFIGS = Path(__file__).parents[1] / "data" / "model_configs"
MODELS = sorted(path.name for path in CONFIGS.iterdir())


def check(document: dict[str, Any]) -> None:
    """Check a document, as a reader of it gets it, against the schema."""
    Draft202012Validator(read_schema()).validate(json.loads(json.dumps(document)))


def model_plan(name: str = "Qwen3-8B", **options: Any) -> Plan:
    return plan(str(CONFIGS / name), **{"npu": "RBLN-CR13", "max_seq_len": 1024, **options})


def objects(schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield every description of an object with fields in a schema."""
    if "properties" in schema:
        yield schema
    for value in schema.values():
        if isinstance(value, dict):
            yield from objects(value)


# What must hold of the schema itself.


def test_the_schema_is_a_valid_schema_of_this_version() -> None:
    schema = read_schema()
    Draft202012Validator.check_schema(schema)
    assert schema["properties"]["schema_version"] == {
        "description": schema["properties"]["schema_version"]["description"],
        "const": SCHEMA_VERSION,
    }
    assert schema["$id"] == f"urn:reblock:plan:{SCHEMA_VERSION}"


def test_every_object_of_the_schema_is_closed_complete_and_described() -> None:
    found = list(objects(read_schema()))
    assert len(found) >= 10
    for each in found:
        assert each["additionalProperties"] is False
        assert each["required"] == list(each["properties"])
        assert each["description"]
        for name, field in each["properties"].items():
            assert field.get("description") or "$ref" in field, name


def test_fields_of_bytes_and_only_they_are_named_so() -> None:
    for each in objects(read_schema()):
        for name, field in each["properties"].items():
            if name.endswith("_bytes") and name != "static_bytes":
                assert "integer" in field["type"], name


@pytest.mark.parametrize(
    ("definition", "field", "type_"),
    [
        ("plan", "limited_by", Limit),
        ("plan", "attn_impl", AttnImpl),
        ("term", "basis", Basis),
    ],
)
def test_enumerations_of_the_schema_are_those_of_the_code(
    definition: str, field: str, type_: Any
) -> None:
    listed = read_schema()["$defs"][definition]["properties"][field]["enum"]
    assert sorted(listed) == sorted(get_args(type_))


# Documents.


@pytest.mark.parametrize("name", MODELS)
def test_the_document_of_every_model_matches_the_schema(name: str) -> None:
    for npu in ("RBLN-CR13", "RBLN-CA25x4"):
        check(plan_document([model_plan(name, npu=npu, dtype="bfloat16")]))


@pytest.mark.parametrize("name", [*FLASH, LLAMA2_EAGER])
def test_the_document_of_an_artifact_of_optimum_rbln_matches_the_schema(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(STANDIN))
    document = plan_document([plan(str(DATA / name))])
    check(document)
    assert document["plans"][0]["kind"] == "artifact"


def test_the_document_of_an_artifact_of_the_torch_backend_matches_the_schema(
    tmp_path: Path,
) -> None:
    directory = str(make_artifact(tmp_path / "a", sliding_layers=(1,)))
    document = plan_document([plan(directory, npu="cpu:8GB", num_blocks=12)])
    check(document)
    found = document["plans"][0]
    assert (found["num_blocks"], found["num_blocks_asked"]) == (12, 12)
    assert [layer["window"] for layer in found["layers"]] == [None, 512]


def test_documents_of_what_does_not_fit_match_the_schema() -> None:
    for options in ({"memory_budget": "1GB"}, {"npu": "RBLN-CA25", "batch_size": 900}):
        document = plan_document([model_plan(**options)])
        check(document)
        found = document["plans"][0]
        assert found["fits"] is False
        assert found["num_blocks"] is found["num_requests"] is found["num_tokens"] is None
        assert found["waterfall"]["unused_bytes"] < 0
        assert found["explanation"].startswith("does not fit: ")


def test_several_plans_and_refusals_stand_in_one_document() -> None:
    refused = Refused(
        name="Qwen3-8B", npu="RBLN-CA25", memory_budget="20GB", reason="the device has less"
    )
    document = plan_document([model_plan(), model_plan(memory_budget="80%")], refused=[refused])
    check(document)
    assert [each["memory_budget"] for each in document["plans"]] == ["100%", "80%"]
    assert document["refused"] == [asdict(refused)]
    assert document["shared"] is None


def test_plans_that_share_a_device_stand_beside_what_they_share() -> None:
    shared = plan_together(
        [str(CONFIGS / "Qwen3-0.6B"), str(CONFIGS / "SmolLM2-135M")],
        npu="RBLN-CA25",
        settings=PlanSettings(batch_size=2, max_seq_len=2048),
    )
    document = plan_document(shared.plans, shared=shared)
    check(document)
    assert document["shared"]["is_split"] is True
    total = sum(each["needed_bytes"] for each in document["plans"])
    assert document["shared"]["needed_bytes"] == total


# That the schema sees what is wrong.


@pytest.mark.parametrize(
    "path",
    [
        (),
        ("plans", 0),
        ("plans", 0, "layers", 0),
        ("plans", 0, "waterfall"),
        ("plans", 0, "waterfall", "terms", 0),
        ("plans", 0, "chiplets", 3),
        ("plans", 0, "budgets"),
        ("plans", 0, "next_step"),
        ("plans", 0, "tightest"),
        ("plans", 0, "commands", 0),
    ],
)
def test_a_field_more_or_less_does_not_match_the_schema(path: tuple[str | int, ...]) -> None:
    document = plan_document([model_plan()])
    check(document)

    def at(content: Any) -> dict[str, Any]:
        for step in path:
            content = content[step]
        assert isinstance(content, dict)
        return content

    more = copy.deepcopy(document)
    at(more)["a_new_field"] = 1
    with pytest.raises(ValidationError):
        check(more)
    for name in at(document):
        less = copy.deepcopy(document)
        del at(less)[name]
        with pytest.raises(ValidationError):
            check(less)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_blocks", "12"),
        ("num_blocks", 1.5),
        ("budget_bytes", -1),
        ("limited_by", "luck"),
        ("kind", "engine"),
        ("fits", 1),
        ("notes", "one note"),
    ],
)
def test_a_value_of_another_kind_does_not_match_the_schema(field: str, value: object) -> None:
    document = plan_document([model_plan()])
    document["plans"][0][field] = value
    with pytest.raises(ValidationError):
        check(document)


# That the numbers are the plan's.


def test_the_document_says_what_the_plan_says() -> None:
    made = model_plan("gemma-3-27b-it", memory_budget="80%", max_seq_len=8192)
    found = json.loads(json.dumps(plan_document([made])))["plans"][0]
    held, step = made.capacity, made.next_step
    assert held is not None
    assert found["device"] == "RBLN-CR13"
    assert (found["num_devices"], found["num_chiplets"]) == (1, 4)
    assert found["num_blocks"] == made.num_blocks
    assert found["num_requests"] == held.num_full_sequences
    assert found["num_tokens"] == held.num_tokens
    assert found["longest_request_tokens"] == held.longest_sequence_tokens
    assert found["next_step"] == (None if step is None else asdict(step))
    assert found["tightest"] == {"node": made.tightest[0], "chiplet": made.tightest[1]}
    assert found["budgets"]["smallest_bytes"] == made.budgets.smallest_bytes
    assert found["explanation"] == made.explanation
    assert found["fixed_bytes_per_request"] == made.model.fixed_bytes_per_request > 0
    assert [command["line"] for command in found["commands"]] == [
        command.line for command in made.commands
    ]


def test_figures_of_the_document_add_up() -> None:
    for name in ("Qwen3-8B", "gemma-3-27b-it", "mamba-130m-hf"):
        found = plan_document([model_plan(name, memory_budget="75%", batch_size=2)])["plans"][0]
        waterfall = found["waterfall"]
        used = sum(term["num_bytes"] for term in waterfall["terms"])
        assert waterfall["dram_bytes"] - waterfall["reserve_bytes"] == waterfall["available_bytes"]
        assert used + waterfall["unused_bytes"] == waterfall["budget_bytes"]
        assert waterfall["budget_bytes"] == found["budget_bytes"]
        for use in found["chiplets"]:
            assert use["used_bytes"] + use["free_bytes"] == use["budget_bytes"]
            assert set(use["static_bytes"]) <= {term["name"] for term in waterfall["terms"]}


def test_an_artifact_of_a_module_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(STANDIN))
    made = replace(plan(str(DATA / QWEN3_CR13)), module="language_model")
    document = plan_document([made])
    check(document)
    assert document["plans"][0]["module"] == "language_model"
