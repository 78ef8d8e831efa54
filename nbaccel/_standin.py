"""`%%accelerate` before `%load_ext nbaccel`: a magic of that name that says what is missing.

Nothing is imported: where IPython is not in use, there is nobody to tell.
"""

from __future__ import annotations

import sys

from nbaccel.errors import UserMistake

__all__ = ["offer"]


def offer() -> None:
    """Register the stand-in in the shell of this process, if it has one and lacks the magic."""
    ipython = sys.modules.get("IPython")
    find = getattr(ipython, "get_ipython", None)
    shell = find() if find is not None else None
    manager = getattr(shell, "magics_manager", None)
    if manager is not None and "accelerate" not in manager.magics["cell"]:
        manager.register_function(_accelerate, "line_cell", "accelerate")


def _accelerate(line: str, cell: str | None = None) -> None:
    """A magic of nbaccel, which `%load_ext nbaccel` brings."""
    written = "%accelerate" if cell is None else "%%accelerate"
    raise UserMistake(
        f"{written} is a magic of nbaccel's extension, which this notebook has not loaded: `import "
        "nbaccel` alone does not bring it. Run %load_ext nbaccel in a cell of its own, then this "
        "cell again."
    )
