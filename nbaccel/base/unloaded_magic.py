"""`%%accelerate` before `%load_ext nbaccel`: a magic of that name that says what is missing.

Nothing is imported: without IPython there is no user of magics.
"""

from __future__ import annotations

import sys

from nbaccel.base.errors import UserMistake


def register_stand_in() -> None:
    """Register the stand-in in the shell of this process, if it has one and lacks the magic."""
    module = sys.modules.get("IPython")
    ipython = getattr(module, "get_ipython", None)
    shell = ipython() if ipython is not None else None
    manager = getattr(shell, "magics_manager", None)
    # The real magic, where it is loaded already, must not be replaced.
    if manager is not None and "accelerate" not in manager.magics["cell"]:
        manager.register_function(_stand_in_magic, "line_cell", "accelerate")


def _stand_in_magic(line: str, text: str | None = None) -> None:
    """A magic of nbaccel, which `%load_ext nbaccel` brings."""
    name = "%accelerate" if text is None else "%%accelerate"
    raise UserMistake(
        f"{name} is a magic of nbaccel's extension, which this notebook has not loaded: "
        "`import nbaccel` alone does not bring it. Run %load_ext nbaccel in a cell of its own, "
        "then this cell again."
    )
