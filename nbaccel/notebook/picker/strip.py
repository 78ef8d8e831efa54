"""The strip of candidates and the proposals of Suggest: a click takes one.

    names, a group of toggle buttons, each as wide as the strip
    bars, one HTML that lies over them and lets every click through

The browser makes the buttons a radio group with arrow keys (`picker.js`), as all options are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import ipywidgets as w

from nbaccel.notebook.picker.fields import SharedFields, Toggles, toggle_class
from nbaccel.notebook.picker.form_html import (
    BarRow,
    fits_html,
    proposal_html,
    rows_of_ways,
    table_html,
    verdict_text,
)
from nbaccel.notebook.picker.html import label_html

if TYPE_CHECKING:
    from nbaccel.memory.ways import Candidate, Proposal
    from nbaccel.notebook.picker.model import PickerModel

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
