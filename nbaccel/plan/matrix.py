"""What works with what, as the tables of the README."""

from __future__ import annotations

from collections.abc import Sequence

from nbaccel.capabilities import (
    DEVICES,
    FP8_BACKENDS,
    PRECISIONS,
    START_METHODS,
    STRATEGIES,
    DeviceRow,
)

__all__ = ["README_BEGIN", "README_END", "markdown_table", "readme_matrix"]

README_BEGIN = "<!-- capabilities:begin -->"
README_END = "<!-- capabilities:end -->"


def readme_matrix() -> str:
    """The tables of the README, in Markdown.

    Returns:
        What stands between the two markers, without them.
    """
    precisions = [row.name for row in PRECISIONS]
    methods = [row.name for row in START_METHODS]
    matrix = [
        [
            f"`{row.name}`: {row.meaning}",
            *(_mark(row, name) for name in precisions),
            *("yes" if name in row.start_methods else "" for name in methods),
        ]
        for row in DEVICES
    ]
    devices = [row.name for row in DEVICES]
    strategies = [
        [
            f"`{row.name}`: {row.meaning}",
            *("yes" if name in row.devices else "" for name in devices),
            *("yes" if name in row.precisions else "" for name in precisions),
        ]
        for row in STRATEGIES
    ]
    rows = [("precision", row.name, row.meaning, row.needs) for row in PRECISIONS]
    rows += [("strategy", row.name, row.meaning, row.needs) for row in STRATEGIES]
    rows += [("fp8 backend", row.name, row.meaning, row.needs) for row in FP8_BACKENDS]
    rows += [("start", row.name, row.meaning, row.needs) for row in START_METHODS]
    needs = [[kind, f"`{name}`", meaning, text] for kind, name, meaning, text in rows]
    return "\n\n".join(
        [
            markdown_table(["Device", *_quoted(precisions), *_quoted(methods)], matrix),
            markdown_table(["Strategy", *_quoted(devices), *_quoted(precisions)], strategies),
            markdown_table(["Kind", "Name", "Meaning", "Needs"], needs),
        ]
    )


def _quoted(names: Sequence[str]) -> list[str]:
    return [f"`{name}`" for name in names]


def _mark(row: DeviceRow, precision: str) -> str:
    if precision not in row.precisions:
        return ""
    return "slow" if precision in dict(row.slow) else "yes"


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown.

    Args:
        head: The first line.
        rows: The others.

    Returns:
        Text without a line end.
    """
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
