"""Every write to an artifact: locked, built out of sight, put in place in one step.

replace     an edit in place: exchange where the system can, journal where it cannot
write_new   a new artifact at a destination where nothing is
lock        one edit of an artifact at a time
clean_up    what edits left that were cut off
stage       a directory beside its target, exchanged or renamed into its place
journal     the same for a directory that cannot be exchanged
carry       bringing over the files that do not change
system      calls that the standard library does not offer
undisturbed steps that Ctrl-C must not stop halfway
"""

from __future__ import annotations

from reblock.artifact.transaction.carry import Sharing
from reblock.artifact.transaction.clean_up import begin_edit, clean_up_if_possible
from reblock.artifact.transaction.lock import EditLock
from reblock.artifact.transaction.replace import replace_files
from reblock.artifact.transaction.stage import left_note
from reblock.artifact.transaction.undisturbed import undisturbed
from reblock.artifact.transaction.write_new import check_destination, copy_with, new_directory

__all__ = [
    "EditLock",
    "Sharing",
    "begin_edit",
    "check_destination",
    "clean_up_if_possible",
    "copy_with",
    "left_note",
    "new_directory",
    "replace_files",
    "undisturbed",
]
