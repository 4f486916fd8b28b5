"""``python -m bolegen``: the command line."""

import sys

from bolegen.cli import main

__all__: list[str] = []

if __name__ == "__main__":
    sys.exit(main())
