"""The block count of an artifact, read from its JSON alone.

This is all that `reblock get` runs, so it imports next to nothing. Opening an artifact in full
(`reader.open_artifact`) checks far more.
"""

import os

from reblock.artifact.files import read_file
from reblock.errors import NotAnArtifact, UnknownFormat
from reblock.json_fields import JsonFields, parse_json_object

CONFIG_NAME = "rbln_config.json"
FORMAT_VERSION = 1


def config_path(directory: str) -> str:
    """Return the path of the `rbln_config.json` of the artifact in `directory`.

    Raises:
        NotAnArtifact: no directory is there, or it has no such file.
        PermissionError: the system does not let one see which.
    """
    if not os.path.isdir(directory):
        _check_access(directory)
        reason = "is not a directory" if os.path.lexists(directory) else "does not exist"
        raise NotAnArtifact(f"{reason}; give the directory of a compiled artifact", path=directory)
    path = os.path.join(directory, CONFIG_NAME)
    if not os.path.exists(path):
        _check_access(path)
        raise NotAnArtifact(f"holds no {CONFIG_NAME}, so it is not an artifact", path=directory)
    return path


def _check_access(path: str) -> None:
    try:
        os.stat(path)
    except PermissionError:
        raise
    except (OSError, ValueError):
        return


def read_num_blocks(directory: str) -> int:
    """Return how many KV-cache blocks the artifact in `directory` says that it holds.

    Works for the artifacts of every backend.

    Raises:
        NotAnArtifact: `directory` is no directory or has no `rbln_config.json`.
        PermissionError: The system does not let one see whether it is.
        CorruptArtifact: The JSON is cut off or invalid, or the count is missing or no count.
        UnknownFormat: A newer version of reblock wrote it.
    """
    path = config_path(directory)
    fields = JsonFields(parse_json_object(read_file(path), path=path), path=path)
    if "reblock" in fields.values:
        check_format_version(fields.nested("reblock"))
    return fields.integer("kvcache_num_blocks")


def check_format_version(fields: JsonFields) -> None:
    """Check the `format_version` of an object that reblock wrote.

    Raises:
        CorruptArtifact: There is none, or it is no number.
        UnknownFormat: It is one that this version does not know.
    """
    version = fields.integer("format_version")
    if version > FORMAT_VERSION:
        raise UnknownFormat(
            f"is of format_version {version}, and this version of reblock reads up to "
            f"{FORMAT_VERSION}; upgrade reblock",
            path=fields.path,
        )
