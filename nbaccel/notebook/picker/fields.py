"""The fields of a picker: one setting each, with what it comes to and what it means.

The only state of a field is text that was typed and refused: it shows what the picker's model
says (`sync`) and passes on what the user does. Its widgets are made once, that of its mistakes
with the first one; later only their values change, so the keyboard's focus stays where it is.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

import ipywidgets as w

from nbaccel.notebook.picker.form_html import css_name, error_html, label_html, note_html
from nbaccel.notebook.picker.outcomes import TRUTH_WORDS, default_text_of, outcome_of

if TYPE_CHECKING:
    from nbaccel.memory.settings_form import Setting
    from nbaccel.notebook.picker.model import PickerModel

ChooseValue = Callable[["SettingField", Any], None]
FieldLook = Literal["whole", "usable", "brief"]
"""How much of a field is shown: ``usable`` hides it while it cannot be set; ``brief`` also hides
options that cannot be chosen, and says only what an open value comes to."""
_MAX_BUTTONS = 5  # more options than these are a list, unless their words are short
_ROW_CHARS = 30
_EMPTY_CLAUSE = re.compile(r"; empty [^;]*")
_OPEN_LABEL = "default"


class SharedFields:
    """Makes widgets with few messages to the page.

    They share layouts and styles, and have their classes and values from the beginning.
    """

    def __init__(self, lock: threading.RLock) -> None:
        self.lock = lock
        self.layout = w.Layout()
        self.width = w.Layout(width="auto")
        self._text = _new_style(w.Text, description_width="190px")
        self._list = _new_style(w.Dropdown, description_width="190px")
        self._html = _new_style(w.HTML)
        self._button = _new_style(w.Button)
        self._toggle = _new_style(w.ToggleButton)

    def new_html(self, html_text: str = "", *css_classes: str) -> w.HTML:
        """Text; none where it is to be filled."""
        return w.HTML(html_text, layout=self.layout, style=self._html, **_with(css_classes))

    def new_box(self, children: Sequence[w.Widget], *css_classes: str) -> w.VBox:
        """Widgets one below another."""
        return w.VBox(children, layout=self.layout, **_with(css_classes))

    def new_row(self, children: Sequence[w.Widget], *css_classes: str) -> w.HBox:
        """Widgets side by side."""
        return w.HBox(children, layout=self.layout, **_with(css_classes))

    def new_text(self, label: str, *css_classes: str, **more: Any) -> w.Text:
        """A line to type in."""
        return w.Text(
            description=label, layout=self.width, style=self._text, **_with(css_classes), **more
        )

    def new_list(self, label: str, *css_classes: str) -> w.Dropdown:
        """A list to choose from."""
        return w.Dropdown(
            description=label, layout=self.width, style=self._list, **_with(css_classes)
        )

    def new_toggle(self, text: str, tooltip: str, *css_classes: str) -> w.ToggleButton:
        """A button that is on or off."""
        return w.ToggleButton(
            description=text,
            tooltip=tooltip,
            layout=self.width,
            style=self._toggle,
            **_with(css_classes),
        )

    def new_button(self, text: str, css_class: str, on_press: Callable[[], object]) -> w.Button:
        """A button that does something."""
        button = w.Button(
            description=text,
            layout=self.width,
            style=self._button,
            **_with(("nbaccel-action", css_class)),
        )
        button.on_click(lambda _: on_press())
        return button


class Toggles:
    """Buttons of which at most one is on; a state that code shows presses none of them."""

    def __init__(self, fields: SharedFields, press: Callable[[Any, bool], None]) -> None:
        self._shared = fields
        self._press = press
        self._is_showing = False
        self.buttons: dict[Any, w.ToggleButton] = {}

    def add(self, key: Any, text: str, tooltip: str, css_class: str) -> w.ToggleButton:
        """Another button."""
        button = self._shared.new_toggle(text, tooltip, css_class)
        button.observe(lambda change: self._pressed(key, is_on=change.new), "value")
        self.buttons[key] = button
        return button

    def show(self, key: Any) -> None:
        """Switch one on and the others off."""
        self._is_showing = True
        try:
            for own_key, button in self.buttons.items():
                button.value = own_key == key
        finally:
            self._is_showing = False

    def _pressed(self, key: Any, *, is_on: bool) -> None:
        with self._shared.lock:
            if not self._is_showing:
                self._press(key, is_on)


class HtmlPart:
    """HTML that follows the state of a model."""

    def __init__(self, fields: SharedFields, css_class: str, make: Callable[[], str]) -> None:
        self._make = make
        self.box = fields.new_html(make(), css_class)

    def sync(self) -> None:
        """Show the present state."""
        self.box.value = self._make()


def _with(css_classes: Sequence[str]) -> dict[str, Any]:
    """Classes as an argument, which `repr` of a widget writes as well; `add_class` sends each."""
    return {"_dom_classes": tuple(css_classes)}


def _new_style(widget_class: type[w.Widget], **values: str) -> w.Widget:
    """A style as this kind of widget takes it: ipywidgets 8 has more classes of them than 7."""
    return widget_class.class_traits()["style"].klass(**values)


class SettingField:
    """One choice, as the widget `box`, with mistakes in what was typed or chosen here."""

    def __init__(
        self,
        setting: Setting,
        model: PickerModel,
        on_choose: ChooseValue,
        fields: SharedFields,
        look: FieldLook = "whole",
    ) -> None:
        self.setting = setting
        self.messages: tuple[str, ...] = ()
        self.is_visible = True
        self._look = look
        self._model = model
        self._hand_on = on_choose
        self._shared = fields
        self._is_syncing = False
        self._note = fields.new_html("", "nbaccel-field-note")
        self._errors: w.HTML | None = None
        self.box = fields.new_box(
            [*self._controls(), self._note], "nbaccel-setting", f"nbaccel-{css_name(setting.name)}"
        )
        self.sync()

    def sync(self) -> None:
        """Show the state of the model."""
        name = self.setting.name
        refusal = self._model.refusal(name)
        self.is_visible = self._model.is_shown(name) and (self._look == "whole" or not refusal)
        toggle_class(self.box, "nbaccel-hidden", not self.is_visible)
        if self.is_visible:
            with self._syncing():
                self._show(self._model.value(name), refusal)
                self._show_errors()

    def tell(self, messages: tuple[str, ...]) -> None:
        """Show mistakes at this field; an empty tuple removes them."""
        self.messages = messages
        self._show_errors()

    def _show_errors(self) -> None:
        # Made for the first mistake: most fields never have one, and a widget costs a message.
        if self._errors is None and self.messages:
            self._errors = self._shared.new_html("", "nbaccel-field-errors")
            self.box.children = (*self.box.children, self._errors)
        if self._errors is not None:
            self._errors.value = error_html(self.messages)

    def _controls(self) -> list[w.Widget]:
        raise NotImplementedError

    def _show(self, value: Any, refusal: str) -> None:
        raise NotImplementedError

    def _choose(self, value: Any) -> None:
        if not self._is_syncing:
            self._hand_on(self, value)

    @contextmanager
    def _syncing(self) -> Iterator[None]:
        # Widgets report values that code sets as well; those are no choices of the user.
        was_syncing = self._is_syncing
        self._is_syncing = True
        try:
            yield
        finally:
            self._is_syncing = was_syncing

    def _explain(
        self,
        refusal: str,
        *,
        meaning: str = "",
        reasons: Sequence[str] = (),
        shows_outcome: bool = False,
    ) -> str:
        """The note: what an open value comes to, what it means, where to read about it.

        With `shows_outcome` the field itself shows the value, so that only its reason is told.
        """
        outcome = outcome_of(self._model, self.setting)
        if self._look == "brief":
            return note_html("", outcome=outcome.reason, reasons=reasons)
        meaning = meaning or self.setting.meaning
        if self._look == "usable":
            # The value beside it shows what an empty field is, and room is for one line.
            meaning = _EMPTY_CLAUSE.sub("", meaning.partition(". ")[0].rstrip(".")) + "."
        return note_html(
            meaning,
            outcome=outcome.reason if shows_outcome and outcome.value else outcome.text(),
            docs_link=self.setting.docs_link,
            refusal=refusal,
            reasons=reasons,
        )

    def _label(self) -> str:
        label = self.setting.label
        unit = self.setting.unit
        return label if unit in ("", label.lower()) else f"{label} [{unit}]"


class OptionsField(SettingField):
    """A few options, each a button; one that cannot be chosen is greyed and says why."""

    def _controls(self) -> list[w.Widget]:
        self._toggles = Toggles(self._shared, self._pressed)
        for number, option in enumerate(self.setting.options):
            css_class = f"nbaccel-option-{css_name(option.value)}"
            self._toggles.add(number, option.label, option.meaning, css_class)
        return [
            self._shared.new_html(label_html(self._label()), "nbaccel-field-label"),
            self._shared.new_row(list(self._toggles.buttons.values()), "nbaccel-options"),
        ]

    def _pressed(self, number: int, is_on: bool) -> None:
        if is_on:
            self._choose(self.setting.options[number].value)
        # Pressing the chosen option again must not switch it off: another one must be chosen.
        self.sync()

    def _show(self, value: Any, refusal: str) -> None:
        labels: dict[str, list[str]] = {}
        meaning = ""
        on_number = None
        for number, offer in enumerate(self._model.offers(self.setting.name)):
            button = self._toggles.buttons[number]
            button.disabled = bool(refusal or offer.reason)
            button.tooltip = refusal or offer.reason or offer.option.meaning
            if self._look == "brief":
                toggle_class(button, "nbaccel-hidden", bool(offer.reason))
            if offer.option.value == value:
                on_number = number
                meaning = offer.option.meaning
            if offer.reason:
                labels.setdefault(offer.reason, []).append(offer.option.label)
        self._toggles.show(on_number)
        reasons = [f"{', '.join(names)}: {reason}" for reason, names in labels.items()]
        self._note.value = self._explain(refusal, meaning=meaning, reasons=reasons)


class ListField(SettingField):
    """Many options, or yes and no, as a list; below it, why some cannot be chosen."""

    def _controls(self) -> list[w.Widget]:
        self._values: list[Any] = []
        self._list = self._shared.new_list(self._label())
        # By index, not by value: None is a value here, and for the widget it means no selection.
        self._list.observe(lambda change: self._picked(change.new), "index")
        return [self._list]

    def _picked(self, index: int | None) -> None:
        with self._shared.lock:
            if not self._is_syncing and index is not None:
                self._choose(self._values[index])
                self.sync()  # a refused choice goes back to the present value

    def _show(self, shown_value: Any, refusal: str) -> None:
        is_truth = self.setting.kind == "truth"
        offers = [] if is_truth else self._model.offers(self.setting.name)
        options = self._truths() if is_truth else []
        options += [(one.option.label, one.option.value) for one in offers if not one.reason]
        lines = [f"{one.option.label}: {one.reason}" for one in offers if one.reason]
        if shown_value not in [value for _, value in options]:
            # A file may hold a value that cannot be chosen on this machine.
            options.append((as_text(shown_value) or _OPEN_LABEL, shown_value))
        self._values = [value for _, value in options]
        option_labels = tuple(option_label for option_label, _ in options)
        # Setting `options` resets the selection, so it is done only where they differ.
        if option_labels != self._list.options:
            self._list.options = option_labels
        self._list.index = self._values.index(shown_value)
        self._list.disabled = bool(refusal)
        self._note.value = self._explain(refusal, reasons=lines, shows_outcome=is_truth)

    def _truths(self) -> list[tuple[str, Any]]:
        truths: list[tuple[str, Any]] = [(word, value) for value, word in TRUTH_WORDS.items()]
        if not self.setting.may_be_open and self.setting.default in TRUTH_WORDS:
            return truths  # such a field always holds one of the two
        text = default_text_of(self._model, self.setting)
        label = f"{_OPEN_LABEL} ({text})" if text else _OPEN_LABEL
        option = [("auto", "auto")] if self.setting.takes_auto else []
        return [(label, None), *truths, *option]


class LineField(SettingField):
    """A number, text, words or a table, typed; empty means the default."""

    def _controls(self) -> list[w.Widget]:
        # Only when the field is left: half a number would be refused while it is typed.
        self._line = self._shared.new_text(self._label(), continuous_update=False)
        self._line.observe(lambda change: self._entered(change.new), "value")
        return [self._line]

    def _entered(self, text: str) -> None:
        with self._shared.lock:
            if not self._is_syncing:
                self._choose(as_value(text, self.setting.kind))
                self.sync()  # shows the value as it was taken: 5e8 as a whole number

    def _show(self, value: Any, refusal: str) -> None:
        if not self.messages:  # refused text stays, to be corrected
            self._line.value = as_text(value)
        self._line.disabled = bool(refusal)
        self._line.placeholder = outcome_of(self._model, self.setting).value or _OPEN_LABEL
        self._note.value = self._explain(refusal, shows_outcome=True)


class CountField(LineField):
    """How many processes: a button for each usual number, and a line for any other."""

    def _controls(self) -> list[w.Widget]:
        [self._line] = super()._controls()
        self._line.description = "Another number"  # hidden, for screen readers
        self._toggles = Toggles(self._shared, self._pressed)
        for count in self._model.usual_process_counts:
            self._toggles.add(count, str(count), "", f"nbaccel-option-{count}")
        label = self._shared.new_html(label_html(self._label()), "nbaccel-field-label")
        row = [*self._toggles.buttons.values(), self._line]
        return [label, self._shared.new_row(row, "nbaccel-options", "nbaccel-count")]

    def _pressed(self, count: int, is_on: bool) -> None:
        # Pressing the chosen one again leaves the number to the plan.
        self._choose(count if is_on else None)
        self.sync()

    def _show(self, value: Any, refusal: str) -> None:
        super()._show(value, refusal)
        self._toggles.show(value)


def field_for(
    setting: Setting,
    model: PickerModel,
    on_choose: ChooseValue,
    fields: SharedFields,
    look: FieldLook = "whole",
) -> SettingField:
    """The field that fits a choice."""
    is_count = setting.name == "num_processes" and look == "brief"
    field_class: type[SettingField] = CountField if is_count else LineField
    if setting.kind == "truth":
        field_class = ListField
    elif setting.kind == "one-of":
        labels = [option.label for option in setting.options]
        fits_row = len(labels) <= _MAX_BUTTONS or len("".join(labels)) <= _ROW_CHARS
        field_class = OptionsField if fits_row and not setting.section else ListField
    return field_class(setting, model, on_choose, fields, look)


def toggle_class(widget: w.DOMWidget, class_name: str, is_on: bool) -> None:
    """Add or remove a class of a widget, without a message where nothing changes."""
    (widget.add_class if is_on else widget.remove_class)(class_name)


def as_text(value: Any) -> str:
    """A value as it is typed: a table as JSON, words with commas between them."""
    if value is None:
        return ""
    if isinstance(value, (list, tuple)) and all(isinstance(item, str) for item in value):
        return ", ".join(value)
    if isinstance(value, (dict, list, tuple, bool)):
        return json.dumps(value)
    return str(value)


def as_value(typed_text: str, setting_kind: str) -> Any:
    """The value that typed text stands for; other text is returned, and read or refused later."""
    text = typed_text.strip()
    if not text:
        return None
    if setting_kind == "words" and text != "auto":
        return [word.strip() for word in text.split(",") if word.strip()]
    if setting_kind == "table" and text != "auto":
        try:
            return json.loads(text)
        except ValueError:  # the validator that refuses it says what it must be
            return text
    return text
