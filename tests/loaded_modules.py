"""What an import costs: which modules it brings along."""

from __future__ import annotations

import os
import subprocess
import sys

import reblock

__all__ = ["modules_loaded_by"]


def modules_loaded_by(imports: str, *names: str) -> list[str]:
    """Return which of these modules a fresh interpreter has loaded after the imports."""
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            f"import sys, {imports}\nprint(*sorted(set({names!r}) & set(sys.modules)))",
        ],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": os.path.dirname(os.path.dirname(reblock.__file__))},
    )
    return done.stdout.split()
