"""The Python interface of optimum-rbln, as far as it deals with the KV cache and generation.

Scripts written for optimum-rbln find here, under the same names, what they import from there.
Nothing of optimum-rbln is imported, and the model class, which needs torch, is loaded when it is
first used; all else is arithmetic over the core of reblock.
"""

from __future__ import annotations

from reblock.rbln.attention import RBLNDecoderOnlyFlashAttentionMixin
from reblock.rbln.cache_metas import (
    CacheMeta,
    FullAttentionKVCacheMeta,
    KVCacheMeta,
    LinearAttentionCacheMeta,
    SlidingWindowAttentionKVCacheMeta,
)
from reblock.rbln.compiled_model import RBLNCompiledModel
from reblock.rbln.configuration import (
    RBLNDecoderOnlyModelConfig,
    RBLNDecoderOnlyModelForCausalLMConfig,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from reblock.rbln.modeling import RBLNAutoModelForCausalLM

__all__ = [
    "CacheMeta",
    "FullAttentionKVCacheMeta",
    "KVCacheMeta",
    "LinearAttentionCacheMeta",
    "RBLNAutoModelForCausalLM",
    "RBLNCompiledModel",
    "RBLNDecoderOnlyFlashAttentionMixin",
    "RBLNDecoderOnlyModelConfig",
    "RBLNDecoderOnlyModelForCausalLMConfig",
    "SlidingWindowAttentionKVCacheMeta",
]


def __getattr__(name: str) -> object:
    if name != "RBLNAutoModelForCausalLM":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from reblock.rbln.modeling import RBLNAutoModelForCausalLM

    return RBLNAutoModelForCausalLM


def __dir__() -> list[str]:
    return __all__
