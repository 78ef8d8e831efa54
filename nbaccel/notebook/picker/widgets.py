"""A picker in a notebook: panels of fields, memory bars, the configuration to copy, actions.

    user ── widgets ──► PickerView ── choose ──► PickerModel ── observe ──► PickerView.sync

Widgets are made once, those of a section when it is first opened; a change sends values only. A
front end may handle the user's actions in another thread while a cell runs, so every action takes
one lock.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ipywidgets as w

from nbaccel.errors import ConfigError
from nbaccel.notebook.picker.choices import PANELS, title_of
from nbaccel.notebook.picker.fields import (
    FacesPanel,
    FoldedSection,
    MemoryPanel,
    SettingField,
    SharedFields,
    field_for,
)
from nbaccel.notebook.picker.html import (
    error_html,
    front_html,
    heading_html,
    remarks_html,
    title_html,
)

if TYPE_CHECKING:
    from nbaccel.notebook.picker.choices import Setting
    from nbaccel.notebook.picker.model import PickerModel


__all__ = ["ActionsRow", "CarryOut", "FilesPanel", "PickerView"]


CarryOut = Callable[..., tuple[str, ...]]
_SUGGEST = "Suggest"
_NO_CHANGE = "Nothing has been changed yet"


class ActionsRow:
    """The line at the top.

    Args:
        model: The picker's model.
        shared_fields: Layouts and styles.
        carry_out: Runs an action and shows its errors.

    Attributes:
        box: The widget to show.
    """

    def __init__(
        self, model: PickerModel, shared_fields: SharedFields, carry_out: CarryOut
    ) -> None:
        self._model, self._carry_out = model, carry_out
        title_widget = shared_fields.new_html(title_html())
        self._suggest = shared_fields.new_button(_SUGGEST, "nbaccel-suggest", self._on_suggest)
        self._undo = shared_fields.new_button("Undo", "nbaccel-undo", self._on_undo)
        self.box = shared_fields.new_row([title_widget, self._suggest, self._undo], "nbaccel-head")

    def sync(self) -> None:
        """Disable buttons that have no effect now."""
        self._undo.disabled = not self._model.can_undo
        self._undo.tooltip = "Take the last change back" if self._model.can_undo else _NO_CHANGE
        suggest_refusal = self._model.suggest_refusal
        self._suggest.disabled = bool(suggest_refusal)
        self._suggest.tooltip = suggest_refusal or "Take the fastest settings that fit"

    def _on_undo(self) -> None:
        self._carry_out(self._model.undo)

    def _on_suggest(self) -> None:
        self._suggest.disabled, self._suggest.description = True, "Looking …"
        try:
            self._carry_out(self._model.suggest)
        finally:
            self._suggest.description = _SUGGEST
            self.sync()


class FilesPanel:
    """Loading from a file, a path or pasted text; saving.

    Args:
        model: The picker's model.
        shared_fields: Layouts and styles.
        carry_out: Runs an action and shows its errors.

    Attributes:
        section: The section, which is filled when it is opened.
    """

    def __init__(
        self, model: PickerModel, shared_fields: SharedFields, carry_out: CarryOut
    ) -> None:
        self._model, self._shared, self._carry_out = model, shared_fields, carry_out
        self._faces: w.Dropdown | None = None
        self.section = FoldedSection("Load or save", (), model, shared_fields, self._make)
        self.section.box.add_class("nbaccel-files")

    def sync(self) -> None:
        """Offer the languages that are available now."""
        if self._faces is not None:
            face_names = tuple(config_face.name for config_face in self._model.faces())
            if self._faces.options != face_names:
                kept_name = self._faces.value
                self._faces.options = face_names
                self._faces.value = kept_name if kept_name in face_names else "YAML"

    def _make(self) -> list[w.Widget]:
        text_style = {"layout": self._shared.width, "style": self._shared.text}
        self._upload = w.FileUpload(
            description="Load a file",
            accept=".json,.yaml,.yml",
            icon="",  # Notebook 7 cannot load the font of its icons
            layout=self._shared.width,
        )
        self._upload.observe(lambda change: self._on_upload(change.new), "value")
        self._path = w.Text(description="Path", placeholder="ds_config.json", **text_style)
        self._paste = w.Textarea(
            description="Or paste it",
            placeholder="a DeepSpeed configuration or a RunConfig, as JSON or YAML",
            **text_style,
        )
        self._errors = self._shared.new_html("", "nbaccel-load-errors")
        self._target = w.Text(description="Save to", placeholder="run.yaml", **text_style)
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
            self._errors,
            self._row(
                self._target.add_class("nbaccel-target"),
                self._faces.add_class("nbaccel-save-as"),
                new_button("Save", "nbaccel-save", self._on_save),
            ),
        ]

    def _row(self, *widgets: w.Widget) -> w.Widget:
        return self._shared.new_row(widgets, "nbaccel-row")

    def _on_upload(self, uploaded_files: Sequence[Any] | dict[str, Any]) -> None:
        if not uploaded_files:
            return
        first_file = next(
            iter(uploaded_files.values() if isinstance(uploaded_files, dict) else uploaded_files)
        )
        file_content = bytes(first_file["content"])
        self._load(lambda: file_content.decode() + "\n")
        # Emptied, so that the same file can be chosen again. In ipywidgets 7 the trait is
        # read-only, and a dict.
        self._upload.set_trait("value", type(uploaded_files)())

    def _on_path(self) -> None:
        self._load(lambda: Path(self._path.value.strip()))

    def _on_paste(self) -> None:
        # A line's end makes it text for the reader, even if it looks like a path.
        if not self._load(lambda: self._paste.value + "\n"):
            self._paste.value = ""  # refused text stays, to be corrected

    def _load(self, read_source: Callable[[], str | Path]) -> tuple[str, ...]:
        load_mistakes = self._carry_out(lambda: self._model.load(read_source()), done="Loaded.")
        self._errors.value = error_html(load_mistakes)
        return load_mistakes

    def _on_save(self) -> None:
        target_path, face_name = (
            self._target.value.strip(),
            str(self._faces.value) if self._faces else "",
        )
        save_mistakes = self._carry_out(
            lambda: self._model.save(target_path, face_name),
            done=f"Saved to {target_path} as {face_name}.",
        )
        self._errors.value = error_html(save_mistakes)


_FEW_SECTIONS = 2  # more of them lie below one "Advanced"


class PickerView:
    """Everything that is shown of one picker.

    Args:
        model: The model that it shows and changes.
        panel_names: Which panels.
        is_whole: Whether memory, the configuration and files are shown, too.
        lock: Held while what the user does is carried out.
        hidden_class: A class of elements that are not to be seen as long as this is.

    Attributes:
        root: The widget that holds all others.
    """

    def __init__(
        self,
        model: PickerModel,
        panel_names: Sequence[str],
        *,
        is_whole: bool,
        lock: threading.RLock,
        hidden_class: str,
    ) -> None:
        self._model, self._lock, self._shared = model, lock, SharedFields()
        self._fields: dict[str, SettingField] = {}
        self._sections: list[FoldedSection] = []
        self._told_elsewhere: list[SettingField] = []
        self._said: tuple[str, ...] = ()
        self._wrong: tuple[str, ...] = ()
        front_widget = self._shared.new_html(front_html(hidden_class), "nbaccel-front")
        self._messages = self._shared.new_html()
        panel_boxes = {panel_name: self._panel(panel_name) for panel_name in panel_names}
        self._parts: list[MemoryPanel | FacesPanel | FilesPanel | ActionsRow] = []
        self.root = self._shared.new_box(
            [front_widget, *self._whole(panel_boxes, is_whole=is_whole)], "nbaccel-picker"
        )
        self.sync()

    # ---------------------------------------------------------------- out
    def sync(self) -> None:
        """Show the present state of the model."""
        with self._lock:
            for setting_field in list(self._fields.values()):
                setting_field.sync()
            for folded_section in self._sections:
                folded_section.sync()
            for view_part in self._parts:
                view_part.sync()
            self._tell()

    # ---------------------------------------------------------------- in
    def carry_out(
        self,
        action: Callable[[], Any],
        *,
        field: SettingField | None = None,
        done: str = "",
    ) -> tuple[str, ...]:
        """Do what the user asks for, and show what goes wrong.

        Args:
            action: Changes the model.
            field: The field that the user acted in, if any.
            done: What to say when it is done.

        Returns:
            What is wrong; nothing where it was done.
        """
        with self._lock:
            self._forget(field)
            try:
                action()
            except ConfigError as error:
                self._place(error, field)
                return error.mistakes
            except Exception as error:  # ipywidgets would only log it
                self._wrong = (f"{type(error).__name__}: {error}",)
                self._tell()
                return self._wrong
            self._said = (done,) if done else ()
            if field is None:
                self._drop_what_was_typed()
            self._tell()
            return ()

    def _forget(self, field: SettingField | None) -> None:
        """Remove messages of earlier mistakes; a field whose text is still wrong keeps its own."""
        for told_field in self._told_elsewhere:
            told_field.tell(())
        self._told_elsewhere, self._said, self._wrong = [], (), ()
        if field is not None:
            field.messages = ()  # the text stays visible until the next attempt is judged

    def _drop_what_was_typed(self) -> None:
        """Clear refused text in all fields after a whole configuration was loaded or undone."""
        refused_fields = [field for field in self._fields.values() if field.messages]
        for field in refused_fields:
            field.tell(())
            field.sync()

    def _place(self, error: ConfigError, field: SettingField | None) -> None:
        """Show each mistake at its field, if that is visible."""
        other_messages: list[str] = []
        for name, messages in self._model.mistakes_of(error).items():
            named_field = self._fields.get(name)
            if named_field is None or named_field is field or not self._model.is_shown(name):
                other_messages += messages
                continue
            if not named_field.messages:  # the field's own messages come first
                named_field.tell(tuple(messages))
                self._told_elsewhere.append(named_field)
        if field is not None:
            field.tell(tuple(other_messages) or error.mistakes)
            other_messages = []
        self._wrong = tuple(other_messages)
        self._tell()

    def _tell(self) -> None:
        remarks = dict.fromkeys([*self._said, *self._model.remarks])
        self._messages.value = error_html(self._wrong) + remarks_html(remarks)

    def _choose(self, field: SettingField, value: Any) -> None:
        self.carry_out(lambda: self._model.choose(field.setting.name, value), field=field)

    # ---------------------------------------------------------------- building
    def _whole(self, panels: dict[str, w.Widget], *, is_whole: bool) -> list[w.Widget]:
        if not is_whole:
            return [self._shared.new_box(list(panels.values())), self._messages]
        files = FilesPanel(self._model, self._shared, self.carry_out)
        actions = ActionsRow(self._model, self._shared, self.carry_out)
        memory, faces = (
            MemoryPanel(self._model, self._shared),
            FacesPanel(self._model, self._shared),
        )
        self._parts = [memory, faces, files, actions]
        self._sections.append(files.section)
        # Memory is in sight while precision and stage are chosen; what grows comes last.
        columns = [
            self._shared.new_box(boxes, "nbaccel-column")
            for boxes in (
                (panels["precision"], panels["zero"]),
                (memory.box, panels["launch"], faces.box),
            )
        ]
        return [
            actions.box,
            self._messages,
            self._shared.new_row(columns, "nbaccel-columns"),
            files.section.box,
        ]

    def _panel(self, name: str) -> w.Widget:
        settings = self._model.settings(name)
        sections: dict[str, list[Setting]] = {}
        for setting in settings:
            sections.setdefault(setting.section, []).append(setting)
        first = self._made(sections.pop("", []))
        heading = self._shared.new_html(heading_html(title_of(name)))
        return self._shared.new_box(
            [heading, *first, *self._below(sections)], "nbaccel-panel", f"nbaccel-panel-{name}"
        )

    def _below(self, sections: dict[str, list[Setting]]) -> list[w.Widget]:
        """Sections that are opened on demand: a few one by one, many below one heading."""
        if len(sections) <= _FEW_SECTIONS:
            return [self._section(name, group).box for name, group in sections.items()]
        all_settings = [setting for group in sections.values() for setting in group]
        # Its sections are made when it is opened: every widget costs messages to the page.
        advanced = FoldedSection(
            "Advanced",
            all_settings,
            self._model,
            self._shared,
            lambda: [self._section(name, group).box for name, group in sections.items()],
        )
        self._sections.append(advanced)
        return [advanced.box]

    def _section(self, name: str, settings: Sequence[Setting]) -> FoldedSection:
        title = name if name not in map(title_of, PANELS) else "Advanced"
        section = FoldedSection(
            title, settings, self._model, self._shared, lambda: self._made(settings)
        )
        self._sections.append(section)
        return section

    def _made(self, settings: Sequence[Setting]) -> list[w.Widget]:
        new_fields = [
            field_for(setting, self._model, self._choose, self._shared) for setting in settings
        ]
        self._fields |= {field.setting.name: field for field in new_fields}
        return [field.box for field in new_fields]
