"""Why `reblock compile` would refuse a model, as far as its config.json shows.

The compiler finds out more: it runs the model's own code on shapes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from reblock.model_spec import ModelSpec

__all__ = ["obstacles"]

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
