"""Rows that other packages add: read from their entry points.

A package says in its metadata where its row is defined::

    [project.entry-points."nbaccel.devices"]
    npu = "my_package.rows:NPU"

The named module is imported together with the tables, in notebooks and workers alike: the row
belongs in one that imports nothing but `nbaccel.capability_rows`. If it fails, its row is missing,
but nbaccel can be imported; the reason is kept, and reported where it matters.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Protocol, TypeVar


class NamedRow(Protocol):
    """What every row has."""

    @property
    def name(self) -> str:
        """As users write it."""


_AnyRow = TypeVar("_AnyRow", bound=NamedRow)


def rows_from_outside(
    group: str, row_class: type[_AnyRow], built_in: tuple[_AnyRow, ...]
) -> tuple[tuple[_AnyRow, ...], tuple[str, ...]]:
    """The built-in rows with those of installed packages behind them."""
    rows_by_name = {loaded_row.name: loaded_row for loaded_row in built_in}
    problems = []
    group_points: Iterable[EntryPoint] = _all_entry_points().select(group=group)
    # Sorted: of two rows with one name the first is used, which must not depend on the machine.
    for entry_point in sorted(
        group_points, key=lambda entry_point: (entry_point.name, entry_point.value)
    ):
        try:
            loaded_row = entry_point.load()
        # nbaccel must stay usable without the row.
        except Exception as error:  # a package's module may raise anything
            problems.append(
                f"{_describe_entry_point(entry_point)} cannot be loaded: "
                f"{_describe_error(error)}. {_ROW_REMEDY}"
            )
            continue
        if not isinstance(loaded_row, row_class):
            problems.append(
                f"{_describe_entry_point(entry_point)} must be a {row_class.__name__}: got "
                f"{loaded_row!r}. {_ROW_REMEDY}"
            )
        elif loaded_row.name in rows_by_name and rows_by_name[loaded_row.name] != loaded_row:
            problems.append(
                f"{_describe_entry_point(entry_point)} has a row named {loaded_row.name!r}, and "
                f"there is one of that name already. The other one is used. {_ROW_REMEDY}"
            )
        else:
            rows_by_name[loaded_row.name] = loaded_row
    return tuple(rows_by_name.values()), tuple(problems)


_ROW_REMEDY = "What it adds is missing. Repair or uninstall the package."


@cache
def _all_entry_points() -> Any:
    """Those of all installed packages; cached, because reading them takes long."""
    return entry_points()


def _describe_entry_point(entry_point: EntryPoint) -> str:
    text = f" of the package {entry_point.dist.name}" if entry_point.dist is not None else ""
    return f"Entry point {entry_point.name} = {entry_point.value} ({entry_point.group}){text}"


def _describe_error(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}".removesuffix(".")
