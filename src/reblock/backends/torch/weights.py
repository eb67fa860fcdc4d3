"""The weights of an artifact: one safetensors file, mapped into memory once for all programs."""

from __future__ import annotations

import hashlib
import os
from typing import TYPE_CHECKING

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from reblock.backends.torch.native.pack import is_packed
from reblock.backends.torch.refusal import NotCompilable
from reblock.errors import ArtifactMismatch, CorruptArtifact

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor, nn

__all__ = ["WEIGHTS_FILE", "check_weight_dtype", "layout_digest", "map_weights", "save_weights"]

# Not transformers' own name: the tensors are named after the modules of the model, which need not
# be the names that its checkpoints have.
WEIGHTS_FILE = "weights.safetensors"


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return every parameter and buffer by name, a tied one under each of its names."""
    return {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }


def save_weights(path: str, model: nn.Module, shapes: nn.Module) -> int:
    """Write the tensors that the programs read, and return their bytes.

    Args:
        path: the file to write.
        model: the model with its weights.
        shapes: the same model as it was compiled; it says which tensors and in what type.
    """
    loaded = named_tensors(model)
    kept: dict[str, Tensor] = {}
    for name, expected in [*shapes.named_parameters(), *shapes.named_buffers()]:
        tensor = loaded.get(name)
        if tensor is None or tensor.shape != expected.shape:
            raise NotCompilable(f"its weights do not match its configuration: {name}")
        # A copy where a tensor is a view of a larger one, which must not be written whole.
        kept[name] = tensor.detach().to(expected.dtype).contiguous().clone()
    save_file(kept, path, metadata={"format": "pt"})
    # safetensors keeps what it writes to its owner; an artifact is as public as its directory.
    os.chmod(path, 0o666 & os.stat(os.path.dirname(path)).st_mode)
    return sum(tensor.numel() * tensor.element_size() for tensor in kept.values())


def layout_digest(tensors: Mapping[str, Tensor]) -> str:
    """Return a digest of the names, types and shapes of tensors.

    Compiled code reads weights by address. Were a shape another one, it would read past the end.
    """
    layout = sorted((name, str(t.dtype), tuple(t.shape)) for name, t in tensors.items())
    return hashlib.sha256(repr(layout).encode()).hexdigest()


def check_weight_dtype(weights: Mapping[str, Tensor], weight_dtype: str, *, path: str) -> None:
    """Check that linear layers keep their weights in the type that `rbln_config.json` states.

    Programs do not depend on it, but people who choose an artifact by it do.

    Raises:
        ArtifactMismatch: They keep them in another.
    """
    kept = {str(t.dtype).removeprefix("torch.") for t in weights.values() if is_packed(t)}
    # A module of a model's own may keep its weights in a type of its own beside it.
    if kept and weight_dtype not in kept:
        raise ArtifactMismatch(
            f"its linear layers keep their weights in {', '.join(sorted(kept))}, but "
            f"rbln_config.json says {weight_dtype}",
            path=path,
        )


def map_weights(directory: str, files: Sequence[str]) -> dict[str, Tensor]:
    """Return the weights by name; their memory is the files' own, read when it is touched.

    Raises:
        CorruptArtifact: a file is cut off or no safetensors file.
    """
    weights: dict[str, Tensor] = {}
    for name in files:
        path = os.path.join(directory, name)
        try:
            with safe_open(path, framework="pt") as file:
                for key in file.keys():  # noqa: SIM118  safe_open is no mapping
                    weights[key] = file.get_tensor(key)
        except (OSError, SafetensorError) as error:
            raise CorruptArtifact(f"is no whole file of weights: {error}", path=path) from error
    return weights
