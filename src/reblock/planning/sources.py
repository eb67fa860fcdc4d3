"""From the name that a user writes to what is known of a model before it is compiled.

A name is, in this order: a directory, a file, and otherwise the id of a model on the Hugging Face
hub, unless it looks like a path. So a file that was misspelt is never looked for on a network.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from reblock.artifact.files import read_file
from reblock.artifact.location import config_path
from reblock.errors import CorruptArtifact, NotAnArtifact, UnsupportedModel
from reblock.json_fields import parse_json_object
from reblock.model_spec import parse_model_config, read_weight_bytes
from reblock.planning.gguf_file import read_gguf
from reblock.planning.hub import read_hub_model

if TYPE_CHECKING:
    from reblock.model_spec import ModelSpec, WeightBytes

__all__ = ["ModelSource", "is_artifact", "open_model"]

_CONFIG = "config.json"
_ADAPTER = "adapter_config.json"
_GGUF = ".gguf"
_MAX_LISTED = 8
# What the hub allows: an owner and a name, or a name alone.
_HUB_ID = re.compile(r"(?:\w[\w.-]*/)?\w[\w.-]{0,95}", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSource:
    """A model that is not compiled yet.

    `name` is what `reblock compile` takes: as the user wrote it, but the directory of a
    `config.json` and the GGUF file of a directory. `stored` are the weights as the checkpoint has
    them, None where none were seen. `notes` stand beside those of `spec`.
    """

    name: str
    kind: Literal["directory", "gguf", "hub"]
    spec: ModelSpec
    stored: WeightBytes | None
    notes: tuple[str, ...]


def open_model(name: str) -> ModelSource:
    """Return what is known of the model `name`: a directory, a file or a hub id.

    Raises:
        UnsupportedModel: There is no such model, or it is none that writes token by token.
        CorruptArtifact: A file of it cannot be read or is not what it must be.
        MissingDependency: It is not here, and the package that asks the hub is not installed.
        ReblockError: The hub cannot be asked.
    """
    if os.path.isdir(name):
        return _open_directory(name)
    if os.path.lexists(name):
        return _open_file(name)
    if _is_path_like(name) or not _HUB_ID.fullmatch(name):
        raise UnsupportedModel(f"{name!r}: there is no such file or directory", model=name)
    found = read_hub_model(name)
    spec = parse_model_config(found.config_text, path=found.path)
    return ModelSource(name=name, kind="hub", spec=spec, stored=found.weights, notes=found.notes)


def is_artifact(name: str) -> bool:
    """Return whether `name` is the directory of a compiled artifact.

    It may hold the `config.json` of the model besides.

    Raises:
        PermissionError: The system does not let one see.
    """
    try:
        config_path(name)
    except NotAnArtifact:
        return False
    return True


def _is_path_like(name: str) -> bool:
    return name.startswith((".", "/", "~")) or name.endswith((_GGUF, ".json"))


def _open_directory(directory: str) -> ModelSource:
    config = os.path.join(directory, _CONFIG)
    if os.path.lexists(config):
        spec = parse_model_config(read_file(config), path=config)
        stored = read_weight_bytes(directory)
        return ModelSource(name=directory, kind="directory", spec=spec, stored=stored, notes=())
    if os.path.lexists(os.path.join(directory, _ADAPTER)):
        raise UnsupportedModel(
            f"{directory!r} holds an adapter; give its base model{_base_model(directory)}, with "
            "the adapter merged into it where it is to be compiled",
            model=directory,
        )
    files = [name for name in _list(directory) if name.endswith(_GGUF)]
    if not files:
        raise UnsupportedModel(
            f"{directory!r} has no {_CONFIG} and no {_GGUF} file, so it holds no model",
            model=directory,
        )
    if len(files) > 1:
        listed = ", ".join(files[:_MAX_LISTED]) + (", ..." if len(files) > _MAX_LISTED else "")
        raise UnsupportedModel(
            f"{directory!r} has no {_CONFIG} but {len(files)} GGUF files; give one of them: "
            f"{listed}",
            model=directory,
        )
    return _open_gguf(os.path.join(directory, files[0]))


def _list(directory: str) -> list[str]:
    try:
        return sorted(name for name in os.listdir(directory) if name.isprintable())
    except OSError as error:
        raise CorruptArtifact(f"cannot be read: {error.strerror}", path=directory) from error


def _base_model(directory: str) -> str:
    """Return the name of an adapter's base model, to stand in a sentence."""
    path = os.path.join(directory, _ADAPTER)
    base = parse_json_object(read_file(path), path=path).get("base_model_name_or_path")
    return f", {base!r}" if isinstance(base, str) and base and base.isprintable() else ""


def _open_file(path: str) -> ModelSource:
    if path.endswith(_GGUF):
        return _open_gguf(path)
    if not path.endswith(".json"):
        raise UnsupportedModel(
            f"{path!r} is neither a directory nor a {_GGUF} file nor a {_CONFIG}; give the "
            "directory of the model",
            model=path,
        )
    directory, name = os.path.split(path)
    if name == _CONFIG:
        return _open_directory(directory or os.curdir)
    # What lies beside a file of another name need not belong to it.
    spec = parse_model_config(read_file(path), path=path)
    note = f"Weights were not looked for, as {name} is not called {_CONFIG}."
    return ModelSource(name=path, kind="directory", spec=spec, stored=None, notes=(note,))


def _open_gguf(path: str) -> ModelSource:
    model = read_gguf(path)
    spec = parse_model_config(json.dumps(model.config), path=path)
    return ModelSource(name=path, kind="gguf", spec=spec, stored=model.weights, notes=())
