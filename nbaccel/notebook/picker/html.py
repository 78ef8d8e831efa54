"""The parts of a picker that only show something, as HTML: pure functions, all text escaped."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from html import escape
from importlib.resources import files
from itertools import zip_longest
from typing import TYPE_CHECKING

from nbaccel.base.units import count_noun, format_bytes
from nbaccel.notebook.picker.memory_model import SEGMENT_NAMES
from nbaccel.plan.launch_plan import Choice

if TYPE_CHECKING:
    from nbaccel.notebook.picker.exporters import ConfigFace
    from nbaccel.notebook.picker.memory_model import BarSegment, MemoryBar
    from nbaccel.notebook.picker.model import FitVerdict
    from nbaccel.notebook.picker.text_mistakes import TextMistake


__all__ = [
    "bars_html",
    "css_name",
    "error_html",
    "face_html",
    "front_html",
    "heading_html",
    "label_html",
    "note_html",
    "remarks_html",
    "resolved_html",
    "text_mistakes_html",
    "verdict_html",
]


# Without permission for the clipboard the text is selected: Ctrl+C is left to the user.
_COPY_SCRIPT = (
    "const button = this, text = button.parentElement.querySelector('pre');"
    "const select = () => {window.getSelection().selectAllChildren(text);"
    " button.textContent = 'Press Ctrl+C'};"
    "const done = () => {button.textContent = 'Copied';"
    " setTimeout(() => {button.textContent = 'Copy'}, 1500)};"
    "if (navigator.clipboard) {"
    "navigator.clipboard.writeText(text.textContent).then(done, select)} else select();"
)

_SELECT_LINE_SCRIPT = (
    "const area = this.closest('.nbaccel-editor').querySelector('textarea'),"
    " lines = area.value.split('\\n'), number = Number(this.dataset.line) - 1,"
    " start = lines.slice(0, number).join('\\n').length + (number > 0 ? 1 : 0);"
    "area.focus(); area.setSelectionRange(start, start + (lines[number] || '').length);"
    "area.scrollTop = area.scrollHeight * Math.max(0, number - 3) / lines.length;"
)
_MAX_LINE_CHARS = 60


def front_html(hidden_class: str) -> str:
    """The picker's style, and the script that gives its widgets names, roles and arrow keys.

    The script runs when the style is loaded: scripts in the HTML of a widget are not run.
    """
    style_text, script_text = _style_and_script()
    return (
        f'<style onload="{escape(script_text)}">{style_text}</style>'
        f"<style>.{css_name(hidden_class)} {{ display: none }}</style>"
    )


@cache
def _style_and_script() -> tuple[str, str]:
    folder = files("nbaccel.notebook.picker")
    style_text, script_text = (
        (folder / name).read_text(encoding="utf-8") for name in ("picker.css", "picker.js")
    )
    return style_text, script_text


def css_name(setting_name: object) -> str:
    """A name as the end of a class: ``zero_optimization.stage`` as ``zero_optimization-stage``."""
    lower_name = "none" if setting_name is None else str(setting_name).lower()
    return "".join(
        one_character if one_character.isalnum() or one_character in "_-" else "-"
        for one_character in lower_name
    )


# ---------------------------------------------------------------------- beside a field
def heading_html(text: str) -> str:
    """A panel's name."""
    return f'<div class="nbaccel-heading" role="heading" aria-level="3">{escape(text)}</div>'


def label_html(text: str, *, is_hidden: bool = False) -> str:
    """A group's label; screen readers get it as the group's name."""
    hidden_class = " nbaccel-hidden" if is_hidden else ""
    return f'<span class="nbaccel-label{hidden_class}">{escape(text)}</span>'


def note_html(
    meaning: str,
    *,
    outcome: str = "",
    docs_link: str = "",
    refusal: str = "",
    reasons: Sequence[str] = (),
) -> str:
    """The note beside a field: what it comes to, its meaning, and why something cannot be used."""
    html_parts = []
    if refusal:
        html_parts.append(f'<span class="nbaccel-refusal">{escape(_as_sentence(refusal))}</span>')
    elif outcome:
        html_parts.append(f'<span class="nbaccel-outcome">{escape(_as_sentence(outcome))}</span>')
    if meaning:
        html_parts.append(escape(meaning))
    if not refusal:
        html_parts += [
            f'<span class="nbaccel-refusal">{escape(_as_sentence(reason))}</span>'
            for reason in reasons
        ]
    if docs_link:
        html_parts.append(
            f'<a href="{escape(docs_link)}" target="_blank" rel="noopener noreferrer">docs</a>'
        )
    return f'<div class="nbaccel-note">{" ".join(html_parts)}</div>' if html_parts else ""


def _as_sentence(clause: str) -> str:
    return clause if clause.endswith(".") else f"{clause[:1].upper()}{clause[1:]}."


def error_html(error_messages: Iterable[str]) -> str:
    """Mistakes, with a word and a sign besides the colour."""
    return "".join(
        f'<div class="nbaccel-error" role="alert">⚠ <b>Not taken:</b> {escape(error_message)}</div>'
        for error_message in error_messages
    )


def text_mistakes_html(mistakes: Sequence[TextMistake], text: str, otherwise: str) -> str:
    """The mistakes of a text that is being edited, each with the line that it is in."""
    if not mistakes:
        return f'<div class="nbaccel-note" role="status">{escape(otherwise)}</div>'
    lines = text.splitlines()
    items = "".join(_text_mistake(mistake, lines) for mistake in mistakes)
    count_text = count_noun(len(mistakes), "mistake")
    return (
        f'<div role="status"><b class="nbaccel-word">⚠ {count_text}</b>'
        f'<ul class="nbaccel-mistakes">{items}</ul></div>'
    )


def _text_mistake(mistake: TextMistake, lines: Sequence[str]) -> str:
    if mistake.line is None:
        return f"<li>{escape(mistake.message)}</li>"
    text = lines[mistake.line - 1].strip() if mistake.line <= len(lines) else ""
    button = (
        f'<button type="button" class="nbaccel-to-line" data-line="{mistake.line}" '
        f'onclick="{escape(_SELECT_LINE_SCRIPT)}" title="Select this line">'
        f"line {mistake.line}</button>"
    )
    code = f" <code>{escape(text[:_MAX_LINE_CHARS])}</code>" if text else ""
    return f"<li>{button}{code} {escape(mistake.message)}</li>"


def remarks_html(remarks: Iterable[str]) -> str:
    """Remarks on what else the last change has changed."""
    parts = "".join(f'<div class="nbaccel-remark">{escape(text)}</div>' for text in remarks)
    return f'<div role="status">{parts}</div>' if parts else ""


# ---------------------------------------------------------------------- memory
def verdict_html(verdict: FitVerdict) -> str:
    """Whether it fits, and what to do where it does not."""
    if not (verdict.text or verdict.remedy):
        return ""
    class_and_sign = {True: ("nbaccel-fits", "✓"), False: ("nbaccel-lacks", "✗"), None: ("", "")}
    css_class, verdict_sign = class_and_sign[verdict.fits]
    remedy_html = f"<div>{escape(verdict.remedy)}</div>" if verdict.remedy else ""
    return (
        f'<div class="nbaccel-verdict {css_class}" role="status">'
        f'<span class="nbaccel-word">{verdict_sign} {escape(verdict.text)}</span>'
        f"{remedy_html}</div>"
    )


def bars_html(memory_bars: Iterable[MemoryBar]) -> str:
    """Memory place by place, each as a bar with its numbers beside it."""
    bars = list(memory_bars)
    return "".join(
        _bar_html(memory_bar, next_bar) for memory_bar, next_bar in zip_longest(bars, bars[1:])
    )


def _bar_html(memory_bar: MemoryBar, next_bar: MemoryBar | None) -> str:
    used_bytes = sum(segment.bytes for segment in memory_bar.segments if segment.kind != "free")
    # Beyond the capacity the bar is scaled to the need; 1 keeps an empty bar from dividing by 0.
    full_width = max(memory_bar.capacity, used_bytes, 1)
    segments_html = "".join(
        _segment_html(segment, full_width) for segment in memory_bar.segments if segment.bytes
    )
    if memory_bar.capacity and used_bytes > memory_bar.capacity:
        place = 100 * memory_bar.capacity / full_width
        segments_html += f'<span class="nbaccel-capacity" style="left:{place:.2f}%"></span>'
    # Devices with equal contents share one legend, below the last of them.
    is_like_next = next_bar is not None and next_bar.segments == memory_bar.segments
    legend_html = (
        ""
        if is_like_next
        else "".join(_legend_html(segment) for segment in memory_bar.segments if segment.bytes)
    )
    return (
        f'<div class="nbaccel-bar{" nbaccel-lacks" if memory_bar.lacking else ""}">'
        f"{_bar_head_html(memory_bar)}"
        f'<div class="nbaccel-track" role="img" aria-label="{escape(memory_bar.text())}">'
        f"{segments_html}</div>"
        + (f'<ul class="nbaccel-legend">{legend_html}</ul>' if legend_html else "")
        + "</div>"
    )


def _bar_head_html(bar: MemoryBar) -> str:
    capacity_text = f" of {format_bytes(bar.capacity)}" if bar.capacity else ""
    head_html = escape(f"needs {format_bytes(bar.needed)}{capacity_text}")
    if bar.lacking:
        lacking_text = escape(f"does not fit: {format_bytes(bar.lacking)} too little")
        head_html = f'{head_html} · <span class="nbaccel-word">✗ {lacking_text}</span>'
    return (
        '<div class="nbaccel-bar-head"><span class="nbaccel-bar-label">'
        f"{escape(bar.label)}</span>"
        f"<span>{head_html}</span></div>"
    )


def _segment_html(segment: BarSegment, full_width: int) -> str:
    text = escape(f"{SEGMENT_NAMES.get(segment.kind, segment.kind)} {format_bytes(segment.bytes)}")
    return (
        f'<span class="nbaccel-segment nbaccel-{css_name(segment.kind)}" title="{text}" '
        f'style="width:{100 * segment.bytes / full_width:.3f}%"></span>'
    )


def _legend_html(segment: BarSegment) -> str:
    return (
        f'<li><span class="nbaccel-swatch nbaccel-{css_name(segment.kind)}"></span>'
        f"{escape(SEGMENT_NAMES.get(segment.kind, segment.kind))} "
        f"<b>{escape(format_bytes(segment.bytes))}</b></li>"
    )


# ---------------------------------------------------------------------- the configuration
def face_html(face: ConfigFace) -> str:
    """The configuration in one language, with a button that copies it."""
    return (
        f'<div class="nbaccel-face"><pre tabindex="0" aria-label="{escape(face.name)}">'
        f"{escape(face.text)}</pre>"
        f'<button type="button" class="nbaccel-copy" title="Copy {escape(face.name)}" '
        f'onclick="{escape(_COPY_SCRIPT)}">Copy</button></div>'
    )


def resolved_html(plan_choices: Sequence[Choice]) -> str:
    """The open settings and what they are resolved to, with the reasons."""
    if not plan_choices:
        return '<p class="nbaccel-note">Nothing is left open.</p>'
    table_rows = "".join(
        f'<tr><th scope="row">{escape(plan_choice.name)}</th>'
        f"<td>{escape(str(plan_choice.value))}</td>"
        f"<td>{escape(plan_choice.reason)}</td></tr>"
        for plan_choice in plan_choices
    )
    table_head = (
        '<tr><th scope="col">setting</th><th scope="col">value</th><th scope="col">why</th></tr>'
    )
    # With `tabindex` the keyboard can scroll the table.
    return (
        '<div class="nbaccel-scroll" tabindex="0"><table class="nbaccel-resolved">'
        f"<thead>{table_head}</thead><tbody>{table_rows}</tbody></table></div>"
    )
