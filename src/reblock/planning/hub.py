"""A model on the Hugging Face hub: its configuration and the size of its weights.

Of the weights the headers alone are fetched. Where the hub is, who asks and whether it may be
asked at all is as huggingface_hub has it: `HF_ENDPOINT`, `HF_TOKEN`, `HF_HUB_OFFLINE`. What is
fetched lies in its cache, so that a model that was looked at once is there without a network.
"""

from __future__ import annotations

import contextlib
import logging
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from reblock.artifact.files import read_file
from reblock.errors import CorruptArtifact, MissingDependency, ReblockError, UnsupportedModel
from reblock.model_spec.weights import WeightBytes, read_weight_bytes, sum_tensors

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["HubModel", "read_hub_model"]

_INSTALL = "pip install 'reblock[hub]'"
_CONFIG = "config.json"
_UNKNOWN = "How large the weights are in the files is not known"


@dataclass(frozen=True, slots=True, kw_only=True)
class HubModel:
    """What the hub has of a model; `path` is where its `config.json` lies in the cache.

    `revision` is the commit that everything is of. `weights` are None where there are none to
    look at, and `notes` say why.
    """

    config_text: bytes
    path: str
    revision: str
    weights: WeightBytes | None
    notes: tuple[str, ...]


def read_hub_model(model_id: str) -> HubModel:
    """Return the configuration and the size of a model on the hub, or in the cache of the hub.

    Raises:
        MissingDependency: huggingface_hub is not installed.
        UnsupportedModel: There is no such model, it may not be read, or it has no configuration.
        ReblockError: The hub cannot be reached, or the cache cannot be written.
        CorruptArtifact: The file in the cache cannot be read.
    """
    try:
        import huggingface_hub  # noqa: F401  whether it is there
    except ImportError as error:
        raise MissingDependency(
            f"{model_id!r} is no file or directory here, and looking on the Hugging Face hub needs "
            f"huggingface_hub, which is not installed: {_INSTALL}",
            package="huggingface_hub",
            install=_INSTALL,
        ) from error
    with _quiet():
        path, is_reachable = _fetch_config(model_id)
        revision = os.path.basename(os.path.dirname(path))
        weights, notes = _find_weights(model_id, path, revision, is_reachable=is_reachable)
    return HubModel(
        config_text=read_file(path), path=path, revision=revision, weights=weights, notes=notes
    )


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep progress bars and remarks of huggingface_hub out of our own."""
    from huggingface_hub.utils import (  # type: ignore[attr-defined]
        are_progress_bars_disabled,
        disable_progress_bars,
        enable_progress_bars,
    )
    from huggingface_hub.utils import logging as hub_logging

    level, was_disabled = hub_logging.get_verbosity(), are_progress_bars_disabled()
    hub_logging.set_verbosity(logging.CRITICAL)
    # Where the environment asks for bars, huggingface_hub warns that they stay.
    is_asked_for = os.environ.get("HF_HUB_DISABLE_PROGRESS_BARS") is not None
    if not is_asked_for:
        disable_progress_bars()
    try:
        yield
    finally:
        hub_logging.set_verbosity(level)
        if not is_asked_for and not was_disabled:
            enable_progress_bars()


def _fetch_config(model_id: str) -> tuple[str, bool]:
    """Return where the configuration lies in the cache, and whether the hub could be asked."""
    from huggingface_hub import (
        get_hf_file_metadata,
        hf_hub_download,
        hf_hub_url,
        try_to_load_from_cache,
    )
    from huggingface_hub.errors import (  # type: ignore[attr-defined]
        HFValidationError,
        HTTPError,  # that of the package it makes requests with, which is not always the same
        RemoteEntryNotFoundError,
    )

    try:
        # A download that fails is tried for half a minute. This is not.
        get_hf_file_metadata(hf_hub_url(model_id, _CONFIG))
        return hf_hub_download(model_id, _CONFIG), True
    except (HFValidationError, RemoteEntryNotFoundError) as error:
        raise _refusal(model_id, error) from error
    except (HTTPError, OSError, RuntimeError) as error:
        cached = try_to_load_from_cache(model_id, _CONFIG)
        if isinstance(cached, str):
            return cached, False
        raise _refusal(model_id, error) from error


def _refusal(model_id: str, error: Exception) -> ReblockError:
    """Return what to tell of a model whose configuration the hub did not give."""
    from huggingface_hub import constants

    problem = _problem(model_id, error)
    if problem is not None:
        return UnsupportedModel(problem, model=model_id)
    # An answer that is an error, or a cache that cannot be written.
    if isinstance(error, OSError) and not isinstance(error, ConnectionError):
        why = f"cannot be read from {constants.ENDPOINT}: {_first_line(error)}"
    elif constants.HF_HUB_OFFLINE:
        why = "is no file or directory here and not in the cache, and HF_HUB_OFFLINE is set"
    else:
        why = (
            "is no file or directory here and not in the cache, and "
            f"{constants.ENDPOINT} cannot be reached"
        )
    return ReblockError(f"{model_id!r} {why}; check the network, or give a directory")


def _problem(model_id: str, error: Exception) -> str | None:
    """Return what is wrong with the model itself, None where the hub is what fails."""
    from huggingface_hub import constants
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        RemoteEntryNotFoundError,
        RepositoryNotFoundError,
    )

    hub = constants.ENDPOINT
    if isinstance(error, HFValidationError):
        return f"{model_id!r} is no file or directory here and no name that a model can have"
    if isinstance(error, RemoteEntryNotFoundError):
        return (
            f"{model_id!r} has no {_CONFIG} at {hub}: it may hold an adapter, whose base model is "
            "the one to give, or GGUF files, of which one can be downloaded and given"
        )
    if isinstance(error, GatedRepoError):
        return (
            f"{model_id!r} may be read only by those who were granted access: ask for it at "
            f"{hub}/{model_id}, then log in with `hf auth login`, or give a directory"
        )
    if isinstance(error, RepositoryNotFoundError):
        return (
            f"{model_id!r} is no file or directory here and no model at {hub}, or a private one: "
            "check the name, log in with `hf auth login`, or give a directory"
        )
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status in (401, 403):
        return (
            f"{model_id!r} may not be read, as {hub} answers {status}: log in with `hf auth "
            "login`, look at HF_TOKEN, or give a directory"
        )
    return None


def _find_weights(
    model_id: str, path: str, revision: str, *, is_reachable: bool
) -> tuple[WeightBytes | None, tuple[str, ...]]:
    """Return the size of the weights in the cache, or at the hub; None with the reason."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import (  # type: ignore[attr-defined]
        HTTPError,
        NotASafetensorsRepoError,
        SafetensorsParsingError,
    )

    # A download that was cut off is no fault of the model.
    with contextlib.suppress(CorruptArtifact):
        found = read_weight_bytes(os.path.dirname(path))
        if found is not None and found.source == "headers":
            return found, ()
    if not is_reachable:
        return None, (f"{_UNKNOWN}: they are not in the cache, and the hub cannot be asked.",)
    try:
        repository = HfApi().get_safetensors_metadata(model_id, revision=revision)
    except NotASafetensorsRepoError:
        return None, (f"{_UNKNOWN}: {model_id} has no safetensors files.",)
    except (SafetensorsParsingError, HTTPError, OSError, ValueError, RuntimeError) as error:
        return None, (f"{_UNKNOWN}: {_first_line(error)}.",)
    tensors = (
        (tensor.dtype, tensor.shape, tensor.data_offsets)
        for file in repository.files_metadata.values()
        for tensor in file.tensors.values()
    )
    return sum_tensors(tensors), ()


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__
