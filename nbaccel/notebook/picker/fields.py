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

from nbaccel.notebook.picker.html import css_name, error_html, label_html, note_html
from nbaccel.notebook.picker.outcomes import TRUTH_WORDS, default_text_of, outcome_of

if TYPE_CHECKING:
    from nbaccel.notebook.picker.choices import ChoiceOption, Setting
    from nbaccel.notebook.picker.model import PickerModel


__all__ = [
    "ChooseValue",
    "FieldLook",
    "LineField",
    "ListField",
    "OptionsField",
    "SettingField",
    "SharedFields",
    "as_text",
    "as_value",
    "field_for",
    "toggle_class",
]


ChooseValue = Callable[["SettingField", Any], None]
FieldLook = Literal["whole", "usable", "brief"]
"""How much of a field is shown: ``usable`` hides it while it cannot be set; ``brief`` also hides
options that cannot be chosen, and says only what an open value comes to."""
_MAX_BUTTONS = 5  # more options than these are a list, unless their words are short
_ROW_CHARS = 30
_GROUPED_DIGITS = re.compile(r"\d{1,3}(,\d{3})+")  # 500,000,000
_EMPTY_CLAUSE = re.compile(r"; empty [^;]*")
_OPEN_LABEL = "default"


class SharedFields:
    """Makes widgets with few messages to the page.

    They share layouts and styles, and have their classes and values from the beginning.

    Attributes:
        lock: The same.
    """

    def __init__(self, lock: threading.RLock) -> None:
        self.lock = lock
        self.layout = w.Layout()
        self.width = w.Layout(width="auto")
        self.text = _new_style(w.Text, description_width="190px")
        self.list = _new_style(w.Dropdown, description_width="190px")
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

    def new_toggle(self, text: str, tooltip: str, *css_classes: str) -> w.ToggleButton:
        """A button that is on or off."""
        return w.ToggleButton(
            description=text,
            tooltip=tooltip,
            layout=self.width,
            style=self._toggle,
            **_with(css_classes),
        )

    def new_button(self, text: str, css_class: str, on_press: Callable[[], None]) -> w.Button:
        """A button that does something."""
        button = w.Button(
            description=text,
            layout=self.width,
            style=self._button,
            **_with(("nbaccel-action", css_class)),
        )
        button.on_click(lambda _: on_press())
        return button


def _with(css_classes: Sequence[str]) -> dict[str, Any]:
    """Classes as an argument, which `repr` of a widget writes as well; `add_class` sends each."""
    return {"_dom_classes": tuple(css_classes)}


def _new_style(widget_class: type[w.Widget], **values: str) -> w.Widget:
    """A style as this kind of widget takes it: ipywidgets 8 has more classes of them than 7."""
    return widget_class.class_traits()["style"].klass(**values)


class SettingField:
    """One choice.

    Attributes:
        setting: The choice.
        box: The widget to show.
        messages: Mistakes in what was typed or chosen here.
        is_visible: Whether it is shown as things are.
    """

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
        setting_label = self.setting.label
        setting_unit = self.setting.unit
        return (
            setting_label
            if setting_unit in ("", setting_label.lower())
            else f"{setting_label} [{setting_unit}]"
        )


class OptionsField(SettingField):
    """A few options, each a button; one that cannot be chosen is greyed and says why."""

    def _controls(self) -> list[w.Widget]:
        self._buttons = [self._button(option) for option in self.setting.options]
        return [
            self._shared.new_html(label_html(self._label()), "nbaccel-field-label"),
            self._shared.new_row(self._buttons, "nbaccel-options"),
        ]

    def _button(self, option: ChoiceOption) -> w.ToggleButton:
        button = self._shared.new_toggle(
            option.label,
            option.meaning,
            f"nbaccel-option-{css_name(option.value)}",
        )
        button.observe(lambda change: self._pressed(button, option, change.new), "value")
        return button

    def _pressed(self, button: w.ToggleButton, option: ChoiceOption, is_on: bool) -> None:
        with self._shared.lock:
            if self._is_syncing:
                return
            if is_on:
                self._choose(option.value)
            # Pressing the chosen option again must not switch it off: another one must be chosen.
            self.sync()

    def _show(self, value: Any, refusal: str) -> None:
        labels_by_reason: dict[str, list[str]] = {}
        meaning = ""
        for button, option_offer in zip(
            self._buttons, self._model.offers(self.setting.name), strict=True
        ):
            is_on = option_offer.option.value == value
            button.value = is_on
            button.disabled = bool(refusal or option_offer.reason)
            button.tooltip = refusal or option_offer.reason or option_offer.option.meaning
            if self._look == "brief":
                toggle_class(button, "nbaccel-hidden", bool(option_offer.reason))
            if is_on:
                meaning = option_offer.option.meaning
            if option_offer.reason:
                labels_by_reason.setdefault(option_offer.reason, []).append(
                    option_offer.option.label
                )
        reason_lines = [
            f"{', '.join(option_labels)}: {reason}"
            for reason, option_labels in labels_by_reason.items()
        ]
        self._note.value = self._explain(refusal, meaning=meaning, reasons=reason_lines)


class ListField(SettingField):
    """Many options, or yes and no, as a list; below it, why some cannot be chosen."""

    def _controls(self) -> list[w.Widget]:
        self._values: list[Any] = []
        self._list = w.Dropdown(
            description=self._label(), layout=self._shared.width, style=self._shared.list
        )
        # By index, not by value: None is a value here, and for the widget it means no selection.
        self._list.observe(lambda change: self._picked(change.new), "index")
        return [self._list]

    def _picked(self, index: int | None) -> None:
        with self._shared.lock:
            if not self._is_syncing and index is not None:
                self._choose(self._values[index])
                self.sync()  # a refused choice goes back to the present value

    def _show(self, shown_value: Any, refusal: str) -> None:
        options, lines = self._offered()
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
        self._note.value = self._explain(
            refusal, reasons=lines, shows_outcome=self.setting.kind == "truth"
        )

    def _offered(self) -> tuple[list[tuple[str, Any]], list[str]]:
        if self.setting.kind == "truth":
            return self._truths(), []
        option_offers = self._model.offers(self.setting.name)
        options = [
            (option_offer.option.label, option_offer.option.value)
            for option_offer in option_offers
            if not option_offer.reason
        ]
        lines = [
            f"{option_offer.option.label}: {option_offer.reason}"
            for option_offer in option_offers
            if option_offer.reason
        ]
        return options, lines

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
        self._line = w.Text(
            description=self._label(),
            # Only when the field is left: half a number would be refused while it is typed.
            continuous_update=False,
            layout=self._shared.width,
            style=self._shared.text,
        )
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


def field_for(
    setting: Setting,
    model: PickerModel,
    on_choose: ChooseValue,
    fields: SharedFields,
    look: FieldLook = "whole",
) -> SettingField:
    """The field that fits a choice."""
    field_class: type[SettingField] = LineField
    if setting.kind == "truth":
        field_class = ListField
    elif setting.kind == "one-of":
        labels = [option.label for option in setting.options]
        fits_row = len(labels) <= _MAX_BUTTONS or len("".join(labels)) <= _ROW_CHARS
        field_class = OptionsField if fits_row and not setting.section else ListField
    return field_class(setting, model, on_choose, fields, look)


def toggle_class(widget: w.DOMWidget, class_name: str, is_on: bool) -> None:
    """Add or remove a class of a widget, without a message where nothing changes."""
    if is_on:
        widget.add_class(class_name)
    else:
        widget.remove_class(class_name)


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
    """The value that typed text stands for; other text is returned, and will be refused."""
    typed_text = typed_text.strip()
    if not typed_text:
        return None
    if typed_text == "auto" or setting_kind == "text":
        return typed_text
    readers: dict[str, Callable[[str], Any]] = {
        "whole": _whole_number,
        "number": float,
        "words": _typed_words,
        "table": json.loads,
    }
    try:
        return readers[setting_kind](typed_text)
    except ValueError:  # the validator that refuses it says what it must be
        return typed_text


def _whole_number(text: str) -> int | float:
    if _GROUPED_DIGITS.fullmatch(text):
        text = text.replace(",", "")
    try:
        return int(text)
    except ValueError:
        parsed_number = float(text)
        return int(parsed_number) if parsed_number.is_integer() else parsed_number


def _typed_words(text: str) -> list[str]:
    return [typed_word.strip() for typed_word in text.split(",") if typed_word.strip()]
