"""Artifacts on disk: open and validate them, change their block count, put them in place.

This package is the only place that writes artifacts. It imports the standard library only.

    count       the block count, read from the JSON alone: all that `reblock get` needs
    program     one `.rbln` file of the torch backend
    reader      a whole artifact, opened and checked
    resize      another block count: planned, then applied
    lock        one edit of an artifact at a time
    stage       a directory built beside its target and put in its place in one step
    undisturbed steps that Ctrl-C must not stop halfway
    files       reading regular, bounded files
"""
