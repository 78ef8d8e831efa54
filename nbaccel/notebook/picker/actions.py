"""What a picker does beside choosing: Suggest, Undo, loading and saving."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ipywidgets as w

from nbaccel.notebook.picker.drawing import error_html, title_html
from nbaccel.notebook.picker.fields import Shared
from nbaccel.notebook.picker.sections import Section

if TYPE_CHECKING:
    from nbaccel.notebook.picker.model import PickerModel

__all__ = ["Actions", "CarryOut", "Files"]

CarryOut = Callable[..., tuple[str, ...]]
_SUGGEST = "Suggest"
_NO_CHANGE = "Nothing has been changed yet"


class Actions:
    """The line at the top.

    Args:
        model: The picker's model.
        shared: Layouts and styles.
        carry_out: Does something and shows what goes wrong.

    Attributes:
        box: What is shown.
    """

    def __init__(self, model: PickerModel, shared: Shared, carry_out: CarryOut) -> None:
        self._model, self._carry_out = model, carry_out
        title = shared.new_html()
        title.value = title_html()
        self._suggest = shared.new_button(_SUGGEST, "nbaccel-suggest", self._on_suggest)
        self._undo = shared.new_button("Undo", "nbaccel-undo", self._on_undo)
        self.box = w.HBox([title, self._suggest, self._undo], layout=shared.layout)
        self.box.add_class("nbaccel-head")

    def sync(self) -> None:
        """Grey what cannot be done now."""
        self._undo.disabled = not self._model.can_undo
        self._undo.tooltip = "Take the last change back" if self._model.can_undo else _NO_CHANGE
        refusal = self._model.suggest_refusal
        self._suggest.disabled = bool(refusal)
        self._suggest.tooltip = refusal or "Take the fastest settings that fit"

    def _on_undo(self) -> None:
        self._carry_out(self._model.undo)

    def _on_suggest(self) -> None:
        self._suggest.disabled, self._suggest.description = True, "Looking …"
        try:
            self._carry_out(self._model.suggest)
        finally:
            self._suggest.description = _SUGGEST
            self.sync()


class Files:
    """Loading from a file, a path or pasted text; saving.

    Args:
        model: The picker's model.
        shared: Layouts and styles.
        carry_out: Does something and shows what goes wrong.

    Attributes:
        section: What is shown, when it is opened.
    """

    def __init__(self, model: PickerModel, shared: Shared, carry_out: CarryOut) -> None:
        self._model, self._shared, self._carry_out = model, shared, carry_out
        self._faces: w.Dropdown | None = None
        self.section = Section("Load or save", (), model, shared, self._make)
        self.section.box.add_class("nbaccel-files")

    def sync(self) -> None:
        """Offer the languages that there are now."""
        if self._faces is not None:
            names = tuple(face.name for face in self._model.faces())
            if self._faces.options != names:
                kept = self._faces.value
                self._faces.options = names
                self._faces.value = kept if kept in names else "YAML"

    def _make(self) -> list[w.Widget]:
        wide = {"layout": self._shared.width, "style": self._shared.text}
        self._upload = w.FileUpload(
            description="Load a file",
            accept=".json,.yaml,.yml",
            icon="",  # Notebook 7 is refused the font of its icons
            layout=self._shared.width,
        )
        self._upload.observe(lambda change: self._on_upload(change.new), "value")
        self._path = w.Text(description="Path", placeholder="ds_config.json", **wide)
        self._paste = w.Textarea(
            description="Or paste it",
            placeholder="a DeepSpeed configuration or a RunConfig, as JSON or YAML",
            **wide,
        )
        self._errors = self._shared.new_html()
        self._target = w.Text(description="Save to", placeholder="run.yaml", **wide)
        self._faces = w.Dropdown(
            description="as", layout=self._shared.width, style=self._shared.list
        )
        self.sync()
        new_button = self._shared.new_button
        return [
            self._upload.add_class("nbaccel-upload"),
            self._row(
                self._path.add_class("nbaccel-path"),
                new_button("Load", "nbaccel-load", self._on_path),
            ),
            self._row(
                self._paste.add_class("nbaccel-paste"),
                new_button("Take over", "nbaccel-take-over", self._on_paste),
            ),
            self._errors.add_class("nbaccel-load-errors"),
            self._row(
                self._target.add_class("nbaccel-target"),
                self._faces.add_class("nbaccel-save-as"),
                new_button("Save", "nbaccel-save", self._on_save),
            ),
        ]

    def _row(self, *widgets: w.Widget) -> w.Widget:
        return w.HBox(widgets, layout=self._shared.layout).add_class("nbaccel-row")

    def _on_upload(self, files: Sequence[Any] | dict[str, Any]) -> None:
        if not files:
            return
        first = next(iter(files.values() if isinstance(files, dict) else files))
        content = bytes(first["content"])
        self._load(lambda: content.decode() + "\n")
        self._upload.set_trait(
            "value", type(files)()
        )  # read-only in ipywidgets 7, and a dict there

    def _on_path(self) -> None:
        self._load(lambda: Path(self._path.value.strip()))

    def _on_paste(self) -> None:
        # With a line's end it is text, whatever it looks like.
        if not self._load(lambda: self._paste.value + "\n"):
            self._paste.value = ""

    def _load(self, source: Callable[[], str | Path]) -> tuple[str, ...]:
        wrong = self._carry_out(lambda: self._model.load(source()), done="Loaded.")
        self._errors.value = error_html(wrong)
        return wrong

    def _on_save(self) -> None:
        path, face = self._target.value.strip(), str(self._faces.value) if self._faces else ""
        wrong = self._carry_out(
            lambda: self._model.save(path, face), done=f"Saved to {path} as {face}."
        )
        self._errors.value = error_html(wrong)
