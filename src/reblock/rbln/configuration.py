"""How a decoder-only model is compiled, with the keywords, defaults and checks of optimum-rbln."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, ClassVar, Literal, get_args

from reblock.block_count import parse_block_count
from reblock.budget import parse_budget
from reblock.errors import InvalidOption, UsageError
from reblock.rbln.base_configuration import RBLNModelConfig
from reblock.rbln.cache_metas import CacheMeta
from reblock.sizing import block_bounds

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Self

    from reblock.sizing import BlockBounds

__all__ = ["RBLNDecoderOnlyModelConfig", "RBLNDecoderOnlyModelForCausalLMConfig"]

_logger = logging.getLogger(__name__)

AttnImpl = Literal["eager", "flash_attn"]
CacheImpl = Literal["static", "sliding_window", "hybrid"]
Phase = Literal["prefill", "image_prefill", "decode"]

_DEFAULT_PREFILL_CHUNK_SIZE = 128
_PREFILL_CHUNK_STEP = 64


class RBLNDecoderOnlyModelConfig(RBLNModelConfig):
    """How a decoder-only model without a head is compiled; None is not given.

    `memory_budget` bounds the device memory that the estimate of the block count counts on, for
    weights, workspace and KV cache together: a fraction of what one device has available (0.8 or
    "80%"), or bytes (10737418240 or "10GB"). It is kept as it was given and never saved.
    `kvcache_num_blocks` is 0 until the count is known.

    Raises:
        UsageError: A keyword is unknown, a value is not accepted, or two exclude each other.
        NotImplementedError: `logits_to_keep` is above 1.
    """

    _default_phases: ClassVar[tuple[Phase, ...]] = ("prefill",)
    _default_logits_to_keep: ClassVar[int] = 0
    _saved_names: ClassVar[tuple[str, ...]] = (
        *RBLNModelConfig._saved_names,
        "batch_size",
        "max_seq_len",
        "use_inputs_embeds",
        "use_position_ids",
        "use_attention_mask",
        "quantization",
        "lora_config",
        "attn_impl",
        "kvcache_partition_len",
        "kvcache_block_size",
        "prefill_chunk_size",
        "kvcache_num_blocks",
        "cache_impl",
        "sliding_window",
        "sliding_window_layers",
        "phases",
        "logits_to_keep",
        "output_hidden_states",
        "_requires_batch_sort",
        "decoder_batch_sizes",
        "cache_metas",
    )

    def __init__(
        self,
        batch_size: int | None = None,
        max_seq_len: int | None = None,
        use_inputs_embeds: bool | None = None,
        use_attention_mask: bool | None = None,
        use_position_ids: bool | None = None,
        attn_impl: AttnImpl | None = None,
        kvcache_partition_len: int | None = None,
        kvcache_block_size: int | None = None,
        quantization: object = None,
        lora_config: object = None,
        prefill_chunk_size: int | None = None,
        kvcache_num_blocks: int | None = None,
        memory_budget: float | str | None = None,
        decoder_batch_sizes: Sequence[int] | None = None,
        cache_impl: CacheImpl | None = None,
        sliding_window: int | None = None,
        sliding_window_layers: list[int] | None = None,
        phases: list[Phase] | None = None,
        logits_to_keep: int | None = None,
        output_hidden_states: bool | None = None,
        cache_metas: Sequence[CacheMeta | Mapping[str, object]] | None = None,
        _requires_batch_sort: bool | None = None,
        **kwargs: object,
    ) -> None:
        # The keywords of every configuration, which check themselves.
        super().__init__(**kwargs)  # type: ignore[arg-type]
        self.batch_size = _positive("batch_size", 1 if batch_size is None else batch_size)
        self.max_seq_len = _positive_or_none("max_seq_len", max_seq_len)
        self.use_inputs_embeds = use_inputs_embeds or False
        self.use_attention_mask = use_attention_mask or False
        self.use_position_ids = use_position_ids or False
        if self.use_position_ids and not self.use_attention_mask:
            raise InvalidOption(
                "use_position_ids=True needs use_attention_mask=True; give both or neither",
                option="use_position_ids",
            )
        self.quantization = quantization or {}
        self.lora_config = lora_config
        self.kvcache_partition_len = _positive_or_none(
            "kvcache_partition_len", kvcache_partition_len
        )
        self.attn_impl = _resolve_attn_impl(attn_impl, self.kvcache_partition_len)
        self.kvcache_block_size = _positive_or_none("kvcache_block_size", kvcache_block_size)
        self.prefill_chunk_size = _check_chunk_size(prefill_chunk_size)
        self.kvcache_num_blocks = parse_block_count(kvcache_num_blocks) if kvcache_num_blocks else 0
        self.memory_budget = _check_budget(memory_budget, self.kvcache_num_blocks)
        self.cache_impl = _one_of_choices("cache_impl", cache_impl, get_args(CacheImpl)) or "static"
        self.sliding_window = _positive_or_none("sliding_window", sliding_window)
        self.sliding_window_layers = list(sliding_window_layers or [])
        self.phases = _check_phases(phases) or list(self._default_phases)
        self.logits_to_keep = self._check_logits(logits_to_keep)
        self.output_hidden_states = output_hidden_states or False
        self._requires_batch_sort = _requires_batch_sort
        self.decoder_batch_sizes = (
            _resolve_decoders(decoder_batch_sizes, self.batch_size) if self.can_generate else None
        )
        self.cache_metas = [
            meta if isinstance(meta, CacheMeta) else CacheMeta.from_serialized(meta)
            for meta in cache_metas or []
        ]

    @classmethod
    def _from_values(cls, values: dict[str, object]) -> Self:
        if "kvcache_num_blocks" not in values:
            raise UsageError(
                "is no configuration of a decoder-only model: kvcache_num_blocks is missing"
            )
        # Multiples of 64 are what RBLN devices take; programs for a cpu may have other chunks.
        chunk_size = values.get("prefill_chunk_size")
        others = {name: value for name, value in values.items() if name != "prefill_chunk_size"}
        config = super()._from_values(others)
        config.prefill_chunk_size = _positive(
            "prefill_chunk_size", _DEFAULT_PREFILL_CHUNK_SIZE if chunk_size is None else chunk_size
        )
        return config

    def _check_logits(self, logits_to_keep: int | None) -> int:
        if logits_to_keep is None:
            return self._default_logits_to_keep
        if logits_to_keep > 1:
            raise NotImplementedError(
                f"logits_to_keep={logits_to_keep} is not supported: 0 keeps the logits of all "
                "tokens, 1 those of the last"
            )
        return logits_to_keep

    @property
    def use_global_attention(self) -> bool:
        """Whether any layer sees the whole past."""
        return self.cache_impl in ("static", "hybrid")

    @property
    def use_local_attention(self) -> bool:
        """Whether any layer sees a window of the past."""
        return self.cache_impl in ("sliding_window", "hybrid")

    @property
    def use_multiple_decoder(self) -> bool:
        """Whether there are decoders of several batch sizes."""
        return self.decoder_batch_sizes is not None and len(self.decoder_batch_sizes) > 1

    @property
    def can_generate(self) -> bool:
        """Whether there is a decoder."""
        return "decode" in self.phases

    @property
    def is_auto_num_blocks(self) -> bool:
        """Whether the block count is still to be estimated."""
        return self.kvcache_num_blocks == 0

    @property
    def num_full_blocks(self) -> int:
        """The most blocks that the programs can use."""
        return self._bounds().full

    @property
    def num_min_blocks(self) -> int:
        """The fewest blocks that the programs run with."""
        return self._bounds().minimum

    def _bounds(self) -> BlockBounds:
        if self.max_seq_len is None or self.kvcache_block_size is None:
            option = "max_seq_len" if self.max_seq_len is None else "kvcache_block_size"
            raise InvalidOption(
                f"{option} is not set, so it is not known how many blocks the programs use; set it",
                option=option,
            )
        return block_bounds(
            attn_impl="flash_attn" if self.attn_impl == "flash_attn" else "eager",
            max_seq_len=self.max_seq_len,
            block_size=self.kvcache_block_size,
            batch_size=self.batch_size,
        )


class RBLNDecoderOnlyModelForCausalLMConfig(RBLNDecoderOnlyModelConfig):
    """How a decoder-only model that generates text is compiled."""

    _default_phases: ClassVar[tuple[Phase, ...]] = ("prefill", "decode")
    _default_logits_to_keep: ClassVar[int] = 1


def _positive(option: str, value: object) -> int:
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return value
    raise InvalidOption(f"{option}={value!r} must be a whole number from 1 up", option=option)


def _positive_or_none(option: str, value: int | None) -> int | None:
    return None if value is None else _positive(option, value)


def _one_of_choices(option: str, value: str | None, choices: Sequence[str]) -> str | None:
    if value is None or value in choices:
        return value
    raise InvalidOption(
        f"{option}={value!r} is not known; choose {', '.join(choices[:-1])} or {choices[-1]}",
        option=option,
    )


def _resolve_attn_impl(attn_impl: str | None, partition_len: int | None) -> str | None:
    attn_impl = _one_of_choices("attn_impl", attn_impl, get_args(AttnImpl))
    if partition_len is None or attn_impl == "flash_attn":
        return attn_impl
    _logger.warning(
        "kvcache_partition_len=%d is for attn_impl='flash_attn', so that is taken and not %r",
        partition_len,
        attn_impl,
    )
    return "flash_attn"


def _check_chunk_size(value: int | None) -> int:
    size = _DEFAULT_PREFILL_CHUNK_SIZE if value is None else _positive("prefill_chunk_size", value)
    if size % _PREFILL_CHUNK_STEP:
        raise InvalidOption(
            f"prefill_chunk_size={size} must be a multiple of {_PREFILL_CHUNK_STEP}",
            option="prefill_chunk_size",
        )
    return size


def _check_budget(budget: float | str | None, num_blocks: int) -> float | str | None:
    """Return the budget as it was given, after reading it for a mistake."""
    if budget is None:
        return None
    parse_budget(budget)
    if num_blocks:
        raise UsageError(
            f"memory_budget={budget!r} and kvcache_num_blocks={num_blocks} exclude each other: one "
            "asks for as many blocks as fit, the other says how many; leave one of them out"
        )
    return budget


def _check_phases(phases: list[Phase] | None) -> list[str]:
    known = get_args(Phase)
    if phases is None:
        return []
    if not isinstance(phases, list) or not all(phase in known for phase in phases):
        raise InvalidOption(
            f"phases={phases!r} must be a list of some of {', '.join(known)}", option="phases"
        )
    return list(phases)


def _resolve_decoders(sizes: Sequence[int] | None, batch_size: int) -> list[int]:
    """Return the batch sizes of the decoders, the largest first."""
    option = "decoder_batch_sizes"
    if sizes is None:
        return [batch_size]
    if not isinstance(sizes, (list, tuple)):
        raise InvalidOption(f"{option}={sizes!r} must be a list of batch sizes", option=option)
    decoders = sorted((_positive(option, size) for size in sizes), reverse=True)
    largest = max(decoders, default=0)
    if largest > batch_size:
        raise InvalidOption(
            f"{option}={list(sizes)} has {largest}, which is above batch_size={batch_size}; take "
            "it out, or raise batch_size to it",
            option=option,
        )
    if largest < batch_size:
        _logger.warning(
            "decoder_batch_sizes=%s does not reach batch_size=%d, which is added",
            list(sizes),
            batch_size,
        )
        decoders.insert(0, batch_size)
    return decoders
