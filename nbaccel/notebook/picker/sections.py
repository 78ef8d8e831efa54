"""What is opened on demand: a button as heading, and below it what is made when it is opened."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import ipywidgets as w

from nbaccel.notebook.picker.drawing import css_name
from nbaccel.notebook.picker.fields import Shared, toggle_class

if TYPE_CHECKING:
    from nbaccel.notebook.picker.choices import Setting
    from nbaccel.notebook.picker.model import PickerModel

__all__ = ["Section"]


class Section:
    """Settings below a heading.

    The heading is a button, which the keyboard reaches and opens in every front end.

    Args:
        title: The heading.
        settings: What is in it; it is hidden while none of them means anything.
        model: The picker's model.
        shared: Layouts and styles.
        make: Makes what is in it, when it is opened first.

    Attributes:
        box: What is shown.
        heading: The button.
    """

    def __init__(
        self,
        title: str,
        settings: Sequence[Setting],
        model: PickerModel,
        shared: Shared,
        make: Callable[[], list[w.Widget]],
    ) -> None:
        self._title, self._settings, self._model, self._make = title, settings, model, make
        self._is_shown: bool | None = None
        self.heading = shared.new_toggle(title, "")
        self.heading.add_class("nbaccel-opens").add_class(f"nbaccel-opens-{css_name(title)}")
        self.heading.observe(lambda change: self._turn(is_open=change.new), "value")
        self._inside = shared.new_box([])
        self._inside.add_class("nbaccel-section").add_class("nbaccel-hidden")
        self.box = shared.new_box([self.heading, self._inside])
        self.sync()

    def sync(self) -> None:
        """Show it where it means something, with the number of settings made in it."""
        if not self._settings:
            return
        is_shown = any(self._model.is_shown(setting.name) for setting in self._settings)
        toggle_class(self.box, "nbaccel-hidden", not is_shown)
        if is_shown and self._is_shown is False:
            self.heading.value = True  # what was just chosen is settled in it
        self._is_shown = is_shown
        num_set = sum(self._is_set(setting) for setting in self._settings) if is_shown else 0
        self.heading.description = f"{self._title} ({num_set} set)" if num_set else self._title

    def _is_set(self, setting: Setting) -> bool:
        value = self._model.value(setting.name)
        return value is not None and value != setting.default

    def _turn(self, *, is_open: bool) -> None:
        if is_open and not self._inside.children:
            self._inside.children = self._make()
        toggle_class(self._inside, "nbaccel-hidden", not is_open)
