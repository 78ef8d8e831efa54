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

from nbaccel.capabilities import device_row
from nbaccel.notebook.picker.fields import SharedFields, toggle_class
from nbaccel.notebook.picker.html import label_html
from nbaccel.notebook.picker.strip_html import (
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

TakeNamed = Callable[[str], Any]
_TITLE = "What fits"
_WITHOUT_MODEL = (
    "With a model, a bar for each way to train is here, against the memory that there is."
)
_WAITING = "Memory is being estimated …"


class CandidateStrip:
    """Ways to train, each with the memory that it needs.

    Args:
        model: The picker's model.
        shared_fields: Layouts and styles.
        take: Takes the candidate of a name.

    Attributes:
        box: The widget to show.
    """

    def __init__(self, model: PickerModel, shared_fields: SharedFields, take: TakeNamed) -> None:
        self._model, self._shared, self._take = model, shared_fields, take
        self._is_syncing = False
        self._heading = shared_fields.new_html(question_html(3, _TITLE), "nbaccel-strip-head")
        self._names = shared_fields.new_box([], "nbaccel-options", "nbaccel-candidates")
        self._bars = shared_fields.new_html("", "nbaccel-bars")
        group_label = shared_fields.new_html(label_html("Ways to train", is_hidden=True))
        self._strip = shared_fields.new_box([self._names, group_label, self._bars], "nbaccel-strip")
        self.box = shared_fields.new_box([self._heading, self._strip], "nbaccel-part-3")

    def sync(self) -> None:
        """Show the present candidates; before they are estimated, the room that they will take."""
        is_waiting = self._model.is_memory_postponed
        candidates = () if is_waiting else self._model.candidates()
        toggle_class(self._strip, "nbaccel-awaited", is_waiting)
        self._heading.value = question_html(3, _TITLE, self._remark(candidates))
        self._is_syncing = True
        try:
            self._sync_buttons(candidates)
        finally:
            self._is_syncing = False
        self._bars.value = strip_html(candidates) if candidates else ""

    def _remark(self, candidates: Sequence[Candidate]) -> str:
        if self._model.is_memory_postponed:
            return escape(_WAITING)
        if self._model.trained is None:
            return escape(_WITHOUT_MODEL)
        best = next((candidate for candidate in candidates if candidate.is_best), None)
        line_text = "the dashed line is what there is; click to take one."
        remark = f"{escape(_place_words(candidates))}{line_text}"
        if best is not None:
            remark += f" ★ <b>{escape(best.name)}</b>: {escape(best.reason)}."
        return remark

    def _sync_buttons(self, candidates: Sequence[Candidate]) -> None:
        buttons = list(self._names.children)
        while len(buttons) < len(candidates):
            buttons.append(self._new_button(len(buttons)))
        # Buttons stay where they are, so that the keyboard keeps its place.
        if len(buttons) != len(self._names.children):
            self._names.children = tuple(buttons)
        for number, button in enumerate(buttons):
            toggle_class(button, "nbaccel-hidden", number >= len(candidates))
            if number < len(candidates):
                candidate = candidates[number]
                button.description = candidate.name
                button.value = candidate.is_taken
                button.disabled = bool(candidate.refusal)
                button.tooltip = _told_candidate(candidate)

    def _new_button(self, number: int) -> w.ToggleButton:
        button = self._shared.new_toggle("", "", f"nbaccel-candidate-{number}")
        button.observe(lambda change: self._pressed(button, is_on=change.new), "value")
        return button

    def _pressed(self, button: w.ToggleButton, *, is_on: bool) -> None:
        with self._shared.lock:
            if self._is_syncing:
                return
            if is_on:
                self._take(button.description)
            # A refused one goes off again, and the one that is taken stays on when it is pressed.
            self.sync()


def _place_words(candidates: Sequence[Candidate]) -> str:
    """Whose memory the bars are."""
    for candidate in candidates:
        if candidate.need is not None:
            first_label = candidate.need.bars[0].label.partition(" · ")[0]
            kind, separator, _ = first_label.partition(":")
            return f"memory of each {device_row(kind).noun}; " if separator else "host memory; "
    return ""


def _told_candidate(candidate: Candidate) -> str:
    """What a screen reader and the mouse's pointer say of a candidate."""
    clauses = [verdict_text(candidate), step_text(candidate) if candidate.step_s else ""]
    # The reason of one that cannot be taken is its verdict, too.
    return "; ".join(dict.fromkeys(filter(None, (*clauses, candidate.reason))))


class TakenLine:
    """What is taken now, and whether it fits.

    Args:
        model: The picker's model.
        shared_fields: Layouts and styles.

    Attributes:
        box: The widget to show.
    """

    def __init__(self, model: PickerModel, shared_fields: SharedFields) -> None:
        self._model = model
        self.box = shared_fields.new_html("", "nbaccel-taken-line")

    def sync(self) -> None:
        """Show the present state of the model."""
        taken = None
        if not self._model.is_memory_postponed:
            taken = next((one for one in self._model.candidates() if one.is_taken), None)
        self.box.value = taken_html(taken, self._model.verdict, self._model.samples_of_step)


class ProposalsPanel:
    """One to three proposals, shown when they are asked for.

    Args:
        shared_fields: Layouts and styles.
        take: Takes a proposal.

    Attributes:
        box: The widget to show.
    """

    def __init__(self, shared_fields: SharedFields, take: Callable[[Proposal], Any]) -> None:
        self._shared, self._take = shared_fields, take
        self.box = shared_fields.new_box([], "nbaccel-proposals", "nbaccel-hidden")

    def show(self, proposals: Sequence[Proposal]) -> None:
        """Show proposals, each with a button that takes it.

        Args:
            proposals: What is proposed; the best first.
        """
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
