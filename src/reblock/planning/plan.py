"""How many blocks, how many requests, before anything is compiled, and why.

A model and an artifact become a `Candidate`. From there on one piece of code answers for both, and
it is the code that sizes real caches.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import TYPE_CHECKING

from reblock.budget import WHOLE_DEVICE, MemoryBudget, parse_budget
from reblock.errors import UsageError
from reblock.planning.advice import advise_model, advise_shared, explain
from reblock.planning.answer import Answer, answer, budgets
from reblock.planning.artifact_facts import artifact_target, cached_by
from reblock.planning.candidate import (
    MAX_BATCH_SIZE,
    ModelSubject,
    artifact_candidate,
    most_requests,
)
from reblock.planning.commands import artifact_commands, model_commands
from reblock.planning.model_memory import cached_model
from reblock.planning.obstacles import obstacles, obstacles_for_rbln
from reblock.planning.result import Command, NextStep, Plan
from reblock.planning.settings import PlanSettings
from reblock.planning.sources import ModelSource, is_artifact, open_model
from reblock.planning.target import Target, parse_target

if TYPE_CHECKING:
    from typing import Any

    from reblock.artifact.reader import Artifact
    from reblock.options import AttnImpl, WeightDtype
    from reblock.planning.candidate import Candidate

__all__ = ["make_plan", "open_subject", "plan"]


def plan(
    name: str,
    *,
    npu: str | None = None,
    memory_budget: float | str | MemoryBudget | None = None,
    batch_size: int | None = None,
    max_seq_len: int | None = None,
    attn_impl: AttnImpl | None = None,
    kvcache_partition_len: int | None = None,
    kvcache_block_size: int | None = None,
    prefill_chunk_size: int | None = None,
    dtype: str | None = None,
    weight_dtype: WeightDtype | None = None,
    kv_dtype: str | None = None,
    weight_bytes: int | None = None,
    num_blocks: int | None = None,
    module: str | None = None,
) -> Plan:
    """Return how many blocks and requests a model or an artifact has room for, and why.

    Nothing is compiled, and of a hub nothing is downloaded but the configuration.

    Args:
        name: A directory with `config.json` or with an artifact, a GGUF file, or a hub id.
        npu: A device, `RBLN-CA25x4` for several, `cpu` (this machine), or `cpu:24GB` (another).
            By default the cpu, and for an artifact what it was compiled for.
        memory_budget: As everywhere: 0.8, "80%", "10GB"; by default the whole device.
        batch_size: Requests that run side by side. By default as many of `max_seq_len` as fit.
        max_seq_len: Tokens of the longest request; by default what the model was made for.
        attn_impl: "flash_attn" or "eager"; by default what the device's compiler takes.
        kvcache_partition_len: Tokens that flash attention works on at a time.
        kvcache_block_size: Tokens in a block.
        prefill_chunk_size: Tokens of a prompt that are read at a time.
        dtype: The type of the weights; by default that of the checkpoint.
        weight_dtype: For the cpu, the type of the weights of linear layers; by default `dtype`.
        kv_dtype: The type of keys and values; by default that of the programs.
        weight_bytes: What the weights take, where that is known better than from files.
        num_blocks: A count to ask for, instead of the largest that fits.
        module: The module with the cache, of an artifact of several.

    Raises:
        UsageError: Options that make no sense, or that an artifact has settled.
        BelowMinimum: `num_blocks` is less than the programs need.
        BudgetAboveDevice: The budget is more than the device has.
        UnsupportedModel: The model is not there or says too little of itself.
        BadArtifact: The artifact is damaged.
        MissingDependency: A package is missing to read a hub or an artifact.
    """
    settings = PlanSettings(
        batch_size=batch_size,
        max_seq_len=max_seq_len,
        attn_impl=attn_impl,
        kvcache_partition_len=kvcache_partition_len,
        kvcache_block_size=kvcache_block_size,
        prefill_chunk_size=prefill_chunk_size,
        dtype=dtype,
        weight_dtype=weight_dtype,
        kv_dtype=kv_dtype,
        weight_bytes=weight_bytes,
        num_blocks=num_blocks,
    )
    budget = WHOLE_DEVICE if memory_budget is None else memory_budget
    if not isinstance(budget, MemoryBudget):
        budget = parse_budget(budget)
    target = None if npu is None else parse_target(npu)
    return make_plan(open_subject(name, module), settings, target, budget)


def open_subject(name: str, module: str | None = None) -> ModelSource | Artifact:
    """Return the model or the artifact that `name` names.

    Raises:
        UnsupportedModel: There is none, or it is no language model.
        UsageError: A module of what is no artifact.
        BadArtifact: The artifact is damaged.
        MissingDependency: It takes a package to read it, which is not installed.
    """
    if not isinstance(name, str) or not name:
        raise UsageError(f"{name!r} is no name of a model or an artifact")
    if is_artifact(name):
        from reblock.artifact.reader import open_artifact

        return open_artifact(name, module)
    if module is not None:
        raise UsageError(f"module={module!r}: {name!r} is no artifact, so it has no modules")
    return open_model(name)


def make_plan(
    subject: ModelSource | Artifact,
    settings: PlanSettings,
    target: Target | None,
    budget: MemoryBudget,
) -> Plan:
    """Return the plan of what is open already; `plan` says what the arguments mean."""
    if isinstance(subject, ModelSource):
        target = target or parse_target("cpu")
        return _plan_model(ModelSubject.make(subject, settings, target), budget)
    return _plan_artifact(subject, settings, target, budget)


def _plan_model(subject: ModelSubject, budget: MemoryBudget) -> Plan:
    settings, target, spec = subject.settings, subject.target, subject.model.spec
    is_chosen = settings.batch_size is None
    candidate = _choose(subject, budget)
    found = answer(candidate, target.device, budget, num_blocks=settings.num_blocks)
    step = _next_block(candidate, found)
    if is_chosen:
        found = _with_open_batch(subject, candidate, found)
        if settings.num_blocks is None:
            step = _next_request(subject, candidate, found)
    advice: list[str] = []
    if found.num_blocks is None:
        advice = [*advise_shared(found, budget, _fewer_blocks(subject, candidate, found))]
        advice += advise_model(subject, candidate, budget)
    return Plan(
        name=subject.source.name,
        kind="model",
        module=None,
        model_type=spec.model_type,
        num_parameters=spec.num_parameters,
        weights_dtype=subject.model.weights.dtype or "as stored",
        target=target,
        is_batch_chosen=is_chosen,
        num_blocks_asked=settings.num_blocks,
        model=cached_model(spec, subject.model.kv_dtype, candidate.max_seq_len),
        budget=budget,
        next_step=step,
        explanation=explain(candidate, found, step, is_chosen=is_chosen),
        advice=tuple(advice),
        commands=_model_commands(subject, candidate, found, budget),
        notes=(*_model_notes(subject), *_count_notes(candidate, found)),
        **_shared_fields(candidate, found),
    )


def _with_open_batch(subject: ModelSubject, candidate: Candidate, found: Answer) -> Answer:
    """Return the answer with what holds where the number of requests may still be chosen."""
    available = found.budgets.available_bytes
    largest = most_requests(subject, available).largest(available)
    if subject.settings.num_blocks is not None:
        return replace(found, largest_num_blocks=largest)
    # A budget that holds one request works.
    one = budgets(subject.at(1), available, None)
    return replace(
        found,
        limited_by="budget" if candidate.batch_size < MAX_BATCH_SIZE else "full_batch",
        budgets=replace(one, full_bytes=found.budgets.full_bytes),
        largest_num_blocks=largest,
    )


def _fewer_blocks(subject: ModelSubject, candidate: Candidate, found: Answer) -> int | None:
    """Return the most blocks that fit where more were asked for, None where none do."""
    if subject.settings.num_blocks is None:
        return None
    if subject.settings.batch_size is None:
        candidate = most_requests(subject, found.budget_bytes)
    return candidate.largest(found.budget_bytes)


def _choose(subject: ModelSubject, budget: MemoryBudget) -> Candidate:
    """Return the candidate for the requests that were asked for, or for as many as fit."""
    settings, device = subject.settings, subject.target.device
    if settings.batch_size is not None:
        return subject.at(settings.batch_size)
    if settings.num_blocks is None:
        return most_requests(subject, budget.resolve(device.available_bytes))
    # As many requests as the blocks hold.
    per_request = subject.at(1).blocks_per_request
    return subject.at(min(max(1, settings.num_blocks // per_request), MAX_BATCH_SIZE))


def _model_notes(subject: ModelSubject) -> list[str]:
    source, notes = subject.source, list(subject.model.notes)
    if source.stored is None and source.kind != "hub":
        notes.append("No weights were found beside the configuration; compiling needs them.")
    if not subject.target.is_cpu:
        return [*notes, *obstacles_for_rbln(source, subject.settings)]
    if refused := obstacles(subject.model.spec):
        notes.insert(0, f"reblock does not compile this model for the cpu: {', '.join(refused)}.")
    return notes


def _model_commands(
    subject: ModelSubject, candidate: Candidate, found: Answer, budget: MemoryBudget
) -> tuple[Command, ...]:
    is_refused = subject.target.is_cpu and obstacles(subject.model.spec)
    if found.num_blocks is None or is_refused:
        return ()
    return model_commands(
        subject,
        candidate,
        budget,
        num_blocks=found.num_blocks,
        is_count_asked=subject.settings.num_blocks is not None,
    )


def _next_request(subject: ModelSubject, candidate: Candidate, found: Answer) -> NextStep | None:
    if found.num_blocks is None or candidate.batch_size >= MAX_BATCH_SIZE:
        return None
    is_full = found.num_blocks == candidate.bounds.full
    larger = subject.at(candidate.batch_size + 1) if is_full else candidate
    needed = larger.smallest_budget(larger.bounds.full)
    return NextStep(
        num_blocks=larger.bounds.full,
        num_requests=larger.batch_size,
        budget_bytes=needed,
        is_available=needed <= found.budgets.available_bytes,
    )


def _next_block(candidate: Candidate, found: Answer) -> NextStep | None:
    if found.num_blocks is None or found.num_blocks >= candidate.bounds.full:
        return None
    count = found.num_blocks + 1
    needed = candidate.smallest_budget(count)
    return NextStep(
        num_blocks=count,
        num_requests=candidate.capacity(count).num_full_sequences,
        budget_bytes=needed,
        is_available=needed <= found.budgets.available_bytes,
    )


def _plan_artifact(
    artifact: Artifact, settings: PlanSettings, asked: Target | None, budget: MemoryBudget
) -> Plan:
    settled = [name for name in settings.given if name != "num_blocks"]
    if settled:
        raise UsageError(
            f"{artifact.directory} is compiled, which has settled {', '.join(settled)}; leave "
            "that out, or plan the model itself"
        )
    target, notes = artifact_target(artifact, asked)
    candidate = artifact_candidate(artifact)
    found = answer(candidate, target.device, budget, num_blocks=settings.num_blocks)
    step = _next_block(candidate, found)
    fewer = None if settings.num_blocks is None else candidate.largest(found.budget_bytes)
    config = artifact.config
    made: tuple[Command, ...] = ()
    if found.num_blocks is not None and candidate.memory.has_resizable_cache:
        made = artifact_commands(
            artifact, num_blocks=found.num_blocks, needed_bytes=found.needed_bytes
        )
    return Plan(
        name=artifact.directory,
        kind="artifact",
        module=artifact.module,
        model_type=config.cls_name if config.reblock is None else config.reblock.model_type,
        num_parameters=None,
        weights_dtype=config.weight_dtype or "as stored",
        target=target,
        is_batch_chosen=False,
        num_blocks_asked=settings.num_blocks,
        model=cached_by(artifact),
        budget=budget,
        next_step=step,
        explanation=explain(candidate, found, step, is_chosen=False),
        advice=advise_shared(found, budget, fewer),
        commands=made,
        notes=(*notes, *_count_notes(candidate, found)),
        **_shared_fields(candidate, found),
    )


def _count_notes(candidate: Candidate, found: Answer) -> tuple[str, ...]:
    full = candidate.bounds.full
    if found.num_blocks is None or found.num_blocks <= full:
        return ()
    note = (
        f"{found.num_blocks:,} blocks are more than the {full:,} that {candidate.batch_size:,} "
        f"request(s) of {candidate.max_seq_len:,} tokens can ever use."
    )
    return (note,)


def _shared_fields(candidate: Candidate, found: Answer) -> dict[str, Any]:
    """Return the fields of a plan that have the same name in a candidate or an answer."""
    return {
        "batch_size": candidate.batch_size,
        "max_seq_len": candidate.max_seq_len,
        "attn_impl": candidate.attn_impl,
        "kvcache_partition_len": candidate.kvcache_partition_len,
        "kvcache_block_size": candidate.kvcache_block_size,
        "bounds": candidate.bounds,
        **{field.name: getattr(found, field.name) for field in fields(found)},
    }
