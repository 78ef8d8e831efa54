"""A picker without widgets: text for a terminal, and tables for a saved notebook.

Both begin with the three questions of the form, and show its strip as bars of letters.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from typing import TYPE_CHECKING

from nbaccel.notebook.picker.choices import PANELS, title_of
from nbaccel.notebook.picker.memory_model import SEGMENT_KINDS, SEGMENT_NAMES
from nbaccel.notebook.picker.outcomes import outcome_of, value_with_unit
from nbaccel.notebook.picker.strip_html import (
    device_bar,
    step_text,
    strip_scale,
    used_bytes,
    verdict_text,
)
from nbaccel.plan.launch_plan import Choice, choices_table

if TYPE_CHECKING:
    from nbaccel.notebook.picker.candidates import Candidate
    from nbaccel.notebook.picker.memory_model import MemoryBar
    from nbaccel.notebook.picker.model import PickerModel

__all__ = ["candidate_rows", "picker_html", "picker_text", "text_bar"]

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
_TABLE_CELL = "style='text-align:left'"


def picker_text(model: PickerModel, panel_names: Sequence[str] = PANELS) -> str:
    """The picker for a terminal: the choices, their memory, and the plan.

    Args:
        model: The picker's model.
        panel_names: The panels that it has.

    Returns:
        Text for a fixed-width font.
    """
    text_lines = _question_lines(model) if _is_whole(panel_names) else []
    for panel_name, table_rows in _setting_rows(model, panel_names):
        label_width = max(len(table_row[0]) for table_row in table_rows)
        value_width = max(len(table_row[1]) for table_row in table_rows)
        text_lines += [
            title_of(panel_name),
            *(
                f"  {label_text:<{label_width}}  {value_text:<{value_width}}  {meaning_text}"
                for label_text, value_text, meaning_text in table_rows
            ),
            "",
        ]
    text_lines += ["Memory", *(f"  {memory_line}" for memory_line in _memory_lines(model)), ""]
    if plan_choices := model.resolved():
        text_lines += [choices_table("What open settings come to", plan_choices, ()), ""]
    for face in model.faces():
        text_lines += [
            face.name,
            *(f"  {memory_line}" for memory_line in face.text.splitlines()),
            "",
        ]
    return "\n".join(memory_line.rstrip() for memory_line in text_lines).rstrip()


def picker_html(model: PickerModel, panel_names: Sequence[str] = PANELS) -> str:
    """The same for a saved notebook: tables without scripts and styles, which filters remove.

    Args:
        model: The picker's model.
        panel_names: The panels that it has.

    Returns:
        HTML.
    """
    html_parts = _question_html(model) if _is_whole(panel_names) else []
    for panel_name, table_rows in _setting_rows(model, panel_names):
        html_parts.append(f"<p><b>{escape(title_of(panel_name))}</b></p>{_html_table(table_rows)}")
    memory_items = "".join(
        f"<li>{escape(memory_line)}</li>" for memory_line in _memory_lines(model)
    )
    html_parts.append(f"<p><b>Memory</b></p><ul>{memory_items}</ul>")
    if plan_choices := model.resolved():
        html_parts.append(
            f"<p><b>What open settings come to</b></p>{_html_table(_choice_rows(plan_choices))}"
        )
    html_parts += [
        f"<p><b>{escape(face.name)}</b></p><pre>{escape(face.text)}</pre>" for face in model.faces()
    ]
    return "".join(html_parts)


def _is_whole(panel_names: Sequence[str]) -> bool:
    return tuple(panel_names) == PANELS


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


def _fit_lines(model: PickerModel) -> list[str]:
    """The strip as bars of letters, with what the letters mean."""
    if model.trained is None:
        return []
    if model.is_memory_postponed:
        return [model.verdict.text]
    candidates = model.candidates()
    rows = candidate_rows(candidates)
    name_width = max((len(row[0]) for row in rows), default=0)
    # A refusal is a sentence, beside which no time is told.
    word_width = max((len(row[2]) for row in rows if row[3]), default=0)
    lines = [
        f"{name:<{name_width}}  {bar:<{_BAR_CHARS + 1}}  {words:<{word_width}}  {step}"
        for name, bar, words, step in rows
    ]
    return [*lines, _letters_of(candidates)] if lines else []


def candidate_rows(candidates: Sequence[Candidate]) -> list[tuple[str, str, str, str]]:
    """The strip as text: name, bar, whether it fits, seconds of a step.

    Args:
        candidates: All of them.

    Returns:
        A row for each.
    """
    full_width = strip_scale(candidates)
    rows = []
    for candidate in candidates:
        bar = device_bar(candidate)
        sign = "(•)" if candidate.is_taken else "( )"
        best = " ★ best" if candidate.is_best else ""
        rows.append(
            (
                f"{sign} {candidate.name}",
                "" if bar is None else text_bar(bar, full_width),
                verdict_text(candidate),
                "" if candidate.refusal else f"{step_text(candidate)}{best}",
            )
        )
    return rows


def text_bar(bar: MemoryBar, full_width: int) -> str:
    """A bar as letters, one kind after the other; ``|`` is what there is, ``>`` that it goes on.

    Args:
        bar: The bar.
        full_width: Bytes that the whole width stands for.

    Returns:
        At most 41 characters.
    """
    letters, end_bytes = "", 0
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


def _question_lines(model: PickerModel) -> list[str]:
    lines: list[str] = []
    for question, answer in _question_texts(model):
        lines += [question, *(f"  {answer_line}" for answer_line in answer), ""]
    fit_lines = _fit_lines(model)
    if fit_lines:
        lines += ["3. What fits", *(f"  {fit_line}" for fit_line in fit_lines), ""]
    return lines


def _question_html(model: PickerModel) -> list[str]:
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
    rows = "".join(
        f"<tr><th scope='row' {_TABLE_CELL}>{escape(name)}</th>"
        f"<td {_TABLE_CELL}><code style='white-space:pre'>{escape(bar)}</code></td>"
        f"<td {_TABLE_CELL}>{escape(words)}</td><td {_TABLE_CELL}>{escape(step)}</td></tr>"
        for name, bar, words, step in candidate_rows(candidates)
    )
    return [
        *parts,
        f"<table><tbody>{rows}</tbody></table><p>{escape(_letters_of(candidates))}</p>",
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


def _shown_value(model: PickerModel, setting_name: str) -> str:
    setting_value, setting = model.value(setting_name), model.setting(setting_name)
    for choice_option in setting.options:
        if choice_option.value == setting_value:
            return choice_option.label
    if setting_value is None:
        return outcome_of(model, setting).value or "default"
    return value_with_unit(setting_value, setting.unit if setting.kind != "one-of" else "")


def _value_meaning(model: PickerModel, setting_name: str) -> str:
    setting_value, setting = model.value(setting_name), model.setting(setting_name)
    chosen_meaning = next(
        (
            choice_option.meaning
            for choice_option in setting.options
            if choice_option.value == setting_value and choice_option.meaning
        ),
        "",
    )
    return chosen_meaning or setting.meaning


def _memory_lines(model: PickerModel) -> list[str]:
    memory_lines = [bar.told() for bar in model.bars()]
    verdict = model.verdict
    return [*memory_lines, " ".join(filter(None, (verdict.text, verdict.remedy)))]


def _choice_rows(plan_choices: Sequence[Choice]) -> list[tuple[str, str, str]]:
    return [
        (plan_choice.name, str(plan_choice.value), plan_choice.reason)
        for plan_choice in plan_choices
    ]


def _html_table(table_rows: Sequence[tuple[str, str, str]]) -> str:
    table_body = "".join(
        f"<tr><th scope='row' style='text-align:left'>{escape(label_text)}</th><td "
        f"style='text-align:left'>{escape(value_text)}</td><td "
        f"style='text-align:left'>{escape(meaning_text)}</td></tr>"
        for label_text, value_text, meaning_text in table_rows
    )
    return f"<table><tbody>{table_body}</tbody></table>"
