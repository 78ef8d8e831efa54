"""Parts of a picker beside its fields: folded sections, and languages to copy.

What is below a heading is made when it is first opened: every widget costs messages to the page.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import ipywidgets as w

from nbaccel.memory.settings_form import settings_forms
from nbaccel.notebook.picker.fields import SharedFields, Toggles, toggle_class
from nbaccel.notebook.picker.html import (
    css_name,
    face_html,
    label_html,
    resolved_html,
)

if TYPE_CHECKING:
    from nbaccel.memory.settings_form import Setting
    from nbaccel.notebook.picker.model import PickerModel


class FoldedSection:
    """Settings below a heading: a button, which the keyboard opens in every front end."""

    def __init__(
        self,
        title: str,
        settings: Sequence[Setting],
        model: PickerModel,
        fields: SharedFields,
        widgets: Callable[[], list[w.Widget]],
        *,
        css_class: str = "",
    ) -> None:
        self._title = title
        self._settings = settings
        self._model = model
        self._make = widgets
        self._is_shown: bool | None = None
        self._shared = fields
        self._inside: w.VBox | None = None
        css_class = css_class or f"nbaccel-opens-{css_name(title)}"
        classes = ("nbaccel-opens", css_class)
        self.heading = fields.new_toggle(title, "", *classes)
        self.heading.observe(lambda change: self._turn(is_open=change.new), "value")
        self.box = fields.new_box([self.heading], "nbaccel-folded")
        self.sync()

    def sync(self) -> None:
        """Show it where it means something, with the number of settings made in it."""
        if not self._settings:
            return
        is_shown = any(self._model.is_shown(setting.name) for setting in self._settings)
        toggle_class(self.box, "nbaccel-hidden", not is_shown)
        # Not on the first call, where `_is_shown` is None: sections begin closed.
        if is_shown and self._is_shown is False:
            self.heading.value = True  # what was just chosen has its settings here
        self._is_shown = is_shown
        values = ((self._model.value(one.name), one.default) for one in self._settings)
        num_set = sum(value not in (None, default) for value, default in values) * is_shown
        self.heading.description = f"{self._title} ({num_set} set)" if num_set else self._title

    def _turn(self, *, is_open: bool) -> None:
        if is_open and self._inside is None:
            self._inside = self._shared.new_box(self._make(), "nbaccel-section")
            self.box.children = (self.heading, self._inside)
        if self._inside is not None:
            toggle_class(self._inside, "nbaccel-hidden", not is_open)


_RUN_FACES = ("YAML", "Command line", "Python")
_RESOLVED_FACE = "Resolved"


class FacesPanel:
    """The configuration in one language at a time, and the plan's decisions."""

    def __init__(self, model: PickerModel, fields: SharedFields) -> None:
        self._model = model
        self._shared = fields
        self._not_chosen = {form.file_name: form.not_chosen for form in settings_forms()}
        self._names = (*self._not_chosen, *_RUN_FACES, _RESOLVED_FACE)
        self._picked = self._names[0]
        self._text: w.HTML | None = None
        self._toggles = Toggles(fields, self._pressed)

    def make(self) -> list[w.Widget]:
        """Its widgets, when it is opened."""
        self._text = self._shared.new_html()
        buttons = [
            self._toggles.add(name, name, "", f"nbaccel-face-{css_name(name)}")
            for name in self._names
        ]
        self.sync()
        label = self._shared.new_html(label_html("Shown as", is_hidden=True))
        row = self._shared.new_row(buttons, "nbaccel-options")
        return [self._shared.new_box([label, row, self._text], "nbaccel-panel", "nbaccel-faces")]

    def sync(self) -> None:
        """Show the present state of the model."""
        if self._text is None:
            return
        faces = {name: face_html(name, text) for name, text in self._model.faces().items()}
        faces[_RESOLVED_FACE] = resolved_html(self._model.resolved())
        # `_picked` is kept: a language that is missing now, such as DeepSpeed's, may come back.
        name = self._picked if self._picked in faces else _RUN_FACES[0]
        for own_name, button in self._toggles.buttons.items():
            button.disabled = own_name not in faces
            button.tooltip = self._not_chosen.get(own_name, "") if button.disabled else ""
        self._toggles.show(name)
        self._text.value = faces[name]

    def _pressed(self, name: str, is_on: bool) -> None:
        self._picked = name if is_on else self._picked
        self.sync()
