"""The strip of candidates and the proposals of Suggest: a click takes one.

    names, a group of toggle buttons, each as wide as the strip
    bars, one HTML that lies over them and lets every click through

The browser makes the buttons a radio group with arrow keys (`picker.js`), as all options are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

import ipywidgets as w

from nbaccel.notebook.picker.compared_ways import button_names, name_with_precision
from nbaccel.notebook.picker.fields import SharedFields, toggle_class
from nbaccel.notebook.picker.html import label_html
from nbaccel.notebook.picker.strip_html import (
    compared_html,
    place_text,
    proposal_html,
    question_html,
    step_text,
    strip_html,
    taken_html,
    verdict_text,
)

if TYPE_CHECKING:
    from nbaccel.notebook.picker.candidates import Candidate
    from nbaccel.notebook.picker.model import PickerModel
    from nbaccel.notebook.picker.suggesting import Proposal

__all__ = ["CandidateStrip", "ProposalsPanel", "TakenLine"]

TakeCandidate = Callable[["Candidate"], Any]
_TITLE = "What fits"
_WITHOUT_MODEL = (
    "With a model, a bar for each way to train is here, against the memory that there is."
)
_COMPARE = "Compare precisions"
_COMPARE_MEANING = "Show each way to train in each precision that the machine has."
_SOME_WAIT = "Ways that may fit with activations computed again are being estimated …"
_WAITING = "Memory is being estimated …"


class CandidateStrip:
    """Ways to train, each with the memory that it needs.

    Attributes:
        box: The widget to show.
    """

    def __init__(self, model: PickerModel, fields: SharedFields, take: TakeCandidate) -> None:
        self._model = model
        self._shared = fields
        self._take = take
        self._is_syncing = False
        # What the buttons stand for, in their order.
        self._shown: tuple[Candidate, ...] = ()
        self._heading = fields.new_html(question_html(3, _TITLE), "nbaccel-strip-head")
        self._compare = fields.new_toggle(_COMPARE, _COMPARE_MEANING, "nbaccel-compare")
        self._compare.observe(lambda change: self._compare_pressed(is_on=change.new), "value")
        top = fields.new_row([self._heading, self._compare], "nbaccel-strip-top")
        self._names = fields.new_box([], "nbaccel-options", "nbaccel-candidates")
        self._bars = fields.new_html("", "nbaccel-bars")
        label = fields.new_html(label_html("Ways to train", is_hidden=True))
        self._strip = fields.new_box([self._names, label, self._bars], "nbaccel-strip")
        self.box = fields.new_box([top, self._strip], "nbaccel-part-3")

    def sync(self) -> None:
        """Show the present candidates; before they are estimated, the room that they will take."""
        is_waiting = self._model.is_memory_postponed
        compares = self._model.compares_precisions
        self._shown = () if is_waiting else self._model.shown_candidates()
        toggle_class(self._strip, "nbaccel-awaited", is_waiting)
        toggle_class(self._strip, "nbaccel-comparing", compares)
        self._heading.value = question_html(3, _TITLE, self._remark(self._shown))
        self._is_syncing = True
        try:
            self._compare.value = compares
            self._compare.tooltip = f"{_COMPARE_MEANING} {self._model.precision_hint}".strip()
            may_compare = not is_waiting and len(self._model.precisions) > 1
            toggle_class(self._compare, "nbaccel-hidden", not (self._shown and may_compare))
            self._sync_buttons(self._shown)
        finally:
            self._is_syncing = False
        self._bars.value = self._drawn() if self._shown else ""

    def _drawn(self) -> str:
        if self._model.compares_precisions:
            return compared_html(self._shown)
        return strip_html(self._shown, self._model.precision_hint)

    def _remark(self, candidates: Sequence[Candidate]) -> str:
        if self._model.is_memory_postponed:
            return escape(_WAITING)
        if self._model.trained is None:
            return escape(_WITHOUT_MODEL)
        best = next((candidate for candidate in candidates if candidate.is_best), None)
        place = place_text(candidates)
        remark = f"{escape(place)}; click to take one." if place else "click to take one."
        if best is not None:
            name = name_with_precision(best) if self._model.compares_precisions else best.name
            remark += f" ★ <b>{escape(name)}</b>: {escape(best.reason)}."
        if not all(candidate.is_estimated for candidate in candidates):
            remark += f" {escape(_SOME_WAIT)}"
        return remark

    def _sync_buttons(self, candidates: Sequence[Candidate]) -> None:
        buttons = list(self._names.children)
        while len(buttons) < len(candidates):
            buttons.append(self._new_button(len(buttons)))
        # Buttons stay where they are, so that the keyboard keeps its place.
        if len(buttons) != len(self._names.children):
            self._names.children = tuple(buttons)
        names = button_names(candidates, compares=self._model.compares_precisions)
        for number, button in enumerate(buttons):
            toggle_class(button, "nbaccel-hidden", number >= len(candidates))
            if number < len(candidates):
                candidate = candidates[number]
                is_first = number == 0 or candidates[number - 1].name != candidate.name
                toggle_class(button, "nbaccel-first", is_first)
                button.description = names[number]
                button.value = candidate.is_taken
                button.disabled = bool(candidate.refusal)
                button.tooltip = _candidate_text(candidate)

    def _new_button(self, number: int) -> w.ToggleButton:
        button = self._shared.new_toggle("", "", f"nbaccel-candidate-{number}")
        button.observe(lambda change: self._pressed(number, is_on=change.new), "value")
        return button

    def _pressed(self, number: int, *, is_on: bool) -> None:
        with self._shared.lock:
            if self._is_syncing:
                return
            if is_on and number < len(self._shown):
                self._take(self._shown[number])
            # A refused one goes off again, and the one that is taken stays on when it is pressed.
            self.sync()

    def _compare_pressed(self, *, is_on: bool) -> None:
        with self._shared.lock:
            if not self._is_syncing:
                self._model.compare_precisions(is_on=is_on)


def _candidate_text(candidate: Candidate) -> str:
    """What a screen reader and the mouse's pointer say of a candidate."""
    clauses = [verdict_text(candidate), step_text(candidate) if candidate.step_s else ""]
    # The reason of one that cannot be taken is its verdict, too.
    return "; ".join(dict.fromkeys(filter(None, (*clauses, candidate.reason))))


class TakenLine:
    """What is taken now, and whether it fits.

    Attributes:
        box: The widget to show.
    """

    def __init__(self, model: PickerModel, fields: SharedFields) -> None:
        self._model = model
        self.box = fields.new_html("", "nbaccel-taken-line")

    def sync(self) -> None:
        """Show the present state of the model."""
        taken = None
        if not self._model.is_memory_postponed:
            taken = next((one for one in self._model.shown_candidates() if one.is_taken), None)
        self.box.value = taken_html(taken, self._model.verdict, self._model.samples_of_step)


class ProposalsPanel:
    """One to three proposals, shown when they are asked for.

    Attributes:
        box: The widget to show.
    """

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
            proposal.title, "nbaccel-take", lambda: self._take(proposal)
        )
        text = self._shared.new_html(proposal_html(proposal))
        return self._shared.new_box([button, text], "nbaccel-proposal")
