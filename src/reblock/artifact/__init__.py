"""Artifacts on disk: open and validate them, change their block count, put them in place.

This package is the only place that writes artifacts. It imports the standard library only.

    count        the block count, read from the JSON alone: all that `reblock get` needs
    location     where the files of an artifact are, also while an edit is being finished
    files        reading regular, bounded files
    zip_check    the outline of a zip archive, checked before anything of it is believed
    program      one `.rbln` file of the torch backend
    rebel        `.rbln` files of the RBLN compiler, through the compiler's own class
    rebel_model  what a compiled model says of its memory, in the terms of the core
    modules      artifacts of several modules
    reader       a whole artifact, opened and checked
    checksum     digests of programs and weights
    verify       everything that can be checked, one check at a time
    resize       another block count: planned, then applied
    previous     the block count before the last change
    transaction  every write: locked, built out of sight, put in place in one step
"""
