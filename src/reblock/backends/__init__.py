"""Compilers behind reblock, one package or module each.

A backend turns a model into an artifact and runs what it compiled. Nothing here is imported
before a command needs it, because most commands work on artifacts alone. `loading` starts a backend
in a process of its own and imports none.
"""
