"""`RBLNAutoModelForCausalLM`: compile a model or load an artifact, as in optimum-rbln.

Loads no torch until a model is compiled or loaded.
"""

from __future__ import annotations

import fnmatch
import logging
import os
import shutil
import tempfile
import weakref
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn

from reblock.artifact.location import CONFIG_NAME, locate
from reblock.artifact.reader import open_artifact, read_config
from reblock.artifact.transaction import check_destination
from reblock.backends.loading import check_backend, require_torch
from reblock.errors import (
    InvalidOption,
    UnsupportedModel,
    UsageError,
)
from reblock.progress import SilentProgress
from reblock.rbln.arguments import check_compiled, read_arguments

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from contextlib import AbstractContextManager

    from reblock.options import CompileOptions
    from reblock.rbln.arguments import Arguments
    from reblock.rbln.generation import RBLNModelForCausalLM

__all__ = ["RBLNAutoModelForCausalLM"]

_logger = logging.getLogger(__name__)

# What a model repository holds that is of use here beside its weights; code is not.
_DESCRIPTION = ("*.json", "*.model", "*.txt", "*.jinja")


class RBLNAutoModelForCausalLM:
    """Makes models from what `from_pretrained` is given; there are no objects of it."""

    def __init__(self) -> None:
        raise UsageError("use RBLNAutoModelForCausalLM.from_pretrained(model_or_artifact)")

    @classmethod
    def from_pretrained(
        cls,
        model_id: str | os.PathLike[str],
        export: bool | None = None,
        rbln_config: object = None,
        **keywords: object,
    ) -> RBLNModelForCausalLM:
        """Return a model that runs: compiled now, or loaded from an artifact.

        Args:
            model_id: A directory with a Hugging Face model, a GGUF file, a hub id, or the directory
                of an artifact.
            export: Whether to compile. None compiles where `model_id` is no artifact.
            rbln_config: A dictionary of the keys of `rbln_config`, or a configuration object.
            keywords: The same keys with the prefix `rbln_`; `model_save_dir`, where a compiled
                artifact is kept, without which it goes when the model does; and the arguments of
                transformers that say where a model is found and of which type its weights are.

        Raises:
            InvalidOption: An argument is not known or cannot be honoured; the message says why.
            MissingDependency: torch or transformers is not installed.
            BadArtifact: The artifact cannot be loaded here.
            UnsupportedModel, DoesNotFit, CompileFailed: The model cannot be compiled.
        """
        arguments = read_arguments(rbln_config, keywords)
        model_id = os.fspath(model_id)
        subfolder = str(arguments.fetching.get("subfolder", ""))
        directory = os.path.join(model_id, subfolder) if subfolder else model_id
        is_artifact = os.path.exists(locate(directory, CONFIG_NAME))
        if export is None:
            export = not is_artifact
        if not export:
            return _load(directory, arguments)
        if is_artifact:
            raise InvalidOption(
                f"export=True compiles a model, but {directory!r} is compiled already; leave "
                "export out to load it",
                option="export",
            )
        return _export(model_id, arguments)

    @classmethod
    def from_model(cls, *_arguments: object, **_keywords: object) -> NoReturn:
        """Refuse, and say what to do instead."""
        raise UsageError(
            "from_model is not supported, as a model is compiled from its files: save it with "
            "save_pretrained, its tokenizer too, and give the directory to "
            "from_pretrained(directory, export=True)"
        )


def _load(directory: str, arguments: Arguments) -> RBLNModelForCausalLM:
    config = read_config(directory)
    check_backend(config, directory)
    check_compiled(arguments, config)
    artifact = open_artifact(directory)
    require_torch("running a model")
    from reblock.rbln.generation import RBLNModelForCausalLM

    return RBLNModelForCausalLM(artifact, creates_runtimes=arguments.creates_runtimes)


def _export(model_id: str, arguments: Arguments) -> RBLNModelForCausalLM:
    options = arguments.compile_options
    if arguments.model_save_dir is not None:
        if not isinstance(arguments.model_save_dir, str | os.PathLike):
            raise InvalidOption(
                f"model_save_dir={arguments.model_save_dir!r} must be the path of a directory",
                option="model_save_dir",
            )
        destination = os.fspath(arguments.model_save_dir)
        # Now and not after minutes of fetching.
        check_destination(destination, source=None)
        _compile(model_id, destination, options, arguments.fetching)
        return _load(destination, _loading(arguments))
    temporary = tempfile.mkdtemp(prefix="reblock-")
    try:
        destination = os.path.join(temporary, "artifact")
        _compile(model_id, destination, options, arguments.fetching)
        model = _load(destination, _loading(arguments))
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    weakref.finalize(model, shutil.rmtree, temporary, ignore_errors=True)
    return model


def _loading(arguments: Arguments) -> Arguments:
    """Return what is left to say once the artifact is compiled."""
    keys: dict[str, Any] = {"create_runtimes": arguments.creates_runtimes}
    return read_arguments(keys, {})


def _compile(
    model_id: str, destination: str, options: CompileOptions, fetching: Mapping[str, object]
) -> None:
    require_torch("running a model")
    model_id = _find(model_id, fetching)
    from reblock.backends.torch import compile_model

    with _transformers_as_it_was():
        compile_model(model_id, destination, options, _LoggedProgress())


def _find(model_id: str, fetching: Mapping[str, object]) -> str:
    """Return where the model is, fetched first where `fetching` says how.

    Raises:
        UsageError: A revision of what has none is asked for.
        UnsupportedModel: It cannot be fetched.
    """
    if not fetching:
        return model_id
    subfolder = str(fetching.get("subfolder", ""))
    if os.path.exists(model_id):
        if fetching.get("revision", "main") != "main":
            raise InvalidOption(
                f"revision={fetching['revision']!r} is of a model on the hub, but {model_id!r} is "
                "here; leave it out",
                option="revision",
            )
        return os.path.join(model_id, subfolder) if subfolder else model_id
    from huggingface_hub import snapshot_download

    how: dict[str, Any] = {name: value for name, value in fetching.items() if name != "subfolder"}
    how["ignore_patterns"] = [os.path.join(subfolder, "*/*")]
    try:
        # Older repositories have their weights in the second form alone.
        for weights in ("*.safetensors", "*.bin"):
            patterns = [os.path.join(subfolder, name) for name in (*_DESCRIPTION, weights)]
            fetched = os.path.join(
                snapshot_download(model_id, allow_patterns=patterns, **how), subfolder
            )
            if fnmatch.filter(os.listdir(fetched), weights):
                break
    # What the hub, the network or the cache raises is of many kinds; all have a message.
    except (OSError, ValueError) as error:
        raise UnsupportedModel(
            f"{model_id!r} cannot be fetched: {type(error).__name__}: {error}", model=model_id
        ) from error
    return fetched


@contextmanager
def _transformers_as_it_was() -> Iterator[None]:
    """Bring transformers' messages and bars back, which compiling turns off."""
    from transformers.utils import logging

    settings: Any = logging  # which is annotated in part
    verbosity, has_bars = settings.get_verbosity(), settings.is_progress_bar_enabled()
    try:
        yield
    finally:
        settings.set_verbosity(verbosity)
        if has_bars:
            settings.enable_progress_bar()


class _LoggedProgress(SilentProgress):
    """Progress as messages of the logger `reblock.rbln.modeling`."""

    def stage(self, text: str) -> AbstractContextManager[None]:
        """Log the beginning of a stage."""
        _logger.info("%s", text)
        return super().stage(text)

    def note(self, text: str) -> None:
        """Log what is worth knowing."""
        _logger.warning("%s", text)
