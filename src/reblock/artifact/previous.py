"""The block count before the last change, kept in a small file of the artifact's own.

It stands beside `rbln_config.json` and not in it, so that a change and its opposite leave that file
as it was, and so that it is kept for the artifacts of every backend.
"""

from __future__ import annotations

import json
import os

from reblock.artifact.files import read_file
from reblock.artifact.location import locate
from reblock.errors import NoPreviousCount
from reblock.json_fields import JsonFields, check_format_version, parse_json_object

__all__ = ["PREVIOUS_NAME", "previous_text", "read_previous"]

PREVIOUS_NAME = ".reblock.json"
_KEY = "previous_kvcache_num_blocks"


def read_previous(directory: str, module: str | None = None) -> int:
    """Return the block count that an artifact, or a module of it, had before its last change.

    Raises:
        NoPreviousCount: It was never changed.
        CorruptArtifact: The file that keeps it is damaged.
        UnknownFormat: A newer version of reblock wrote it.
    """
    path = locate(directory, os.path.join(module or "", PREVIOUS_NAME))
    if not os.path.lexists(path):
        raise NoPreviousCount(
            f"{directory!r} has no previous block count, because it was never changed; give the "
            "count that you want",
            path=directory,
        )
    fields = JsonFields(parse_json_object(read_file(path), path=path), path=path)
    check_format_version(fields)
    fields.refuse_unknown(("format_version", _KEY))
    return fields.integer(_KEY)


def previous_text(num_blocks: int) -> str:
    """Return the content of the file that keeps `num_blocks`."""
    return json.dumps({"format_version": 1, _KEY: num_blocks}) + "\n"
