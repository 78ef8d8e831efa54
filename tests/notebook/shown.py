"""A picker with its real widgets, driven as a front end drives it: by setting traits."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import ipywidgets
import pytest
import torch

from nbaccel.notebook.picker.widgets import PickerView
from nbaccel.notebook.pickers import Picker
from tests.notebook.machines import with_gpus

BUCKET = "zero_optimization.reduce_bucket_size"
OPTIMIZER_PLACE = "zero_optimization.offload_optimizer.device"


class Shown:
    """A picker as a front end has it."""

    def __init__(self, picker: Picker) -> None:
        self.picker = picker
        self.view: PickerView = picker._live_view()

    def all(self, *css_classes: str) -> list[ipywidgets.Widget]:
        """Widgets with the last class, below one with each class before it."""
        found = [self.view.root]
        for css_class in css_classes:
            found = [w for top in found for w in below(top) if css_class in w._dom_classes]
        return found

    def one(self, *css_classes: str) -> ipywidgets.Widget:
        found = self.all(*css_classes)
        assert len(found) == 1, f"{len(found)} widgets for {css_classes}"
        return found[0]

    def box(self, setting: str) -> ipywidgets.Widget:
        """The field of a setting: among the first ones, or looked up in the list of all."""
        fields = self.view._all_fields()
        seen = [f.box for f in fields if f.setting.name == setting and f.is_visible]
        return seen[0] if seen else self.looked_up(setting)

    def looked_up(self, setting: str) -> ipywidgets.Widget:
        """The field of a setting in the list of all, found by its name."""
        self.one("nbaccel-opens-all").value = True
        self.one("nbaccel-search").value = setting
        return self.one("nbaccel-found", css_of(setting))

    def button(self, setting: str, option: str) -> ipywidgets.Widget:
        of_setting = below(self.box(setting))
        return next(w for w in of_setting if f"nbaccel-option-{option}" in w._dom_classes)

    def press(self, setting: str, option: str) -> None:
        self.button(setting, option).value = True

    def candidates(self) -> list[ipywidgets.Widget]:
        """The buttons of the ways to train that are shown."""
        buttons = self.one("nbaccel-candidates").children
        return [w for w in buttons if "nbaccel-hidden" not in w._dom_classes]

    def take(self, name: str) -> None:
        """Press a way to train."""
        next(w for w in self.candidates() if w.description == name).value = True

    def taken(self) -> list[str]:
        return [w.description for w in self.candidates() if w.value]

    def field(self, setting: str) -> ipywidgets.Widget:
        """The line or list of a setting."""
        kinds = (ipywidgets.Text, ipywidgets.Dropdown)
        return next(w for w in below(self.box(setting)) if isinstance(w, kinds))

    def pick(self, setting: str, label: str) -> None:
        """Take an item of a list."""
        self.field(setting).index = self.field(setting).options.index(label)

    def text(self, setting: str) -> str:
        """What is written around a field."""
        return text_of(self.box(setting))

    def everything(self) -> str:
        return text_of(self.view.root)

    def on(self, setting: str) -> list[str]:
        """The options that are pressed."""
        buttons = below(self.box(setting))
        return [w.description for w in buttons if getattr(w, "value", None) is True]


def css_of(setting: str) -> str:
    return f"nbaccel-{setting.replace('.', '-')}"


def below(widget: ipywidgets.Widget) -> Iterator[ipywidgets.Widget]:
    for child in getattr(widget, "children", ()):
        yield child
        yield from below(child)


def text_of(widget: ipywidgets.Widget) -> str:
    return "\n".join(
        w.value
        for w in below(widget)
        if isinstance(w, ipywidgets.HTML) and "nbaccel-front" not in w._dom_classes
    )


def net(width: int = 8) -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.Linear(width, 2))


def big() -> torch.nn.Module:
    with torch.device("meta"):
        return torch.nn.Sequential(*(torch.nn.Linear(16384, 16384) for _ in range(22)))


@pytest.fixture
def show() -> Iterator[Callable[..., Shown]]:
    def show_it(picker: Picker | None = None, **arguments: object) -> Shown:
        return Shown(picker or Picker(**{"inventory": with_gpus(2), **arguments}))

    yield show_it
    ipywidgets.Widget.close_all()
