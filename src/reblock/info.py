"""The key `reblock` of `rbln_config.json`: what the compiler notes about its own work.

Nothing may stand in it that this version does not know.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from reblock.errors import UnknownFormat
from reblock.json_fields import check_format_version

if TYPE_CHECKING:
    from collections.abc import Mapping

    from reblock.json_fields import JsonFields

__all__ = ["ReblockInfo", "WeightsFile", "check_file_name", "parse_info"]

_FILE_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]*", re.ASCII)
_SHA256 = re.compile(r"[0-9a-f]{64}")
# The largest file that a system knows.
_MAX_FILE_BYTES = 2**63 - 1

_KEYS = (
    "format_version",
    "reblock_version",
    "backend",
    "torch_version",
    "isa",
    "model_type",
    "architecture",
    "weight_dtype",
    "weights",
    "programs",
)
_WEIGHT_DTYPES = ("float32", "bfloat16", "int8")
_WEIGHTS_KEYS = ("bytes", "sha256")
_PROGRAM_KEYS = ("sha256",)


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsFile:
    """The size of a file of weights and the digest of all of it, as they were compiled."""

    num_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ReblockInfo:
    """What reblock itself notes about an artifact that it compiled.

    `weight_dtype` is the type of the weights of linear layers, None where it is that of the
    programs. `weights` has every file of weights by its name. `programs` has the digest of every
    program by the program's name; `reblock.artifact.checksum` says what it covers.
    """

    format_version: int
    reblock_version: str
    backend: str
    torch_version: str
    isa: str
    model_type: str
    architecture: str
    weight_dtype: str | None
    weights: Mapping[str, WeightsFile]
    programs: Mapping[str, str]


def parse_info(info: JsonFields) -> ReblockInfo:
    """Return what the object under the key `reblock` says.

    Raises:
        CorruptArtifact: A key is missing, or its value makes no sense.
        UnknownFormat: A newer reblock wrote it.
    """
    check_format_version(info)
    info.refuse_unknown(_KEYS)
    backend = info.text("backend")
    if backend != "torch":
        raise UnknownFormat(f"reblock.backend {backend!r} is not known", path=info.path)
    return ReblockInfo(
        format_version=info.integer("format_version"),
        reblock_version=info.text("reblock_version"),
        backend=backend,
        torch_version=info.text("torch_version"),
        isa=info.text("isa"),
        model_type=info.text("model_type"),
        architecture=info.text("architecture"),
        weight_dtype=_parse_weight_dtype(info),
        weights=_parse_weights(info),
        programs=_parse_programs(info),
    )


def check_file_name(fields: JsonFields, key: str, name: str) -> str:
    """Return `name`, which is checked to be one that cannot lead out of a directory."""
    if not _FILE_NAME.fullmatch(name):
        raise fields.corrupt(key, f"has {name!r}, which is no plain file name")
    return name


def _parse_weight_dtype(info: JsonFields) -> str | None:
    if "weight_dtype" not in info.values:
        return None
    name = info.text("weight_dtype")
    if name not in _WEIGHT_DTYPES:
        raise info.corrupt("weight_dtype", f"is {name!r}; known are {', '.join(_WEIGHT_DTYPES)}")
    return name


def _parse_weights(info: JsonFields) -> dict[str, WeightsFile]:
    files = info.nested("weights")
    if not files.values:
        raise info.corrupt("weights", "names no file")
    weights = {}
    for name in files.values:
        file = files.nested(check_file_name(info, "weights", name))
        file.refuse_unknown(_WEIGHTS_KEYS)
        weights[name] = WeightsFile(
            num_bytes=file.integer("bytes", maximum=_MAX_FILE_BYTES), sha256=_parse_sha256(file)
        )
    return weights


def _parse_programs(info: JsonFields) -> dict[str, str]:
    programs = info.nested("programs")
    digests = {}
    for name in programs.values:
        program = programs.nested(check_file_name(info, "programs", name))
        program.refuse_unknown(_PROGRAM_KEYS)
        digests[name] = _parse_sha256(program)
    return digests


def _parse_sha256(fields: JsonFields) -> str:
    digest = fields.text("sha256")
    if not _SHA256.fullmatch(digest):
        raise fields.corrupt("sha256", f"must be 64 digits of 0-9 and a-f, not {digest[:80]!r}")
    return digest
