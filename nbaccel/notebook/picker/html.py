"""The parts of a picker that only show something, as HTML: pure functions, all text escaped."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from html import escape
from importlib.resources import files
from itertools import zip_longest
from typing import TYPE_CHECKING

from nbaccel.notebook.picker.memory_model import SEGMENT_NAMES
from nbaccel.plan.launch_plan import Choice
from nbaccel.units import format_bytes

if TYPE_CHECKING:
    from nbaccel.notebook.picker.exporters import ConfigFace
    from nbaccel.notebook.picker.memory_model import BarSegment, MemoryBar
    from nbaccel.notebook.picker.model import FitVerdict


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
    "title_html",
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


def front_html(hidden_class: str) -> str:
    """The picker's style, and the script that gives its widgets names, roles and arrow keys.

    The script runs when the style is loaded: scripts in the HTML of a widget are not run.

    Args:
        hidden_class: A class of elements that are not to be seen as long as this is.
    """
    style_text, script_text = _style_and_script()
    return (
        f'<style onload="{escape(script_text)}">{style_text}</style>'
        f"<style>.{css_name(hidden_class)} {{ display: none }}</style>"
    )


@cache
def _style_and_script() -> tuple[str, str]:
    package_folder = files("nbaccel.notebook.picker")
    style_text, script_text = (
        (package_folder / file_name).read_text(encoding="utf-8")
        for file_name in ("picker.css", "picker.js")
    )
    return style_text, script_text


def css_name(setting_name: object) -> str:
    """A name as the end of a class: ``zero_optimization.stage`` as ``zero_optimization-stage``.

    Args:
        setting_name: The name of a choice, or a value.
    """
    lower_name = "none" if setting_name is None else str(setting_name).lower()
    return "".join(
        one_character if one_character.isalnum() or one_character in "_-" else "-"
        for one_character in lower_name
    )


# ---------------------------------------------------------------------- beside a field
def title_html() -> str:
    """The name of the whole."""
    return '<span class="nbaccel-title">How to train</span>'


def heading_html(heading_text: str) -> str:
    """A panel's name.

    Args:
        heading_text: The name.
    """
    return (
        f'<div class="nbaccel-heading" role="heading" aria-level="3">{escape(heading_text)}</div>'
    )


def label_html(label_text: str, *, is_hidden: bool = False) -> str:
    """A group's label; screen readers get it as the group's name.

    Args:
        label_text: The label.
        is_hidden: Whether only they get it.
    """
    hidden_class = " nbaccel-hidden" if is_hidden else ""
    return f'<span class="nbaccel-label{hidden_class}">{escape(label_text)}</span>'


def note_html(setting_meaning: str, *, refusal: str = "", reasons: Sequence[str] = ()) -> str:
    """The note below a field: its meaning, and why it or some of its values cannot be used.

    Args:
        setting_meaning: One line.
        refusal: Why nothing can be chosen here; empty where it can.
        reasons: Why some values cannot be chosen.
    """
    html_parts = [escape(setting_meaning)] if setting_meaning else []
    refusal_lines = [f"Not now: {refusal}."] if refusal else [f"{reason}." for reason in reasons]
    html_parts += [
        f'<span class="nbaccel-refusal">{escape(refusal_text)}</span>'
        for refusal_text in refusal_lines
    ]
    return f'<div class="nbaccel-note">{" ".join(html_parts)}</div>' if html_parts else ""


def error_html(error_messages: Iterable[str]) -> str:
    """Mistakes, with a word and a sign besides the colour.

    Args:
        error_messages: One per mistake.
    """
    return "".join(
        f'<div class="nbaccel-error" role="alert">⚠ <b>Not taken:</b> {escape(error_message)}</div>'
        for error_message in error_messages
    )


def remarks_html(remarks: Iterable[str]) -> str:
    """Remarks on what else the last change has changed.

    Args:
        remarks: One sentence each.
    """
    remark_parts = "".join(
        f'<div class="nbaccel-remark">{escape(remark_text)}</div>' for remark_text in remarks
    )
    return f'<div role="status">{remark_parts}</div>' if remark_parts else ""


# ---------------------------------------------------------------------- memory
def verdict_html(fit_verdict: FitVerdict) -> str:
    """Whether it fits, and what to do where it does not.

    Args:
        fit_verdict: The model's.
    """
    if not (fit_verdict.text or fit_verdict.remedy):
        return ""
    class_and_sign = {True: ("nbaccel-fits", "✓"), False: ("nbaccel-lacks", "✗"), None: ("", "")}
    css_class, verdict_sign = class_and_sign[fit_verdict.fits]
    remedy_html = f"<div>{escape(fit_verdict.remedy)}</div>" if fit_verdict.remedy else ""
    return (
        f'<div class="nbaccel-verdict {css_class}" role="status">'
        f'<span class="nbaccel-word">{verdict_sign} {escape(fit_verdict.text)}</span>'
        f"{remedy_html}</div>"
    )


def bars_html(memory_bars: Iterable[MemoryBar]) -> str:
    """Memory place by place, each as a bar with its numbers beside it.

    Args:
        memory_bars: The bars.
    """
    shown_bars = list(memory_bars)
    return "".join(
        _bar_html(memory_bar, next_bar)
        for memory_bar, next_bar in zip_longest(shown_bars, shown_bars[1:])
    )


def _bar_html(memory_bar: MemoryBar, next_bar: MemoryBar | None) -> str:
    used_bytes = sum(
        bar_segment.bytes for bar_segment in memory_bar.segments if bar_segment.kind != "free"
    )
    # Beyond the capacity the bar is scaled to the need; 1 keeps an empty bar from dividing by 0.
    full_width = max(memory_bar.capacity, used_bytes, 1)
    segments_html = "".join(
        _segment_html(bar_segment, full_width)
        for bar_segment in memory_bar.segments
        if bar_segment.bytes
    )
    if memory_bar.capacity and used_bytes > memory_bar.capacity:
        capacity_place = 100 * memory_bar.capacity / full_width
        segments_html += (
            f'<span class="nbaccel-capacity" style="left:{capacity_place:.2f}%"></span>'
        )
    # Devices with equal contents share one legend, below the last of them.
    is_like_next = next_bar is not None and next_bar.segments == memory_bar.segments
    legend_html = (
        ""
        if is_like_next
        else "".join(
            _legend_html(bar_segment) for bar_segment in memory_bar.segments if bar_segment.bytes
        )
    )
    return (
        f'<div class="nbaccel-bar{" nbaccel-lacks" if memory_bar.lacking else ""}">'
        f"{_bar_head_html(memory_bar)}"
        f'<div class="nbaccel-track" role="img" aria-label="{escape(memory_bar.told())}">'
        f"{segments_html}</div>"
        + (f'<ul class="nbaccel-legend">{legend_html}</ul>' if legend_html else "")
        + "</div>"
    )


def _bar_head_html(memory_bar: MemoryBar) -> str:
    capacity_text = f" of {format_bytes(memory_bar.capacity)}" if memory_bar.capacity else ""
    head_html = escape(f"needs {format_bytes(memory_bar.needed)}{capacity_text}")
    if memory_bar.lacking:
        lacking_text = escape(f"does not fit: {format_bytes(memory_bar.lacking)} too little")
        head_html = f'{head_html} · <span class="nbaccel-word">✗ {lacking_text}</span>'
    return (
        '<div class="nbaccel-bar-head"><span class="nbaccel-bar-label">'
        f"{escape(memory_bar.label)}</span>"
        f"<span>{head_html}</span></div>"
    )


def _segment_html(bar_segment: BarSegment, full_width: int) -> str:
    title_text = escape(
        f"{SEGMENT_NAMES.get(bar_segment.kind, bar_segment.kind)} {format_bytes(bar_segment.bytes)}"
    )
    return (
        f'<span class="nbaccel-segment nbaccel-{css_name(bar_segment.kind)}" title="{title_text}" '
        f'style="width:{100 * bar_segment.bytes / full_width:.3f}%"></span>'
    )


def _legend_html(bar_segment: BarSegment) -> str:
    return (
        f'<li><span class="nbaccel-swatch nbaccel-{css_name(bar_segment.kind)}"></span>'
        f"{escape(SEGMENT_NAMES.get(bar_segment.kind, bar_segment.kind))} "
        f"<b>{escape(format_bytes(bar_segment.bytes))}</b></li>"
    )


# ---------------------------------------------------------------------- the configuration
def face_html(config_face: ConfigFace) -> str:
    """The configuration in one language, with a button that copies it.

    Args:
        config_face: The text.
    """
    return (
        f'<div class="nbaccel-face"><pre tabindex="0" aria-label="{escape(config_face.name)}">'
        f"{escape(config_face.text)}</pre>"
        f'<button type="button" class="nbaccel-copy" title="Copy {escape(config_face.name)}" '
        f'onclick="{escape(_COPY_SCRIPT)}">Copy</button></div>'
    )


def resolved_html(plan_choices: Sequence[Choice]) -> str:
    """The open settings and what they are resolved to, with the reasons.

    Args:
        plan_choices: The decisions of the plan.
    """
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
