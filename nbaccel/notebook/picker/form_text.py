"""A picker as text: for a terminal, and folded below the table of a saved notebook.

It begins with the three questions of the form; its table has a row for each way to train and a
column for each precision. What does not go into a cell is told below.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING

from nbaccel.base.units import format_bytes
from nbaccel.notebook.picker.choices import (
    PANELS,
    groups_of_ways,
    is_shown_once,
    name_with_precision,
    precision_label,
    title_of,
)
from nbaccel.notebook.picker.form_html import place_text, verdict_text
from nbaccel.notebook.picker.outcomes import outcome_of, shown_value

if TYPE_CHECKING:
    from nbaccel.memory.ways import Candidate
    from nbaccel.notebook.picker.model import PickerModel

TABLE_CHARS = 78
"""Two less than a terminal has: what is below a heading is indented."""
_INDENT = "  "
_CELL_CHARS = 12  # "✗ 1000.0 GiB" and "not possible"
_SIGNS = "✓ fits, ✗ does not"


def picker_text(
    model: PickerModel, panel_names: Sequence[str] = PANELS, *, measures: bool = True
) -> str:
    """The picker for a terminal: the choices, their memory, and the plan."""
    return "\n\n".join(picker_sections(model, panel_names, measures=measures))


def picker_sections(
    model: PickerModel, panel_names: Sequence[str] = PANELS, *, measures: bool = True
) -> Iterator[str]:
    """The same, one section after the other: the first ones need no measurement."""
    if tuple(panel_names) == PANELS:
        yield _section("1. What is trained", _folded(_trained_lines(model)))
        yield _section("2. On what", _folded(_machine_lines(model)))
        if model.is_memory_postponed:
            yield _section("3. What fits", [model.verdict.text])
        elif model.candidates():
            # In the chosen precision alone, where others would have to be measured.
            compares = measures or model.has_compared
            candidates = model.compared_candidates() if compares else model.candidates()
            lines = precision_table_lines(candidates)
            if not any(candidate.is_taken for candidate in candidates):
                lines.append("What is chosen is none of these ways; its memory is below.")
            yield _section("3. What fits", lines)
    for panel_name in panel_names:
        if rows := list(_setting_rows(model, panel_name)):
            yield _section(title_of(panel_name), _aligned(rows))
    verdict = model.verdict
    lines = [*(bar.text() for bar in model.bars()), f"{verdict.text} {verdict.remedy}".strip()]
    yield _section("Memory", _folded(lines))
    if choices := model.resolved():
        rows = [(choice.name, str(choice.value), choice.reason) for choice in choices]
        yield _section("What open settings come to", _aligned([("what", "value", "why"), *rows]))
    for name, text in model.faces().items():
        # Code is to be copied: its lines stay as they are.
        yield _section(name, text.splitlines())


def _section(title: str, lines: Sequence[str]) -> str:
    return "\n".join((title, *(f"{_INDENT}{line}".rstrip() for line in lines)))


def _folded(lines: Sequence[str], indent: str = _INDENT) -> list[str]:
    """Lines that are too wide for a terminal in several; the others as they are."""
    folded: list[str] = []
    for line in lines:
        if len(line) <= TABLE_CHARS:
            folded.append(line)
        else:
            folded += textwrap.wrap(
                line, TABLE_CHARS, subsequent_indent=indent, break_on_hyphens=False
            )
    return folded


def _aligned(rows: Sequence[tuple[str, str, str]]) -> list[str]:
    """Columns side by side; the last one is folded."""
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    indent = " " * (sum(widths) + 2 * len(_INDENT))
    lines = [f"{row[0]:<{widths[0]}}  {row[1]:<{widths[1]}}  {row[2]}" for row in rows]
    return _folded(lines, indent)


def _trained_lines(model: PickerModel) -> list[str]:
    trained = model.trained
    if trained is None:
        return ["nothing yet: configure(model, batch) shows what fits"]
    batch = f"batch {model.batch_shapes}" if model.batch_shapes else "no batch"
    return [f"{trained.name} · {trained.facts}", batch]


def _machine_lines(model: PickerModel) -> list[str]:
    parts = [f"{part.label} (used)" if part.is_used else part.label for part in model.machine_parts]
    processes = shown_value(model, "num_processes")
    if reason := outcome_of(model, model.setting("num_processes")).reason:
        processes = f"{processes} ({reason})"
    return [*parts, f"{processes} · precision {shown_value(model, 'mixed_precision')}"]


def _setting_rows(model: PickerModel, panel_name: str) -> Iterator[tuple[str, str, str]]:
    """The common choices of a panel, and those of the others that are set."""
    for setting in model.settings(panel_name):
        value = model.value(setting.name)
        is_common = not setting.section and not model.refusal(setting.name)
        if model.is_shown(setting.name) and (is_common or value not in (None, setting.default)):
            meanings = [one.meaning for one in setting.options if one.value == value]
            meaning = next(filter(None, meanings), setting.meaning)
            yield setting.label, shown_value(model, setting.name), meaning


# ---------------------------------------------------------------------- the table of ways
def precision_table_lines(candidates: Sequence[Candidate], *, knows_free: bool = True) -> list[str]:
    """The table for a terminal; what fits is told where it is known what is free."""
    groups = list(groups_of_ways(candidates))
    compared = [one for _, of_way in groups if not is_shown_once(of_way) for one in of_way]
    precisions = list(dict.fromkeys(one.precision for one in compared))
    place = place_text(candidates)
    if place:
        place = f"{place[:1].upper()}{place[1:]}{_free_text(candidates)}"
        if any(candidate.placement.leaves_device for candidate in candidates):
            place += ", + of the host"
    signs = _SIGNS if knows_free else ""
    lines = textwrap.wrap(": ".join(filter(None, (place, signs))), TABLE_CHARS)
    cells_chars = max(1, len(precisions)) * (len(_INDENT) + _CELL_CHARS)
    name_chars = min(max((len(name) for name, _ in groups), default=0), TABLE_CHARS - cells_chars)
    if precisions:
        lines += _beside("", name_chars, [[precision_label(one)] for one in precisions])
    for name, of_way in groups:
        if is_shown_once(of_way):
            room = TABLE_CHARS - name_chars - len(_INDENT)
            refused = ": ".join((*_marks_of(of_way[0]), of_way[0].refusal))
            lines += _beside(name, name_chars, [textwrap.wrap(refused, room)])
            continue
        by_precision = {candidate.precision: candidate for candidate in of_way}
        cells = [_cell_lines(by_precision.get(one), knows_free) for one in precisions]
        lines += _beside(name, name_chars, cells)
    for note in _notes_of(candidates):
        lines += textwrap.wrap(note, TABLE_CHARS, subsequent_indent=_INDENT)
    return lines


def _beside(name: str, name_chars: int, cells: Sequence[Sequence[str]]) -> Iterator[str]:
    """The lines of a row, whose name may need several."""
    name_lines = textwrap.wrap(name, name_chars) if name else []
    for first, *texts in zip_longest(name_lines, *cells, fillvalue=""):
        columns = (f"{first:<{name_chars}}", *(f"{text:<{_CELL_CHARS}}" for text in texts))
        yield _INDENT.join(columns).rstrip()


def _cell_lines(candidate: Candidate | None, knows_free: bool) -> list[str]:
    if candidate is None:
        return ["—"]
    lines = textwrap.wrap(candidate.verdict, _CELL_CHARS)
    if candidate.refusal:
        lines = ["not possible"]
    elif candidate.need is not None:
        sign = f"{'✓' if candidate.fits else '✗'} " if knows_free else ""
        first, *others = candidate.need.bars
        lines = [f"{sign}{format_bytes(first.needed)}"]
        lines += [f"+ {format_bytes(bar.needed)}" for bar in others if bar.is_host and bar.needed]
    return [*lines, *_marks_of(candidate)]


def _marks_of(candidate: Candidate) -> list[str]:
    marks = (("chosen", candidate.is_taken), ("★ best", candidate.is_best))
    return [mark for mark, is_marked in marks if is_marked]


def _free_text(candidates: Sequence[Candidate]) -> str:
    """What is free of it; empty where that is not known, or not the same on all devices."""
    bars = next((one.need.bars for one in candidates if one.need is not None), ())
    # Devices come first; there is one bar of host memory where processes compute there.
    alike = [bar for bar in bars if ":" in bar.place] or bars[:1]
    others = [sum(one.bytes for one in bar.segments if one.kind == "others") for bar in alike]
    free = {bar.capacity - used for bar, used in zip(alike, others, strict=True)}
    is_known = len(free) == 1 and all(bar.capacity for bar in alike)
    return f" ({format_bytes(free.pop())} free)" if is_known else ""


def _notes_of(candidates: Sequence[Candidate]) -> Iterator[str]:
    """What cells have no room for: why one is refused, what lacks elsewhere, and the best."""
    for name, of_way in groups_of_ways(candidates):
        clauses: dict[str, list[str]] = {}
        for one in of_way if not is_shown_once(of_way) else ():
            lacks_elsewhere = one.fits is False and one.need and not one.need.bars[0].lacking
            if one.refusal or lacks_elsewhere:
                clauses.setdefault(verdict_text(one), []).append(precision_label(one.precision))
        if clauses:
            told = (f"{words} in {', '.join(labels)}" for words, labels in clauses.items())
            yield f"{name}: {'; '.join(told)}."
    for best in (candidate for candidate in candidates if candidate.is_best):
        yield f"★ {name_with_precision(best)}: {best.reason}."
