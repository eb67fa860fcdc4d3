"""The block count of an artifact, read from its JSON alone.

This is all that `reblock get` runs, so it imports next to nothing. Opening an artifact in full
(`reader.open_artifact`) checks far more.
"""

from reblock.artifact.files import read_config_file
from reblock.artifact.location import has_left_overs
from reblock.json_fields import JsonFields, check_format_version, parse_json_object


def read_num_blocks(directory: str, module: str | None = None) -> int:
    """Return how many KV-cache blocks the artifact in `directory`, or a module of it, holds.

    Works for the artifacts of every backend. What an edit left that was cut off is cleaned up,
    where that is possible.

    Raises:
        NotAnArtifact: `directory` is no directory or has no `rbln_config.json`.
        PermissionError: The system does not let one see whether it is.
        CorruptArtifact: The JSON is cut off or invalid, or the count is missing or no count.
        UnknownFormat: A newer version of reblock wrote it.
        ModuleNeeded: Its cache is in a module and none is given, or it has no such module.
        NotResizable: It is of a kind that has no KV cache.
    """
    if has_left_overs(directory):
        from reblock.artifact.transaction.clean_up import clean_up_if_possible

        clean_up_if_possible(directory)
    if module is not None:
        from reblock.artifact.modules import check_module

        check_module(directory, module)
    path, text = read_config_file(directory, module)
    fields = JsonFields(parse_json_object(text, path=path), path=path)
    if "kvcache_num_blocks" not in fields.values and "reblock" not in fields.values:
        from reblock.artifact.modules import no_cache

        raise no_cache(directory, fields.values)
    if "reblock" in fields.values:
        check_format_version(fields.nested("reblock"))
    return fields.integer("kvcache_num_blocks")
