"""The fields of a picker: widgets, made once so that the focus stays, for one setting each."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

import ipywidgets as w

from nbaccel.notebook.picker import rendering

if TYPE_CHECKING:
    from nbaccel.memory.settings_form import Setting
    from nbaccel.notebook.picker.model import PickerModel

CarryOut = Callable[..., tuple[str, ...]]  # returns what was wrong; `field`: where that is told
FieldLook = Literal["whole", "usable", "brief"]
"""How much of a field is shown: ``usable`` hides it while it cannot be set; ``brief`` also hides
options that cannot be chosen, and says only what an open value comes to."""
_MAX_BUTTONS = 5  # more options than these are a list, unless their words are short
_ROW_CHARS = 30
_EMPTY_CLAUSE = re.compile(r"; empty [^;]*")
_OPEN_LABEL = "default"


class Form:
    """What the parts of a form share; makes widgets with few messages to the page."""

    def __init__(self, model: PickerModel, carry_out: CarryOut) -> None:
        self.model = model
        self.carry_out = carry_out
        self._is_showing = False
        self._layout = w.Layout()
        self._width = w.Layout(width="auto")
        self._styles: dict[Any, w.Widget] = {}

    def hear(self, widget: w.Widget, trait: str, act: Callable[[Any], object]) -> None:
        """Act on what the user does with a widget."""

        def on_change(change: Any) -> None:
            with self.model.lock:
                if not self._is_showing:
                    act(change.new)

        widget.observe(on_change, trait)

    @contextmanager
    def showing(self) -> Iterator[None]:
        """Values that code sets are reported as well; they are no choices of the user."""
        was_showing = self._is_showing
        self._is_showing = True
        try:
            yield
        finally:
            self._is_showing = was_showing

    def make(self, kind: Any, *css_classes: str, **values: Any) -> Any:
        """A widget of a kind, with values of its traits."""
        values["layout"] = self._layout if issubclass(kind, (w.Box, w.HTML)) else self._width
        if not issubclass(kind, w.Box):
            if kind not in self._styles:
                width = {"description_width": "190px"} if kind in (w.Text, w.Dropdown) else {}
                # The class that this kind takes: ipywidgets 8 has more of them than 7.
                self._styles[kind] = kind.class_traits()["style"].klass(**width)
            values["style"] = self._styles[kind]
        # As an argument, which `repr` of a widget writes as well; `add_class` sends each.
        return kind(**values, _dom_classes=css_classes)

    def new_html(self, html_text: str = "", *css_classes: str) -> w.HTML:
        """Text; none where it is to be filled."""
        return self.make(w.HTML, *css_classes, value=html_text)

    def new_box(self, children: Sequence[w.Widget], *css_classes: str) -> w.VBox:
        """Widgets one below another."""
        return self.make(w.VBox, *css_classes, children=children)

    def new_row(self, children: Sequence[w.Widget], *css_classes: str) -> w.HBox:
        """Widgets side by side."""
        return self.make(w.HBox, *css_classes, children=children)

    def new_button(self, text: str, css_class: str, on_press: Callable[[], object]) -> w.Button:
        """A button that does something."""
        button = self.make(w.Button, "nbaccel-action", css_class, description=text)
        button.on_click(lambda _: on_press())
        return button


class Toggles:
    """Buttons of which at most one is on."""

    def __init__(self, form: Form, press: Callable[[Any, bool], None]) -> None:
        self._form = form
        self._press = press
        self.buttons: dict[Any, w.ToggleButton] = {}

    def add(self, key: Any, text: str, tooltip: str, css_class: str) -> w.ToggleButton:
        """Another button."""
        button = self._form.make(w.ToggleButton, css_class, description=text, tooltip=tooltip)
        self._form.hear(button, "value", lambda is_on: self._press(key, is_on))
        self.buttons[key] = button
        return button

    def show(self, key: Any) -> None:
        """Switch one on and the others off."""
        with self._form.showing():
            for own_key, button in self.buttons.items():
                button.value = own_key == key


class FoldedSection:
    """Settings below a heading: a button, which the keyboard opens in every front end."""

    def __init__(
        self,
        title: str,
        form: Form,
        make: Callable[[], list[w.Widget]],
        css_class: str = "",
        *,
        listed: Sequence[Setting] = (),
    ) -> None:
        self._title = title
        self._listed = listed
        self._model = form.model
        self._make = make
        self._is_shown: bool | None = None
        self._form = form
        self._inside: w.VBox | None = None
        classes = ("nbaccel-opens", css_class or f"nbaccel-opens-{rendering.css_name(title)}")
        self.heading = form.make(w.ToggleButton, *classes, description=title)
        self.heading.observe(lambda change: self._turn(is_open=change.new), "value")
        self.box = form.new_box([self.heading], "nbaccel-folded")
        self.sync()

    def sync(self) -> None:
        """Show it where it means something, with the number of settings made in it."""
        if not self._listed:
            return
        is_shown = any(self._model.is_shown(setting.name) for setting in self._listed)
        toggle_class(self.box, "nbaccel-hidden", not is_shown)
        # Not on the first call, where `_is_shown` is None: sections begin closed.
        if is_shown and self._is_shown is False:
            self.heading.value = True  # what was just chosen has its settings here
        self._is_shown = is_shown
        values = ((self._model.value(one.name), one.default) for one in self._listed)
        num_set = sum(value not in (None, default) for value, default in values) * is_shown
        self.heading.description = f"{self._title} ({num_set} set)" if num_set else self._title

    def _turn(self, *, is_open: bool) -> None:
        if is_open and self._inside is None:
            self._inside = self._form.new_box(self._make(), "nbaccel-section")
            self.box.children = (self.heading, self._inside)
        if self._inside is not None:
            toggle_class(self._inside, "nbaccel-hidden", not is_open)


class SettingField:
    """One choice, as the widget `box`, with mistakes in what was typed or chosen here."""

    def __init__(self, setting: Setting, form: Form, look: FieldLook = "whole") -> None:
        self.setting = setting
        self.messages: tuple[str, ...] = ()
        self.is_visible = True
        self._look = look
        self._model = form.model
        self._form = form
        self._note = form.new_html("", "nbaccel-field-note")
        css_class = f"nbaccel-{rendering.css_name(setting.name)}"
        self.box = form.new_box([*self._controls(), self._note], "nbaccel-setting", css_class)
        self.sync()

    def sync(self) -> None:
        """Show the state of the model."""
        name = self.setting.name
        refusal = self._model.refusal(name)
        self.is_visible = self._model.is_shown(name) and (self._look == "whole" or not refusal)
        toggle_class(self.box, "nbaccel-hidden", not self.is_visible)
        if self.is_visible:
            with self._form.showing():
                self._show(self._model.value(name), refusal)
                if self.messages:
                    self._note.value += rendering.error_html(self.messages)

    def tell(self, messages: tuple[str, ...]) -> None:
        """Show mistakes at this field; an empty tuple removes them."""
        self.messages = messages
        self.sync()

    def _controls(self) -> list[w.Widget]:
        raise NotImplementedError

    def _show(self, value: Any, refusal: str) -> None:
        raise NotImplementedError

    def _choose(self, value: Any) -> None:
        """Pass on what the user has chosen; one that is refused goes back to the present value."""
        self._form.carry_out(lambda: self._model.choose(self.setting.name, value), field=self)
        self.sync()

    def _explain(
        self,
        refusal: str,
        *,
        meaning: str = "",
        reasons: Sequence[str] = (),
        shows_outcome: bool = False,
    ) -> str:
        """The note: what an open value comes to, unless the field shows it, and what it means."""
        outcome = rendering.outcome_of(self._model, self.setting)
        if self._look == "brief":
            return rendering.note_html("", outcome=outcome.reason, reasons=reasons)
        meaning = meaning or self.setting.meaning
        if self._look == "usable":
            # The value beside it shows what an empty field is, and room is for one line.
            meaning = _EMPTY_CLAUSE.sub("", meaning.partition(". ")[0].rstrip(".")) + "."
        return rendering.note_html(
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
        self._toggles = Toggles(self._form, self._pressed)
        for number, option in enumerate(self.setting.options):
            css_class = f"nbaccel-option-{rendering.css_name(option.value)}"
            self._toggles.add(number, option.label, option.meaning, css_class)
        return [
            self._form.new_html(rendering.label_html(self._label()), "nbaccel-field-label"),
            self._form.new_row(list(self._toggles.buttons.values()), "nbaccel-options"),
        ]

    def _pressed(self, number: int, is_on: bool) -> None:
        if is_on:
            self._choose(self.setting.options[number].value)
        else:
            self.sync()  # the chosen option cannot be switched off: another one must be chosen

    def _show(self, value: Any, refusal: str) -> None:
        labels: dict[str, list[str]] = {}
        meaning = ""
        on_number = None
        for number, (option, reason) in enumerate(self._model.offers(self.setting.name)):
            button = self._toggles.buttons[number]
            button.disabled = bool(refusal or reason)
            button.tooltip = refusal or reason or option.meaning
            if self._look == "brief":
                toggle_class(button, "nbaccel-hidden", bool(reason))
            if option.value == value:
                on_number = number
                meaning = option.meaning
            if reason:
                labels.setdefault(reason, []).append(option.label)
        self._toggles.show(on_number)
        reasons = [f"{', '.join(names)}: {reason}" for reason, names in labels.items()]
        self._note.value = self._explain(refusal, meaning=meaning, reasons=reasons)


class ListField(SettingField):
    """Many options, or yes and no, as a list; below it, why some cannot be chosen."""

    def _controls(self) -> list[w.Widget]:
        self._values: list[Any] = []
        self._list = self._form.make(w.Dropdown, description=self._label())
        # By index, not by value: None is a value here, and for the widget it means no selection.
        self._form.hear(self._list, "index", self._picked)
        return [self._list]

    def _picked(self, index: int | None) -> None:
        if index is not None:
            self._choose(self._values[index])

    def _show(self, shown_value: Any, refusal: str) -> None:
        is_truth = self.setting.kind == "truth"
        offers = [] if is_truth else self._model.offers(self.setting.name)
        options = self._truths() if is_truth else []
        options += [(one.label, one.value) for one, reason in offers if not reason]
        lines = [f"{one.label}: {reason}" for one, reason in offers if reason]
        if shown_value not in [value for _, value in options]:
            # A file may hold a value that cannot be chosen on this machine.
            options.append((as_text(shown_value) or _OPEN_LABEL, shown_value))
        self._values = [value for _, value in options]
        labels = tuple(label for label, _ in options)
        # Setting `options` resets the selection, so it is done only where they differ.
        if labels != self._list.options:
            self._list.options = labels
        self._list.index = self._values.index(shown_value)
        self._list.disabled = bool(refusal)
        self._note.value = self._explain(refusal, reasons=lines, shows_outcome=is_truth)

    def _truths(self) -> list[tuple[str, Any]]:
        truths = [(word, value) for value, word in rendering.TRUTH_WORDS.items()]
        if not self.setting.may_be_open and self.setting.default in rendering.TRUTH_WORDS:
            return truths  # such a field always holds one of the two
        text = rendering.default_text_of(self._model, self.setting)
        label = f"{_OPEN_LABEL} ({text})" if text else _OPEN_LABEL
        option = [("auto", "auto")] if self.setting.takes_auto else []
        return [(label, None), *truths, *option]


class LineField(SettingField):
    """A number, text, words or a table, typed; empty means the default."""

    def _controls(self) -> list[w.Widget]:
        # Only when the field is left: half a number would be refused while it is typed.
        self._line = self._form.make(w.Text, description=self._label(), continuous_update=False)
        # Shown again as it was taken: 5e8 as a whole number.
        kind = self.setting.kind
        self._form.hear(self._line, "value", lambda text: self._choose(as_value(text, kind)))
        return [self._line]

    def _show(self, value: Any, refusal: str) -> None:
        if not self.messages:  # refused text stays, to be corrected
            self._line.value = as_text(value)
        self._line.disabled = bool(refusal)
        outcome = rendering.outcome_of(self._model, self.setting)
        self._line.placeholder = outcome.value or _OPEN_LABEL
        self._note.value = self._explain(refusal, shows_outcome=True)


class CountField(LineField):
    """How many processes: a button for each usual number, and a line for any other."""

    def _controls(self) -> list[w.Widget]:
        [self._line] = super()._controls()
        self._line.description = "Another number"  # hidden, for screen readers
        self._toggles = Toggles(self._form, self._pressed)
        for count in self._model.usual_process_counts:
            self._toggles.add(count, str(count), "", f"nbaccel-option-{count}")
        label = self._form.new_html(rendering.label_html(self._label()), "nbaccel-field-label")
        row = [*self._toggles.buttons.values(), self._line]
        return [label, self._form.new_row(row, "nbaccel-options", "nbaccel-count")]

    def _pressed(self, count: int, is_on: bool) -> None:
        # Pressing the chosen one again leaves the number to the plan.
        self._choose(count if is_on else None)

    def _show(self, value: Any, refusal: str) -> None:
        super()._show(value, refusal)
        self._toggles.show(value)


def field_for(setting: Setting, form: Form, look: FieldLook = "whole") -> SettingField:
    """The field that fits a choice."""
    is_count = setting.name == "num_processes" and look == "brief"
    field_class: type[SettingField] = CountField if is_count else LineField
    if setting.kind == "truth":
        field_class = ListField
    elif setting.kind == "one-of":
        labels = [option.label for option in setting.options]
        fits_row = len(labels) <= _MAX_BUTTONS or len("".join(labels)) <= _ROW_CHARS
        field_class = OptionsField if fits_row and not setting.section else ListField
    return field_class(setting, form, look)


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


def as_value(typed_text: str, kind: str) -> Any:
    """The value that typed text stands for; other text is returned, and read or refused later."""
    text = typed_text.strip()
    if not text:
        return None
    if kind == "words" and text != "auto":
        return [word.strip() for word in text.split(",") if word.strip()]
    if kind == "table" and text != "auto":
        try:
            return json.loads(text)
        except ValueError:  # the validator that refuses it says what it must be
            return text
    return text
