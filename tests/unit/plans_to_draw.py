"""Plans and sweeps to draw, of models that are made up."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from reblock.budget import parse_budget
from reblock.model_spec import parse_model_config
from reblock.planning import PlanSettings, make_plan, parse_target, share_device
from reblock.planning.sources import ModelSource
from reblock.planning.sweep import sweep_budgets

if TYPE_CHECKING:
    from reblock.planning import Plan, SharedPlan
    from reblock.planning.sweep import Sweep


def make_source(name: str = "models/small", **values: Any) -> ModelSource:
    content = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": 16,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "vocab_size": 128_256,
        "max_position_embeddings": 131_072,
        "tie_word_embeddings": True,
        "dtype": "bfloat16",
    }
    spec = parse_model_config(json.dumps({**content, **values}), path="config.json")
    return ModelSource(name=name, kind="directory", spec=spec, stored=None, notes=())


def make(
    npu: str = "RBLN-CA25",
    budget: str = "100%",
    *,
    source: ModelSource | None = None,
    **values: Any,
) -> tuple[Plan, Sweep]:
    source = source or make_source()
    settings, target = PlanSettings(**{"max_seq_len": 32_768, **values}), parse_target(npu)
    plan = make_plan(source, settings, target, parse_budget(budget))
    return plan, sweep_budgets(source, settings, target)


def make_shared(*budgets: str, npu: str = "RBLN-CR13") -> tuple[SharedPlan, list[Sweep]]:
    sources = [make_source("models/first"), make_source("models/second", num_hidden_layers=4)]
    settings, target = PlanSettings(batch_size=8, max_seq_len=32_768), parse_target(npu)
    shared = share_device(sources, settings, target, [parse_budget(text) for text in budgets])
    return shared, [sweep_budgets(source, settings, target) for source in sources]


def with_terms(plan: Plan, **sizes: int) -> Plan:
    """Return the plan with more on every chiplet than it is used to."""
    chiplets = [replace(use, static_bytes={**use.static_bytes, **sizes}) for use in plan.chiplets]
    return replace(plan, chiplets=tuple(chiplets))
