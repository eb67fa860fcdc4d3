"""Runs the compiled programs of an artifact on a KV cache of the size that it states."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from reblock.artifact.reader import open_artifact
from reblock.backends.loading import check_backend
from reblock.backends.torch.host import check_host
from reblock.backends.torch.kv_cache import KVCache
from reblock.backends.torch.process import keep_freed_memory
from reblock.backends.torch.program import LoadedProgram, ProgramInputs
from reblock.backends.torch.weights import check_weight_dtype, map_weights
from reblock.engine.limits import EngineLimits
from reblock.engine.text import read_eos_token_ids
from reblock.errors import ArtifactMismatch, CorruptArtifact

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reblock.artifact.reader import Artifact
    from reblock.config import RBLNConfig

__all__ = ["TorchRunner", "load_runner"]


class TorchRunner:
    """The torch backend's side of `reblock.engine.Runner`."""

    def __init__(self, artifact: Artifact, num_blocks: int) -> None:
        keep_freed_memory()
        config = artifact.config
        self._config = config
        self.cache = KVCache(config.cache_metas, num_blocks)
        assert config.reblock is not None
        self.weights = map_weights(artifact.directory, tuple(config.reblock.weights))
        digests = config.reblock.programs
        programs = {
            file.name: LoadedProgram(
                file, self.weights, self.cache.tensors, sha256=digests[file.name]
            )
            for file in artifact.programs
        }
        shapes = {"prefill": (1, config.prefill_chunk_size)}
        shapes |= {f"decoder_batch_{size}": (size, 1) for size in config.decoder_batch_sizes}
        held = {name: (program.batch, program.tokens) for name, program in programs.items()}
        if held != shapes:
            raise ArtifactMismatch(
                f"its programs take rows and tokens {held}, but rbln_config.json says {shapes}",
                path=artifact.directory,
            )
        sizes = {program.vocab_size for program in programs.values()}
        if len(sizes) > 1:
            raise ArtifactMismatch(
                f"its programs know different numbers of tokens, {sorted(sizes)}",
                path=artifact.directory,
            )
        self._limits = _limits(artifact.directory, config, num_blocks, vocab_size=sizes.pop())
        self._prefill = programs.pop("prefill")
        self._decoders = {program.batch: program for program in programs.values()}
        check_weight_dtype(self.weights, config.weight_dtype, path=artifact.directory)

    @property
    def limits(self) -> EngineLimits:
        """The sizes of the programs and of the cache."""
        return self._limits

    @property
    def kv_bytes(self) -> int:
        """Bytes that the KV cache takes."""
        return self.cache.num_bytes

    def prefill(
        self, token_ids: list[int], start: int, block_table: list[int], slot: int
    ) -> Tensor:
        """Read one chunk of a prompt; see `reblock.engine.Runner`.

        A short chunk is not filled up: programs take as many tokens and rows as there are.
        """
        count = len(token_ids)
        inputs = ProgramInputs(
            input_ids=torch.tensor([token_ids]),
            start=torch.tensor([start]),
            num_tokens=torch.tensor([count]),
            num_rows=torch.tensor([1]),
            block_tables=torch.tensor([self._used(block_table, start + count)]),
            slots=torch.tensor([slot]),
        )
        return self._prefill.run(inputs)[0]

    def decode(
        self,
        token_ids: list[int],
        positions: list[int],
        block_tables: list[list[int]],
        slots: list[int],
    ) -> Tensor:
        """Read one token of each request; see `reblock.engine.Runner`."""
        rows = len(token_ids)
        used = [
            self._used(table, position + 1)
            for table, position in zip(block_tables, positions, strict=True)
        ]
        width = max(map(len, used))
        # A short table is filled up with its own first block, whose tokens are masked there.
        tables = [table + table[:1] * (width - len(table)) for table in used]
        inputs = ProgramInputs(
            input_ids=torch.tensor(token_ids)[:, None],
            start=torch.tensor(positions),
            num_tokens=torch.ones(rows, dtype=torch.int64),
            num_rows=torch.tensor([rows]),
            block_tables=torch.tensor(tables),
            slots=torch.tensor(slots),
        )
        return self._decoders[self._limits.decoder_for(rows)].run(inputs)

    def resize(self, num_blocks: int, moves: Sequence[tuple[int, int]]) -> None:
        """Have a cache of another size; see `reblock.engine.Runner`."""
        self.cache.resize(num_blocks, moves)
        self._limits = replace(self._limits, num_blocks=num_blocks)

    def _used(self, block_table: list[int], num_tokens: int) -> list[int]:
        """Return the blocks that hold the first `num_tokens` tokens."""
        return block_table[: self._limits.num_blocks_for(num_tokens)]


def _limits(
    directory: str, config: RBLNConfig, num_blocks: int, *, vocab_size: int
) -> EngineLimits:
    return EngineLimits(
        num_blocks=num_blocks,
        block_size=config.kvcache_block_size,
        max_seq_len=config.max_seq_len,
        max_batch=config.batch_size,
        decoder_batch_sizes=config.decoder_batch_sizes,
        prefill_chunk_size=config.prefill_chunk_size,
        vocab_size=vocab_size,
        eos_token_ids=read_eos_token_ids(directory),
        has_rings=not all(meta.layer_type == "full_attention" for meta in config.cache_metas),
    )


def load_runner(artifact: Artifact, num_threads: int | None = None) -> TorchRunner:
    """Load an artifact's programs and take the memory of its KV cache.

    Args:
        artifact: an artifact of the torch backend.
        num_threads: threads for the programs; None for torch's own choice, all cores.

    Raises:
        HostMismatch: it was compiled for another torch or another processor.
        CorruptArtifact: a program is not the one that was compiled, or it or the weights cannot
            be loaded.
        ArtifactMismatch: the programs, the weights and rbln_config.json contradict each other.
        DoesNotFit: there is not enough memory for its KV cache.
    """
    config = artifact.config
    check_backend(config, artifact.directory)
    assert config.reblock is not None
    check_host(config.reblock, path=artifact.directory, torch_version=torch.__version__)
    if num_threads is not None:
        torch.set_num_threads(num_threads)
    try:
        return TorchRunner(artifact, config.kvcache_num_blocks)
    except CorruptArtifact:
        # An edit may have moved its files meanwhile.
        again = open_artifact(artifact.directory)
        if again == artifact:
            raise
        return TorchRunner(again, again.config.kvcache_num_blocks)
