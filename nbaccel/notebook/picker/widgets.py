"""A picker in a notebook: three questions, what was taken, all settings, actions.

    user ── widgets ──► PickerView ── choose ──► PickerModel ── observe ──► PickerView.sync

Widgets are made once, those of a section when it is first opened; a change sends values only. A
front end may handle the user's actions in another thread while a cell runs, so every action takes
one lock.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import ipywidgets as w

from nbaccel.base.errors import ConfigError
from nbaccel.notebook.picker.choices import PANELS, taken_settings, title_of
from nbaccel.notebook.picker.fields import (
    FieldLook,
    HtmlPart,
    SettingField,
    SharedFields,
    field_for,
)
from nbaccel.notebook.picker.form_html import (
    error_html,
    front_html,
    heading_html,
    machine_html,
    remarks_html,
    rows_of_places,
    table_html,
    taken_html,
    trained_html,
    use_html,
)
from nbaccel.notebook.picker.json_editor import CarryOut, ConfigEditor
from nbaccel.notebook.picker.panels import (
    AllSettings,
    CandidateStrip,
    FacesPanel,
    FoldedSection,
    ProposalsPanel,
)

if TYPE_CHECKING:
    from nbaccel.memory.settings_form import Setting
    from nbaccel.memory.ways import Candidate
    from nbaccel.notebook.picker.model import PickerModel

_SUGGEST = "Suggest"
_NO_CHANGE = "Nothing has been changed yet"


class _ViewPart(Protocol):
    """What shows a part of the model."""

    def sync(self) -> None:
        """Show the present state of the model."""


class ActionsRow:
    """The line at the bottom: Suggest, Undo, how to use it, and the languages to copy it in."""

    def __init__(self, model: PickerModel, fields: SharedFields, carry_out: CarryOut) -> None:
        self._model = model
        self._carry_out = carry_out
        self._faces = FacesPanel(model, fields)
        self._proposals = ProposalsPanel(
            fields, lambda proposal: carry_out(lambda: model.take_proposal(proposal))
        )
        self._suggest = fields.new_button(_SUGGEST, "nbaccel-suggest", self._on_suggest)
        self._undo = fields.new_button("Undo", "nbaccel-undo", lambda: carry_out(model.undo))
        self._use = fields.new_html(use_html("picker"), "nbaccel-use")
        section = FoldedSection(
            "Copy as", (), model, fields, self._faces.make, css_class="nbaccel-opens-faces"
        )
        row = fields.new_row([self._suggest, self._undo, self._use, section.box], "nbaccel-actions")
        self.box = fields.new_box([self._proposals.box, row], "nbaccel-foot")

    def sync(self) -> None:
        """Disable buttons that have no effect now; proposals are of the state before."""
        self._proposals.hide()
        self._faces.sync()
        self._undo.disabled = not self._model.can_undo
        self._undo.tooltip = "Take the last change back" if self._model.can_undo else _NO_CHANGE
        refusal = self._model.suggest_refusal
        self._suggest.disabled = bool(refusal)
        self._suggest.tooltip = refusal or "Propose settings that fit"

    def tell_variable(self, name: str) -> None:
        """Say how what was chosen is used, by the variable that holds the picker."""
        self._use.value = use_html(name)

    def _on_suggest(self) -> None:
        self._suggest.disabled = True
        self._suggest.description = "Looking …"
        try:
            self._carry_out(lambda: self._proposals.show(self._model.proposals()))
        finally:
            self._suggest.description = _SUGGEST
            self._suggest.disabled = bool(self._model.suggest_refusal)


_ON_WHAT = ("num_processes", "mixed_precision")


class PickerView:
    """Everything that is shown of one picker; without `actions` where that is a part of it."""

    def __init__(
        self,
        model: PickerModel,
        panel_names: Sequence[str],
        *,
        lock: threading.RLock,
        hidden_class: str,
    ) -> None:
        self._model = model
        self._lock = lock
        self._shared = SharedFields(lock)
        # Those of the list of all settings, each made when it is first shown.
        self._listed: dict[str, SettingField] = {}
        self._first: list[SettingField] = []
        self._told_elsewhere: list[SettingField] = []
        self._said: tuple[str, ...] = ()
        self._wrong: tuple[str, ...] = ()
        widget = self._shared.new_html(front_html(hidden_class), "nbaccel-front")
        self._messages = self._shared.new_html()
        self.actions: ActionsRow | None = None
        self._parts: list[_ViewPart] = []
        is_whole = tuple(panel_names) == PANELS
        inside = self._whole(panel_names) if is_whole else self._panels(panel_names)
        self.root = self._shared.new_box([widget, *inside], "nbaccel-picker")
        self.sync()

    # ---------------------------------------------------------------- out
    def sync(self) -> None:
        """Show the present state of the model."""
        with self._lock:
            for field in list(self._all_fields()):
                field.sync()
            for part in self._parts:
                part.sync()
            self._tell()

    # ---------------------------------------------------------------- in
    def carry_out(
        self,
        action: Callable[[], Any],
        *,
        field: SettingField | None = None,
        done: str = "",
    ) -> tuple[str, ...]:
        """Do what the user asks for, and show what goes wrong."""
        with self._lock:
            self._forget(field)
            mistakes: tuple[str, ...] = ()
            try:
                action()
            except ConfigError as error:
                mistakes = error.mistakes
                self._place(error, field)
            except Exception as error:  # ipywidgets would only log it
                mistakes = self._wrong = (f"{type(error).__name__}: {error}",)
            else:
                self._said = (done,) if done else ()
                # After a whole configuration was loaded or undone, no refused text stays.
                for refused in [one for one in self._all_fields() if one.messages and not field]:
                    refused.tell(())
                    refused.sync()
            self._tell()
            return mistakes

    def _forget(self, field: SettingField | None) -> None:
        """Remove messages of earlier mistakes; a field whose text is still wrong keeps its own."""
        for told_field in self._told_elsewhere:
            told_field.tell(())
        self._told_elsewhere = []
        self._said = self._wrong = ()
        if field is not None:
            field.messages = ()  # the text stays visible until the next attempt is judged

    def _place(self, error: ConfigError, field: SettingField | None) -> None:
        """Show each mistake at its field, if that is visible."""
        other_messages: list[str] = []
        for name, messages in self._model.mistakes_of(error).items():
            named_fields = [
                one
                for one in self._all_fields()
                if one.setting.name == name and one is not field and one.is_visible
            ]
            other_messages += [] if named_fields else messages
            # The field's own messages come first.
            for named_field in (one for one in named_fields if not one.messages):
                named_field.tell(tuple(messages))
                self._told_elsewhere.append(named_field)
        if field is not None:
            field.tell(tuple(other_messages) or error.mistakes)
        self._wrong = () if field is not None else tuple(other_messages)

    def _tell(self) -> None:
        remarks = dict.fromkeys([*self._said, *self._model.remarks])
        self._messages.value = error_html(self._wrong) + remarks_html(remarks)

    def _all_fields(self) -> Iterator[SettingField]:
        yield from self._first
        yield from self._listed.values()

    def _choose(self, field: SettingField, value: Any) -> None:
        self.carry_out(lambda: self._model.choose(field.setting.name, value), field=field)

    # ---------------------------------------------------------------- building
    def _whole(self, panel_names: Sequence[str]) -> list[w.Widget]:
        """The three questions, what was taken, and everything else folded."""
        shared = self._shared
        trained = shared.new_html(trained_html(self._model), "nbaccel-part-1")
        machine = HtmlPart(shared, "nbaccel-machine", lambda: machine_html(self._model))
        on_what = [self._field(self._model.setting(name), "brief") for name in _ON_WHAT]
        strip = CandidateStrip(self._model, shared, self._take)
        taken = HtmlPart(shared, "nbaccel-taken-line", lambda: taken_html(self._model))
        taken_fields = [self._field(setting, "usable") for setting in taken_settings()]
        all_settings = AllSettings(self._model, shared, panel_names, self._listed_field)
        memory = FoldedSection(
            "Memory place by place", (), self._model, shared, lambda: [self._places_box()]
        )
        editor = ConfigEditor(self._model, shared, self.carry_out)
        self.actions = actions = ActionsRow(self._model, shared, self.carry_out)
        self._parts = [machine, strip, taken, all_settings, editor, actions]
        folded = [all_settings.section.box, editor.section.box, memory.box]
        return [
            trained,
            shared.new_row([machine.box, *(field.box for field in on_what)], "nbaccel-part-2"),
            strip.box,
            shared.new_box(
                [
                    self._messages,
                    taken.box,
                    shared.new_box([field.box for field in taken_fields], "nbaccel-taken-fields"),
                    shared.new_row(folded, "nbaccel-folds"),
                ],
                "nbaccel-part-4",
            ),
            actions.box,
        ]

    def _places_box(self) -> w.Widget:
        """The memory of each device, the host and the disk."""
        places = HtmlPart(
            self._shared, "nbaccel-memory", lambda: table_html(rows_of_places(self._model.bars()))
        )
        self._parts.append(places)
        return places.box

    def _panels(self, panel_names: Sequence[str]) -> list[w.Widget]:
        """Parts of the form: their common settings, and below them the others, folded."""
        all_settings = AllSettings(self._model, self._shared, panel_names, self._listed_field)
        self._parts.append(all_settings)
        boxes = []
        for name in panel_names:
            settings = self._model.settings(name)
            common = [
                self._listed_field(setting).box for setting in settings if not setting.section
            ]
            others = [setting for setting in settings if setting.section]
            heading = self._shared.new_html(heading_html(title_of(name)))
            inside = [heading, *common, *all_settings.sections_of(name, others)]
            boxes.append(self._shared.new_box(inside, "nbaccel-panel", f"nbaccel-panel-{name}"))
        return [self._shared.new_box(boxes), self._messages]

    def _take(self, candidate: Candidate) -> None:
        self.carry_out(lambda: self._model.take(candidate.name, candidate.precision))

    def _field(self, setting: Setting, look: FieldLook) -> SettingField:
        new_field = field_for(setting, self._model, self._choose, self._shared, look)
        self._first.append(new_field)
        return new_field

    def _listed_field(self, setting: Setting) -> SettingField:
        if setting.name not in self._listed:
            self._listed[setting.name] = field_for(setting, self._model, self._choose, self._shared)
        return self._listed[setting.name]
