"""What the ranks of a pool are at, as a table; while a cell runs, `launch.dashboard` tells it."""

from __future__ import annotations

import html
from collections.abc import Sequence

from nbaccel.launch.dashboard.board import RankStatus
from nbaccel.units import format_bytes, format_seconds

__all__ = ["RankStatus", "StatusTable"]

# No colour is named, and the background shows through: it reads on light and dark alike.
_CELL = "text-align:left;padding:0.2em 1.2em 0.2em 0;border:none;background:none"


class StatusTable:
    """The ranks as a table, in a notebook and as text.

    Args:
        rows: One per rank.
        headline: A line above them.
    """

    def __init__(self, rows: Sequence[RankStatus], *, headline: str = "") -> None:
        self.rows = tuple(rows)
        self.headline = headline

    def _cells(self) -> list[list[str]]:
        has_device = any(row.device_bytes is not None for row in self.rows)
        head = ["rank", "state", "for", "memory", *(["on device"] if has_device else []), "doing"]
        return [head, *(_cells_of(row, has_device=has_device) for row in self.rows)]

    def __str__(self) -> str:
        cells = self._cells() if self.rows else []
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines = ["  ".join(map(str.ljust, line, widths)).rstrip() for line in cells]
        return "\n".join([self.headline, *lines] if self.headline else lines)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        above = f"<div>{html.escape(self.headline)}</div>" if self.headline else ""
        if not self.rows:
            return above
        head, *body = self._cells()
        top = "".join(f'<th style="{_CELL};opacity:0.6">{html.escape(c)}</th>' for c in head)
        lines = (
            "<tr>" + "".join(f'<td style="{_CELL}">{html.escape(c)}</td>' for c in line) + "</tr>"
            for line in body
        )
        return above + (
            '<table style="border:none;margin:0"><thead><tr style="background:none">'
            f"{top}</tr></thead><tbody>{''.join(lines)}</tbody></table>"
        )


def _cells_of(row: RankStatus, *, has_device: bool) -> list[str]:
    device = "-" if row.device_bytes is None else format_bytes(row.device_bytes)
    return [
        str(row.rank),
        row.state,
        format_seconds(row.seconds),
        format_bytes(row.rss_bytes),
        *([device] if has_device else []),
        row.doing,
    ]
