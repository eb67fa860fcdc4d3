"""Why `reblock compile` would refuse a model, as far as its config.json shows.

The compiler finds out more: it runs the model's own code on shapes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from reblock.config import DTYPE_BYTES

if TYPE_CHECKING:
    from reblock.model_spec import ModelSpec
    from reblock.planning.settings import PlanSettings
    from reblock.planning.sources import ModelSource

__all__ = ["obstacles", "obstacles_for_rbln"]

_KINDS = {
    "latent": "latent attention",
    "recurrent": "layers with a recurrent state",
    "chunked": "chunked attention",
    "shared": "layers that read another layer's cache",
}


def obstacles(spec: ModelSpec) -> tuple[str, ...]:
    """Return what in a model is not compiled for the cpu; docs/models.md has the reasons."""
    kinds = {layer.kind for layer in spec.layers}
    kinds |= {"recurrent" for layer in spec.layers if layer.state_elements}
    found = [text for kind, text in _KINDS.items() if kind in kinds]
    if spec.is_quantized:
        found.append("quantized weights")
    return tuple(found)


def obstacles_for_rbln(source: ModelSource, settings: PlanSettings) -> tuple[str, ...]:
    """Return sentences on what of a plan optimum-rbln does not make, or not by an option."""
    notes = []
    if source.kind == "gguf":
        notes.append("optimum-rbln does not read GGUF files; compile the original model.")
    if settings.kv_dtype is not None:
        notes.append(
            f"optimum-rbln has no option for a cache of {settings.kv_dtype} alone; see its "
            "quantization."
        )
    if settings.dtype is not None and DTYPE_BYTES[settings.dtype] == 1:
        notes.append(
            f"optimum-rbln has no option for weights of {settings.dtype} alone; see its "
            "quantization."
        )
    return tuple(notes)
