"""The fields of a picker: one choice each, as buttons, a list or a line of text.

A field holds no state of its own but what was typed and refused: it shows what the picker's model
says (`sync`) and hands on what the user does. Its widgets are made once; later only their values
change, so the keyboard's focus stays where it is.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import ipywidgets as w

from nbaccel.notebook.picker.drawing import css_name, error_html, label_html, note_html

if TYPE_CHECKING:
    from nbaccel.notebook.picker.choices import Option, Setting
    from nbaccel.notebook.picker.model import PickerModel

__all__ = [
    "Choose",
    "Field",
    "LineField",
    "ListField",
    "OptionsField",
    "Shared",
    "as_text",
    "as_value",
    "field_for",
    "toggle_class",
]

Choose = Callable[["Field", Any], None]
_FEW = 5  # more options than these are a list
_GROUPED = re.compile(r"\d{1,3}(,\d{3})+")  # 500,000,000
_TRUTHS = {True: "yes", False: "no"}


class Shared:
    """Layouts and styles that all widgets have in common: each of their own would be a message."""

    def __init__(self) -> None:
        self.layout = w.Layout()
        self.width = w.Layout(width="auto")
        self.text = _new_style(w.Text, description_width="190px")
        self.list = _new_style(w.Dropdown, description_width="190px")
        self._html, self._button = _new_style(w.HTML), _new_style(w.Button)
        self._toggle = _new_style(w.ToggleButton)

    def new_html(self) -> w.HTML:
        """Nothing, to be filled."""
        return w.HTML(layout=self.layout, style=self._html)

    def new_box(self, children: Sequence[w.Widget]) -> w.VBox:
        """Widgets one below another."""
        return w.VBox(children, layout=self.layout)

    def new_toggle(self, text: str, tooltip: str) -> w.ToggleButton:
        """A button that is on or off."""
        return w.ToggleButton(
            description=text, tooltip=tooltip, layout=self.width, style=self._toggle
        )

    def new_button(self, text: str, css_class: str, press: Callable[[], None]) -> w.Button:
        """A button that does something."""
        button = w.Button(description=text, layout=self.width, style=self._button)
        button.on_click(lambda _: press())
        return button.add_class("nbaccel-action").add_class(css_class)


def _new_style(kind: type[w.Widget], **values: str) -> w.Widget:
    """A style as this kind of widget takes it: ipywidgets 8 has more classes of them than 7."""
    return kind.class_traits()["style"].klass(**values)


class Field:
    """One choice.

    Attributes:
        setting: The choice.
        box: What is shown.
        messages: What is wrong with what was typed or chosen here.
    """

    def __init__(
        self, setting: Setting, model: PickerModel, choose: Choose, shared: Shared
    ) -> None:
        self.setting = setting
        self.messages: tuple[str, ...] = ()
        self._model, self._hand_on, self._shared = model, choose, shared
        self._is_syncing = False
        self._note, self._errors = shared.new_html(), shared.new_html()
        self.box = shared.new_box([*self._controls(), self._note, self._errors])
        self.box.add_class("nbaccel-setting").add_class(f"nbaccel-{css_name(setting.name)}")
        self.sync()

    def sync(self) -> None:
        """Show what the model says."""
        name = self.setting.name
        is_shown = self._model.is_shown(name)
        toggle_class(self.box, "nbaccel-hidden", not is_shown)
        if is_shown:
            with self._syncing():
                self._show(self._model.value(name), self._model.refusal(name))
                self._errors.value = error_html(self.messages)

    def tell(self, messages: tuple[str, ...]) -> None:
        """Show what is wrong here; an empty tuple takes it back.

        Args:
            messages: One per mistake.
        """
        self.messages = messages
        self._errors.value = error_html(messages)

    def _controls(self) -> list[w.Widget]:
        raise NotImplementedError

    def _show(self, value: Any, refusal: str) -> None:
        raise NotImplementedError

    def _choose(self, value: Any) -> None:
        if not self._is_syncing:
            self._hand_on(self, value)

    @contextmanager
    def _syncing(self) -> Iterator[None]:
        before, self._is_syncing = self._is_syncing, True
        try:
            yield
        finally:
            self._is_syncing = before

    def _label(self) -> str:
        label, unit = self.setting.label, self.setting.unit
        return label if unit in ("", label.lower()) else f"{label} [{unit}]"


class OptionsField(Field):
    """A few options, each a button; one that cannot be chosen is greyed and says why."""

    def _controls(self) -> list[w.Widget]:
        heading = self._shared.new_html()
        heading.value = label_html(self._label())
        self._buttons = [self._button(option) for option in self.setting.options]
        row = w.HBox(self._buttons, layout=self._shared.layout)
        return [heading, row.add_class("nbaccel-options")]

    def _button(self, option: Option) -> w.ToggleButton:
        button = self._shared.new_toggle(option.label, option.meaning)
        button.add_class(f"nbaccel-option-{css_name(option.value)}")
        button.observe(lambda change: self._pressed(button, option, change.new), "value")
        return button

    def _pressed(self, button: w.ToggleButton, option: Option, is_on: bool) -> None:
        if self._is_syncing:
            return
        if is_on:
            self._choose(option.value)
        # What was on stays on: options are taken back by choosing another.
        self.sync()

    def _show(self, value: Any, refusal: str) -> None:
        reasons: dict[str, list[str]] = {}
        meaning = ""
        for button, offer in zip(self._buttons, self._model.offers(self.setting.name), strict=True):
            is_on = offer.option.value == value
            button.value = is_on
            button.disabled = bool(refusal or offer.reason)
            button.tooltip = refusal or offer.reason or offer.option.meaning
            if is_on:
                meaning = offer.option.meaning
            if offer.reason:
                reasons.setdefault(offer.reason, []).append(offer.option.label)
        told = [f"{', '.join(labels)}: {reason}" for reason, labels in reasons.items()]
        self._note.value = note_html(meaning or self.setting.meaning, refusal=refusal, reasons=told)


class ListField(Field):
    """Many options, or yes and no: a list to open. What cannot be chosen stands below, with why."""

    def _controls(self) -> list[w.Widget]:
        self._values: list[Any] = []
        self._list = w.Dropdown(
            description=self._label(), layout=self._shared.width, style=self._shared.list
        )
        # By place, not by value: None is a value here, and for the widget it is no selection.
        self._list.observe(lambda change: self._picked(change.new), "index")
        return [self._list]

    def _picked(self, place: int | None) -> None:
        if not self._is_syncing and place is not None:
            self._choose(self._values[place])
            self.sync()

    def _show(self, value: Any, refusal: str) -> None:
        options, reasons = self._offered()
        if value not in [known for _, known in options]:
            options.append((as_text(value) or "default", value))  # from a file, say
        self._values = [known for _, known in options]
        labels = tuple(label for label, _ in options)
        if labels != self._list.options:
            self._list.options = labels
        self._list.index = self._values.index(value)
        self._list.disabled = bool(refusal)
        self._note.value = note_html(self.setting.meaning, refusal=refusal, reasons=reasons)

    def _offered(self) -> tuple[list[tuple[str, Any]], list[str]]:
        if self.setting.kind == "truth":
            return self._truths(), []
        offers = self._model.offers(self.setting.name)
        options = [(offer.option.label, offer.option.value) for offer in offers if not offer.reason]
        told = [f"{offer.option.label}: {offer.reason}" for offer in offers if offer.reason]
        return options, told

    def _truths(self) -> list[tuple[str, Any]]:
        named: list[tuple[str, Any]] = [(word, truth) for truth, word in _TRUTHS.items()]
        default = _TRUTHS.get(self.setting.default)
        if self.setting.run_field != "deepspeed" and default is not None:
            return named  # such a field always holds one of the two
        left = "default" if default is None else f"default ({default})"
        auto = [("auto", "auto")] if self.setting.takes_auto else []
        return [(left, None), *named, *auto]


class LineField(Field):
    """A number, text, words or a table, typed; empty leaves it to what is in force otherwise."""

    def _controls(self) -> list[w.Widget]:
        default = self.setting.default
        self._line = w.Text(
            description=self._label(),
            placeholder="default" if default in (None, "") else f"default: {_readable(default)}",
            continuous_update=False,
            layout=self._shared.width,
            style=self._shared.text,
        )
        self._line.observe(lambda change: self._entered(change.new), "value")
        return [self._line]

    def _entered(self, text: str) -> None:
        if not self._is_syncing:
            self._choose(as_value(text, self.setting.kind))
            self.sync()

    def _show(self, value: Any, refusal: str) -> None:
        if not self.messages:  # what was refused stays, to be mended
            self._line.value = as_text(value)
        self._line.disabled = bool(refusal)
        self._note.value = note_html(self.setting.meaning, refusal=refusal)


def field_for(setting: Setting, model: PickerModel, choose: Choose, shared: Shared) -> Field:
    """The field that fits a choice.

    Args:
        setting: The choice.
        model: What it is a choice of.
        choose: Called with the field and a value when the user gives one.
        shared: Layouts and styles.

    Returns:
        The field.
    """
    if setting.kind == "one-of":
        is_first = not setting.section and len(setting.options) <= _FEW
        return (OptionsField if is_first else ListField)(setting, model, choose, shared)
    if setting.kind == "truth":
        return ListField(setting, model, choose, shared)
    return LineField(setting, model, choose, shared)


def toggle_class(widget: w.DOMWidget, name: str, is_on: bool) -> None:
    """Give a widget a class or take it, without a message where nothing changes.

    Args:
        widget: The widget.
        name: The class.
        is_on: Whether it is to have it.
    """
    if is_on:
        widget.add_class(name)
    else:
        widget.remove_class(name)


def as_text(value: Any) -> str:
    """A value as it is typed: a table as JSON, words with commas between them.

    Args:
        value: What a configuration holds.
    """
    if value is None:
        return ""
    if isinstance(value, (list, tuple)) and all(isinstance(item, str) for item in value):
        return ", ".join(value)
    if isinstance(value, (dict, list, tuple, bool)):
        return json.dumps(value)
    return str(value)


def as_value(text: str, kind: str) -> Any:
    """What was typed, as the value that is meant; text that is none stays text, to be refused.

    Args:
        text: What was typed: ``5e8`` and ``500_000_000`` are the same whole number.
        kind: The kind of the setting.

    Returns:
        The value; None where nothing was typed.
    """
    text = text.strip()
    if not text:
        return None
    if text == "auto" or kind == "text":
        return text
    readers: dict[str, Callable[[str], Any]] = {
        "whole": _whole,
        "number": float,
        "words": _words,
        "table": json.loads,
    }
    try:
        return readers[kind](text)
    except ValueError:  # what it should have been is said by whoever refuses it
        return text


def _readable(value: Any) -> str:
    return f"{value:,}" if type(value) is int else as_text(value)


def _whole(text: str) -> int | float:
    if _GROUPED.fullmatch(text):
        text = text.replace(",", "")
    try:
        return int(text)
    except ValueError:
        number = float(text)
        return int(number) if number.is_integer() else number


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]
