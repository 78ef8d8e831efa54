"""The notebook's changes of installed packages, for workers that live between cells.

They travel as the value of a name: so they are sent when they have changed, to each rank that has
not got them, with what their functions read.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from nbaccel.calls.changed_packages import sendable_changes
from nbaccel.transfer.free_names import Names
from nbaccel.transfer.package_changes import AppliedChanges

__all__ = ["LiveChanges", "take_changes"]

_NAME = "nbaccel_package_changes"


class LiveChanges:
    """The notebook's side: when the changes are to be sent."""

    def __init__(self) -> None:
        self._num_calls = 0
        self._has_sent = False

    def call_made(self) -> None:
        """A call has brought its own copies of changed functions: cells get theirs again."""
        self._num_calls += 1

    @contextlib.contextmanager
    def named(self, namespace: dict[str, Any], cell_names: Names) -> Iterator[Names]:
        """Let the namespace have the changes, as a cell's names ask for them."""
        changes = sendable_changes()
        self._has_sent |= bool(changes)
        if not self._has_sent:
            yield cell_names
            return
        namespace[_NAME] = (self._num_calls, changes)
        try:
            yield replace(cell_names, possible=cell_names.possible | {_NAME})
        finally:
            del namespace[_NAME]


def take_changes(namespace: dict[str, Any], applied_changes: AppliedChanges) -> None:
    """Make the changes that have come, if any have."""
    if _NAME in namespace:
        _, changes = namespace.pop(_NAME)
        applied_changes.follow(changes)
