"""What a frontend asks a kernel beside running cells, and what a user reads in it."""

from __future__ import annotations

from typing import Any

from tests.kernel.kernel import WAIT_S, Cell, Kernel

CURSOR = "‸"

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


def inspect(kernel: Kernel, code: str) -> dict[str, Any]:
    """What Shift-Tab shows behind the last character; empty where nothing is found."""
    reply = kernel.client.inspect(code, len(code), reply=True, timeout=WAIT_S)["content"]
    assert reply["status"] == "ok"
    return reply["data"] if reply["found"] else {}


def paged(kernel: Kernel, code: str) -> str:
    """What a line such as `name?` opens in the pager, or prints."""
    reply = kernel.client.execute(code, reply=True, timeout=WAIT_S)["content"]
    assert reply["status"] == "ok"
    return "\n".join(page["data"]["text/plain"] for page in reply["payload"])


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
