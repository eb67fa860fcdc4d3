"""Plans as one JSON object, for scripts; `plan.schema.json` beside this describes every field."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from importlib.resources import files
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reblock.planning.result import CachedModel, LayerGroup, Plan, SharedPlan, Term, Waterfall
    from reblock.sizing import ChipletUse

__all__ = ["SCHEMA_VERSION", "Refused", "plan_document", "read_schema"]

# Raised where a field gets another meaning or goes away, and not where one is added.
SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """A device and a budget that there is no plan for, and why."""

    name: str
    npu: str
    memory_budget: str
    reason: str


def plan_document(
    plans: Sequence[Plan], *, shared: SharedPlan | None = None, refused: Sequence[Refused] = ()
) -> dict[str, Any]:
    """Return the JSON object of plans; where they share a device they are those of `shared`."""
    return {
        "schema_version": SCHEMA_VERSION,
        "plans": [_plan(plan) for plan in plans],
        "shared": None if shared is None else _shared(shared),
        "refused": [asdict(each) for each in refused],
    }


def read_schema() -> dict[str, Any]:
    """Return the JSON Schema of what `plan_document` returns."""
    text = files("reblock.planning").joinpath("plan.schema.json").read_text(encoding="utf-8")
    schema: dict[str, Any] = json.loads(text)
    return schema


def _plan(plan: Plan) -> dict[str, Any]:
    return {
        **_subject(plan),
        **_shapes(plan),
        **_cached(plan.model),
        **_outcome(plan),
        "waterfall": _waterfall(plan.waterfall),
        "chiplets": [_chiplet(use) for use in plan.chiplets],
        "explanation": plan.explanation,
        "advice": list(plan.advice),
        "commands": [asdict(command) for command in plan.commands],
        "notes": list(plan.notes),
    }


def _subject(plan: Plan) -> dict[str, Any]:
    target = plan.target
    return {
        "name": plan.name,
        "kind": plan.kind,
        "module": plan.module,
        "model_type": plan.model_type,
        "num_parameters": plan.num_parameters,
        "weights_dtype": plan.weights_dtype,
        "npu": target.text,
        "device": target.device.name,
        "num_devices": target.num_devices,
        "num_chiplets": target.device.num_chiplets,
    }


def _shapes(plan: Plan) -> dict[str, Any]:
    return {
        "batch_size": plan.batch_size,
        "is_batch_chosen": plan.is_batch_chosen,
        "max_seq_len": plan.max_seq_len,
        "attn_impl": plan.attn_impl,
        "kvcache_partition_len": plan.kvcache_partition_len,
        "kvcache_block_size": plan.kvcache_block_size,
        "num_blocks_asked": plan.num_blocks_asked,
    }


def _cached(model: CachedModel) -> dict[str, Any]:
    return {
        "kv_dtype": model.kv_dtype,
        "bytes_per_token": model.bytes_per_token,
        "full_bytes_per_token": model.full_bytes_per_token,
        "fixed_bytes_per_request": model.fixed_bytes_per_request,
        "layers": [_layer(group) for group in model.layers],
    }


def _layer(group: LayerGroup) -> dict[str, Any]:
    return asdict(group)


def _outcome(plan: Plan) -> dict[str, Any]:
    held, step = plan.capacity, plan.next_step
    node, chiplet = plan.tightest
    return {
        "memory_budget": plan.budget.text,
        "budget_bytes": plan.budget_bytes,
        "fits": plan.fits,
        "num_blocks": plan.num_blocks,
        "num_requests": None if held is None else held.num_full_sequences,
        "num_tokens": None if held is None else held.num_tokens,
        "longest_request_tokens": None if held is None else held.longest_sequence_tokens,
        "num_min_blocks": plan.bounds.minimum,
        "num_full_blocks": plan.bounds.full,
        "largest_num_blocks": plan.largest_num_blocks,
        "limited_by": plan.limited_by,
        "tightest": {"node": node, "chiplet": chiplet},
        "needed_bytes": plan.needed_bytes,
        "budgets": asdict(plan.budgets) | {"is_empty": plan.budgets.is_empty},
        "next_step": None if step is None else asdict(step),
    }


def _waterfall(waterfall: Waterfall) -> dict[str, Any]:
    return {
        "node": waterfall.node,
        "num_blocks": waterfall.num_blocks,
        "dram_bytes": waterfall.dram_bytes,
        "reserve_bytes": waterfall.reserve_bytes,
        "available_bytes": waterfall.available_bytes,
        "outside_budget_bytes": waterfall.outside_budget_bytes,
        "budget_bytes": waterfall.budget_bytes,
        "terms": [_term(term) for term in waterfall.terms],
        "bytes_per_block": waterfall.bytes_per_block,
        "unused_bytes": waterfall.unused_bytes,
    }


def _term(term: Term) -> dict[str, Any]:
    return asdict(term)


def _chiplet(use: ChipletUse) -> dict[str, Any]:
    return asdict(use) | {"used_bytes": use.used_bytes, "free_bytes": use.free_bytes}


def _shared(shared: SharedPlan) -> dict[str, Any]:
    return {
        "is_split": shared.is_split,
        "budget_bytes": shared.budget_bytes,
        "available_bytes": shared.available_bytes,
        "needed_bytes": shared.needed_bytes,
        "smallest_bytes": shared.smallest_bytes,
        "fits": shared.fits,
        "explanation": shared.explanation,
    }
