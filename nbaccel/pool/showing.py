"""The last expressions of all ranks, in the cell: once where they are equal.

rank 0  {"text/plain": "0.91"} ─┐          [0-2] 0.91
rank 1  {"text/plain": "0.91"} ─┼──►       [3] 0.87
rank 2  {"text/plain": "0.91"} ─┤
rank 3  {"text/plain": "0.87"} ─┘
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from nbaccel.launch import publish as cell
from nbaccel.units import spans

__all__ = ["Publish", "show_results"]

Publish = Callable[[Mapping[str, Any]], None]
"""Shows `{"data": ..., "metadata": ...}`."""


def show_results(
    results: Mapping[int, Mapping[str, Any] | None], publish: Publish = cell.display
) -> None:
    """Show what the ranks' cells ended with.

    Args:
        results: The bundle of each rank that ran the cell, as `CellShell.run` returned it.
        publish: Shows a bundle.
    """
    groups = _groups(results)
    lines: list[str] = []
    for ranks, bundle in groups:
        if len(ranks) == len(results):
            publish(bundle)
            return
        label = f"[{spans(ranks)}]"
        if _is_one_line(bundle):
            lines.append(f"{label} {bundle['data']['text/plain']}")
            continue
        publish(_plain([*lines, label]))
        publish(bundle)
        lines = []
    if lines:
        publish(_plain(lines))


def _groups(
    results: Mapping[int, Mapping[str, Any] | None],
) -> list[tuple[list[int], Mapping[str, Any]]]:
    """Ranks with the same bundle, by their lowest; ranks without one are left out."""
    groups: list[tuple[list[int], Mapping[str, Any]]] = []
    for rank, bundle in sorted(results.items(), key=lambda item: item[0]):
        if not bundle or not bundle["data"]:
            continue
        for ranks, same in groups:
            if same == bundle:
                ranks.append(rank)
                break
        else:
            groups.append(([rank], bundle))
    return groups


def _is_one_line(bundle: Mapping[str, Any]) -> bool:
    data = bundle["data"]
    return set(data) == {"text/plain"} and "\n" not in data["text/plain"]


def _plain(lines: list[str]) -> dict[str, Any]:
    return {"data": {"text/plain": "\n".join(lines)}, "metadata": {}}
