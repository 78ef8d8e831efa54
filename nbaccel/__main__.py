"""``python -m nbaccel``: the same as the command ``nbaccel``."""

import sys

from nbaccel.cli import main

if __name__ == "__main__":
    sys.exit(main())
