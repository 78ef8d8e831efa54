"""A picker in a notebook: three questions, what was taken, all settings, actions.

    user ── widgets ──► PickerView ── choose ──► PickerModel ── observe ──► PickerView.sync
    text ── a moment without a key ──► PickerModel.read ──► mistakes, each with its line, or Apply

Widgets are made once, because each costs messages to the page. A front end may handle actions in
another thread while a cell runs, so every action takes one lock.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ipywidgets as w

from nbaccel.base.errors import ConfigError
from nbaccel.memory.settings_form import settings_forms
from nbaccel.notebook.picker import fields, rendering
from nbaccel.notebook.picker.choices import PANELS, by_name, settings, taken_settings, title_of
from nbaccel.notebook.picker.config_text import TextMistake, mistakes_in_text
from nbaccel.notebook.picker.fields import FoldedSection, Form, SettingField, toggle_class
from nbaccel.output import publish

if TYPE_CHECKING:
    from nbaccel.memory.settings_form import Setting
    from nbaccel.memory.ways import Candidate
    from nbaccel.notebook.picker.model import PickerModel


_TYPING_PAUSE_S = 0.25


class ConfigEditor:
    """An editor of the configuration, with files to load and to save."""

    def __init__(self, form: Form) -> None:
        self._model = form.model
        self._form = form
        self._text: Any = None  # until it is made
        # The text of the present configuration, which an edited one is compared with.
        self._present_text = ""
        self._timer: asyncio.TimerHandle | None = None
        title = "Edit, paste or load JSON"
        self.section = FoldedSection(title, form, self._make, "nbaccel-opens-editor")
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
        was_edited = self._is_edited
        self._present_text = self._model.editable_text()
        if not was_edited:
            self._write(self._present_text)
        self._check()

    def _make(self) -> list[w.Widget]:
        form = self._form
        make = form.make
        self._text = make(
            *(w.Textarea, "nbaccel-text"),
            description="Configuration",
            placeholder="a DeepSpeed configuration or a RunConfig, as JSON or YAML",
        )
        form.hear(self._text, "value", lambda _: self._on_typed())
        self._told = form.new_html("", "nbaccel-text-mistakes")
        self._apply = form.new_button(
            "Apply", "nbaccel-apply", lambda: self._take(self._text.value + "\n")
        )
        self._revert = form.new_button("Revert", "nbaccel-revert", self._revert_text)
        self._path = make(w.Text, "nbaccel-path", description="File", placeholder="ds_config.json")
        self._target = make(w.Text, "nbaccel-target", description="Save to", placeholder="run.yaml")
        self._faces = make(w.Dropdown, "nbaccel-save-as", description="as")
        self._errors = form.new_html("", "nbaccel-load-errors")
        load = form.new_button("Load", "nbaccel-load", self._on_load)
        save = form.new_button("Save", "nbaccel-save", self._on_save)
        self.sync()
        buttons = form.new_row([self._apply, self._revert], "nbaccel-row")
        beside = form.new_box([self._told, buttons], "nbaccel-beside-text")
        return [
            form.new_row([self._text, beside], "nbaccel-editor"),
            form.new_row([self._path, load], "nbaccel-row"),
            form.new_row([self._target, self._faces, save], "nbaccel-row"),
            self._errors,
        ]

    def _on_typed(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = publish.call_later(_TYPING_PAUSE_S, self._check)
        if self._timer is None:
            self._check()

    @property
    def _is_edited(self) -> bool:
        return bool(self._text.value.strip() != self._present_text.strip())

    def _check(self) -> tuple[TextMistake, ...]:
        """Show the mistakes of the text; that of the present configuration has none."""
        with self._model.lock:
            text = self._text.value
            is_edited = self._is_edited and bool(text.strip())
            mistakes = mistakes_in_text(text, self._model.read) if is_edited else ()
            chosen = "This is what is chosen now: edit it, or paste over."
            said = "No mistakes." if is_edited else chosen
            self._told.value = rendering.text_mistakes_html(mistakes, text, said)
            self._apply.disabled = bool(mistakes) or not is_edited
            self._revert.disabled = not is_edited
            return mistakes

    def _write(self, text: str) -> None:
        with self._form.showing():
            self._text.value = text

    def _revert_text(self) -> None:
        self._write(self._present_text)
        self._check()

    def _take(self, source: str) -> None:
        """Take a text over; one with mistakes stays, to be corrected at its lines."""
        text_before = self._present_text
        mistakes = self._form.carry_out(lambda: self._model.load(source), done="Loaded.")
        self._errors.value = ""
        if mistakes:
            self._check()
            return
        if self._present_text == text_before:  # nothing was changed, so nobody was told
            self._present_text = self._model.editable_text()
        self._revert_text()

    def _on_load(self) -> None:
        """Bring a file into the editor, and take it over unless there is something wrong in it."""
        try:
            text = Path(self._path.value.strip()).expanduser().read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            mistake = f"The file cannot be read: {error}. Give the path of a JSON or YAML file."
            self._errors.value = rendering.error_html([mistake])
            return
        self._errors.value = ""
        self._write(text)
        if not self._check():
            self._take(text + "\n")

    def _on_save(self) -> None:
        path = self._target.value.strip()
        name = str(self._faces.value)
        done = f"Saved to {path} as {name}."
        mistakes = self._form.carry_out(partial(self._model.save, path, name), done=done)
        self._errors.value = rendering.error_html(mistakes)


_RUN_FACES = ("YAML", "Command line", "Python")
_RESOLVED_FACE = "Resolved"


class FacesPanel:
    """The configuration in one language at a time, and the plan's decisions."""

    def __init__(self, form: Form) -> None:
        self._model = form.model
        self._form = form
        self._not_chosen = {form.file_name: form.not_chosen for form in settings_forms()}
        self._names = (*self._not_chosen, *_RUN_FACES, _RESOLVED_FACE)
        self._picked = self._names[0]
        self._text: w.HTML | None = None
        self._toggles = fields.Toggles(form, self._pressed)

    def make(self) -> list[w.Widget]:
        """Its widgets, when it is opened."""
        self._text = self._form.new_html()
        buttons = [
            self._toggles.add(name, name, "", f"nbaccel-face-{rendering.css_name(name)}")
            for name in self._names
        ]
        self.sync()
        label = self._form.new_html(rendering.label_html("Shown as", is_hidden=True))
        row = self._form.new_row(buttons, "nbaccel-options")
        return [self._form.new_box([label, row, self._text], "nbaccel-panel", "nbaccel-faces")]

    def sync(self) -> None:
        """Show the present state of the model."""
        if self._text is None:
            return
        faces = {key: rendering.face_html(key, text) for key, text in self._model.faces().items()}
        faces[_RESOLVED_FACE] = rendering.resolved_html(self._model.resolved())
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


class CandidateStrip:
    """Ways to train, each with the memory that it needs."""

    def __init__(self, form: Form) -> None:
        self._model = form.model
        self._form = form
        # What the buttons stand for, in their order.
        self._shown: tuple[Candidate, ...] = ()
        self._heading = form.new_html("", "nbaccel-strip-head")
        self._buttons = fields.Toggles(form, self._pressed)
        self._names = form.new_box([], "nbaccel-options", "nbaccel-candidates")
        self._bars = form.new_html("", "nbaccel-bars")
        label = form.new_html(rendering.label_html("Ways to train", is_hidden=True))
        self._strip = form.new_box([self._names, label, self._bars], "nbaccel-strip")
        self.box = form.new_box([self._heading, self._strip], "nbaccel-part-3")

    def sync(self) -> None:
        """Show the present candidates; before they are estimated, the room that they will take."""
        model = self._model
        self._shown = model.candidates()
        toggle_class(self._strip, "nbaccel-awaited", model.is_memory_postponed)
        self._heading.value = rendering.fits_html(model)
        rows = [*rendering.shown_rows(model)]
        buttons = self._buttons.buttons
        for number in range(len(buttons), len(rows)):
            self._buttons.add(number, "", "", f"nbaccel-candidate-{number}")
        # Buttons stay where they are, so that the keyboard keeps its place.
        if len(buttons) != len(self._names.children):
            self._names.children = tuple(buttons.values())
        for number, button in buttons.items():
            toggle_class(button, "nbaccel-hidden", number >= len(rows))
        for button, row, candidate in zip(buttons.values(), rows, self._shown, strict=False):
            button.description = row.name
            button.disabled = row.is_refused
            button.tooltip = _candidate_text(candidate)
        self._buttons.show(next((n for n, row in enumerate(rows) if row.is_chosen), None))
        self._bars.value = rendering.table_html(rows) if rows else ""

    def _pressed(self, number: int, is_on: bool) -> None:
        if is_on and number < len(self._shown):
            self._form.carry_out(lambda: self._model.take(self._shown[number].name))
        # A refused one goes off again, and the one that is taken stays on when it is pressed.
        self.sync()


def _candidate_text(candidate: Candidate) -> str:
    """What a screen reader and the mouse's pointer say of a candidate."""
    # The reason of one that cannot be taken is its verdict, too.
    told = (rendering.verdict_text(candidate), candidate.reason)
    return "; ".join(dict.fromkeys(filter(None, told)))


_MAX_FOUND = 12


class AllSettings:
    """The searchable list of all settings, in a section that is filled when it is opened."""

    def __init__(
        self, form: Form, panels: Sequence[str], field_of: Callable[[Setting], SettingField]
    ) -> None:
        self._form = form
        self._field_of = field_of
        self._panels = panels
        self._sections: list[FoldedSection] = []
        title = f"All {len(by_name())} settings"
        self.section = FoldedSection(title, form, self._make, "nbaccel-opens-all")

    def sync(self) -> None:
        """Show the number of settings that are made in each section."""
        for section in self._sections:
            section.sync()

    def _make(self) -> list[w.Widget]:
        search = self._form.make(
            *(w.Text, "nbaccel-search"),
            description="Search",
            placeholder="a name, a key of DeepSpeed, or a word of its meaning",
        )
        search.observe(lambda change: self._find(change.new), "value")
        self._found_count = self._form.new_html("", "nbaccel-found-count")
        self._found = self._form.new_box([], "nbaccel-found")
        panels = []
        for name in self._panels:
            inside = self.sections_of(name, settings(name))
            panels.append(self._form.new_box(inside, "nbaccel-panel", f"nbaccel-panel-{name}"))
        self._list = self._form.new_box(panels, "nbaccel-listed")
        return [search, self._found_count, self._found, self._list]

    def sections_of(self, panel_name: str, listed: Iterable[Setting]) -> list[w.Widget]:
        """Settings of a panel below a heading for each of their sections."""
        groups: dict[str, list[Setting]] = {}
        for setting in listed:
            groups.setdefault(setting.section, []).append(setting)
        title = title_of(panel_name)
        titles = {"": f"{title}: common", title: f"{title}: more"}
        sections = [
            FoldedSection(
                titles.get(name, name), *(self._form, partial(self._boxes_of, group)), listed=group
            )
            for name, group in groups.items()
        ]
        self._sections += sections
        return [section.box for section in sections]

    def _boxes_of(self, listed: Iterable[Setting]) -> list[w.Widget]:
        return [self._field_of(setting).box for setting in listed]

    def _find(self, words: str) -> None:
        found = search_settings(words, [one for name in self._panels for one in settings(name)])
        is_searching = bool(words.strip())
        shown = found[:_MAX_FOUND]
        self._found.children = tuple(self._boxes_of(shown))
        text = f"{len(found)} found" if found else "Nothing found: try another word"
        if len(found) > len(shown):
            text += f", the first {len(shown)} are shown: type more"
        self._found_count.value = f'<div role="status">{text}.</div>' if is_searching else ""
        toggle_class(self._list, "nbaccel-hidden", is_searching)
        toggle_class(self._found, "nbaccel-hidden", not is_searching)


def search_settings(words: str, listed: Sequence[Setting]) -> list[Setting]:
    """Find settings by what people remember of them: by label, by name, by meaning."""
    wanted = words.lower().split()
    ranked: list[tuple[int, Setting]] = []
    for setting in listed if wanted else ():
        places = (
            setting.label.lower(),
            f"{setting.name} {setting.strategy_key}".lower(),
            f"{setting.meaning} {setting.section}".lower(),
        )
        if all(word in " ".join(places) for word in wanted):
            is_first_in = [wanted[0] in place for place in places]
            ranked.append((is_first_in.index(True), setting))
    return [setting for _, setting in sorted(ranked, key=lambda found: found[0])]


_NO_CHANGE = "Nothing has been changed yet"


class ActionsRow:
    """The line at the bottom: Suggest, Undo, how to use it, and the languages to copy it in."""

    def __init__(self, form: Form) -> None:
        self._model = model = form.model
        self._form = form
        self._faces = FacesPanel(form)
        self._proposals = form.new_box([], "nbaccel-proposals", "nbaccel-hidden")
        self._suggest = form.new_button(
            "Suggest", "nbaccel-suggest", lambda: form.carry_out(self._show_proposals)
        )
        self._undo = form.new_button("Undo", "nbaccel-undo", lambda: form.carry_out(model.undo))
        self._use = form.new_html(rendering.use_html("picker"), "nbaccel-use")
        section = FoldedSection("Copy as", form, self._faces.make, "nbaccel-opens-faces")
        row = form.new_row([self._suggest, self._undo, self._use, section.box], "nbaccel-actions")
        self.box = form.new_box([self._proposals, row], "nbaccel-foot")

    def sync(self) -> None:
        """Disable buttons that have no effect now; proposals are of the state before."""
        toggle_class(self._proposals, "nbaccel-hidden", True)
        self._faces.sync()
        self._undo.disabled = not self._model.can_undo
        self._undo.tooltip = "Take the last change back" if self._model.can_undo else _NO_CHANGE
        refusal = self._model.suggest_refusal
        self._suggest.disabled = bool(refusal)
        self._suggest.tooltip = refusal or "Propose settings that fit"

    def tell_variable(self, name: str) -> None:
        """Say how what was chosen is used, by the variable that holds the picker."""
        self._use.value = rendering.use_html(name)

    def _show_proposals(self) -> None:
        cards = []
        for proposal in self._model.proposals():
            take = partial(self._form.carry_out, partial(self._model.take_proposal, proposal))
            button = self._form.new_button(f"Use this: {proposal.title}", "nbaccel-take", take)
            text = self._form.new_html(rendering.proposal_html(proposal))
            cards.append(self._form.new_box([button, text], "nbaccel-proposal"))
        self._proposals.children = tuple(cards)
        toggle_class(self._proposals, "nbaccel-hidden", not cards)


_ON_WHAT = ("num_processes", "mixed_precision")


class PickerView:
    """Everything that is shown of one picker; without `actions` where that is a part of it."""

    def __init__(self, model: PickerModel, panels: Sequence[str], *, hidden_class: str) -> None:
        self._model = model
        self._form = Form(model, self.carry_out)
        # Those of the list of all settings, each made when it is first shown.
        self._listed: dict[str, SettingField] = {}
        self._first: list[SettingField] = []
        self._said: tuple[str, ...] = ()
        self._wrong: tuple[str, ...] = ()
        widget = self._form.new_html(rendering.front_html(hidden_class), "nbaccel-front")
        self._messages = self._form.new_html()
        self.actions: ActionsRow | None = None
        self._syncs: list[Callable[[], None]] = []  # each shows a part of the model's present state
        inside = self._whole(panels) if tuple(panels) == PANELS else self._panels(panels)
        self.root = self._form.new_box([widget, *inside], "nbaccel-picker")
        self.sync()

    def sync(self) -> None:
        """Show the present state of the model."""
        with self._model.lock:
            for field in list(self._all_fields()):
                field.sync()
            for sync_part in self._syncs:
                sync_part()
            self._tell()

    def carry_out(
        self, action: Callable[[], Any], *, field: SettingField | None = None, done: str = ""
    ) -> tuple[str, ...]:
        """Do what the user asks for, and show what goes wrong."""
        with self._model.lock:
            # Messages of earlier mistakes go; a field whose text is still wrong keeps its own.
            self._said = self._wrong = ()
            if field is not None:
                field.messages = ()  # the text stays visible until the next attempt is judged
            mistakes: tuple[str, ...] = ()
            try:
                action()
            except ConfigError as error:
                mistakes = error.mistakes
                if field is not None:
                    field.tell(mistakes)
                else:
                    self._wrong = mistakes
            except Exception as error:  # ipywidgets would only log it
                mistakes = self._wrong = (f"{type(error).__name__}: {error}",)
            else:
                self._said = (done,) if done else ()
                # After a whole configuration was loaded or undone, no refused text stays.
                for refused in [one for one in self._all_fields() if one.messages and not field]:
                    refused.tell(())
            self._tell()
            return mistakes

    def _tell(self) -> None:
        remarks = dict.fromkeys([*self._said, *self._model.remarks])
        self._messages.value = rendering.error_html(self._wrong) + rendering.remarks_html(remarks)

    def _all_fields(self) -> Iterator[SettingField]:
        yield from self._first
        yield from self._listed.values()

    def _whole(self, panels: Sequence[str]) -> list[w.Widget]:
        form = self._form
        trained = form.new_html(rendering.trained_html(self._model), "nbaccel-part-1")
        machine = self._live_html("nbaccel-machine", lambda: rendering.machine_html(self._model))
        on_what = [self._field(self._model.setting(name), "brief") for name in _ON_WHAT]
        strip = CandidateStrip(form)
        self._syncs.append(strip.sync)
        taken = self._live_html("nbaccel-taken-line", lambda: rendering.taken_html(self._model))
        taken_fields = [self._field(setting, "usable") for setting in taken_settings()]
        all_settings = AllSettings(form, panels, self._listed_field)
        memory = FoldedSection("Memory place by place", form, lambda: [self._places()])
        editor = ConfigEditor(form)
        self.actions = actions = ActionsRow(form)
        self._syncs += [all_settings.sync, editor.sync, actions.sync]
        folded = [all_settings.section.box, editor.section.box, memory.box]
        return [
            trained,
            form.new_row([machine, *(field.box for field in on_what)], "nbaccel-part-2"),
            strip.box,
            form.new_box(
                [
                    self._messages,
                    taken,
                    form.new_box([field.box for field in taken_fields], "nbaccel-taken-fields"),
                    form.new_row(folded, "nbaccel-folds"),
                ],
                "nbaccel-part-4",
            ),
            actions.box,
        ]

    def _places(self) -> w.HTML:
        def table() -> str:
            return rendering.table_html(rendering.rows_of_places(self._model.bars()))

        return self._live_html("nbaccel-memory", table)

    def _live_html(self, css_class: str, make_html: Callable[[], str]) -> w.HTML:
        part = self._form.new_html(make_html(), css_class)
        self._syncs.append(lambda: setattr(part, "value", make_html()))
        return part

    def _panels(self, panels: Sequence[str]) -> list[w.Widget]:
        """Parts of the form: their common settings, and below them the others, folded."""
        all_settings = AllSettings(self._form, panels, self._listed_field)
        self._syncs.append(all_settings.sync)
        boxes = []
        for name in panels:
            common = [self._listed_field(one).box for one in settings(name) if not one.section]
            others = [setting for setting in settings(name) if setting.section]
            heading = self._form.new_html(rendering.heading_html(title_of(name)))
            inside = [heading, *common, *all_settings.sections_of(name, others)]
            boxes.append(self._form.new_box(inside, "nbaccel-panel", f"nbaccel-panel-{name}"))
        return [self._form.new_box(boxes), self._messages]

    def _field(self, setting: Setting, look: fields.FieldLook) -> SettingField:
        new_field = fields.field_for(setting, self._form, look)
        self._first.append(new_field)
        return new_field

    def _listed_field(self, setting: Setting) -> SettingField:
        if setting.name not in self._listed:
            self._listed[setting.name] = fields.field_for(setting, self._form)
        return self._listed[setting.name]
