"""One compiled program in memory: its pieces, run in order on shared weights and caches."""

from __future__ import annotations

import os
import tempfile
import zipfile
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from reblock.backends.torch.weights import layout_digest
from reblock.errors import ArtifactMismatch, CorruptArtifact, HostMismatch

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from reblock.artifact.program import ProgramFile

__all__ = ["LoadedProgram", "ProgramInputs"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramInputs:
    """What one call works on; B and T are the program's own, and rows may be padding.

    A padding row has the same start, tokens and table as the last real row.
    """

    input_ids: Tensor  # [B, T] int64
    start: Tensor  # [B] int64, position of each row's first token
    num_tokens: Tensor  # [B] int64, real tokens of each row
    num_rows: Tensor  # [1] int64, real rows
    block_tables: Tensor  # [B, W] int64
    slots: Tensor  # [B] int64


@dataclass(frozen=True, slots=True)
class _Layer:
    run: Callable[[list[Tensor]], list[Tensor]]
    is_sliding: bool
    shared: tuple[int, ...]
    caches: list[Tensor]
    weights: list[Tensor]


class LoadedProgram:
    """A program of an artifact, ready to run. Its weights and caches belong to the caller."""

    def __init__(
        self, file: ProgramFile, weights: Mapping[str, Tensor], caches: Mapping[str, Tensor]
    ) -> None:
        graph: Any = file.graph
        try:
            self.batch = int(graph["batch"])
            self.tokens = int(graph["tokens"])
            if graph["weights_layout"] != layout_digest(weights):
                raise ArtifactMismatch(
                    "was compiled for weights of other names, types or shapes than lie beside it",
                    path=file.path,
                )
            names = {"prologue", "epilogue", *(layer["piece"] for layer in graph["layers"])}
            pieces = _load_pieces(file.path, sorted(names))
            self._prologue = pieces["prologue"]
            self._epilogue = pieces["epilogue"]
            self._prologue_weights = [weights[name] for name in graph["prologue_weights"]]
            self._epilogue_weights = [weights[name] for name in graph["epilogue_weights"]]
            self._layers = [
                _Layer(
                    pieces[layer["piece"]],
                    bool(layer["is_sliding"]),
                    tuple(int(index) for index in layer["shared"]),
                    [caches[name] for name in layer["caches"]],
                    [weights[name] for name in layer["weights"]],
                )
                for layer in graph["layers"]
            ]
        except (KeyError, TypeError, ValueError) as error:
            raise CorruptArtifact(
                f"its description of the compiled graph cannot be read: {error!r}", path=file.path
            ) from error

    def run(self, inputs: ProgramInputs) -> Tensor:
        """Store keys and values for the given tokens; return logits [B, vocabulary], float32."""
        last = inputs.num_tokens - 1
        offsets = torch.minimum(torch.arange(self.tokens)[None, :], last[:, None])
        positions = inputs.start[:, None] + offsets
        hidden, *shared = self._prologue([inputs.input_ids, positions, *self._prologue_weights])
        place = [inputs.start, inputs.num_tokens, inputs.num_rows]
        for layer in self._layers:
            where = inputs.slots if layer.is_sliding else inputs.block_tables
            own = [shared[index] for index in layer.shared]
            (hidden,) = layer.run([hidden, *place, where, *layer.caches, *own, *layer.weights])
        (logits,) = self._epilogue([hidden, inputs.num_tokens, *self._epilogue_weights])
        return logits


def _load_pieces(path: str, names: list[str]) -> dict[str, Callable[[list[Tensor]], list[Tensor]]]:
    """Load the shared library of every piece out of a PT2 archive.

    The libraries lie on disk only until they are mapped, so a process that is killed leaves
    nothing behind.
    """
    runners: dict[str, Callable[[list[Tensor]], list[Tensor]]] = {}
    try:
        with zipfile.ZipFile(path) as archive, tempfile.TemporaryDirectory() as directory:
            for name in names:
                library = _extract(archive, name, os.path.join(directory, name))
                if library is None:
                    raise CorruptArtifact(f"has no compiled piece {name!r}", path=path)
                runner = torch._C._aoti.AOTIModelContainerRunnerCpu(library, 1)
                runners[name] = runner.run
    except zipfile.BadZipFile as error:
        raise CorruptArtifact(f"is no whole archive: {error}", path=path) from error
    except RuntimeError as error:
        raise HostMismatch(
            f"its compiled code cannot be loaded here: {str(error).splitlines()[0]}", path=path
        ) from error
    return runners


def _extract(archive: zipfile.ZipFile, piece: str, directory: str) -> str | None:
    """Write the files of one piece to `directory` and return the path of its library."""
    library = None
    for info in archive.infolist():
        *_, folder, name = ("", "", *info.filename.split("/"))
        if folder != piece or not name:
            continue
        os.makedirs(directory, exist_ok=True)
        target = os.path.join(directory, name)
        with archive.open(info) as source, open(target, "wb") as file:
            while chunk := source.read(1 << 20):
                file.write(chunk)
        if name.endswith(".so"):
            library = target
    return library
