"""What a picker shows and nobody presses, as HTML: pure functions, every text escaped."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from html import escape
from importlib.resources import files
from itertools import zip_longest
from typing import TYPE_CHECKING

from nbaccel.notebook.picker.memory import NAMES
from nbaccel.plan.plan import Choice
from nbaccel.units import format_bytes

if TYPE_CHECKING:
    from nbaccel.notebook.picker.memory import Bar, Segment
    from nbaccel.notebook.picker.model import Verdict
    from nbaccel.notebook.picker.texts import Face

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
_COPY = (
    "const button = this, text = button.parentElement.querySelector('pre');"
    "const select = () => {window.getSelection().selectAllChildren(text);"
    " button.textContent = 'Press Ctrl+C'};"
    "const done = () => {button.textContent = 'Copied';"
    " setTimeout(() => {button.textContent = 'Copy'}, 1500)};"
    "if (navigator.clipboard) {"
    "navigator.clipboard.writeText(text.textContent).then(done, select)} else select();"
)


def front_html(hides: str) -> str:
    """The picker's style, and the script that gives its widgets names, roles and arrow keys.

    The script runs when the style is loaded: scripts in the HTML of a widget are not run.

    Args:
        hides: A class of elements that are not to be seen as long as this is.
    """
    style, script = _front()
    return (
        f'<style onload="{escape(script)}">{style}</style>'
        f"<style>.{css_name(hides)} {{ display: none }}</style>"
    )


@cache
def _front() -> tuple[str, str]:
    folder = files("nbaccel.notebook.picker")
    style, script = (
        (folder / name).read_text(encoding="utf-8") for name in ("picker.css", "picker.js")
    )
    return style, script


def css_name(name: object) -> str:
    """A name as the end of a class: ``zero_optimization.stage`` as ``zero_optimization-stage``.

    Args:
        name: The name of a choice, or a value.
    """
    text = "none" if name is None else str(name).lower()
    return "".join(sign if sign.isalnum() or sign in "_-" else "-" for sign in text)


# ---------------------------------------------------------------------- beside a field
def title_html() -> str:
    """The name of the whole."""
    return '<span class="nbaccel-title">How to train</span>'


def heading_html(text: str) -> str:
    """A panel's name.

    Args:
        text: The name.
    """
    return f'<div class="nbaccel-heading" role="heading" aria-level="3">{escape(text)}</div>'


def label_html(text: str, *, is_hidden: bool = False) -> str:
    """A group's label; screen readers get it as the group's name.

    Args:
        text: The label.
        is_hidden: Whether only they get it.
    """
    more = " nbaccel-hidden" if is_hidden else ""
    return f'<span class="nbaccel-label{more}">{escape(text)}</span>'


def note_html(meaning: str, *, refusal: str = "", reasons: Sequence[str] = ()) -> str:
    """What stands below a field: its meaning, and why it or some of its values cannot be used.

    Args:
        meaning: One line.
        refusal: Why nothing can be chosen here; empty where it can.
        reasons: Why some values cannot be chosen.
    """
    told = [escape(meaning)] if meaning else []
    why = [f"Not now: {refusal}."] if refusal else [f"{reason}." for reason in reasons]
    told += [f'<span class="nbaccel-refusal">{escape(text)}</span>' for text in why]
    return f'<div class="nbaccel-note">{" ".join(told)}</div>' if told else ""


def error_html(messages: Iterable[str]) -> str:
    """What is wrong, told by a word and a sign beside the colour.

    Args:
        messages: One per mistake.
    """
    return "".join(
        f'<div class="nbaccel-error" role="alert">⚠ <b>Not taken:</b> {escape(message)}</div>'
        for message in messages
    )


def remarks_html(remarks: Iterable[str]) -> str:
    """What the last change has changed besides.

    Args:
        remarks: One sentence each.
    """
    told = "".join(f'<div class="nbaccel-remark">{escape(text)}</div>' for text in remarks)
    return f'<div role="status">{told}</div>' if told else ""


# ---------------------------------------------------------------------- memory
def verdict_html(verdict: Verdict) -> str:
    """Whether it fits, and what to do where it does not.

    Args:
        verdict: The model's.
    """
    if not (verdict.text or verdict.remedy):
        return ""
    signs = {True: ("nbaccel-fits", "✓"), False: ("nbaccel-lacks", "✗"), None: ("", "")}
    css_class, sign = signs[verdict.fits]
    remedy = f"<div>{escape(verdict.remedy)}</div>" if verdict.remedy else ""
    return (
        f'<div class="nbaccel-verdict {css_class}" role="status">'
        f'<span class="nbaccel-word">{sign} {escape(verdict.text)}</span>{remedy}</div>'
    )


def bars_html(bars: Iterable[Bar]) -> str:
    """Memory place by place, each as a bar with its numbers beside it.

    Args:
        bars: The bars.
    """
    shown = list(bars)
    return "".join(_bar(bar, then) for bar, then in zip_longest(shown, shown[1:]))


def _bar(bar: Bar, then: Bar | None) -> str:
    full = sum(part.bytes for part in bar.segments if part.kind != "free")
    scale = max(bar.capacity, full, 1)
    parts = "".join(_segment(part, scale) for part in bar.segments if part.bytes)
    if bar.capacity and full > bar.capacity:
        place = 100 * bar.capacity / scale
        parts += f'<span class="nbaccel-capacity" style="left:{place:.2f}%"></span>'
    # Of devices that hold the same, the last one's numbers are those of all.
    is_like_next = then is not None and then.segments == bar.segments
    legend = "" if is_like_next else "".join(_legend(p) for p in bar.segments if p.bytes)
    return (
        f'<div class="nbaccel-bar{" nbaccel-lacks" if bar.lacking else ""}">{_head(bar)}'
        f'<div class="nbaccel-track" role="img" aria-label="{escape(bar.told())}">{parts}</div>'
        + (f'<ul class="nbaccel-legend">{legend}</ul>' if legend else "")
        + "</div>"
    )


def _head(bar: Bar) -> str:
    of = f" of {format_bytes(bar.capacity)}" if bar.capacity else ""
    told = escape(f"needs {format_bytes(bar.needed)}{of}")
    if bar.lacking:
        lacking = escape(f"does not fit: {format_bytes(bar.lacking)} too little")
        told = f'{told} · <span class="nbaccel-word">✗ {lacking}</span>'
    return (
        f'<div class="nbaccel-bar-head"><span class="nbaccel-bar-label">{escape(bar.label)}</span>'
        f"<span>{told}</span></div>"
    )


def _segment(part: Segment, scale: int) -> str:
    told = escape(f"{NAMES.get(part.kind, part.kind)} {format_bytes(part.bytes)}")
    return (
        f'<span class="nbaccel-segment nbaccel-{css_name(part.kind)}" title="{told}" '
        f'style="width:{100 * part.bytes / scale:.3f}%"></span>'
    )


def _legend(part: Segment) -> str:
    return (
        f'<li><span class="nbaccel-swatch nbaccel-{css_name(part.kind)}"></span>'
        f"{escape(NAMES.get(part.kind, part.kind))} <b>{escape(format_bytes(part.bytes))}</b></li>"
    )


# ---------------------------------------------------------------------- the configuration
def face_html(face: Face) -> str:
    """The configuration in one language, with a button that copies it.

    Args:
        face: The text.
    """
    return (
        f'<div class="nbaccel-face"><pre tabindex="0" aria-label="{escape(face.name)}">'
        f"{escape(face.text)}</pre>"
        f'<button type="button" class="nbaccel-copy" title="Copy {escape(face.name)}" '
        f'onclick="{escape(_COPY)}">Copy</button></div>'
    )


def resolved_html(choices: Sequence[Choice]) -> str:
    """What was left open and what it comes to, with the reasons.

    Args:
        choices: What the plan decides.
    """
    if not choices:
        return '<p class="nbaccel-note">Nothing is left open.</p>'
    rows = "".join(
        f'<tr><th scope="row">{escape(choice.name)}</th><td>{escape(str(choice.value))}</td>'
        f"<td>{escape(choice.reason)}</td></tr>"
        for choice in choices
    )
    head = '<tr><th scope="col">setting</th><th scope="col">value</th><th scope="col">why</th></tr>'
    return (
        '<div class="nbaccel-scroll" tabindex="0"><table class="nbaccel-resolved">'
        f"<thead>{head}</thead><tbody>{rows}</tbody></table></div>"
    )
