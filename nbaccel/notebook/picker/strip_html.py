"""The three questions of a picker and its strip of candidates, as HTML; all text escaped."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import TYPE_CHECKING

from nbaccel.base.units import format_bytes, format_seconds
from nbaccel.config.capabilities import device_row
from nbaccel.memory.step_time import SHORTEST_S
from nbaccel.notebook.picker.compared_ways import (
    groups_of_ways,
    is_shown_once,
    name_with_precision,
    precision_label,
)
from nbaccel.notebook.picker.html import css_name
from nbaccel.notebook.picker.memory_model import SEGMENT_KINDS, SEGMENT_NAMES

if TYPE_CHECKING:
    from nbaccel.notebook.picker.candidates import Candidate
    from nbaccel.notebook.picker.memory_model import BarSegment, MemoryBar
    from nbaccel.notebook.picker.model import FitVerdict, PickerModel
    from nbaccel.notebook.picker.suggesting import Proposal

__all__ = [
    "compared_html",
    "device_bar",
    "machine_html",
    "place_text",
    "proposal_html",
    "question_html",
    "step_text",
    "strip_html",
    "strip_scale",
    "taken_html",
    "trained_html",
    "use_html",
    "used_bytes",
    "verdict_text",
]

_NO_MODEL = "configure(model, batch)"
_FITS_CLASSES = {True: "nbaccel-fits", False: "nbaccel-lacks", None: ""}
_FITS_SIGNS = {True: "✓ ", False: "✗ ", None: ""}
_MOST_CAPACITIES = 1.7  # a bar may be so many times what there is; longer ones are cut


def question_html(number: int, title: str, remark: str = "") -> str:
    """The heading of a question."""
    remark_html = f' <span class="nbaccel-pale">{remark}</span>' if remark else ""
    return (
        '<span class="nbaccel-question" role="heading" aria-level="3">'
        f'<span class="nbaccel-number" aria-hidden="true">{number}</span>'
        f"<b>{escape(title)}</b></span>{remark_html}"
    )


def trained_html(model: PickerModel) -> str:
    """What is trained."""
    trained = model.trained
    if trained is None:
        remark = f"Give the model, and a batch to measure with: <code>{_NO_MODEL}</code>"
        return question_html(1, "What is trained", remark)
    batch = model.batch_shapes
    batch_html = f"batch <code>{escape(batch)}</code>"
    if not batch:
        batch_html = f"no batch: activations are not counted; <code>{_NO_MODEL}</code>"
    remark = f"{escape(trained.name)} · {escape(trained.facts())} · {batch_html}"
    return question_html(1, "What is trained", remark)


def machine_html(model: PickerModel) -> str:
    """The machine: each device, with the memory that it has."""
    parts = "".join(
        f'<li class="nbaccel-part{" nbaccel-used" if part.is_used else ""}">{escape(part.label)}'
        + ('<span class="nbaccel-hidden-text"> (used)</span>' if part.is_used else "")
        + "</li>"
        for part in model.machine_parts
    )
    return f'{question_html(2, "On what")}<ul class="nbaccel-parts">{parts}</ul>'


# ---------------------------------------------------------------------- the strip
def device_bar(candidate: Candidate) -> MemoryBar | None:
    """The memory of one device, or of the host where processes compute there."""
    return None if candidate.need is None else candidate.need.bars[0]


def place_text(candidates: Iterable[Candidate]) -> str:
    """Whose memory the first bar of each candidate is: ``memory of each GPU``."""
    bar = next(filter(None, map(device_bar, candidates)), None)
    if bar is None:
        return ""
    kind, separator, _ = bar.label.partition(" · ")[0].partition(":")
    return f"memory of each {device_row(kind).noun}" if separator else "host memory"


def strip_scale(candidates: Iterable[Candidate]) -> int:
    """Bytes that the whole width of the strip stands for."""
    bars = [bar for bar in map(device_bar, candidates) if bar is not None]
    capacity = max((bar.capacity for bar in bars), default=0)
    most = max((used_bytes(bar) for bar in bars), default=0)
    if capacity:
        most = min(max(most, capacity), round(_MOST_CAPACITIES * capacity))
    return max(most, 1)


def strip_html(candidates: Sequence[Candidate], hint: str = "") -> str:
    """A bar for each candidate, against the line of what there is."""
    full_width = strip_scale(candidates)
    place_html = '<span class="nbaccel-name-place"></span>'
    rows = "".join(
        _row_html(candidate, full_width, candidate.name, place_html) for candidate in candidates
    )
    return f'<div class="nbaccel-rows">{rows}</div>{_strip_legend(candidates, hint)}'


def compared_html(candidates: Sequence[Candidate]) -> str:
    """The same, of each way one thin bar for each precision, all with one scale."""
    full_width = strip_scale(candidates)
    rows = []
    for way_name, of_way in groups_of_ways(candidates):
        for number, candidate in enumerate(of_way):
            # The buttons say both names.
            way_text = "" if number else escape(way_name)
            label = "" if is_shown_once(of_way) else precision_label(candidate.precision)
            place_html = (
                f'<span class="nbaccel-way" aria-hidden="true">{way_text}</span>'
                f'<span class="nbaccel-precision" aria-hidden="true">{escape(label)}</span>'
            )
            told_name = name_with_precision(candidate)
            first_class = "" if number else "nbaccel-first"
            rows.append(_row_html(candidate, full_width, told_name, place_html, first_class))
    return f'<div class="nbaccel-rows">{"".join(rows)}</div>{_strip_legend(candidates)}'


def _strip_legend(candidates: Sequence[Candidate], hint: str = "") -> str:
    bars = [bar for bar in map(device_bar, candidates) if bar is not None]
    kinds = {segment.kind for bar in bars for segment in bar.segments if segment.bytes}
    legend = "".join(
        f'<li><span class="nbaccel-swatch nbaccel-{css_name(kind)}"></span>'
        f"{escape(SEGMENT_NAMES.get(kind, kind))}</li>"
        for kind in ("others", *SEGMENT_KINDS)
        if kind in kinds
    )
    line = '<li><span class="nbaccel-swatch nbaccel-mark"></span>what there is</li>'
    hint_html = f'<span class="nbaccel-hint">{escape(hint)}</span>' if hint else ""
    legend_html = f'<ul class="nbaccel-legend">{legend}{line}</ul>' if bars else ""
    return f'<div class="nbaccel-below-bars">{legend_html}{hint_html}</div>'


def _row_html(
    candidate: Candidate, full_width: int, name: str, place_html: str, row_class: str = ""
) -> str:
    fits_class = "" if candidate.refusal else _FITS_CLASSES[candidate.fits]
    css_classes = " ".join(filter(None, ("nbaccel-strip-row", row_class, fits_class)))
    bar = device_bar(candidate)
    track_html = '<span class="nbaccel-track"></span>'
    if bar is not None:
        track_html = _track(bar, full_width, name)
    if candidate.refusal:
        words_html = f'<span class="nbaccel-refused">{escape(candidate.refusal)}</span>'
    else:
        best_html = ' <span class="nbaccel-best">★ best</span>' if candidate.is_best else ""
        words_html = (
            f'<span class="nbaccel-word">{escape(verdict_text(candidate))}</span>'
            f'<span class="nbaccel-step">{escape(step_text(candidate))}{best_html}</span>'
        )
    return f'<div class="{css_classes}">{place_html}{track_html}{words_html}</div>'


def verdict_text(candidate: Candidate) -> str:
    """Whether it fits, in a few words and with a sign: ``✓ 3.3 GiB free``."""
    if candidate.refusal:
        return candidate.refusal
    if not candidate.is_estimated:
        return candidate.verdict
    bars = () if candidate.need is None else candidate.need.bars
    for bar in bars:
        if bar.lacking:
            place = "" if bar is bars[0] else f" on {bar.label.partition(' · ')[0]}"
            return f"✗ {format_bytes(bar.lacking)} too little{place}"
    return f"✓ {candidate.verdict}" if candidate.fits else candidate.verdict


def step_text(candidate: Candidate) -> str:
    """The estimated time of a step: ``≈ 1.9 s/step``; a dash where it is not known."""
    if candidate.step_s is None:
        return "—"
    return (
        f"≈ {format_seconds(candidate.step_s)}/step"
        if candidate.step_s >= SHORTEST_S
        else "< 1 ms/step"
    )


def _track(bar: MemoryBar, full_width: int, name: str) -> str:
    segments = "".join(
        _strip_segment(segment, full_width)
        for segment in bar.segments
        if segment.bytes and segment.kind != "free"
    )
    cut_class = " nbaccel-cut" if used_bytes(bar) > full_width else ""
    mark = ""
    if bar.capacity:
        place = min(100.0, 100 * bar.capacity / full_width)
        mark = f'<span class="nbaccel-mark" style="left:{place:.2f}%"></span>'
    return (
        f'<span class="nbaccel-track-place"><span class="nbaccel-track{cut_class}" role="img" '
        f'aria-label="{escape(f"{name}: {bar.text()}")}">{segments}</span>{mark}</span>'
    )


def _strip_segment(segment: BarSegment, full_width: int) -> str:
    kind_name = SEGMENT_NAMES.get(segment.kind, segment.kind)
    return (
        f'<span class="nbaccel-segment nbaccel-{css_name(segment.kind)}" '
        f'title="{escape(f"{kind_name} {format_bytes(segment.bytes)}")}" '
        f'style="width:{100 * segment.bytes / full_width:.3f}%"></span>'
    )


def used_bytes(bar: MemoryBar) -> int:
    """Bytes of a bar that are taken, by others too."""
    return sum(segment.bytes for segment in bar.segments if segment.kind != "free")


# ---------------------------------------------------------------------- what was taken
def taken_html(candidate: Candidate | None, verdict: FitVerdict, text: str) -> str:
    """What is chosen now, whether it fits, and its bar for windows where the strip is far away."""
    name = "Chosen settings" if candidate is None else candidate.name
    clauses = [verdict.text, verdict.remedy]
    # Why nothing can be estimated is the reason of each candidate, too.
    if candidate is not None and not (candidate.reason and candidate.reason in verdict.remedy):
        reason = (
            f"{candidate.reason[:1].upper()}{candidate.reason[1:]}." if candidate.reason else ""
        )
        clauses += [reason, _step_sentence(candidate)]
    clauses.append(text)
    bar_html = ""
    if candidate is not None and (bar := device_bar(candidate)) is not None:
        bar_html = (
            f'<div class="nbaccel-taken-bar">{_track(bar, strip_scale([candidate]), name)}</div>'
        )
    fits_class = _FITS_CLASSES[verdict.fits]
    sign = _FITS_SIGNS[verdict.fits]
    return (
        f'<div class="nbaccel-taken {fits_class}" role="status">'
        f'<b role="heading" aria-level="3">{escape(name)}</b> '
        f'<span class="nbaccel-word">{sign}{escape(verdict.text)}</span> '
        f'<span class="nbaccel-pale">{escape(" ".join(filter(None, clauses[1:])))}</span>'
        f"</div>{bar_html}"
    )


def _step_sentence(candidate: Candidate) -> str:
    if candidate.step_s is None:
        return ""
    words = f" ({candidate.step_words})" if candidate.step_words else ""
    if candidate.step_s < SHORTEST_S:
        return f"Less than 1 ms a step{words}."
    return f"About {format_seconds(candidate.step_s)} a step{words}."


def proposal_html(proposal: Proposal) -> str:
    """A proposal: why, and why not the others."""
    whys = "".join(f"<li>{escape(why)}</li>" for why in proposal.why)
    others = "".join(f"<li>{escape(other)}</li>" for other in proposal.not_chosen)
    others_html = f"<details><summary>Why not the others</summary><ul>{others}</ul></details>"
    return f'<ul class="nbaccel-why">{whys}</ul>{others_html if others else ""}'


def use_html() -> str:
    """How what was chosen is used."""
    return (
        '<span class="nbaccel-pale">use it:</span> '
        "<code>notebook_launcher(train, (model,), config=picker)</code>"
    )
