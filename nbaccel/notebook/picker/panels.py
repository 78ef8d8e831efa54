"""Parts of a picker beside its fields: folded sections, languages to copy, the ways to train.

What is below a heading is made when it is first opened: every widget costs messages to the page.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import ipywidgets as w

from nbaccel.memory.settings_form import settings_forms
from nbaccel.notebook.picker.choices import by_name, title_of
from nbaccel.notebook.picker.fields import SettingField, SharedFields, Toggles, toggle_class
from nbaccel.notebook.picker.form_html import (
    BarRow,
    css_name,
    face_html,
    fits_html,
    label_html,
    proposal_html,
    resolved_html,
    rows_of_ways,
    table_html,
    verdict_text,
)

if TYPE_CHECKING:
    from nbaccel.memory.settings_form import Setting
    from nbaccel.memory.ways import Candidate, Proposal
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


_COMPARE_MEANING = "Show each way to train in each precision that the machine has."


class CandidateStrip:
    """Ways to train, each with the memory that it needs."""

    def __init__(
        self, model: PickerModel, fields: SharedFields, take: Callable[[Candidate], Any]
    ) -> None:
        self._model = model
        self._shared = fields
        self._take = take
        # What the buttons stand for, in their order.
        self._shown: tuple[Candidate, ...] = ()
        self._heading = fields.new_html("", "nbaccel-strip-head")
        self._buttons = Toggles(fields, self._pressed)
        self._comparing = Toggles(fields, lambda _, is_on: model.compare_precisions(is_on=is_on))
        self._compare = self._comparing.add(
            True, "Compare precisions", _COMPARE_MEANING, "nbaccel-compare"
        )
        top = fields.new_row([self._heading, self._compare], "nbaccel-strip-top")
        self._names = fields.new_box([], "nbaccel-options", "nbaccel-candidates")
        self._bars = fields.new_html("", "nbaccel-bars")
        label = fields.new_html(label_html("Ways to train", is_hidden=True))
        self._strip = fields.new_box([self._names, label, self._bars], "nbaccel-strip")
        self.box = fields.new_box([top, self._strip], "nbaccel-part-3")

    def sync(self) -> None:
        """Show the present candidates; before they are estimated, the room that they will take."""
        model = self._model
        compares = model.compares_precisions
        self._shown = () if model.is_memory_postponed else model.shown_candidates()
        toggle_class(self._strip, "nbaccel-awaited", model.is_memory_postponed)
        toggle_class(self._strip, "nbaccel-comparing", compares)
        self._heading.value = fits_html(model)
        self._comparing.show(compares)
        self._compare.tooltip = f"{_COMPARE_MEANING} {model.precision_hint}".strip()
        may_compare = bool(self._shown) and len(model.precisions) > 1
        toggle_class(self._compare, "nbaccel-hidden", not may_compare)
        rows = [*rows_of_ways(self._shown, compares=compares, best_mark=model.best_mark)]
        self._sync_buttons(rows)
        self._bars.value = table_html(rows, model.precision_hint) if rows else ""

    def _sync_buttons(self, rows: Sequence[BarRow]) -> None:
        buttons = self._buttons.buttons
        for number in range(len(buttons), len(rows)):
            self._buttons.add(number, "", "", f"nbaccel-candidate-{number}")
        # Buttons stay where they are, so that the keyboard keeps its place.
        if len(buttons) != len(self._names.children):
            self._names.children = tuple(buttons.values())
        for number, button in buttons.items():
            toggle_class(button, "nbaccel-hidden", number >= len(rows))
        for button, row, candidate in zip(buttons.values(), rows, self._shown, strict=False):
            toggle_class(button, "nbaccel-first", bool(row.name))
            button.description = row.told_name
            button.disabled = row.is_refused
            button.tooltip = _candidate_text(candidate)
        self._buttons.show(next((n for n, row in enumerate(rows) if row.is_chosen), None))

    def _pressed(self, number: int, is_on: bool) -> None:
        if is_on and number < len(self._shown):
            self._take(self._shown[number])
        # A refused one goes off again, and the one that is taken stays on when it is pressed.
        self.sync()


def _candidate_text(candidate: Candidate) -> str:
    """What a screen reader and the mouse's pointer say of a candidate."""
    # The reason of one that cannot be taken is its verdict, too.
    return "; ".join(dict.fromkeys(filter(None, (verdict_text(candidate), candidate.reason))))


class ProposalsPanel:
    """The proposals, shown when they are asked for."""

    def __init__(self, fields: SharedFields, take: Callable[[Proposal], Any]) -> None:
        self._shared = fields
        self._take = take
        self.box = fields.new_box([], "nbaccel-proposals", "nbaccel-hidden")

    def show(self, proposals: Sequence[Proposal]) -> None:
        """Show proposals, each with a button that takes it."""
        self.box.children = tuple(self._card(proposal) for proposal in proposals)
        toggle_class(self.box, "nbaccel-hidden", not proposals)

    def hide(self) -> None:
        """Take them away: they are of a state that is past."""
        toggle_class(self.box, "nbaccel-hidden", True)

    def _card(self, proposal: Proposal) -> w.Widget:
        button = self._shared.new_button(
            f"Use this: {proposal.title}", "nbaccel-take", lambda: self._take(proposal)
        )
        text = self._shared.new_html(proposal_html(proposal))
        return self._shared.new_box([button, text], "nbaccel-proposal")


_MAX_FOUND = 12


class AllSettings:
    """The searchable list of all settings, in a section that is filled when it is opened."""

    def __init__(
        self,
        model: PickerModel,
        fields: SharedFields,
        panel_names: Sequence[str],
        field_of: Callable[[Setting], SettingField],
    ) -> None:
        self._model = model
        self._shared = fields
        self._field_of = field_of
        self._panels = panel_names
        self._sections: list[FoldedSection] = []
        title = f"All {len(by_name())} settings"
        self.section = FoldedSection(
            title, (), model, fields, self._make, css_class="nbaccel-opens-all"
        )

    def sync(self) -> None:
        """Show the number of settings that are made in each section."""
        for section in self._sections:
            section.sync()

    def _make(self) -> list[w.Widget]:
        search = self._shared.new_text(
            "Search",
            "nbaccel-search",
            placeholder="a name, a key of DeepSpeed, or a word of its meaning",
        )
        search.observe(lambda change: self._find(change.new), "value")
        self._found_count = self._shared.new_html("", "nbaccel-found-count")
        self._found = self._shared.new_box([], "nbaccel-found")
        panels = [
            self._shared.new_box(
                self.sections_of(name, self._model.settings(name)),
                *("nbaccel-panel", f"nbaccel-panel-{name}"),
            )
            for name in self._panels
        ]
        self._list = self._shared.new_box(panels, "nbaccel-listed")
        return [search, self._found_count, self._found, self._list]

    def sections_of(self, panel_name: str, settings: Iterable[Setting]) -> list[w.Widget]:
        """Settings of a panel below a heading for each of their sections."""
        groups: dict[str, list[Setting]] = {}
        for setting in settings:
            groups.setdefault(setting.section, []).append(setting)
        title = title_of(panel_name)
        titles = {"": f"{title}: common", title: f"{title}: more"}
        sections = [
            FoldedSection(
                titles.get(name, name),
                group,
                self._model,
                self._shared,
                partial(self._boxes_of, group),
            )
            for name, group in groups.items()
        ]
        self._sections += sections
        return [section.box for section in sections]

    def _boxes_of(self, settings: Iterable[Setting]) -> list[w.Widget]:
        return [self._field_of(setting).box for setting in settings]

    def _find(self, words: str) -> None:
        settings = [one for name in self._panels for one in self._model.settings(name)]
        found = search_settings(words, settings)
        is_searching = bool(words.strip())
        shown = found[:_MAX_FOUND]
        self._found.children = tuple(self._boxes_of(shown))
        text = f"{len(found)} found" if found else "Nothing found: try another word"
        if len(found) > len(shown):
            text += f", the first {len(shown)} are shown: type more"
        self._found_count.value = f'<div role="status">{text}.</div>' if is_searching else ""
        toggle_class(self._list, "nbaccel-hidden", is_searching)
        toggle_class(self._found, "nbaccel-hidden", not is_searching)


def search_settings(words: str, settings: Sequence[Setting]) -> list[Setting]:
    """Find settings by what people remember of them: by label, by name, by meaning."""
    wanted_words = words.lower().split()
    ranked: list[tuple[int, Setting]] = []
    for setting in settings if wanted_words else ():
        places = (
            setting.label.lower(),
            f"{setting.name} {setting.strategy_key}".lower(),
            f"{setting.meaning} {setting.section}".lower(),
        )
        if all(word in " ".join(places) for word in wanted_words):
            is_first_in = [wanted_words[0] in place for place in places]
            ranked.append((is_first_in.index(True), setting))
    return [setting for _, setting in sorted(ranked, key=lambda found: found[0])]
