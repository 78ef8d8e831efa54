"""The configuration as text: edited and checked while one types, loaded from a file, saved.

typed or pasted text ── a moment without a key ──► PickerModel.check_source
      │                                              │ mistakes, each with its line
      └── Apply, once there is no mistake            └──► listed beside the text
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ipywidgets as w

from nbaccel.notebook.picker.fields import SharedFields
from nbaccel.notebook.picker.form_html import error_html, text_mistakes_html
from nbaccel.notebook.picker.panels import FoldedSection
from nbaccel.notebook.picker.text_mistakes import TextMistake, mistakes_in_text

if TYPE_CHECKING:
    from nbaccel.notebook.picker.model import PickerModel

CarryOut = Callable[..., tuple[str, ...]]
_TYPING_PAUSE_S = 0.25
_NO_MISTAKES = "No mistakes."


class ConfigEditor:
    """An editor of the configuration, with files to load and to save."""

    def __init__(
        self,
        model: PickerModel,
        fields: SharedFields,
        carry_out: CarryOut,
    ) -> None:
        self._model = model
        self._shared = fields
        self._carry_out = carry_out
        self._text: w.Textarea | None = None
        # The text of the present configuration, which an edited one is compared with.
        self._present_text = ""
        self._timer: asyncio.TimerHandle | None = None
        self._is_writing = False
        self.section = FoldedSection(
            "Edit, paste or load JSON",
            (),
            model,
            fields,
            self._make,
            css_class="nbaccel-opens-editor",
        )
        self.section.box.add_class("nbaccel-files")

    def sync(self) -> None:
        """Show the present configuration, unless another text is being edited."""
        if self._text is None:
            return
        face_names = tuple(self._model.faces())
        if self._faces.options != face_names:
            kept_name = self._faces.value
            self._faces.options = face_names
            self._faces.value = kept_name if kept_name in face_names else "YAML"
        was_edited = self._text.value.strip() != self._present_text.strip()
        self._present_text = self._model.editable_text()
        if not was_edited:
            self._write(self._present_text)
        self._show_mistakes(() if not was_edited else self._mistakes())

    # ---------------------------------------------------------------- building
    def _make(self) -> list[w.Widget]:
        self._text = w.Textarea(
            description="Configuration",
            placeholder="a DeepSpeed configuration or a RunConfig, as JSON or YAML",
            continuous_update=True,
            layout=self._shared.width,
        ).add_class("nbaccel-text")
        self._text.observe(lambda _: self._on_typed(), "value")
        self._told = self._shared.new_html("", "nbaccel-text-mistakes")
        new_button = self._shared.new_button
        self._apply = new_button(
            "Apply", "nbaccel-apply", lambda: self._take(self._typed_text() + "\n")
        )
        self._revert = new_button("Revert", "nbaccel-revert", self._revert_text)
        self._make_file_widgets()
        self.sync()
        return [
            self._shared.new_row(
                [
                    self._text,
                    self._shared.new_box(
                        [self._told, self._row(self._apply, self._revert)], "nbaccel-beside-text"
                    ),
                ],
                "nbaccel-editor",
            ),
            self._row(
                self._path,
                new_button("Load", "nbaccel-load", self._on_path),
                self._upload,
            ),
            self._row(
                self._target,
                self._faces,
                new_button("Save", "nbaccel-save", self._on_save),
            ),
            self._errors,
        ]

    def _make_file_widgets(self) -> None:
        self._upload = w.FileUpload(
            description="Upload a file",
            accept=".json,.yaml,.yml",
            icon="",  # Notebook 7 cannot load the font of its icons
            layout=self._shared.width,
        ).add_class("nbaccel-upload")
        self._upload.observe(lambda change: self._on_upload(change.new), "value")
        new_text = self._shared.new_text
        self._path = new_text("File", "nbaccel-path", placeholder="ds_config.json")
        self._target = new_text("Save to", "nbaccel-target", placeholder="run.yaml")
        self._faces = self._shared.new_list("as", "nbaccel-save-as")
        self._errors = self._shared.new_html("", "nbaccel-load-errors")

    def _row(self, *widgets: w.Widget) -> w.Widget:
        return self._shared.new_row(widgets, "nbaccel-row")

    # ---------------------------------------------------------------- the text
    def _on_typed(self) -> None:
        if self._is_writing:
            return
        if self._timer is not None:
            self._timer.cancel()
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:  # no loop runs in this thread, so no timer can be set
            self._check()
        else:
            self._timer = loop.call_later(_TYPING_PAUSE_S, self._check)

    def _check(self) -> tuple[TextMistake, ...]:
        with self._shared.lock:
            mistakes = self._mistakes()
            self._show_mistakes(mistakes)
            return mistakes

    def _mistakes(self) -> tuple[TextMistake, ...]:
        text = self._typed_text()
        return mistakes_in_text(text, self._model.check_source) if text.strip() else ()

    def _typed_text(self) -> str:
        return str(self._text.value) if self._text is not None else ""

    def _show_mistakes(self, mistakes: Sequence[TextMistake]) -> None:
        text = self._typed_text()
        is_edited = text.strip() not in ("", self._present_text.strip())
        said = _NO_MISTAKES if is_edited else "This is what is chosen now: edit it, or paste over."
        self._told.value = text_mistakes_html(mistakes, text, said)
        self._apply.disabled = bool(mistakes) or not is_edited
        self._revert.disabled = not is_edited

    def _write(self, text: str) -> None:
        self._is_writing = True
        try:
            if self._text is not None:
                self._text.value = text
        finally:
            self._is_writing = False

    def _revert_text(self) -> None:
        self._write(self._present_text)
        self._show_mistakes(())

    def _take(self, source: str) -> None:
        """Take a text over; one with mistakes stays, to be corrected at its lines."""
        text_before = self._present_text
        mistakes = self._carry_out(lambda: self._model.load(source), done="Loaded.")
        self._errors.value = ""
        if mistakes:
            self._check()
            return
        if self._present_text == text_before:  # nothing was changed, so nobody was told
            self._present_text = self._model.editable_text()
        self._revert_text()

    # ---------------------------------------------------------------- files
    def _on_upload(self, uploaded_files: Sequence[Any] | dict[str, Any]) -> None:
        if not uploaded_files:
            return
        files = uploaded_files.values() if isinstance(uploaded_files, dict) else uploaded_files
        self._open(bytes(next(iter(files))["content"]).decode)
        # Emptied, so that the same file can be chosen again. In ipywidgets 7 the trait is
        # read-only, and a dict.
        self._upload.set_trait("value", type(uploaded_files)())

    def _on_path(self) -> None:
        source_path = Path(self._path.value.strip()).expanduser()
        self._open(lambda: source_path.read_text(encoding="utf-8"))

    def _open(self, read_text: Callable[[], str]) -> None:
        """Bring a file into the editor, and take it over unless there is something wrong in it."""
        try:
            text = read_text()
        except (OSError, UnicodeDecodeError) as error:
            self._errors.value = error_html(
                [f"The file cannot be read: {error}. Give the path of a JSON or YAML file."]
            )
            return
        self._errors.value = ""
        self._write(text)
        if not self._check():
            self._take(text + "\n")

    def _on_save(self) -> None:
        target_path = self._target.value.strip()
        name = str(self._faces.value)
        mistakes = self._carry_out(
            lambda: self._model.save(target_path, name),
            done=f"Saved to {target_path} as {name}.",
        )
        self._errors.value = error_html(mistakes)
