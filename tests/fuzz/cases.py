"""What is mutated in case number so-and-so: everything follows from the seed and the number."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

import mutate_files
import mutate_json
import mutate_zip

import artifacts
import zip_archives

CONFIG = "rbln_config.json"
_OPTIMUM = "llama2_7b_flash_ca22"
_DESCRIPTION = "extra/reblock.json"
# Out of 1000 cases.
_SHARES = {
    "config": 270,
    "description": 200,
    "archive": 260,
    "agreeing": 120,
    "optimum": 70,
    "file": 50,
    "journal": 15,
    "history": 10,
    "fat": 5,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One mutated artifact; `may_be_finished` where opening it may rightly change it."""

    mutator: str
    directory: str
    may_be_finished: bool


class Maker:
    """Makes cases beside two artifacts, ours and one of optimum-rbln's, which stay as they are."""

    def __init__(self, root: str) -> None:
        self.root = root
        self.victim = os.path.join(root, "victim")
        os.makedirs(self.victim)
        for name in (CONFIG, "secret"):
            with open(os.path.join(self.victim, name), "w", encoding="utf-8") as file:
                file.write("keep this")
        self.ours = os.path.join(root, "ours")
        with mock.patch("artifacts.os.urandom", Random(0).randbytes):
            artifacts.make_artifact(Path(self.ours), weight_bytes=1000)
        here = os.path.dirname(os.path.abspath(__file__))
        self.optimum = os.path.join(here, "..", "data", "optimum_rbln_0_12", _OPTIMUM)
        self.config = _read(self.ours, CONFIG)
        self.optimum_config = _read(self.optimum, CONFIG)
        self.programs = {f"{name}.rbln": b"" for name in artifacts.PROGRAMS}
        for name in self.programs:
            self.programs[name] = _read(self.ours, name)

    def make(self, seed: int, index: int, parent: str) -> Case:
        """Write the case into the new directory `parent`."""
        rng = Random(f"{seed}/{index}")
        kind = rng.choices(list(_SHARES), list(_SHARES.values()))[0]
        directory = os.path.join(parent, "a")
        os.makedirs(directory)
        mutator = getattr(self, f"_make_{kind}")(rng, directory)
        may_be_finished = kind == "journal"
        return Case(
            mutator=f"{kind} {mutator}", directory=directory, may_be_finished=may_be_finished
        )

    def _write(self, directory: str, changed: dict[str, bytes]) -> None:
        for name in os.listdir(self.ours):
            if name not in changed:
                os.link(os.path.join(self.ours, name), os.path.join(directory, name))
        for name, data in changed.items():
            with open(os.path.join(directory, name), "wb") as file:
                file.write(data)

    def _make_config(self, rng: Random, directory: str) -> str:
        name, data = mutate_json.mutate(rng, self.config)
        self._write(directory, {CONFIG: data})
        return name

    def _make_optimum(self, rng: Random, directory: str) -> str:
        name, data = mutate_json.mutate(rng, self.optimum_config)
        with open(os.path.join(directory, CONFIG), "wb") as file:
            file.write(data)
        return name

    def _make_description(self, rng: Random, directory: str) -> str:
        # The same in all programs as often as in one, as they also have to agree.
        names = list(self.programs) if rng.random() < 0.5 else [rng.choice(list(self.programs))]
        seed, changed = rng.random(), {}
        for name in names:
            mutator, data = mutate_json.mutate(
                Random(seed), zip_archives.read_entry(self.programs[name], _DESCRIPTION)
            )
            changed[name] = zip_archives.replace_entry(self.programs[name], _DESCRIPTION, data)
        self._write(directory, changed)
        return mutator

    def _make_archive(self, rng: Random, directory: str) -> str:
        program = rng.choice(list(self.programs))
        name, data = mutate_zip.mutate(rng, self.programs[program])
        self._write(directory, {program: data})
        return name

    def _make_fat(self, rng: Random, directory: str) -> str:
        if rng.random() < 0.5:
            name, data = mutate_json.mutate_fat(rng, self.config)
            self._write(directory, {CONFIG: data})
        else:
            changed, seed = {}, rng.random()
            for program, archive in self.programs.items():
                description = zip_archives.read_entry(archive, _DESCRIPTION)
                name, data = mutate_json.mutate_fat(Random(seed), description)
                changed[program] = zip_archives.replace_entry(archive, _DESCRIPTION, data)
            self._write(directory, changed)
        return name

    def _make_agreeing(self, rng: Random, directory: str) -> str:
        """Numbers at their limits in a configuration and in programs that agree with it."""
        config: Any = json.loads(self.config)
        large = (1, 2, 7, 4096, 2**20, 2**30, 2**31 - 1, rng.randrange(1, 2**31))
        block_size = rng.choice((256, *large))
        max_seq_len = block_size * rng.choice((1, 2, 8, 2**10))
        batch = rng.choice((4, *large))
        num_blocks = rng.choice((16, *large))
        config |= {"kvcache_block_size": block_size, "kvcache_partition_len": block_size}
        config |= {"max_seq_len": max_seq_len, "batch_size": batch, "prefill_chunk_size": 1}
        config |= {"decoder_batch_sizes": [batch, 1], "kvcache_num_blocks": num_blocks}
        metas = [json.loads(json.dumps(config["cache_metas"][0]))]
        metas[0]["shape"] = [rng.choice(large), rng.choice((1, 8)), block_size, rng.choice(large)]
        config["cache_metas"] = metas
        dram = artifacts.dram_of(metas, num_blocks)
        weight = rng.choice((0, 77, 2**62, 2**63 - 1))
        self._write(directory, {CONFIG: json.dumps(config).encode(), **self.programs})
        for name in artifacts.PROGRAMS:
            os.unlink(os.path.join(directory, f"{name}.rbln"))
            artifacts.write_program(Path(directory), name, num_blocks, dram, weight=weight)
        return "numbers"

    def _make_file(self, rng: Random, directory: str) -> str:
        self._write(directory, {})
        name = rng.choice((CONFIG, *self.programs, "weights.safetensors", "config.json"))
        how = rng.choice(mutate_files.REPLACEMENTS)
        mutate_files.replace(rng, directory, name, how)
        return how.__name__

    def _make_journal(self, rng: Random, directory: str) -> str:
        data = self.config
        if rng.random() < 0.3:
            _, data = mutate_json.mutate(rng, data)
        self._write(directory, {CONFIG: data})
        how = rng.choice((mutate_files.plant_journal, mutate_files.plant_beside))
        how(rng, directory, self.victim)
        return how.__name__

    def _make_history(self, rng: Random, directory: str) -> str:
        self._write(directory, {})
        mutate_files.plant_history(rng, directory)
        path = os.path.join(directory, ".reblock.json")
        if rng.random() < 0.3:
            how = rng.choice(mutate_files.REPLACEMENTS)
            mutate_files.replace(rng, directory, ".reblock.json", how)
            return how.__name__
        name, data = mutate_json.mutate(rng, _read(directory, ".reblock.json"))
        with open(path, "wb") as file:
            file.write(data)
        return name


def _read(directory: str, name: str) -> bytes:
    with open(os.path.join(directory, name), "rb") as file:
        return file.read()
