"""What a frontend asks a kernel beside running cells, and what a user reads in it."""

from __future__ import annotations

import pytest
from IPython import version_info

from tests.kernel.kernel import WAIT_S, Cell, Kernel

CURSOR = "‸"
COMPLETES = pytest.mark.skipif(
    version_info < (8, 6), reason="earlier versions have no matchers that see the whole cell"
)

START = """%%accelerate -n 2
import os
rank = int(os.environ["RANK"])
"""


def complete(kernel: Kernel, code: str) -> list[str]:
    """What Tab offers where the cursor stands, put in the place of what it replaces."""
    cursor = code.index(CURSOR)
    code = code.replace(CURSOR, "")
    reply = kernel.client.complete(code, cursor, reply=True, timeout=WAIT_S)["content"]
    assert reply["status"] == "ok"
    begun = code.rfind("\n", 0, reply["cursor_start"]) + 1
    return [code[begun : reply["cursor_start"]] + match for match in reply["matches"]]


def told(cell: Cell) -> str:
    """The error as the user reads it: no frame of IPython or nbaccel in it."""
    assert cell.error
    text = "\n".join(cell.traceback)
    for frame in ("IPython", "run_cell_magic", "nbaccel/", "site-packages", "Traceback"):
        assert frame not in text, text
    return text


def shown(cell: Cell) -> list[str]:
    """What the cell has displayed, as text."""
    return [data["text/plain"] for data in cell.check().displays]
