"""What a plan says: where the memory goes, how many blocks that leaves, and what would change it.

All bytes are of one device unless a name says otherwise, and devices are alike: budgets and
waterfalls are of each of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from reblock.budget import MemoryBudget
    from reblock.options import AttnImpl
    from reblock.planning.target import Target
    from reblock.sizing import BlockBounds, Capacity, ChipletUse, Limit

__all__ = [
    "Basis",
    "CachedModel",
    "Command",
    "Interval",
    "LayerGroup",
    "NextStep",
    "Plan",
    "SharedPlan",
    "Term",
    "Waterfall",
]

# How a figure is known. exact: counted from what the model says of itself. measured: by running
# the compiled programs. reported: by the compiler. estimate: by a formula whose error is stated.
# allowance: taken over from elsewhere, with an error that nobody has measured.
Basis = Literal["exact", "measured", "reported", "estimate", "allowance"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerGroup:
    """Layers that keep the same of a sequence.

    `bytes_per_token` is of one layer, all heads. `window` is the most tokens kept, None for all.
    `state_bytes` is what one layer keeps of a sequence however long it is.
    """

    kind: str
    num_layers: int
    num_kv_heads: int
    key_width: int
    value_width: int
    index_width: int
    window: int | None
    bytes_per_token: int
    state_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedModel:
    """What a model keeps of every token, all devices together and each head once.

    `bytes_per_token` is what a token takes that is in every window, `full_bytes_per_token` what it
    takes for ever, and `fixed_bytes_per_request` what a request takes besides, however long it is:
    its windows, filled, and its states.
    """

    kv_dtype: str
    bytes_per_token: int
    full_bytes_per_token: int
    fixed_bytes_per_request: int
    layers: tuple[LayerGroup, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Term:
    """One thing that memory goes to, how its size is known, and how far that may be off.

    `error_bytes` is 0 for what is exact and None where nobody knows.
    """

    name: str
    num_bytes: int
    basis: Basis
    error_bytes: int | None
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Waterfall:
    """From the memory of one device down to what is left of the budget, `num_blocks` within.

    The terms add up to `budget_bytes - unused_bytes`; `unused_bytes` is negative where the blocks
    do not fit. `node` is the device with the tightest chiplet.
    """

    node: int
    num_blocks: int
    dram_bytes: int
    reserve_bytes: int
    outside_budget_bytes: int
    budget_bytes: int
    terms: tuple[Term, ...]
    bytes_per_block: int
    unused_bytes: int

    @property
    def available_bytes(self) -> int:
        """What programs may use of the device."""
        return self.dram_bytes - self.reserve_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """The budgets that work: from `smallest_bytes` to all that is available, both included."""

    smallest_bytes: int
    available_bytes: int

    @property
    def is_empty(self) -> bool:
        """Whether no budget works at all."""
        return self.smallest_bytes > self.available_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class NextStep:
    """The next larger answer, and the smallest budget that gives it."""

    num_blocks: int
    num_requests: int
    budget_bytes: int
    is_available: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A command line that makes the plan come true, and what it does."""

    text: str
    line: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How many blocks of KV cache fit, how many requests that is, and why not more.

    `num_blocks` is None where it does not fit; the waterfall then shows the fewest blocks, or those
    that were asked for. `is_batch_chosen` says that `batch_size` was left open, and is the most
    requests of the full length that fit side by side. `needed_bytes` is the smallest budget that
    the blocks of the waterfall fit into. `largest_num_blocks` is what all of the device would
    hold, None where not even the fewest fit; `budgets` are those that any answer exists for.
    `capacity` is None where nothing fits. `weights_dtype` is "as stored" for a checkpoint that is
    used as it is. `advice` says what to change where it does not fit.
    """

    name: str
    kind: Literal["model", "artifact"]
    module: str | None
    model_type: str
    num_parameters: int | None
    weights_dtype: str
    target: Target
    batch_size: int
    is_batch_chosen: bool
    max_seq_len: int
    attn_impl: AttnImpl
    kvcache_partition_len: int | None
    kvcache_block_size: int
    num_blocks_asked: int | None
    model: CachedModel
    budget: MemoryBudget
    budget_bytes: int
    num_blocks: int | None
    bounds: BlockBounds
    capacity: Capacity | None
    limited_by: Limit
    tightest: tuple[int, int]
    needed_bytes: int
    waterfall: Waterfall
    chiplets: tuple[ChipletUse, ...]
    budgets: Interval
    largest_num_blocks: int | None
    next_step: NextStep | None
    explanation: str
    advice: tuple[str, ...]
    commands: tuple[Command, ...]
    notes: tuple[str, ...]

    @property
    def fits(self) -> bool:
        """Whether there is an answer at all."""
        return self.num_blocks is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedPlan:
    """Several models or artifacts on the same devices.

    Every plan has as its budget the share that it is given. `needed_bytes` is what all of them take
    together with the blocks of their plans, `smallest_bytes` what they would take with the fewest
    that work, and `budget_bytes` what they may take; all of one device. `is_split` says that one
    budget was given for all and split here, and not one for each.
    """

    plans: tuple[Plan, ...]
    is_split: bool
    budget_bytes: int
    available_bytes: int
    needed_bytes: int
    smallest_bytes: int
    fits: bool
    explanation: str
