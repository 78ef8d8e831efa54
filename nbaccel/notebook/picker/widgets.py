"""A picker in a notebook: panels of fields, memory bars, the configuration to copy, actions.

    user ── widgets ──► PickerView ── choose ──► PickerModel ── observe ──► PickerView.sync

Widgets are made once, those of a section when it is opened first; a change moves values only. A
front end may have what the user does handled in another thread while a cell runs, so all that
comes in takes one lock.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import ipywidgets as w

from nbaccel.errors import ConfigError
from nbaccel.notebook.picker.actions import Actions, Files
from nbaccel.notebook.picker.drawing import error_html, front_html, heading_html, remarks_html
from nbaccel.notebook.picker.fields import Field, Shared, field_for
from nbaccel.notebook.picker.outlook import Faces, Memory
from nbaccel.notebook.picker.sections import Section
from nbaccel.notebook.picker.words import TITLES

if TYPE_CHECKING:
    from nbaccel.notebook.picker.choices import Setting
    from nbaccel.notebook.picker.model import PickerModel

__all__ = ["PickerView"]

_FEW_SECTIONS = 2  # more of them lie below one "Advanced"


class PickerView:
    """Everything that is shown of one picker.

    Args:
        model: What it shows and changes.
        panels: Which panels.
        is_whole: Whether memory, the configuration and files are shown, too.
        lock: Held while what the user does is carried out.
        hides: A class of elements that are not to be seen as long as this is.

    Attributes:
        root: The widget that holds all others.
    """

    def __init__(
        self,
        model: PickerModel,
        panels: Sequence[str],
        *,
        is_whole: bool,
        lock: threading.RLock,
        hides: str,
    ) -> None:
        self._model, self._lock, self._shared = model, lock, Shared()
        self._fields: dict[str, Field] = {}
        self._sections: list[Section] = []
        self._told_elsewhere: list[Field] = []
        self._said: tuple[str, ...] = ()
        self._wrong: tuple[str, ...] = ()
        front, self._told = self._shared.new_html(), self._shared.new_html()
        front.value = front_html(hides)
        settings = {name: self._panel(name) for name in panels}
        self._parts: list[Memory | Faces | Files | Actions] = []
        self.root = self._shared.new_box(
            [front.add_class("nbaccel-front"), *self._whole(settings, is_whole=is_whole)]
        ).add_class("nbaccel-picker")
        self.sync()

    # ---------------------------------------------------------------- out
    def sync(self) -> None:
        """Show what the model says now."""
        with self._lock:
            for field in list(self._fields.values()):
                field.sync()
            for section in self._sections:
                section.sync()
            for part in self._parts:
                part.sync()
            self._tell()

    # ---------------------------------------------------------------- in
    def carry_out(
        self,
        action: Callable[[], Any],
        *,
        field: Field | None = None,
        done: str = "",
    ) -> tuple[str, ...]:
        """Do what the user asks for; whatever goes wrong is shown to him.

        Args:
            action: Changes the model.
            field: Where he asked, if in a field.
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
            except Exception as error:  # a callback's error would go to a log that nobody reads
                self._wrong = (f"{type(error).__name__}: {error}",)
                self._tell()
                return self._wrong
            self._said = (done,) if done else ()
            if field is None:
                self._drop_what_was_typed()
            self._tell()
            return ()

    def _forget(self, field: Field | None) -> None:
        """Take back what was told of earlier mistakes; what is typed wrong stays so, and told."""
        for each in self._told_elsewhere:
            each.tell(())
        self._told_elsewhere, self._said, self._wrong = [], (), ()
        if field is not None:
            field.messages = ()  # shown until it is known whether the next try is right

    def _drop_what_was_typed(self) -> None:
        """After a whole configuration was taken over or back, no field keeps text of its own."""
        refused = [field for field in self._fields.values() if field.messages]
        for field in refused:
            field.tell(())
            field.sync()

    def _place(self, error: ConfigError, field: Field | None) -> None:
        """Show each mistake beside the field that it is about, if that can be seen."""
        rest: list[str] = []
        for name, messages in self._model.mistakes_of(error).items():
            about = self._fields.get(name)
            if about is None or about is field or not self._model.is_shown(name):
                rest += messages
                continue
            if not about.messages:  # its own come first
                about.tell(tuple(messages))
                self._told_elsewhere.append(about)
        if field is not None:
            field.tell(tuple(rest) or error.mistakes)
            rest = []
        self._wrong = tuple(rest)
        self._tell()

    def _tell(self) -> None:
        remarks = dict.fromkeys([*self._said, *self._model.remarks])
        self._told.value = error_html(self._wrong) + remarks_html(remarks)

    def _choose(self, field: Field, value: Any) -> None:
        self.carry_out(lambda: self._model.choose(field.setting.name, value), field=field)

    # ---------------------------------------------------------------- building
    def _whole(self, panels: dict[str, w.Widget], *, is_whole: bool) -> list[w.Widget]:
        if not is_whole:
            return [self._shared.new_box(list(panels.values())), self._told]
        files = Files(self._model, self._shared, self.carry_out)
        actions = Actions(self._model, self._shared, self.carry_out)
        memory, faces = Memory(self._model, self._shared), Faces(self._model, self._shared)
        self._parts = [memory, faces, files, actions]
        self._sections.append(files.section)
        # Memory is in sight while precision and stage are chosen; what grows comes last.
        first = self._shared.new_box([panels["precision"], panels["zero"]])
        second = self._shared.new_box([memory.box, panels["launch"], faces.box])
        columns = w.HBox(
            [first.add_class("nbaccel-column"), second.add_class("nbaccel-column")],
            layout=self._shared.layout,
        ).add_class("nbaccel-columns")
        return [actions.box, self._told, columns, files.section.box]

    def _panel(self, name: str) -> w.Widget:
        settings = self._model.settings(name)
        heading = self._shared.new_html()
        heading.value = heading_html(TITLES[name])
        sections: dict[str, list[Setting]] = {}
        for setting in settings:
            sections.setdefault(setting.section, []).append(setting)
        first = self._made(sections.pop("", []))
        box = self._shared.new_box([heading, *first, *self._below(sections)])
        return box.add_class("nbaccel-panel").add_class(f"nbaccel-panel-{name}")

    def _below(self, sections: dict[str, list[Setting]]) -> list[w.Widget]:
        """What is opened on demand: a few sections one by one, many below one heading."""
        if len(sections) <= _FEW_SECTIONS:
            return [self._section(name, of).box for name, of in sections.items()]
        everything = [setting for of in sections.values() for setting in of]
        advanced = Section(
            "Advanced",
            everything,
            self._model,
            self._shared,
            lambda: [self._section(name, of).box for name, of in sections.items()],
        )
        self._sections.append(advanced)
        return [advanced.box]

    def _section(self, name: str, settings: Sequence[Setting]) -> Section:
        title = name if name not in TITLES.values() else "Advanced"
        section = Section(title, settings, self._model, self._shared, lambda: self._made(settings))
        self._sections.append(section)
        return section

    def _made(self, settings: Sequence[Setting]) -> list[w.Widget]:
        made = [field_for(each, self._model, self._choose, self._shared) for each in settings]
        self._fields |= {field.setting.name: field for field in made}
        return [field.box for field in made]
