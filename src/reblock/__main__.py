"""`python -m reblock`: the command `reblock`, whatever scripts are on the PATH."""

from __future__ import annotations

import sys

from reblock.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
