"""What a process of the torch backend holds besides weights and cache, before anything is compiled.

An artifact says it of itself, as it was measured. Before that it can only be estimated:

    Runtime     Python, torch, transformers, the tokenizer and the code of the programs
    Workspace   the tensors of one layer at its largest step, what the native operators keep for
                themselves, and the gaps of the allocator's heap

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
_BASE_WORKSPACE_BYTES = 6 * MIB
_FLOAT_BYTES = 4
# Input, normalised input and residual; the gate, what goes through it, and their product.
_NUM_HIDDEN = 3
_NUM_INNER = 3
# A query before and after rotation and the output; keys and values before and after.
_NUM_QUERIES = 3
_NUM_NEW_KEYS = 2
# The native linear layers rearrange that many tokens at once, and sum up an eighth of their outputs
# in all threads together; see native/linear.h.
_LINEAR_TOKENS = 512
_LINEAR_SHARE = 8
# A decoder's attention has a partial result for each range of keys; see native/attention.h.
_RANGE_KEYS = 256
_MOST_RANGES = 64
_PARTIAL_FLOATS = 16  # besides the values
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
    """What the tensors of a model depend on; `inner` is of all experts of a layer together."""

    value_bytes: int
    hidden: int
    inner: int
    heads: int
    vocabulary: int
    layers: frozenset[LayerCache]
    has_experts: bool


def estimate_overhead(
    spec: ModelSpec,
    *,
    dtype: str,
    batch_size: int,
    max_seq_len: int,
    prefill_chunk_size: int,
    decoder_batch_sizes: tuple[int, ...],
) -> Overhead | None:
    """Return what programs of these shapes will take, None where `spec` lacks a width of them.

    The vocabulary stands for the tokenizer, which is not looked at.
    """
    widths = _read_widths(spec, DTYPE_BYTES[dtype])
    if widths is None:
        return None
    rows = max((batch_size, *decoder_batch_sizes))
    num_tokens = max(rows, prefill_chunk_size)
    live = _step_bytes(widths, num_tokens)
    gaps = _gap_bytes(widths, live, num_tokens)
    logits = rows * widths.vocabulary * _FLOAT_BYTES
    scratch = _linear_bytes(widths, num_tokens, rows) + _partial_bytes(widths, rows, max_seq_len)
    # The runtime has gaps as well, which what is live may fill, or not.
    doubtful = gaps + min(live, _HEAP_TENSOR_BYTES)
    num_programs = 1 + len(decoder_batch_sizes)
    return Overhead(
        runtime_bytes=_runtime_bytes(spec.model_type, widths, num_programs),
        runtime_error_bytes=_RUNTIME_ERROR_BYTES + _TOKEN_ERROR_BYTES * widths.vocabulary,
        workspace_bytes=_BASE_WORKSPACE_BYTES + live + logits + scratch + gaps,
        workspace_error_bytes=_WORKSPACE_ERROR_BYTES + doubtful,
    )


def _read_widths(spec: ModelSpec, value_bytes: int) -> _Widths | None:
    hidden, inner, vocabulary = spec.hidden_size, spec.intermediate_size, spec.vocab_size
    if hidden is None or inner is None or vocabulary is None:
        return None
    heads = spec.num_attention_heads or 1  # a model without attention
    experts = _expert_width(spec, hidden, inner, heads, vocabulary)
    return _Widths(
        value_bytes=value_bytes,
        hidden=hidden,
        inner=experts or inner,
        heads=heads,
        vocabulary=vocabulary,
        layers=frozenset(spec.layers),
        has_experts=experts is not None,
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
    # The output layer has a matrix of its own, or shares that of the embeddings. So a model counts
    # as one of experts where they are half as wide again as a layer without could be.
    is_wide = 2 * (rest - vocabulary * hidden) > 3 * inner * per_width
    return rest // per_width if is_wide else None


def _runtime_bytes(model_type: str, widths: _Widths, num_programs: int) -> int:
    num_pieces = len(widths.layers) + _PIECES_BESIDES_LAYERS
    first = min(widths.vocabulary, _NUM_FIRST_TOKENS)
    return (
        _BASE_RUNTIME_BYTES
        + (_HEAVY_IMPORT_BYTES if model_type in _HEAVY_IMPORTS else 0)
        + num_pieces * num_programs * _PIECE_BYTES
        + first * _TOKEN_BYTES
        + (widths.vocabulary - first) * _FURTHER_TOKEN_BYTES
    )


def _step_bytes(widths: _Widths, num_tokens: int) -> int:
    """Return what the widest layer holds at once in a step of that many tokens, of any rows."""
    attention = (
        _NUM_QUERIES * widths.heads * layer.key_width + _NUM_NEW_KEYS * layer.elements_per_token
        for layer in widths.layers
    )
    widest = max((_NUM_INNER * widths.inner, *attention))
    return num_tokens * widths.value_bytes * (_NUM_HIDDEN * widths.hidden + widest)


def _linear_bytes(widths: _Widths, num_tokens: int, rows: int) -> int:
    """Return what the linear layers keep: their inputs rearranged, and sums of all threads."""
    tokens = min(num_tokens, _LINEAR_TOKENS)
    widest = max(
        widths.hidden,
        0 if widths.has_experts else widths.inner,  # experts are products of another kind
        *(widths.heads * layer.key_width for layer in widths.layers),
    )
    sums = max(tokens * widest, min(rows, _LINEAR_TOKENS) * widths.vocabulary) // _LINEAR_SHARE
    return _FLOAT_BYTES * (tokens * widest + sums)


def _partial_bytes(widths: _Widths, rows: int, max_seq_len: int) -> int:
    """Return what a decoder's attention keeps: partial results of `rows` tokens."""

    def floats(layer: LayerCache) -> int:
        num_keys = min(max_seq_len, layer.window or max_seq_len)
        num_ranges = min(-(-num_keys // _RANGE_KEYS), _MOST_RANGES)
        return widths.heads * num_ranges * (layer.value_width + _PARTIAL_FLOATS)

    return _FLOAT_BYTES * rows * max(map(floats, widths.layers), default=0)


def _gap_bytes(widths: _Widths, live: int, num_tokens: int) -> int:
    """Return what the heap keeps between and behind the tensors of a step."""
    gaps = min(live, _HEAP_BYTES) // 2
    if widths.has_experts:
        # What experts compute is of three sizes, which leave more: about as much as it takes.
        gaps += num_tokens * widths.value_bytes * _NUM_INNER * widths.inner
    return min(gaps, _HEAP_BYTES)
