"""Artifacts of several modules, such as a vision tower and the language model that it feeds.

Each module lies in a directory of its own within the artifact, with an `rbln_config.json` of its
own. What the outer files say of a module stands under its name in them, block count included, and
is changed together with it.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from reblock.artifact.files import read_file
from reblock.artifact.location import CONFIG_NAME, locate
from reblock.errors import (
    ArtifactMismatch,
    BadArtifact,
    CorruptArtifact,
    ModuleNeeded,
    NotResizable,
)
from reblock.json_edit import replace_integer
from reblock.json_fields import JsonFields, parse_json_object

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

__all__ = ["OuterConfig", "check_module", "find_modules", "no_cache", "outer_configs"]

_COUNT = "kvcache_num_blocks"
_MAX_DEPTH = 3
_MAX_NAME_LENGTH = 200
_MAX_DIRECTORIES = 1_000
# Keys and parts of class names by which optimum-rbln's other models are known.
_SEQ2SEQ_KEYS = ("enc_max_seq_len", "dec_max_seq_len")
_SEQ2SEQ_NAMES = ("Seq2Seq", "T5", "Bart", "Pegasus", "Whisper")


@dataclass(frozen=True, slots=True, kw_only=True)
class OuterConfig:
    """An `rbln_config.json` above a module that repeats the module's block count.

    `name` is its path within the artifact, and `keys` lead to the count in `text`.
    """

    name: str
    keys: tuple[str, ...]
    text: str

    def with_num_blocks(self, num_blocks: int) -> str:
        """Return its text with another count for the module."""
        return replace_integer(self.text, self.keys, num_blocks)


def find_modules(directory: str) -> tuple[str, ...]:
    """Return the modules in `directory` that have a KV cache, by their paths within it."""
    return tuple(
        os.path.relpath(path, directory)
        for path in _subdirectories(directory)
        if _has_count(os.path.join(path, CONFIG_NAME))
    )


def check_module(directory: str, module: str) -> None:
    """Check that `module` is one of the artifact in `directory`.

    Raises:
        ModuleNeeded: It is not; the message lists those that are there.
    """
    known = find_modules(directory)
    if module not in known:
        listed = ", ".join(known) if known else "none"
        raise ModuleNeeded(
            f"{directory!r} has no module {module!r} with a KV cache; those that it has: {listed}",
            modules=known,
        )


def no_cache(directory: str, values: Mapping[str, object]) -> BadArtifact | ModuleNeeded:
    """Return the error for an artifact whose `rbln_config.json` holds `values` and no KV cache."""
    known = find_modules(directory)
    if known:
        return ModuleNeeded(
            f"{directory!r} has its KV cache in a module; choose it with --module: "
            f"{', '.join(known)}",
            modules=known,
        )
    name = values.get("cls_name")
    if not (isinstance(name, str) and name.isprintable() and len(name) <= _MAX_NAME_LENGTH):
        path = os.path.join(directory, CONFIG_NAME)
        return CorruptArtifact(f"{_COUNT} is missing", path=path)
    return NotResizable(f"holds {name}, {_reason(directory, values, name)}", path=directory)


def _reason(directory: str, values: Mapping[str, object], name: str) -> str:
    if "Pipeline" in name or os.path.exists(os.path.join(directory, "model_index.json")):
        return "a diffusion pipeline, which reads no tokens and has no KV cache"
    if any(key in values for key in _SEQ2SEQ_KEYS) or any(part in name for part in _SEQ2SEQ_NAMES):
        return (
            "an encoder-decoder model; the caches of its decoder are of one fixed size, which no "
            "block count changes"
        )
    return "which has no KV cache: only models that generate text token by token have one"


def outer_configs(
    directory: str, module: str, num_blocks: int, changed_in: str | None = None
) -> tuple[OuterConfig, ...]:
    """Return the configurations above a module that repeat its block count.

    Args:
        directory: The artifact.
        module: The path of the module within it.
        num_blocks: What the module says itself.
        changed_in: A directory whose files stand in for those of the artifact.

    Raises:
        ArtifactMismatch: One of them says another count.
        CorruptArtifact: One of them is damaged.
    """
    found = []
    parts = tuple(module.split(os.sep))
    for depth in range(len(parts)):
        name = os.path.join(*parts[:depth], CONFIG_NAME)
        path = locate(directory, name, changed_in)
        if not os.path.lexists(path):
            continue
        text = read_file(path)
        repeated = _nested_count(parse_json_object(text, path=path), parts[depth:], path)
        if repeated is None:
            continue
        if repeated != num_blocks:
            raise ArtifactMismatch(
                f"says {repeated} blocks for {os.path.join(*parts[depth:])}, but that says "
                f"{num_blocks} itself",
                path=path,
            )
        keys = (*parts[depth:], _COUNT)
        found.append(OuterConfig(name=name, keys=keys, text=text.decode()))
    return tuple(found)


def _nested_count(values: dict[str, object], keys: tuple[str, ...], path: str) -> int | None:
    inner: object = values
    for key in keys:
        inner = inner.get(key) if isinstance(inner, dict) else None
    if not isinstance(inner, dict) or inner.get(_COUNT) is None:
        return None
    return JsonFields(inner, path=path, prefix=f"{'.'.join(keys)}.").integer(_COUNT)


def _subdirectories(directory: str) -> Iterator[str]:
    """Yield the directories below `directory`, nearest first; links are not followed."""
    level, num_seen = [directory], 0
    for _ in range(_MAX_DEPTH):
        below = []
        for parent in level:
            try:
                with os.scandir(parent) as entries:
                    inner = sorted(e.path for e in entries if e.is_dir(follow_symlinks=False))
            except OSError:
                continue
            below += [path for path in inner if not os.path.basename(path).startswith(".")]
        num_seen += len(below)
        if num_seen > _MAX_DIRECTORIES:
            return
        yield from below
        level = below


def _has_count(path: str) -> bool:
    try:
        return _COUNT in parse_json_object(read_file(path), path=path)
    except BadArtifact:
        return False
