"""What a frontend asks a kernel beside running cells."""

from __future__ import annotations

from typing import Any

from tests.kernel.kernel import WAIT_S, Kernel

CURSOR = "‸"


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
