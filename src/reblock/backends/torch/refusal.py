"""The reason why a model cannot be compiled, on its way to the user.

It is found deep inside a model's own code, where nobody knows what the user called the model.
`compile_model` turns it into an `UnsupportedModel` that names it.
"""

from __future__ import annotations

__all__ = ["NotCompilable"]


class NotCompilable(Exception):  # noqa: N818  a reason, which never reaches a user by this name
    """The model does something that a compiled program with a paged cache cannot."""
