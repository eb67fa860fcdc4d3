"""What is sized: a model at one batch size, or an artifact, in the terms that both share."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from reblock.errors import InvalidOption, UsageError
from reblock.planning.model_memory import choose_types
from reblock.planning.result import Term
from reblock.planning.settings import resolve_shapes
from reblock.sizing import BlockBounds, capacity, fits, largest_fitting, last_true, smallest_budget

if TYPE_CHECKING:
    from collections.abc import Mapping

    from reblock.artifact.reader import Artifact
    from reblock.memory import MemoryPlan
    from reblock.options import AttnImpl
    from reblock.planning.model_memory import PlannedModel
    from reblock.planning.settings import PlanSettings
    from reblock.planning.sources import ModelSource
    from reblock.planning.target import Target
    from reblock.sizing import Capacity

__all__ = [
    "MAX_BATCH_SIZE",
    "Candidate",
    "ModelSubject",
    "artifact_candidate",
    "check_count",
    "most_requests",
]

# A pool for more requests than this is no answer that anyone can use.
MAX_BATCH_SIZE = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """Compiled programs, or what they will be: their shapes, bounds and memory.

    `memory` is of all devices, or of one of `num_alike` that hold the same.
    """

    memory: MemoryPlan
    num_alike: int
    terms: Mapping[str, Term]
    bounds: BlockBounds
    batch_size: int
    max_seq_len: int
    attn_impl: AttnImpl
    kvcache_partition_len: int | None
    kvcache_block_size: int

    @property
    def blocks_per_request(self) -> int:
        """The blocks of one request of the full length."""
        return -(-self.max_seq_len // self.kvcache_block_size)

    def smallest_budget(self, num_blocks: int | None = None) -> int:
        """Return the smallest budget of a device for a count, by default the fewest that work."""
        return smallest_budget(self.memory, num_blocks or self.bounds.minimum)

    def capacity(self, num_blocks: int) -> Capacity:
        """Return what that many blocks hold."""
        held = capacity(
            num_blocks,
            block_size=self.kvcache_block_size,
            max_seq_len=self.max_seq_len,
            batch_size=self.batch_size,
        )
        if self.memory.has_resizable_cache:
            return held
        # There is a cache of a fixed size for every request, whatever its length.
        return replace(
            held,
            num_tokens=0,
            num_full_sequences=self.batch_size,
            longest_sequence_tokens=self.max_seq_len,
        )

    def largest(self, budget_bytes: int) -> int | None:
        """Return the most blocks that fit and can be used, None where none do."""
        return largest_fitting(self.memory, self.bounds, budget_bytes)

    def is_full_within(self, budget_bytes: int) -> bool:
        """Return whether every request can have its full length at the same time."""
        return fits(self.memory, self.bounds.full, budget_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSubject:
    """A model that is not compiled yet, with all that was said of its compilation."""

    source: ModelSource
    settings: PlanSettings
    target: Target
    model: PlannedModel

    @classmethod
    def make(cls, source: ModelSource, settings: PlanSettings, target: Target) -> ModelSubject:
        """Return it with its types chosen.

        Raises:
            InvalidOption, UnsupportedModel: As `choose_types`.
        """
        model = choose_types(source, settings, target)
        return cls(source=source, settings=settings, target=target, model=model)

    def changed(self, **settings: object) -> ModelSubject:
        """Return it with other settings."""
        changed = replace(self.settings, **settings)  # type: ignore[arg-type]  # names of fields
        return self.make(self.source, changed, self.target)

    def at(self, batch_size: int) -> Candidate:
        """Return what its programs for `batch_size` requests would be.

        Raises:
            InvalidOption: The settings do not go together.
        """
        shapes = resolve_shapes(
            self.settings,
            self.target,
            batch_size=batch_size,
            max_position_embeddings=self.model.spec.max_position_embeddings,
        )
        memory = self.model.memory(shapes)
        plan = memory.plan
        if not plan.has_resizable_cache:
            shapes = shapes.without_blocks()
            memory = self.model.memory(shapes)
            plan = replace(memory.plan, current_blocks=batch_size)
        return Candidate(
            memory=plan,
            num_alike=self.target.num_devices,
            terms=memory.terms,
            bounds=shapes.bounds,
            batch_size=batch_size,
            max_seq_len=shapes.max_seq_len,
            attn_impl=shapes.attn_impl,
            kvcache_partition_len=shapes.kvcache_partition_len,
            kvcache_block_size=shapes.kvcache_block_size,
        )


def most_requests(subject: ModelSubject, budget_bytes: int) -> Candidate:
    """Return the candidate with the most requests of the full length that fit side by side.

    Where not even one fits, that is the candidate for one.
    """

    def holds(batch_size: int) -> bool:
        return subject.at(batch_size).is_full_within(budget_bytes)

    end = 2
    while end <= MAX_BATCH_SIZE and holds(end):
        end *= 2
    return subject.at(last_true(holds, end // 2, min(end, MAX_BATCH_SIZE + 1)) or 1)


def artifact_candidate(artifact: Artifact) -> Candidate:
    """Return what an artifact is.

    Raises:
        BadArtifact: Its programs contradict each other.
        UsageError: Its programs cannot be read here.
    """
    if not artifact.programs:
        raise UsageError(f"{artifact.directory}: its programs cannot be read here")
    config, memory = artifact.config, artifact.memory_plan()
    bounds = artifact.bounds
    if not memory.has_resizable_cache:
        bounds = BlockBounds(minimum=memory.current_blocks, full=memory.current_blocks)
    is_ours = config.backend == "torch"
    return Candidate(
        memory=memory,
        num_alike=1,
        terms={name: _artifact_term(name, is_ours=is_ours) for name in memory.static},
        bounds=bounds,
        batch_size=config.batch_size,
        max_seq_len=config.max_seq_len,
        attn_impl=config.attn_impl,
        kvcache_partition_len=(
            config.kvcache_block_size if config.attn_impl == "flash_attn" else None
        ),
        kvcache_block_size=config.kvcache_block_size,
    )


def _artifact_term(name: str, *, is_ours: bool) -> Term:
    """Return where a figure of an artifact comes from; its bytes stand in the memory plan."""
    if not is_ours:
        text = "reported by the compiler"
        return Term(name=name, num_bytes=0, basis="reported", error_bytes=None, source=text)
    if name == "Weight":
        text = "the artifact's file of weights"
        return Term(name=name, num_bytes=0, basis="exact", error_bytes=0, source=text)
    text = "measured when the artifact was compiled"
    return Term(name=name, num_bytes=0, basis="measured", error_bytes=None, source=text)


def check_count(candidate: Candidate, num_blocks: int) -> None:
    """Refuse a count where there is no choice.

    Raises:
        InvalidOption: No layer keeps tokens in blocks, and it is not the one there is.
    """
    held = candidate.memory.current_blocks
    if not candidate.memory.has_resizable_cache and num_blocks != held:
        raise InvalidOption(
            f"num_blocks={num_blocks} cannot be chosen: no layer keeps blocks, so there is one "
            f"window or state for each of {held} requests; leave it out",
            option="num_blocks",
        )
