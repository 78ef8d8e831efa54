"""The parts of a picker that only show something, as HTML: pure functions, all text escaped."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import cache
from html import escape
from importlib.resources import files
from typing import TYPE_CHECKING

from nbaccel.base.units import count_noun
from nbaccel.plan.launch_plan import Choice

if TYPE_CHECKING:
    from nbaccel.notebook.picker.text_mistakes import TextMistake

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
    style = _part("bars.css") + _part("picker.css")
    return (
        f'<style onload="{escape(_part("picker.js"))}">{style}</style>'
        f"<style>.{hidden_class} {{ display: none }}</style>"
    )


def kept_html(css_class: str, parts: Sequence[str], text: str) -> str:
    """What a saved notebook or an exported page shows in the form's place."""
    shown = "".join(f"<div>{part}</div>" for part in parts)
    text_html = f"<pre>{escape(text)}</pre>"
    if parts:
        text_html = f"<details><summary>All of it as text</summary>{text_html}</details>"
    return (
        f'<div class="nbaccel-static {css_class}"><style>{_part("bars.css")}</style>'
        f"{shown}{text_html}</div>"
    )


@cache
def _part(name: str) -> str:
    return (files("nbaccel.notebook.picker") / name).read_text(encoding="utf-8")


def css_name(setting_name: object) -> str:
    """A name as the end of a class: ``zero_optimization.stage`` as ``zero_optimization-stage``."""
    return re.sub(r"[^\w-]", "-", str(setting_name).lower())


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
    link = f'<a href="{escape(docs_link)}" target="_blank" rel="noopener noreferrer">docs</a>'
    html_parts = [
        _clause_html("refusal", refusal) or _clause_html("outcome", outcome),
        escape(meaning),
        *(_clause_html("refusal", reason) for reason in reasons if not refusal),
        link if docs_link else "",
    ]
    text = " ".join(filter(None, html_parts))
    return f'<div class="nbaccel-note">{text}</div>' if text else ""


def _clause_html(kind: str, clause: str) -> str:
    sentence = clause if clause.endswith(".") else f"{clause[:1].upper()}{clause[1:]}."
    return f'<span class="nbaccel-{kind}">{escape(sentence)}</span>' if clause else ""


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


# ---------------------------------------------------------------------- the configuration
def face_html(name: str, text: str) -> str:
    """The configuration in one language, with a button that copies it."""
    return (
        f'<div class="nbaccel-face"><pre tabindex="0" aria-label="{escape(name)}">'
        f"{escape(text)}</pre>"
        f'<button type="button" class="nbaccel-copy" title="Copy {escape(name)}" '
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
