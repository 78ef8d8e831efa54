"""All settings of a picker: sections that are opened one by one, and a line to search in them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
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
        self._list = self._shared.new_box(
            [self._panel(name) for name in self._panels], "nbaccel-listed"
        )
        return [search, self._found_count, self._found, self._list]

    def _panel(self, panel_name: str) -> w.Widget:
        boxes = self.sections_of(panel_name, self._model.settings(panel_name))
        return self._shared.new_box(boxes, "nbaccel-panel", f"nbaccel-panel-{panel_name}")

    def sections_of(self, panel_name: str, settings: Iterable[Setting]) -> list[w.Widget]:
        """Settings of a panel below a heading for each of their sections."""
        groups: dict[str, list[Setting]] = {}
        for setting in settings:
            groups.setdefault(setting.section, []).append(setting)
        titles = {"": f"{title_of(panel_name)}: common"}
        titles[title_of(panel_name)] = f"{title_of(panel_name)}: more"
        sections = [
            FoldedSection(
                titles.get(name, name), group, self._model, self._shared, self._fields_of(group)
            )
            for name, group in groups.items()
        ]
        self._sections += sections
        return [section.box for section in sections]

    def _fields_of(self, group: Sequence[Setting]) -> Callable[[], list[w.Widget]]:
        return lambda: [self._field_of(setting).box for setting in group]

    def _find(self, words: str) -> None:
        settings = [one for name in self._panels for one in self._model.settings(name)]
        found = search_settings(words, settings)
        is_searching = bool(words.strip())
        shown = found[:_MAX_FOUND]
        self._found.children = tuple(self._field_of(setting).box for setting in shown)
        text = f"{len(found)} found" if found else "Nothing found: try another word"
        if len(found) > len(shown):
            text += f", the first {len(shown)} are shown: type more"
        self._found_count.value = f'<div role="status">{text}.</div>' if is_searching else ""
        toggle_class(self._list, "nbaccel-hidden", is_searching)
        toggle_class(self._found, "nbaccel-hidden", not is_searching)


def search_settings(words: str, settings: Sequence[Setting]) -> list[Setting]:
    """Find settings by what people remember of them."""
    wanted_words = words.lower().split()
    ranked: list[tuple[int, Setting]] = []
    for setting in settings:
        places = (
            setting.label.lower(),
            f"{setting.name} {setting.strategy_key}".lower(),
            f"{setting.meaning} {setting.section}".lower(),
        )
        everywhere = " ".join(places)
        if wanted_words and all(word in everywhere for word in wanted_words):
            rank = next(
                (number for number, place in enumerate(places) if wanted_words[0] in place),
                len(places),
            )
            ranked.append((rank, setting))
    return [setting for _, setting in sorted(ranked, key=lambda found: found[0])]
