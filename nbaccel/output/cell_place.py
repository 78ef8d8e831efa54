"""The place of a call at the top of its cell's output: what it waits for, its panel, its summary.

    before anything is printed   an output without content, which front ends draw as nothing
    0.5 s                        what is being waited for
    1 s                          the panel
    end                          the summary

All are one output, which is replaced: what workers print comes below it. A call that is over before
it has printed anything, or shown anything here, leaves no output at all.

An `Output` of ipywidgets ignores changes of what it shows: within it, the place is a widget whose
HTML changes.
"""

from __future__ import annotations

import functools
import html
import importlib
import sys
import time
import uuid
from collections.abc import Callable
from typing import Any

from nbaccel.base import env, frames, ipython_private
from nbaccel.base.units import count_noun
from nbaccel.output import publish

# Front ends draw it as nothing, and nbconvert knows both forms: it warns of an output without any.
_HTML_TYPE = "text/html"
_EMPTY_CONTENT: dict[str, Any] = {"text/plain": "", _HTML_TYPE: ""}


class CellPlace:
    """One output of a cell."""

    def __init__(self) -> None:
        self.is_there = publish.has_cells()
        """Whether there is a cell whose output can be replaced."""
        self.has_panel = self.is_there and env.flag("NBACCEL_DASHBOARD") is not False
        # A widget shows HTML only.
        self.is_widget = self.is_there and ipython_private.is_in_output_widget(
            getattr(frames.running_shell(), "kernel", None)
        )
        self._content = _EMPTY_CONTENT
        self._stands = False

    @functools.cached_property
    def display_id(self) -> str:
        """What the front end knows the output by."""
        return uuid.uuid4().hex

    def hold(self) -> None:
        """Keep the place, because something is about to be shown below it. Cheap to call often."""
        if self.has_panel and not self._stands:
            self._publish_content()

    def show(self, data: dict[str, Any]) -> None:
        """Show something here, in the place of what was shown before."""
        new_content = data or _EMPTY_CONTENT
        is_other = new_content != self._content
        self._content = new_content
        # A place that is not there yet holds nothing, and need not be made for that.
        if is_other if self._stands else data:
            self._publish_content()

    def note_cleared(self) -> None:
        """The cell has been cleared: the next output comes below a new place."""
        self._stands = False

    @functools.cached_property
    def _widget(self) -> Any:
        return importlib.import_module("ipywidgets").HTML()

    def _publish_content(self) -> None:
        if self.is_widget:
            self._widget.value = self._content.get(_HTML_TYPE, "")
            if not self._stands:
                self._stands = True
                data = publish.widget_bundle(self._widget)
                publish.publish_display({"data": data, "metadata": {}})
            return
        content: dict[str, Any] = {
            "data": self._content,
            "metadata": {},
            "transient": {"display_id": self.display_id},
        }
        if self._stands:
            # With the same display id, so that the front end replaces the output.
            content["update"] = True
        self._stands = True
        publish.publish_display(content)


SHOWN_AFTER_S = 0.5
"""A start that takes less leaves no trace."""
_CLEAR_TO_END = "\r\x1b[K"  # ECMA-48: erase in line


class WaitingLine:
    """The line of one start of workers, at the place where the call's panel will be."""

    def __init__(
        self, num_workers: int, *, read_clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._headline = f"starting {count_noun(num_workers, 'worker')}"
        self._clock = read_clock
        self._began_at = read_clock()
        self.place = CellPlace()
        self._is_wanted = self.place.is_there or sys.stderr.isatty()
        self._shown = ""
        self._is_over = False

    def due_in(self) -> float:
        """Seconds until there is something to show; infinite afterwards."""
        if self._shown or self._is_over:
            return float("inf")
        return max(0.0, self._began_at + SHOWN_AFTER_S - self._clock())

    def say(self, waited_for: str) -> None:
        """Show what is being waited for, if it has taken long enough. Cheap to call often."""
        text = f"{self._headline}: {waited_for} …" if waited_for else f"{self._headline} …"
        if (
            self._is_over
            or not self._is_wanted
            or text == self._shown
            or self._clock() < self._began_at + SHOWN_AFTER_S
        ):
            return
        self._show(text)
        self._shown = text

    def close(self, *, is_replaced: bool = False) -> None:
        """Remove it."""
        if self._shown and not self._is_over and not (is_replaced and self.place.is_there):
            self._show("")
        self._is_over = True

    def _show(self, text: str) -> None:
        if self.place.is_there:
            text_html = f'<span style="opacity:0.7">{html.escape(text)}</span>'
            self.place.show({"text/plain": text, "text/html": text_html} if text else {})
            return
        sys.stderr.write(f"{_CLEAR_TO_END}nbaccel: {text}" if text else _CLEAR_TO_END)
        sys.stderr.flush()
