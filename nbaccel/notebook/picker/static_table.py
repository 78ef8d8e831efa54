"""A picker without widgets: text for a terminal, and tables for a saved notebook.

Both begin with the three questions of the form: a table has each way to train in each precision,
and bars of letters show what the memory in the chosen one is made of.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from html import escape
from typing import TYPE_CHECKING

from nbaccel.notebook.picker.choices import PANELS, title_of
from nbaccel.notebook.picker.memory_model import SEGMENT_KINDS, SEGMENT_NAMES
from nbaccel.notebook.picker.outcomes import outcome_of, value_with_unit
from nbaccel.notebook.picker.precision_table import (
    TABLE_CELL_STYLE,
    TABLE_CHARS,
    precision_table_html,
    precision_table_lines,
)
from nbaccel.notebook.picker.strip_html import device_bar, strip_scale, used_bytes

if TYPE_CHECKING:
    from nbaccel.notebook.picker.candidates import Candidate
    from nbaccel.notebook.picker.memory_model import MemoryBar
    from nbaccel.notebook.picker.model import PickerModel
    from nbaccel.plan.launch_plan import Choice

__all__ = ["candidate_bars", "picker_html", "picker_sections", "picker_text", "text_bar"]

_BAR_CHARS = 40
# The first letter of a kind; a bar of letters needs no colour.
_KIND_LETTERS = {
    "others": "x",
    "parameters": "P",
    "gradients": "G",
    "optimizer": "O",
    "buckets": "B",
    "activations": "A",
    "moment": "T",
}
_INDENT = "  "


def picker_text(
    model: PickerModel, panel_names: Sequence[str] = PANELS, *, measures: bool = True
) -> str:
    """The picker for a terminal: the choices, their memory, and the plan."""
    return "\n\n".join(picker_sections(model, panel_names, measures=measures))


def picker_sections(
    model: PickerModel, panel_names: Sequence[str] = PANELS, *, measures: bool = True
) -> Iterator[str]:
    """The same, one section after the other: the first ones need no measurement."""
    if _is_whole(panel_names):
        for question, answer in _question_texts(model):
            yield _section(question, _folded(answer))
        if fit_lines := _fit_lines(model, measures=measures):
            yield _section("3. What fits", _folded(fit_lines))
    for panel_name, table_rows in _setting_rows(model, panel_names):
        yield _section(title_of(panel_name), _aligned(table_rows))
    yield _section("Memory", _folded(_memory_lines(model)))
    if choices := model.resolved():
        headed_rows = [("what", "value", "why"), *_choice_rows(choices)]
        yield _section("What open settings come to", _aligned(headed_rows))
    for face in model.faces():
        # Code is to be copied: its lines stay as they are.
        yield _section(face.name, face.text.splitlines())


def _section(title: str, lines: Sequence[str]) -> str:
    return "\n".join((title, *(f"{_INDENT}{line}".rstrip() for line in lines)))


def _folded(lines: Sequence[str], indent: str = _INDENT) -> list[str]:
    """Lines that are too wide for a terminal in several; the others as they are."""
    folded: list[str] = []
    for line in lines:
        is_wide = len(line) > TABLE_CHARS
        folded += (
            textwrap.wrap(line, TABLE_CHARS, subsequent_indent=indent, break_on_hyphens=False)
            if is_wide
            else [line]
        )
    return folded


def _aligned(table_rows: Sequence[tuple[str, str, str]]) -> list[str]:
    """Columns side by side; the last one is folded."""
    label_width = max(len(table_row[0]) for table_row in table_rows)
    value_width = max(len(table_row[1]) for table_row in table_rows)
    indent = " " * (label_width + value_width + 2 * len(_INDENT))
    rows = [
        f"{label_text:<{label_width}}  {value_text:<{value_width}}  {meaning_text}"
        for label_text, value_text, meaning_text in table_rows
    ]
    return _folded(rows, indent)


def picker_html(
    model: PickerModel, panel_names: Sequence[str] = PANELS, *, measures: bool = True
) -> str:
    """The same for a saved notebook: tables without scripts and styles, which filters remove."""
    html_parts = _question_html(model, measures=measures) if _is_whole(panel_names) else []
    for panel_name, table_rows in _setting_rows(model, panel_names):
        html_parts.append(f"<p><b>{escape(title_of(panel_name))}</b></p>{_html_table(table_rows)}")
    memory_items = "".join(
        f"<li>{escape(memory_line)}</li>" for memory_line in _memory_lines(model)
    )
    html_parts.append(f"<p><b>Memory</b></p><ul>{memory_items}</ul>")
    if choices := model.resolved():
        html_parts.append(
            f"<p><b>What open settings come to</b></p>{_html_table(_choice_rows(choices))}"
        )
    html_parts += [
        f"<p><b>{escape(face.name)}</b></p><pre>{escape(face.text)}</pre>" for face in model.faces()
    ]
    return "".join(html_parts)


def _is_whole(names: Sequence[str]) -> bool:
    return tuple(names) == PANELS


# ---------------------------------------------------------------------- the three questions
def _question_texts(model: PickerModel) -> Iterator[tuple[str, tuple[str, ...]]]:
    """The first two questions, each with the lines of its answer."""
    trained = model.trained
    answer: tuple[str, ...] = ("nothing yet: configure(model, batch) shows what fits",)
    if trained is not None:
        batch = f"batch {model.batch_shapes}" if model.batch_shapes else "no batch"
        answer = (f"{trained.name} · {trained.facts()}", batch)
    yield "1. What is trained", answer
    parts = [f"{part.label} (used)" if part.is_used else part.label for part in model.machine_parts]
    processes = _shown_value(model, "num_processes")
    if reason := outcome_of(model, model.setting("num_processes")).reason:
        processes = f"{processes} ({reason})"
    precision = f"precision {_shown_value(model, 'mixed_precision')}"
    yield "2. On what", (*parts, f"{processes} · {precision}")


def _shown_ways(model: PickerModel, *, measures: bool) -> Sequence[Candidate]:
    """The ways to train in each precision; in the chosen one where others are to be measured."""
    if measures or model.has_compared:
        return model.compared_candidates()
    return model.candidates()


def _fit_lines(model: PickerModel, *, measures: bool) -> list[str]:
    """The ways to train, then the chosen precision's as bars of letters with their meanings."""
    if model.is_memory_postponed:
        return [model.verdict.text]
    candidates = model.candidates()
    if not candidates:
        return []
    rows = candidate_bars(candidates)
    width = max(len(name) for name, _ in rows)
    return [
        *precision_table_lines(_shown_ways(model, measures=measures)),
        "",
        _bars_title(model),
        *(f"{name:<{width}}  {bar}" for name, bar in rows),
        _letters_of(candidates),
    ]


def _bars_title(model: PickerModel) -> str:
    return f"What the memory is made of, in {_shown_value(model, 'mixed_precision')}"


def candidate_bars(candidates: Sequence[Candidate]) -> list[tuple[str, str]]:
    """The strip as text: the name and the bar of each candidate."""
    full_width = strip_scale(candidates)
    return [
        (
            f"{'(•)' if candidate.is_taken else '( )'} {candidate.name}",
            "" if bar is None else text_bar(bar, full_width),
        )
        for candidate, bar in zip(candidates, map(device_bar, candidates), strict=True)
    ]


def text_bar(bar: MemoryBar, full_width: int) -> str:
    """A bar as letters, one kind after the other; ``|`` is what there is, ``>`` that it goes on."""
    letters = ""
    end_bytes = 0
    for segment in bar.segments:
        if segment.kind != "free":
            end_bytes += segment.bytes
            end = min(_BAR_CHARS, round(_BAR_CHARS * end_bytes / full_width))
            letters += _KIND_LETTERS[segment.kind] * (end - len(letters))
    if used_bytes(bar) > full_width:
        letters = f"{letters[:-1]}>"
    if bar.capacity and bar.capacity <= full_width:
        place = round(_BAR_CHARS * bar.capacity / full_width)
        letters = f"{letters[:place]:<{place}}|{letters[place:]}"
    return letters


def _letters_of(candidates: Sequence[Candidate]) -> str:
    bars = [bar for bar in map(device_bar, candidates) if bar is not None]
    kinds = {segment.kind for bar in bars for segment in bar.segments}
    meanings = [
        f"{_KIND_LETTERS[kind]} {SEGMENT_NAMES.get(kind, kind)}"
        for kind in ("others", *SEGMENT_KINDS)
        if kind in kinds
    ]
    return ", ".join((*meanings, "| what there is"))


def _question_html(model: PickerModel, *, measures: bool) -> list[str]:
    parts = [
        f"<p><b>{escape(question)}</b><br>{'<br>'.join(map(escape, answer))}</p>"
        for question, answer in _question_texts(model)
    ]
    if model.trained is None:
        return parts
    parts.append("<p><b>3. What fits</b></p>")
    if model.is_memory_postponed:
        return [*parts, f"<p>{escape(model.verdict.text)}</p>"]
    candidates = model.candidates()
    if not candidates:
        return [*parts, f"<p>{escape(model.verdict.text)}</p>"]
    rows = "".join(
        f"<tr><th scope='row' {TABLE_CELL_STYLE}>{escape(name)}</th>"
        f"<td {TABLE_CELL_STYLE}><code style='white-space:pre'>{escape(bar)}</code></td></tr>"
        for name, bar in candidate_bars(candidates)
    )
    return [
        *parts,
        precision_table_html(_shown_ways(model, measures=measures)),
        f"<p>{escape(_bars_title(model))}</p><table><tbody>{rows}</tbody></table>"
        f"<p>{escape(_letters_of(candidates))}</p>",
    ]


# ---------------------------------------------------------------------- settings
def _setting_rows(
    model: PickerModel, panel_names: Sequence[str]
) -> Iterator[tuple[str, list[tuple[str, str, str]]]]:
    """Per panel, the common choices, and those of the others that are set."""
    for panel_name in panel_names:
        table_rows = [
            (setting.label, _shown_value(model, setting.name), _value_meaning(model, setting.name))
            for setting in model.settings(panel_name)
            if model.is_shown(setting.name)
            and (
                (not setting.section and not model.refusal(setting.name))
                or model.value(setting.name) not in (None, setting.default)
            )
        ]
        if table_rows:
            yield panel_name, table_rows


def _shown_value(model: PickerModel, name: str) -> str:
    value = model.value(name)
    setting = model.setting(name)
    for option in setting.options:
        if option.value == value:
            return option.label
    if value is None:
        return outcome_of(model, setting).value or "default"
    return value_with_unit(value, setting.unit if setting.kind != "one-of" else "")


def _value_meaning(model: PickerModel, name: str) -> str:
    value = model.value(name)
    setting = model.setting(name)
    meaning = next(
        (option.meaning for option in setting.options if option.value == value and option.meaning),
        "",
    )
    return meaning or setting.meaning


def _memory_lines(model: PickerModel) -> list[str]:
    memory_lines = [bar.text() for bar in model.bars()]
    verdict = model.verdict
    return [*memory_lines, " ".join(filter(None, (verdict.text, verdict.remedy)))]


def _choice_rows(plan_choices: Sequence[Choice]) -> list[tuple[str, str, str]]:
    return [
        (plan_choice.name, str(plan_choice.value), plan_choice.reason)
        for plan_choice in plan_choices
    ]


def _html_table(rows: Sequence[tuple[str, str, str]]) -> str:
    body = "".join(
        f"<tr><th scope='row' style='text-align:left'>{escape(label_text)}</th><td "
        f"style='text-align:left'>{escape(value_text)}</td><td "
        f"style='text-align:left'>{escape(meaning_text)}</td></tr>"
        for label_text, value_text, meaning_text in rows
    )
    return f"<table><tbody>{body}</tbody></table>"
