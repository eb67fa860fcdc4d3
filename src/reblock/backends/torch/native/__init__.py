"""Operators of our own for what torch does slowly on a CPU: linear layers and attention."""

from reblock.backends.torch.native.grouping import group_linears
from reblock.backends.torch.native.library import build, interface_digest, load
from reblock.backends.torch.native.modules import replace_linears, rounded_linears

# The operators stand in a program as one of its pieces.
PIECE = "native"

__all__ = [
    "PIECE",
    "build",
    "group_linears",
    "interface_digest",
    "load",
    "replace_linears",
    "rounded_linears",
]
