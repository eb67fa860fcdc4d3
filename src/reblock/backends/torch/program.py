"""One compiled program in memory: its pieces, run in order on shared weights and caches."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from reblock.artifact.checksum import check_digest, copy_digested
from reblock.backends.torch import native
from reblock.backends.torch.weights import layout_digest
from reblock.errors import ArtifactMismatch, CorruptArtifact, HostMismatch

if TYPE_CHECKING:
    from collections.abc import Mapping

    from reblock.artifact.program import ProgramFile

__all__ = ["LoadedProgram", "ProgramInputs"]

_Piece = Callable[[list[Tensor]], list[Tensor]]

# The folder of an archive that has a folder for each piece.
_PIECES = "aotinductor"
# What becomes the name of a file on this machine: nothing in it leads out of a directory.
_FILE_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,199}", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramInputs:
    """What one call works on: B rows of T tokens, no more of either than the program's own.

    Rows past `num_rows`, and tokens of a row past its `num_tokens`, are padding.
    """

    input_ids: Tensor  # [B, T] int64
    start: Tensor  # [B] int64, position of each row's first token
    num_tokens: Tensor  # [B] int64, real tokens of each row
    num_rows: Tensor  # [1] int64, real rows
    block_tables: Tensor  # [B, W] int64
    slots: Tensor  # [B] int64


@dataclass(frozen=True, slots=True)
class _Layer:
    run: _Piece
    is_sliding: bool
    shared: tuple[int, ...]
    caches: tuple[str, ...]
    weights: list[Tensor]


class LoadedProgram:
    """A program of an artifact, ready to run. Its weights and caches belong to the caller.

    None of its code is loaded unless its digest is `sha256`.
    """

    def __init__(
        self,
        file: ProgramFile,
        weights: Mapping[str, Tensor],
        caches: Mapping[str, Tensor],
        *,
        sha256: str,
    ) -> None:
        with tempfile.TemporaryDirectory() as directory:
            # Of the bytes that were digested, as the code is: it decides what memory that is given.
            graph, libraries = _extract(file.path, directory, sha256=sha256)
            try:
                self._connect(graph, libraries, weights, caches, file.path)
            except (KeyError, TypeError, ValueError) as error:
                raise CorruptArtifact(
                    f"its description of the compiled graph cannot be read: {error!r}",
                    path=file.path,
                ) from error

    def _connect(
        self,
        graph: Mapping[str, Any],
        libraries: Mapping[str, str],
        weights: Mapping[str, Tensor],
        caches: Mapping[str, Tensor],
        path: str,
    ) -> None:
        """Load the pieces that `graph` names and give each what it works on."""
        self.batch = int(graph["batch"])
        self.tokens = int(graph["tokens"])
        if graph["weights_layout"] != layout_digest(weights):
            raise ArtifactMismatch(
                "was compiled for weights of other names, types or shapes than lie beside it",
                path=path,
            )
        names = {"prologue", "epilogue", *(layer["piece"] for layer in graph["layers"])}
        if absent := {*names, native.PIECE} - libraries.keys():
            raise CorruptArtifact(f"has no compiled piece {min(absent)!r}", path=path)
        # A graph without a size of the vocabulary is of a reblock before it was written.
        if graph["operators"] != native.interface_digest() or "vocab_size" not in graph:
            raise HostMismatch(
                "was compiled with operators of another reblock; compile the model again", path=path
            )
        self.vocab_size = int(graph["vocab_size"])
        if self.vocab_size < 1:
            raise ValueError(f"vocab_size is {self.vocab_size}")
        used = {name for layer in graph["layers"] for name in layer["caches"]}
        if absent := used - caches.keys():
            raise CorruptArtifact(f"works on an unknown cache {min(absent)!r}", path=path)
        # By name: a resize replaces the tensors, and must find nobody who holds on to them.
        self._caches = caches
        _load_operators(libraries[native.PIECE], path)
        pieces = {name: _load_piece(libraries[name], path) for name in sorted(names)}
        self._prologue = pieces["prologue"]
        self._epilogue = pieces["epilogue"]
        self._prologue_weights = [weights[name] for name in graph["prologue_weights"]]
        self._epilogue_weights = [weights[name] for name in graph["epilogue_weights"]]
        self._layers = [
            _Layer(
                pieces[layer["piece"]],
                bool(layer["is_sliding"]),
                tuple(int(index) for index in layer["shared"]),
                tuple(layer["caches"]),
                [weights[name] for name in layer["weights"]],
            )
            for layer in graph["layers"]
        ]
        self._shared = {layer.shared for layer in self._layers}

    def run(self, inputs: ProgramInputs) -> Tensor:
        """Store keys and values for the given tokens; return logits [B, vocabulary], float32."""
        tokens = torch.arange(inputs.input_ids.shape[1])
        offsets = torch.minimum(tokens[None, :], inputs.num_tokens[:, None] - 1)
        positions = inputs.start[:, None] + offsets
        hidden, *shared = self._prologue([inputs.input_ids, positions, *self._prologue_weights])
        place = [inputs.start, inputs.num_tokens, inputs.num_rows]
        # Little is left to do between two layers: the weights have just driven everything that
        # Python needs for it out of the processor's caches.
        own = {indices: [shared[index] for index in indices] for indices in self._shared}
        cache_of = self._caches.__getitem__
        for layer in self._layers:
            where = inputs.slots if layer.is_sliding else inputs.block_tables
            caches = map(cache_of, layer.caches)
            (hidden,) = layer.run(
                [hidden, *place, where, *caches, *own[layer.shared], *layer.weights]
            )
        # A prefill's last layer has answered for the last token only.
        left = inputs.num_tokens.clamp(max=hidden.shape[1])
        (logits,) = self._epilogue([hidden, left, *self._epilogue_weights])
        return logits


def _extract(path: str, directory: str, *, sha256: str) -> tuple[Mapping[str, Any], dict[str, str]]:
    """Write the compiled pieces of a PT2 archive into `directory`, which nobody else can enter.

    The libraries lie there only until they are mapped, so a process that is killed leaves nothing
    behind that matters.

    Returns:
        The program's graph, and the path of the library of each piece.

    Raises:
        CorruptArtifact: the archive is damaged, or it is not the program with that digest.
    """
    libraries: dict[str, str] = {}

    def place(entry: str) -> str | None:
        *_, kind, piece, name = ("", "", *entry.split("/"))
        if kind != _PIECES:
            return None
        target = os.path.join(directory, _check_name(piece, path), _check_name(name, path))
        if os.path.lexists(target):
            raise CorruptArtifact(f"has the file {name!r} of {piece!r} twice", path=path)
        os.makedirs(os.path.dirname(target), exist_ok=True)
        if name.endswith(".so"):
            libraries[piece] = target
        return target

    digested = copy_digested(path, place)
    check_digest(digested.sha256, sha256, path=path)
    return digested.graph, libraries


def _check_name(name: str, path: str) -> str:
    if not _FILE_NAME.fullmatch(name):
        raise CorruptArtifact(f"has a piece of the unusable name {name[:80]!r}", path=path)
    return name


def _load_operators(library: str, path: str) -> None:
    try:
        native.load(library)
    except OSError as error:
        raise HostMismatch(
            f"its native operators cannot be loaded here: {error}", path=path
        ) from error


def _load_piece(library: str, path: str) -> _Piece:
    try:
        return torch._C._aoti.AOTIModelContainerRunnerCpu(library, 1).run
    except RuntimeError as error:
        raise HostMismatch(
            f"its compiled code cannot be loaded here: {str(error).splitlines()[0]}", path=path
        ) from error
