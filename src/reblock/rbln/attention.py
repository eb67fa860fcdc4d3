"""How many blocks fit, and how many there are: the class methods of optimum-rbln over the core.

`compiled_models` maps the names of an artifact's programs to objects with the methods of the
compiler's `RBLNCompiledModel`. `rbln_config` is any object with the attributes that are read;
of these `npu`, `num_min_blocks`, `kvcache_num_blocks` and `memory_budget` may be missing.
"""

from __future__ import annotations

import logging
from contextlib import ExitStack
from typing import TYPE_CHECKING

from reblock.artifact.rebel_model import (
    RESCALE_METHOD,
    check_grids,
    read_caches,
    require_method,
    rescale,
)
from reblock.block_count import parse_block_count
from reblock.devices import get_device
from reblock.errors import BelowMinimum, BudgetTooSmall, InvalidBlockCount, NotResizable
from reblock.memory import ProgramMemory
from reblock.rbln.inputs import (
    SOURCE,
    block_limits,
    blocks_held,
    by_chiplet,
    by_node,
    check_caches,
    fewest_blocks,
    find_prefill,
    make_plan,
    read_budget,
    read_programs,
    resizable_by_name,
    resizable_names,
)
from reblock.rbln.target import target_device
from reblock.sizing import estimate, largest_fitting, resolve_budget, tightest
from reblock.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from reblock.artifact.rebel_model import CompiledModel
    from reblock.memory import MemoryPlan
    from reblock.rbln.inputs import BytesByChiplet, DecoderConfig

__all__ = ["RBLNDecoderOnlyFlashAttentionMixin"]

_logger = logging.getLogger(__name__)


class RBLNDecoderOnlyFlashAttentionMixin:
    """Sizes and resizes the KV cache of compiled models, by optimum-rbln's names."""

    @classmethod
    def set_kvcache_num_blocks_after_compilation(
        cls, compiled_models: Mapping[str, CompiledModel], rbln_config: DecoderConfig
    ) -> None:
        """Grow the one-block caches of a fresh compilation to as many blocks as fit.

        `rbln_config.kvcache_num_blocks` is set to their number.

        Raises:
            ReblockError: As `estimate_num_kvcache_blocks`, and nothing is changed.
            BelowMinimum: Without a prefill program there is one block, and it does not do.
        """
        num_blocks = cls.estimate_num_kvcache_blocks(compiled_models, rbln_config)
        _check_minimum(num_blocks, rbln_config)
        cls.multiply_kv_cache_num_blocks(compiled_models, rbln_config, num_blocks)
        rbln_config.kvcache_num_blocks = num_blocks

    @classmethod
    def estimate_num_kvcache_blocks(
        cls,
        compiled_models: Mapping[str, CompiledModel],
        rbln_config: DecoderConfig,
        current_blocks: int = 1,
    ) -> int:
        """Return the most blocks that fit into `rbln_config.memory_budget` and can be used.

        Without a prefill program that is 1, with a warning. Where no cache can be resized, it is
        the count that the caches were compiled for.

        Args:
            compiled_models: The compiled models of one artifact.
            rbln_config: Its configuration.
            current_blocks: What the resizable caches hold now: 1 just after compilation.

        Raises:
            BudgetAboveDevice: The budget is more than the device has available.
            BudgetTooSmall: The fewest blocks that the programs run with do not fit; it names the
                smallest budget that works.
            UsageError: The budget or the device cannot be read, the device has another number of
                chiplets than the programs, or the prefill program is missing.
            CompilerTooOld: A compiled model lacks a method that tells its sizes.
            BadArtifact: The sizes contradict each other, `cache_metas` or `current_blocks`.
        """
        if "prefill" not in rbln_config.phases:
            _logger.warning(
                "phases=%s has no 'prefill', so the number of blocks is not estimated: it is 1",
                list(rbln_config.phases),
            )
            return 1
        bounds = block_limits(rbln_config)
        if not resizable_names(rbln_config):
            # What a plan without a resizable cache holds is its answer.
            current_blocks = bounds.full
        sizing = estimate(
            make_plan(
                read_programs(compiled_models), resizable_by_name(rbln_config), current_blocks
            ),
            bounds,
            device=get_device(target_device(rbln_config)),
            budget=read_budget(rbln_config),
        )
        return sizing.num_blocks

    @classmethod
    def _collect_chiplet_kvcache_inputs(
        cls, compiled_models: Mapping[str, CompiledModel], rbln_config: DecoderConfig
    ) -> tuple[BytesByChiplet, dict[str, list[list[int]]], int, set[tuple[int, int]]]:
        """Return what an estimate starts from.

        That is what is not KV cache, by chiplet; the caches, unaligned; the bytes of the budget
        for one chiplet; and all chiplets.
        """
        programs = read_programs(compiled_models)
        # Only the caches' sizes as they are matter here, and not which of them can be resized.
        names = [name for program in programs for name in program.caches]
        plan = make_plan(programs, dict.fromkeys(names, True), 1)
        device = get_device(target_device(rbln_config))
        budget_bytes = resolve_budget(plan, device, read_budget(rbln_config))
        alloc = by_chiplet(plan.static_bytes)
        caches = {cache.name: [list(row) for row in cache.bytes_grid] for cache in plan.caches}
        return alloc, caches, budget_bytes // plan.num_chiplets, set(alloc)

    @classmethod
    def _search_num_kvcache_blocks(
        cls,
        rbln_config: DecoderConfig,
        alloc_without_dram: Mapping[tuple[int, int], int],
        kvcache_tensor_sizes: Mapping[str, Sequence[Sequence[int]]],
        available_per_chiplet: int,
        chiplets: Iterable[tuple[int, int]],
        current_blocks: int = 1,
    ) -> int:
        """Return the most blocks that fit into so many bytes on every chiplet and can be used.

        Raises:
            BudgetTooSmall: The fewest blocks that the programs run with do not fit.
        """
        alloc = {"not KV cache": by_node(alloc_without_dram, chiplets)}
        program = ProgramMemory(
            name=SOURCE,
            alloc=check_grids(alloc, source=SOURCE, title="alloc_without_dram"),
            caches=check_caches(kvcache_tensor_sizes),
        )
        plan = make_plan([program], resizable_by_name(rbln_config), current_blocks)
        bounds = block_limits(rbln_config)
        budget_bytes = available_per_chiplet * plan.num_chiplets
        num_blocks = largest_fitting(plan, bounds, budget_bytes)
        if num_blocks is None:
            raise _too_small(plan, bounds.minimum, available_per_chiplet)
        return num_blocks

    @classmethod
    def _kvcache_bytes_per_chiplet(
        cls,
        kvcache_tensor_sizes: Mapping[str, Sequence[Sequence[int]]],
        rbln_config: DecoderConfig,
        num_blocks: int,
        current_blocks: int = 1,
    ) -> BytesByChiplet:
        """Return what the KV cache takes of every chiplet at `num_blocks`, each tensor aligned."""
        caches = check_caches(kvcache_tensor_sizes)
        program = ProgramMemory(name=SOURCE, alloc={}, caches=caches)
        plan = make_plan([program], resizable_by_name(rbln_config), current_blocks)
        return by_chiplet(plan.kv_bytes_at(parse_block_count(num_blocks)))

    @classmethod
    def _required_memory_at(
        cls,
        compiled_models: Mapping[str, CompiledModel],
        rbln_config: DecoderConfig,
        num_blocks: int,
    ) -> int:
        """Return what the KV cache takes of all devices together at `num_blocks`, aligned.

        The models hold `rbln_config.kvcache_num_blocks` now, and one block where that is not set.
        """
        caches = read_caches("prefill", find_prefill(compiled_models))
        current = blocks_held(rbln_config) or 1
        sizes = cls._kvcache_bytes_per_chiplet(caches, rbln_config, num_blocks, current)
        return sum(sizes.values())

    @classmethod
    def multiply_kv_cache_num_blocks(
        cls,
        compiled_models: Mapping[str, CompiledModel],
        rbln_config: DecoderConfig,
        multiplier: int,
    ) -> None:
        """Grow the one-block caches of a fresh compilation to `multiplier` blocks."""
        multiplier = parse_block_count(multiplier)
        method = "exp_multiply_buffer_size"
        # All are asked before the first is changed.
        for multiply in [require_method(model, method) for model in compiled_models.values()]:
            multiply(dict.fromkeys(resizable_names(rbln_config), multiplier))

    @classmethod
    def rescale_kvcache_num_blocks(
        cls,
        compiled_models: Mapping[str, CompiledModel],
        rbln_config: DecoderConfig,
        target: int,
    ) -> None:
        """Give the caches, which hold `rbln_config.kvcache_num_blocks`, `target` blocks.

        Either all models are changed or none. `rbln_config` is left as it is: set its
        `kvcache_num_blocks` when the models are saved.

        Raises:
            InvalidBlockCount: `target` is no whole number from 1 up, or the count now is not set.
            NotResizable: No cache can be resized.
            BelowMinimum: `target` is below `num_min_blocks`.
            CompilerTooOld: A model lacks `exp_rescale_buffer_size`.
        """
        current, target = blocks_held(rbln_config), parse_block_count(target)
        if current == 0:
            raise InvalidBlockCount(
                "rbln_config.kvcache_num_blocks is not set, so it is not known how many blocks the "
                "caches hold; set it to the count the models were compiled or last resized to",
                num_blocks=current,
            )
        names = resizable_names(rbln_config)
        if not names and target != current:
            raise NotResizable(
                f"none of the {len(rbln_config.cache_metas)} caches can be resized: they were "
                f"compiled for exactly {current} blocks. Compile with attn_impl='flash_attn' and "
                "without kvcache_num_blocks to make the count changeable",
                path=SOURCE,
            )
        _check_minimum(target, rbln_config)
        for model in compiled_models.values():
            require_method(model, RESCALE_METHOD)
        _warn_of_size(target, current, rbln_config.num_full_blocks)
        with ExitStack() as undo:
            for model in compiled_models.values():
                rescale(model, names, target, current)
                undo.callback(rescale, model, names, current, target)
            undo.pop_all()


def _check_minimum(num_blocks: int, rbln_config: DecoderConfig) -> None:
    minimum = fewest_blocks(rbln_config)
    if num_blocks < minimum:
        raise BelowMinimum(
            f"kvcache_num_blocks={num_blocks} is below {minimum}, the fewest that the programs run "
            f"with (num_min_blocks); use {minimum} or more, or compile with a lower max_seq_len or "
            "batch_size",
            num_blocks=num_blocks,
            num_min_blocks=minimum,
        )


def _warn_of_size(target: int, current: int, full: int) -> None:
    if target > current:
        _logger.warning(
            "kvcache_num_blocks=%d is more than the %d blocks that there are now. Whether it fits "
            "the device is not checked here; estimate_num_kvcache_blocks says how many do",
            target,
            current,
        )
    if target > full:
        _logger.warning(
            "kvcache_num_blocks=%d is more than the %d blocks that a full batch can use "
            "(num_full_blocks); the other %d take memory for nothing",
            target,
            full,
            target - full,
        )


def _too_small(plan: MemoryPlan, minimum: int, available_per_chiplet: int) -> BudgetTooSmall:
    needed, (node, chiplet) = tightest(plan, minimum)
    return BudgetTooSmall(
        f"kvcache_num_blocks={minimum} is the fewest these programs run with, and it does not fit: "
        f"node {node}, chiplet {chiplet} needs {format_bytes(needed)}, of which "
        f"{format_bytes(plan.static_bytes[node][chiplet])} is not KV cache, but "
        f"available_per_chiplet is {format_bytes(available_per_chiplet)}. The smallest that works "
        f"is {needed}",
        needed_bytes=needed,
        tightest=(node, chiplet),
        budget_bytes=available_per_chiplet * plan.num_chiplets,
        available_bytes=available_per_chiplet * plan.num_chiplets,
        smallest_budget_bytes=needed * plan.num_chiplets,
    )
