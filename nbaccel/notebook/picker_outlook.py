"""What comes of the choices: memory as bars, and the configuration in every language."""

from __future__ import annotations

from typing import TYPE_CHECKING

import ipywidgets as w

from nbaccel.notebook.picker_drawing import (
    bars_html,
    css_name,
    face_html,
    heading_html,
    label_html,
    resolved_html,
    verdict_html,
)
from nbaccel.notebook.picker_fields import Shared

if TYPE_CHECKING:
    from nbaccel.notebook.picker_model import PickerModel

__all__ = ["Faces", "Memory"]

_FACES = ("DeepSpeed JSON", "YAML", "Command line", "Python")
_RESOLVED = "Resolved"
_NO_ENGINE = "needs a ZeRO stage: without one DeepSpeed does not train"


class Memory:
    """Whether it fits, and a bar per place.

    Args:
        model: The picker's model.
        shared: Layouts and styles.

    Attributes:
        box: What is shown.
    """

    def __init__(self, model: PickerModel, shared: Shared) -> None:
        self._model = model
        heading, self._verdict, self._bars = (shared.new_html() for _ in range(3))
        heading.value = heading_html("Memory")
        self._bars.add_class("nbaccel-bars")
        self.box = shared.new_box([heading, self._verdict, self._bars])
        self.box.add_class("nbaccel-panel").add_class("nbaccel-memory")

    def sync(self) -> None:
        """Draw what the model says now."""
        self._verdict.value = verdict_html(self._model.verdict)
        self._bars.value = bars_html(self._model.bars())


class Faces:
    """The configuration in one language at a time, and what was left open.

    Args:
        model: The picker's model.
        shared: Layouts and styles.

    Attributes:
        box: What is shown.
    """

    def __init__(self, model: PickerModel, shared: Shared) -> None:
        self._model = model
        self._picked = _FACES[0]
        self._is_syncing = False
        heading, label, self._text = (shared.new_html() for _ in range(3))
        heading.value = heading_html("Configuration")
        label.value = label_html("Shown as", is_hidden=True)
        self._buttons = {name: shared.new_toggle(name, "") for name in (*_FACES, _RESOLVED)}
        for name, button in self._buttons.items():
            button.add_class(f"nbaccel-face-{css_name(name)}")
            button.observe(lambda change, name=name: self._pressed(name, change.new), "value")
        row = w.HBox(list(self._buttons.values()), layout=shared.layout)
        self.box = shared.new_box([heading, label, row.add_class("nbaccel-options"), self._text])
        self.box.add_class("nbaccel-panel").add_class("nbaccel-faces")

    def sync(self) -> None:
        """Write what the model says now."""
        faces = {face.name: face for face in self._model.faces()}
        shown = self._picked if self._picked in faces or self._picked == _RESOLVED else "YAML"
        self._is_syncing = True
        for name, button in self._buttons.items():
            is_missing = name not in faces and name != _RESOLVED
            button.value, button.disabled = name == shown, is_missing
            button.tooltip = _NO_ENGINE if is_missing else ""
        self._is_syncing = False
        if shown == _RESOLVED:
            self._text.value = resolved_html(self._model.resolved())
        else:
            self._text.value = face_html(faces[shown])

    def _pressed(self, name: str, is_on: bool) -> None:
        if not self._is_syncing:
            self._picked = name if is_on else self._picked
            self.sync()
