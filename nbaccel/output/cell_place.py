"""The place of a call at the top of its cell's output: what it waits for, its panel, its summary.

    before anything is printed   an output without content, which front ends draw as nothing
    0.5 s                        what is being waited for
    1 s                          the panel
    end                          the summary

All are one output, which is replaced: what workers print comes below it. A call that is over before
it has printed anything, or shown anything here, leaves no output at all.
"""

from __future__ import annotations

import functools
import uuid
from typing import Any

from nbaccel import env
from nbaccel.output import publish

__all__ = ["CellPlace"]


# Front ends draw it as nothing, and nbconvert knows both forms: it warns of an output without any.
_EMPTY_CONTENT: dict[str, Any] = {"text/plain": "", "text/html": ""}


class CellPlace:
    """One output of a cell.

    Attributes:
        is_there: Whether there is a cell whose output can be replaced.
        has_panel: Whether there will be a panel in it, which also shows progress bars.
    """

    def __init__(self) -> None:
        self.is_there = publish.has_cells()
        self.has_panel = self.is_there and env.flag("NBACCEL_DASHBOARD") is not False
        self._content = _EMPTY_CONTENT
        self._stands = False

    @functools.cached_property
    def _display_id(self) -> str:
        return uuid.uuid4().hex

    def hold(self) -> None:
        """Keep the place, because something is about to be shown below it. Cheap to call often."""
        if self.has_panel and not self._stands:
            self._publish_content()

    def show(self, mime_data: dict[str, Any]) -> None:
        """Show something here, in the place of what was shown before.

        Args:
            mime_data: By media type; empty for nothing.
        """
        new_content = mime_data or _EMPTY_CONTENT
        is_other, self._content = new_content != self._content, new_content
        # A place that is not there yet holds nothing, and need not be made for that.
        if is_other if self._stands else mime_data:
            self._publish_content()

    def note_cleared(self) -> None:
        """The cell has been cleared: the next output comes below a new place."""
        self._stands = False

    def _publish_content(self) -> None:
        display_content: dict[str, Any] = {
            "data": self._content,
            "metadata": {},
            "transient": {"display_id": self._display_id},
        }
        if self._stands:
            # With the same display id, so that the front end replaces the output.
            display_content["update"] = True
        self._stands = True
        publish.publish_display(display_content)
