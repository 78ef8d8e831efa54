"""Parts of a picker beside its fields: folded sections, memory by place, languages to copy.

What is below a heading is made when it is first opened: every widget costs messages to the page.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import ipywidgets as w

from nbaccel.notebook.picker.choices import settings_forms
from nbaccel.notebook.picker.fields import SharedFields, toggle_class
from nbaccel.notebook.picker.html import (
    bars_html,
    css_name,
    face_html,
    label_html,
    resolved_html,
    verdict_html,
)

if TYPE_CHECKING:
    from nbaccel.notebook.picker.choices import Setting
    from nbaccel.notebook.picker.model import PickerModel

__all__ = ["FacesPanel", "FoldedSection", "MemoryPanel"]


class FoldedSection:
    """Settings below a heading.

    The heading is a button, which the keyboard reaches and opens in every front end.

    Attributes:
        box: The widget to show.
        heading: The button.
    """

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
        num_set = sum(self._is_set(setting) for setting in self._settings) if is_shown else 0
        self.heading.description = f"{self._title} ({num_set} set)" if num_set else self._title

    def _is_set(self, setting: Setting) -> bool:
        value = self._model.value(setting.name)
        return value is not None and value != setting.default

    def _turn(self, *, is_open: bool) -> None:
        if is_open and self._inside is None:
            self._inside = self._shared.new_box(self._make(), "nbaccel-section")
            self.box.children = (self.heading, self._inside)
        if self._inside is not None:
            toggle_class(self._inside, "nbaccel-hidden", not is_open)


_RUN_FACES = ("YAML", "Command line", "Python")
_RESOLVED_FACE = "Resolved"


class MemoryPanel:
    """Whether it fits, and a bar per place.

    Attributes:
        box: The widget to show.
    """

    def __init__(self, model: PickerModel, fields: SharedFields) -> None:
        self._model = model
        self._verdict = fields.new_html()
        self._bars = fields.new_html("", "nbaccel-bars")
        self.box = fields.new_box(
            [self._verdict, self._bars],
            *("nbaccel-panel", "nbaccel-memory"),
        )

    def sync(self) -> None:
        """Show the present state of the model."""
        # The bars first: where they do not fit, the verdict takes longer to find a remedy.
        self._bars.value = bars_html(self._model.bars())
        # Keeps a bar's place, so that nothing moves away from the mouse when it comes.
        toggle_class(self._bars, "nbaccel-awaited", self._model.is_memory_postponed)
        self._verdict.value = verdict_html(self._model.verdict)


class FacesPanel:
    """The configuration in one language at a time, and the plan's decisions.

    Attributes:
        box: The widget to show.
    """

    def __init__(self, model: PickerModel, fields: SharedFields) -> None:
        self._model = model
        self._shared = fields
        self._not_chosen = {
            settings_form.file_name: settings_form.not_chosen for settings_form in settings_forms()
        }
        face_names = (*self._not_chosen, *_RUN_FACES)
        self._picked = face_names[0]
        self._is_syncing = False
        self._text = fields.new_html()
        self._buttons = {
            face_name: fields.new_toggle(face_name, "", f"nbaccel-face-{css_name(face_name)}")
            for face_name in (*face_names, _RESOLVED_FACE)
        }
        for face_name, face_button in self._buttons.items():
            face_button.observe(
                # The default binds this name: a closure would see the last one of the loop.
                lambda change, face_name=face_name: self._pressed(face_name, change.new),
                "value",
            )
        self.box = fields.new_box(
            [
                fields.new_html(label_html("Shown as", is_hidden=True)),
                fields.new_row(list(self._buttons.values()), "nbaccel-options"),
                self._text,
            ],
            *("nbaccel-panel", "nbaccel-faces"),
        )

    def sync(self) -> None:
        """Show the present state of the model."""
        faces_by_name = {face.name: face for face in self._model.faces()}
        # `_picked` is kept: a language that is missing now, such as DeepSpeed's, may come back.
        name = (
            self._picked
            if self._picked in faces_by_name or self._picked == _RESOLVED_FACE
            else "YAML"
        )
        self._is_syncing = True
        for face_name, button in self._buttons.items():
            is_missing = face_name not in faces_by_name and face_name != _RESOLVED_FACE
            button.value = face_name == name
            button.disabled = is_missing
            button.tooltip = self._not_chosen.get(face_name, "") if is_missing else ""
        self._is_syncing = False
        if name == _RESOLVED_FACE:
            self._text.value = resolved_html(self._model.resolved())
        else:
            self._text.value = face_html(faces_by_name[name])

    def _pressed(self, name: str, is_on: bool) -> None:
        with self._shared.lock:
            if not self._is_syncing:
                self._picked = name if is_on else self._picked
                self.sync()
