"""What a process of the torch backend holds besides weights and cache, before anything is compiled.

An artifact says it of itself, as it was measured. Before that it can only be estimated:

    Runtime     Python, torch, transformers, the tokenizer and the code of the programs
    Workspace   the tensors of one layer at its largest step, and what the allocator keeps of them

A layer's tensors are counted from shapes. Every other constant here was fitted to compilations with
torch 2.13.0 for the CPU, transformers 5.24.0 and Python 3.11 on Linux with glibc, by what a process
that serves a full batch was seen to take. Other versions will be off by more than is stated.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from reblock.config import DTYPE_BYTES
from reblock.units import MIB

if TYPE_CHECKING:
    from reblock.model_spec import LayerCache, ModelSpec

__all__ = ["Overhead", "estimate_overhead"]

# A process that has imported torch and transformers and mapped the weights.
_BASE_RUNTIME_BYTES = 260 * MIB
# Each compiled piece is mapped once for every program that it is part of.
_PIECE_BYTES = MIB
_PIECES_BESIDES_LAYERS = 2  # in front of them and behind them
# transformers reads the configuration beside a tokenizer, and for these types its module imports
# what models are made of, accelerate with it.
_HEAVY_IMPORTS = frozenset(
    {"exaone", "gemma4", "gemma4_text", "hrm_text", "jais2", "llama", "olmo_hybrid"}
)
_HEAVY_IMPORT_BYTES = 53 * MIB
# Byte-level BPE. Past the first entries there is room in what reading the file has left free.
_TOKEN_BYTES = 1000
_FURTHER_TOKEN_BYTES = 780
_NUM_FIRST_TOKENS = 65_536

# What is there however small the shapes are: matrix products' own buffers, the sampler.
_BASE_WORKSPACE_BYTES = 8 * MIB
_SCORE_BYTES = 4
# Scores before and after the softmax, where a model's attention is spelled out.
_NUM_SCORES = 2
_SPELLED_OUT = frozenset({"gemma2", "gpt_oss", "vaultgemma"})
# Input, normalised input and residual; the gate, what goes through it, and their product.
_NUM_HIDDEN = 3
_NUM_INNER = 3
# A query before and after rotation and the output; keys and values before and after.
_NUM_QUERIES = 3
_NUM_NEW_KEYS = 2
# glibc cuts tensors of less than 32 MiB out of its heap, which keeps gaps between them and up to
# twice that at its end (M_TRIM_THRESHOLD); larger ones it takes from the system, and gives back.
_HEAP_TENSOR_BYTES = 32 * MIB
_HEAP_BYTES = 2 * _HEAP_TENSOR_BYTES

_RUNTIME_ERROR_BYTES = 8 * MIB
_TOKEN_ERROR_BYTES = 80
_WORKSPACE_ERROR_BYTES = 8 * MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class Overhead:
    """An estimate of both terms, and how far each was off at most where it was calibrated."""

    runtime_bytes: int
    runtime_error_bytes: int
    workspace_bytes: int
    workspace_error_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Widths:
    hidden: int
    inner: int
    heads: int
    vocabulary: int
    has_experts: bool
    spells_out: bool


def estimate_overhead(
    spec: ModelSpec,
    *,
    dtype: str,
    batch_size: int,
    max_seq_len: int,
    prefill_chunk_size: int,
    decoder_batch_sizes: tuple[int, ...],
    kvcache_block_size: int,
) -> Overhead | None:
    """Return what programs of these shapes will take, None where `spec` lacks a width of them.

    The vocabulary stands for the tokenizer, which is not looked at.
    """
    widths = _read_widths(spec)
    if widths is None:
        return None
    num_programs = 1 + len(decoder_batch_sizes)
    num_pieces = len(set(spec.layers)) + _PIECES_BESIDES_LAYERS
    # Tables name whole blocks.
    seq_len = -(-max_seq_len // kvcache_block_size) * kvcache_block_size
    rows = max((batch_size, *decoder_batch_sizes))
    prefill = _step_bytes(spec, widths, DTYPE_BYTES[dtype], 1, prefill_chunk_size, seq_len)
    decode = _step_bytes(spec, widths, DTYPE_BYTES[dtype], rows, 1, seq_len)
    live = max(prefill, decode)
    gaps = min(live, _HEAP_BYTES) // 2
    if widths.has_experts:
        # Their tensors and pages are of other sizes, so neither fits into the gaps of the other.
        gaps = min((prefill + decode) * 5 // 4, _HEAP_BYTES)
    logits = rows * widths.vocabulary * _SCORE_BYTES
    # The runtime has gaps as well, which what is live may fill, or not.
    doubtful = gaps + min(live, _HEAP_TENSOR_BYTES)
    return Overhead(
        runtime_bytes=_runtime_bytes(spec, widths.vocabulary, num_pieces * num_programs),
        runtime_error_bytes=_RUNTIME_ERROR_BYTES + _TOKEN_ERROR_BYTES * widths.vocabulary,
        workspace_bytes=_BASE_WORKSPACE_BYTES + live + logits + gaps,
        workspace_error_bytes=_WORKSPACE_ERROR_BYTES + doubtful,
    )


def _read_widths(spec: ModelSpec) -> _Widths | None:
    hidden, inner = spec.hidden_size, spec.intermediate_size
    heads, vocabulary = spec.num_attention_heads, spec.vocab_size
    if hidden is None or inner is None or vocabulary is None:
        return None
    heads = heads or 1  # a model without attention
    experts = _expert_width(spec, hidden, inner, heads, vocabulary)
    return _Widths(
        hidden=hidden,
        inner=experts or inner,
        heads=heads,
        vocabulary=vocabulary,
        has_experts=experts is not None,
        spells_out=spec.model_type in _SPELLED_OUT,
    )


def _expert_width(
    spec: ModelSpec, hidden: int, inner: int, heads: int, vocabulary: int
) -> int | None:
    """Return the inner width of all experts of a layer together, None where it has none.

    Parameters tell: what is neither embedding nor attention is experts, of three matrices each.
    """
    if spec.num_parameters is None or not spec.layers:
        return None
    attention = sum(
        hidden * (heads * (layer.key_width + layer.value_width) + layer.elements_per_token)
        for layer in spec.layers
    )
    rest = spec.num_parameters - attention - vocabulary * hidden
    per_width = 3 * hidden * len(spec.layers)
    # The output layer has a matrix of its own, or shares that of the embeddings.
    is_wide = 2 * (rest - vocabulary * hidden) > 3 * inner * per_width
    return rest // per_width if is_wide else None


def _runtime_bytes(spec: ModelSpec, vocabulary: int, num_loaded_pieces: int) -> int:
    first = min(vocabulary, _NUM_FIRST_TOKENS)
    return (
        _BASE_RUNTIME_BYTES
        + (_HEAVY_IMPORT_BYTES if spec.model_type in _HEAVY_IMPORTS else 0)
        + num_loaded_pieces * _PIECE_BYTES
        + first * _TOKEN_BYTES
        + (vocabulary - first) * _FURTHER_TOKEN_BYTES
    )


def _step_bytes(
    spec: ModelSpec, widths: _Widths, value_bytes: int, rows: int, tokens: int, seq_len: int
) -> int:
    """Return what the widest layer holds at once in a step of that many rows and tokens."""
    stream = rows * tokens * value_bytes * _NUM_HIDDEN * widths.hidden
    inner = rows * tokens * value_bytes * _NUM_INNER * widths.inner
    attention = max(
        (
            _attention_bytes(layer, widths, value_bytes, rows, tokens, seq_len)
            for layer in set(spec.layers)
        ),
        default=0,
    )
    return stream + (attention + inner if widths.has_experts else max(attention, inner))


def _attention_bytes(
    layer: LayerCache, widths: _Widths, value_bytes: int, rows: int, tokens: int, seq_len: int
) -> int:
    """Return what a layer's attention holds: gathered keys and values, the mask, new tokens."""
    if not layer.elements_per_token:
        return 0
    is_ring = layer.window is not None and layer.window < seq_len
    num_keys = layer.window + tokens if is_ring and layer.window is not None else seq_len
    pages = rows * num_keys * layer.elements_per_token * value_bytes
    mask = rows * tokens * num_keys * value_bytes
    scores = 0
    if widths.spells_out:
        scores = rows * widths.heads * tokens * num_keys * _SCORE_BYTES * _NUM_SCORES
    queries = _NUM_QUERIES * widths.heads * layer.key_width
    new = rows * tokens * value_bytes * (queries + _NUM_NEW_KEYS * layer.elements_per_token)
    return pages + mask + scores + new
