"""The ways to train without widgets: a row for each way, a column for each precision.

The numbers are those of the form's strip. A terminal has 80 columns, so that there a cell is a few
short lines and what does not go into one is told below; HTML has room for all of it in the cell.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from html import escape
from itertools import zip_longest
from typing import TYPE_CHECKING

from nbaccel.base.units import format_bytes
from nbaccel.notebook.picker.compared_ways import (
    groups_of_ways,
    is_shown_once,
    name_with_precision,
    precision_label,
)
from nbaccel.notebook.picker.strip_html import device_bar, place_text, step_text, verdict_text

if TYPE_CHECKING:
    from nbaccel.notebook.picker.candidates import Candidate

__all__ = ["TABLE_CELL_STYLE", "TABLE_CHARS", "precision_table_html", "precision_table_lines"]

TABLE_CHARS = 78
"""Two less than a terminal has: what is below a heading is indented."""
TABLE_CELL_STYLE = "style='text-align:left;vertical-align:top'"
_CELL_CHARS = 12  # "✗ 1000.0 GiB" and "not possible"
_GAP = "  "
_MOST_COLUMNS = 4  # more precisions, of other packages, have a table of their own
_SIGNS = "✓ fits, ✗ does not"


def precision_table_lines(candidates: Sequence[Candidate]) -> list[str]:
    """The table for a terminal."""
    precisions = _precisions_of(candidates)
    lines = _folded(_heading_of(candidates))
    for start in range(0, max(1, len(precisions)), _MOST_COLUMNS):
        lines += _text_rows(candidates, precisions[start : start + _MOST_COLUMNS])
    for note in (*_notes_of(candidates), *_remarks_of(candidates)):
        lines += _folded(note)
    return lines


def precision_table_html(candidates: Sequence[Candidate]) -> str:
    """The table for a saved notebook, without scripts and classes, which filters remove."""
    precisions = _precisions_of(candidates)
    labels = ("way to train", *map(precision_label, precisions))
    head = "".join(f"<th scope='col' {TABLE_CELL_STYLE}>{escape(label)}</th>" for label in labels)
    with_time = _has_times(candidates)
    rows = "".join(
        f"<tr><th scope='row' {TABLE_CELL_STYLE}>{escape(way_name)}</th>"
        f"{_cells_html(of_way, precisions, with_time=with_time)}</tr>"
        for way_name, of_way in groups_of_ways(candidates)
    )
    remarks = "<br>".join(map(escape, _remarks_of(candidates)))
    return (
        f"<p>{escape(_heading_of(candidates))}</p>"
        f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table><p>{remarks}</p>"
    )


def _precisions_of(candidates: Sequence[Candidate]) -> list[str]:
    """The precisions that have a column, in the order of the form."""
    groups = [of_way for _, of_way in groups_of_ways(candidates)]
    compared = [one for of_way in groups if not is_shown_once(of_way) for one in of_way]
    # Not a set, which has no order.
    return list(dict.fromkeys(one.precision for one in compared))


def _heading_of(candidates: Sequence[Candidate]) -> str:
    """What the sizes are of, and what the signs mean."""
    legend = f"{_SIGNS}; ≈ time of a step" if _has_times(candidates) else _SIGNS
    place = place_text(candidates)
    return ": ".join(
        filter(None, (f"{place[:1].upper()}{place[1:]}{_free_text(candidates)}", legend))
    )


def _free_text(candidates: Sequence[Candidate]) -> str:
    """What is free of it; empty where that is not known, or not the same on all devices."""
    bars = next((one.need.bars for one in candidates if one.need is not None), ())
    # Devices come first; there is one bar of host memory where processes compute there.
    alike = [bar for bar in bars if ":" in bar.label.partition(" · ")[0]] or bars[:1]
    free_bytes = {
        bar.capacity - sum(one.bytes for one in bar.segments if one.kind == "others")
        for bar in alike
    }
    is_known = len(free_bytes) == 1 and all(bar.capacity for bar in alike)
    return f" ({format_bytes(free_bytes.pop())} free)" if is_known else ""


def _has_times(candidates: Sequence[Candidate]) -> bool:
    """Whether the time of a step is known anywhere; without a batch it is not."""
    return any(candidate.step_s is not None for candidate in candidates)


def _marks_of(candidate: Candidate) -> list[str]:
    marks = (("chosen", candidate.is_taken), ("★ best", candidate.is_best))
    return [mark for mark, is_marked in marks if is_marked]


def _remarks_of(candidates: Sequence[Candidate]) -> Iterator[str]:
    best = next((candidate for candidate in candidates if candidate.is_best), None)
    if best is not None:
        yield f"★ {name_with_precision(best)}: {best.reason}."
    if candidates and not any(candidate.is_taken for candidate in candidates):
        yield "What is chosen is none of these ways; its memory is below."


# ---------------------------------------------------------------------- in a terminal
def _text_rows(candidates: Sequence[Candidate], precisions: Sequence[str]) -> Iterator[str]:
    way_names = [way_name for way_name, _ in groups_of_ways(candidates)]
    cells_chars = max(1, len(precisions)) * (len(_GAP) + _CELL_CHARS)
    widest = max(map(len, way_names), default=0)
    name_chars = min(widest, TABLE_CHARS - cells_chars)
    with_time = _has_times(candidates)
    if precisions:
        yield from _beside([""], name_chars, [[precision_label(one)] for one in precisions])
    for way_name, of_way in groups_of_ways(candidates):
        name_lines = textwrap.wrap(way_name, name_chars)
        if is_shown_once(of_way):
            room = TABLE_CHARS - name_chars - len(_GAP)
            refusal_lines = textwrap.wrap(_refused_text(of_way[0]), room)
            yield from _beside(name_lines, name_chars, [refusal_lines])
            continue
        by_precision = {candidate.precision: candidate for candidate in of_way}
        cells = [
            _cell_lines(by_precision.get(precision), with_time=with_time)
            for precision in precisions
        ]
        yield from _beside(name_lines, name_chars, cells)


def _beside(lines: Sequence[str], name_chars: int, cells: Sequence[Sequence[str]]) -> Iterator[str]:
    for name, *texts in zip_longest(lines, *cells, fillvalue=""):
        columns = (f"{name:<{name_chars}}", *(f"{text:<{_CELL_CHARS}}" for text in texts))
        yield _GAP.join(columns).rstrip()


def _cell_lines(candidate: Candidate | None, *, with_time: bool) -> list[str]:
    if candidate is None:
        return ["—"]
    if candidate.refusal:
        texts = ["not possible"]
    elif candidate.need is None or not candidate.is_estimated:
        texts = [candidate.verdict]
    else:
        texts = [f"{'✓' if candidate.fits else '✗'} {_needed_text(candidate)}"]
        if with_time:
            texts.append(step_text(candidate).removesuffix("/step"))
    texts += _marks_of(candidate)
    return [line for text in texts for line in textwrap.wrap(text, _CELL_CHARS)]


def _needed_text(candidate: Candidate) -> str:
    bar = device_bar(candidate)
    return "" if bar is None else format_bytes(bar.needed)


def _refused_text(candidate: Candidate) -> str:
    """Why a way cannot be taken in any precision: it stands in no column."""
    return ": ".join((*_marks_of(candidate), candidate.refusal))


def _notes_of(candidates: Sequence[Candidate]) -> Iterator[str]:
    """Of each way what its cells have no room for: why it is refused, and what lacks elsewhere."""
    for name, of_way in groups_of_ways(candidates):
        if is_shown_once(of_way):
            continue
        clauses: dict[str, list[str]] = {}
        for candidate in of_way:
            bar = device_bar(candidate)
            if candidate.refusal or (candidate.fits is False and bar and not bar.lacking):
                precisions = clauses.setdefault(verdict_text(candidate), [])
                precisions.append(precision_label(candidate.precision))
        if clauses:
            told = (f"{words} in {', '.join(labels)}" for words, labels in clauses.items())
            yield f"{name}: {'; '.join(told)}."


def _folded(text: str) -> list[str]:
    return textwrap.wrap(text, TABLE_CHARS, subsequent_indent=_GAP)


# ---------------------------------------------------------------------- in a saved notebook
def _cells_html(of_way: Sequence[Candidate], precisions: Sequence[str], *, with_time: bool) -> str:
    if is_shown_once(of_way):
        num_columns = max(1, len(precisions))
        refusal_html = escape(_refused_text(of_way[0]))
        return f"<td colspan='{num_columns}' {TABLE_CELL_STYLE}>{refusal_html}</td>"
    by_precision = {candidate.precision: candidate for candidate in of_way}
    return "".join(
        f"<td {TABLE_CELL_STYLE}>"
        f"{_cell_html(by_precision.get(precision), with_time=with_time)}</td>"
        for precision in precisions
    )


def _cell_html(candidate: Candidate | None, *, with_time: bool) -> str:
    if candidate is None:
        return "—"
    lines = [escape(verdict_text(candidate))]
    if candidate.need is not None and candidate.is_estimated and not candidate.refusal:
        lines = [escape(_needed_text(candidate)), *lines]
        if with_time:
            lines.append(escape(step_text(candidate)))
    if marks := _marks_of(candidate):
        lines.append(f"<b>{escape(', '.join(marks))}</b>")
    return "<br>".join(lines)
