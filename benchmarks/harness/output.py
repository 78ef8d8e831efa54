"""What a notebook would show below a cell, built from the kernel's messages."""

from __future__ import annotations

import json
import re
from typing import Any

ANSI = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07]*\x07")
MARK = "@@"


class CellOutput:
    """Collects IOPub messages. A display that is updated in place counts once, as shown last."""

    def __init__(self) -> None:
        self.parts: list[tuple[str, str]] = []  # (display id or "", text)
        self.error_text = ""
        self.error_name = ""
        self.raw = ""

    def feed(self, message: dict[str, Any]) -> None:
        kind, content = message["msg_type"], message["content"]
        if kind == "stream":
            self.raw += content["text"]
            self.parts.append(("", content["text"]))
        elif kind in {"display_data", "execute_result", "update_display_data"}:
            self._feed_display(content)
        elif kind == "error":
            self.error_name = content["ename"]
            self.error_text = ANSI.sub("", "\n".join(content["traceback"]))
            self.parts.append(("", self.error_text + "\n"))
        elif kind == "clear_output":
            self.parts = []

    def _feed_display(self, content: dict[str, Any]) -> None:
        text = str(content["data"].get("text/plain", ""))
        self.raw += json.dumps(content["data"], default=str, ensure_ascii=False)
        name = str((content.get("transient") or {}).get("display_id", ""))
        known = [index for index, part in enumerate(self.parts) if name and part[0] == name]
        for index in known:
            self.parts[index] = (name, text + "\n")
        if not known:
            self.parts.append((name, text + "\n"))

    @property
    def text(self) -> str:
        """The text on the screen: colours removed, a line that was rewritten counted once."""
        joined = ANSI.sub("", "".join(text for _, text in self.parts)).replace("\r\n", "\n")
        return "\n".join(line.rsplit("\r", 1)[-1] for line in joined.splitlines())

    @property
    def values(self) -> dict[str, Any]:
        """What the cell handed to `report`."""
        found: dict[str, Any] = {}
        for line in self.text.splitlines():
            if line.startswith(MARK):
                found.update(json.loads(line.removeprefix(MARK)))
        return found
