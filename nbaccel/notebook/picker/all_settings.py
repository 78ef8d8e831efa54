"""All settings of a picker: sections that are opened one by one, and a line to search in them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import ipywidgets as w

from nbaccel.notebook.picker.choices import by_name, title_of
from nbaccel.notebook.picker.fields import SettingField, SharedFields, toggle_class
from nbaccel.notebook.picker.panels import FoldedSection

if TYPE_CHECKING:
    from nbaccel.memory.settings_form import Setting
    from nbaccel.notebook.picker.model import PickerModel

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
