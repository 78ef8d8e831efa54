"""The table of what survives what, in the documentation: made from the figures of the long lane."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

BEGIN = "<!-- chaos:begin (made by `python -m tests.chaos --render`) -->"
END = "<!-- chaos:end -->"

_COLUMNS = (
    ("moments", "moments"),
    ("told", "told"),
    ("old", "old"),
    ("new", "new"),
    ("half done", "half done"),
    ("gone", "kernel killed"),
    ("hung", "hung until Stop"),
    ("torn", "**torn**"),
    ("silent", "**silent**"),
)


def render(record: Mapping[str, Any]) -> str:
    """The table, and the line above it.

    Args:
        record: What `tests.chaos` has written: date, machine, scenes.
    """
    scenes = record["scenes"]
    total = sum(figures["moments"] for figures in scenes.values())
    titles = [title for _, title in _COLUMNS]
    lines = [
        f"{total} moments on {record['date']}, {record['machine']}:",
        "",
        f"| while | {' | '.join(titles)} | to the prompt (median, worst) |",
        f"|---|{'---:|' * (len(titles) + 1)}",
    ]
    for name, figures in scenes.items():
        counts = " | ".join(str(figures[key]) for key, _ in _COLUMNS)
        waits = f"{figures['prompt_median_s']:.2f} s, {figures['prompt_worst_s']:.1f} s"
        lines.append(f"| {name} | {counts} | {waits} |")
    return "\n".join(lines)


def put_into(text: str, table: str) -> str:
    """The page with this table in it."""
    head, _, rest = text.partition(BEGIN)
    _, _, tail = rest.partition(END)
    return f"{head}{BEGIN}\n\n{table}\n\n{END}{tail}"
