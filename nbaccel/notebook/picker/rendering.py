"""A picker as HTML, for widgets and saved notebooks, and as text, for a terminal."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from html import escape
from importlib.resources import files
from typing import TYPE_CHECKING, Any, NamedTuple

from nbaccel.base.units import count_noun, format_bytes
from nbaccel.config.capabilities import device_row
from nbaccel.memory.estimate import HOST, SEGMENT_KINDS, SEGMENT_NAMES, MemoryBar
from nbaccel.notebook.picker.choices import PANELS, form_of, settings, title_of
from nbaccel.plan.launch_plan import Choice

if TYPE_CHECKING:
    from nbaccel.memory.estimate import BarSegment
    from nbaccel.memory.settings_form import Setting, StatePlacement
    from nbaccel.memory.ways import Candidate, Proposal
    from nbaccel.notebook.picker.config_text import TextMistake
    from nbaccel.notebook.picker.model import PickerModel

_OPEN_VALUES = (None, "auto", "")
# Units that are not the plural with its `s` removed.
_SINGULAR_UNITS = {"processes": "process", "batches": "batch", "powers of two": "power of two"}
TRUTH_WORDS = {True: "yes", False: "no"}


class SettingOutcome(NamedTuple):
    """What an open setting comes to, with its unit, and who decides it, or why."""

    value: str = ""
    reason: str = ""

    def text(self) -> str:
        """``2 processes: one per GPU, 2 found``; empty where nothing is left open."""
        return ": ".join(filter(None, (self.value, self.reason)))


# What settings without a value come to, where neither the plan nor a default says so.
_WHEN_EMPTY = {
    "gradient_accumulation_steps": SettingOutcome("1 batch", "unless the code accumulates"),
    "timeout": SettingOutcome("no limit"),
    "shown_output": SettingOutcome("both streams"),
}
_NOTHING_KINDS = ("text", "table", "words")


def outcome_of(model: PickerModel, setting: Setting) -> SettingOutcome:
    """What an open setting comes to."""
    if model.value(setting.name) not in _OPEN_VALUES:
        return SettingOutcome()
    for choice in model.resolved():
        if choice.name in (setting.name, setting.strategy_key):
            is_decided = choice.value not in _OPEN_VALUES
            value_text = value_with_unit(choice.value, setting.unit) if is_decided else ""
            return SettingOutcome(value_text, choice.reason)
    default_text = default_text_of(model, setting)
    if default_text:
        return SettingOutcome(default_text, "default")
    if setting.name in _WHEN_EMPTY:
        return _WHEN_EMPTY[setting.name]
    is_of_run = form_of(setting.name) is None and model.value(setting.name) is None
    return SettingOutcome("none" if is_of_run and setting.kind in _NOTHING_KINDS else "")


def default_text_of(model: PickerModel, setting: Setting) -> str:
    """The value that a setting has by default, with its unit."""
    form = form_of(setting.name)
    default = setting.default if form is None else form.default_of(model.config, setting)
    return "" if default in _OPEN_VALUES else value_with_unit(default, setting.unit)


def shown_value(model: PickerModel, name: str) -> str:
    """What a setting is, or comes to, in words."""
    value = model.value(name)
    setting = model.setting(name)
    for option in setting.options:
        if option.value == value:
            return option.label
    if value is None:
        return outcome_of(model, setting).value or "default"
    return value_with_unit(value, setting.unit if setting.kind != "one-of" else "")


def value_with_unit(value: Any, unit_name: str) -> str:
    """A value as people read it."""
    if isinstance(value, bool):
        return TRUTH_WORDS[value]
    if not isinstance(value, (int, float)):
        return str(value)
    if value == 1:
        singular = unit_name.removesuffix("s") if len(unit_name) > 1 else unit_name
        unit_name = _SINGULAR_UNITS.get(unit_name, singular)
    return f"{value:,} {unit_name}".rstrip()


_NO_MODEL = "configure(model, batch)"
_FITS_CLASSES = {True: "nbaccel-fits", False: "nbaccel-lacks", None: ""}
_FITS_SIGNS = {True: "✓ ", False: "✗ ", None: ""}
_SMALL_SHARE = 0.05
_MOST_CAPACITIES = 1.7  # a bar may be so many times what there is; longer ones are cut


def question_html(number: int, title: str, remark: str = "") -> str:
    """The heading of a question."""
    remark_html = f' <span class="nbaccel-pale">{remark}</span>' if remark else ""
    return (
        '<span class="nbaccel-question" role="heading" aria-level="3"><span class="nbaccel-number" '
        f'aria-hidden="true">{number}</span> <b>{title}</b></span>{remark_html}'
    )


def trained_html(model: PickerModel) -> str:
    """What is trained."""
    remark = f"Give the model, and a batch to measure with: <code>{_NO_MODEL}</code>"
    if model.trained:
        batch = f"batch <code>{escape(model.batch_shapes)}</code>"
        no_batch = f"no batch: activations are not counted; <code>{_NO_MODEL}</code>"
        remark = f"{escape(model.trained)} · {batch if model.batch_shapes else no_batch}"
    return question_html(1, "What is trained", remark)


def machine_html(model: PickerModel) -> str:
    """The machine: each device, with the memory that it has."""
    parts = "".join(
        f'<li class="nbaccel-part{" nbaccel-used" if is_used else ""}">{escape(label)}'
        + ('<span class="nbaccel-hidden-text"> (used)</span>' if is_used else "")
        + "</li>"
        for label, is_used in model.machine_parts
    )
    return f'{question_html(2, "On what")}<ul class="nbaccel-parts">{parts}</ul>'


def fits_html(model: PickerModel, *, is_live: bool = True) -> str:
    """What fits: the heading and which is the best."""
    remark = "With a model, a bar for each way to train is here, against the memory there is."
    if model.is_memory_postponed:
        remark = "Memory is being estimated …"
    elif model.trained:
        clauses = (place_text(model.candidates()), "click to take one" if is_live else "")
        remark = f"{escape('; '.join(filter(None, clauses)))}."
        for best in (candidate for candidate in model.candidates() if candidate.is_best):
            remark += f" ★ <b>{escape(best.name)}</b>: {escape(best.reason)}."
    return question_html(3, "What fits", remark)


def place_text(candidates: Iterable[Candidate]) -> str:
    """Whose memory the first bar of each candidate is: ``memory of each GPU``."""
    for need in (one.need for one in candidates if one.need is not None):
        kind, separator, _ = need.bars[0].place.partition(":")
        return f"memory of each {device_row(kind).noun}" if separator else "host memory"
    return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class BarRow:
    """A way to train, or a place with memory."""

    name: str
    bar: MemoryBar | None
    words: str
    fits: bool | None
    is_refused: bool = False
    mark: str = ""
    is_chosen: bool = False


def shown_rows(model: PickerModel) -> Iterator[BarRow]:
    """A row for each way that the form shows."""
    for candidate in model.candidates():
        yield BarRow(
            name=candidate.name,
            bar=None if candidate.need is None else candidate.need.bars[0],
            words=verdict_text(candidate),
            fits=None if candidate.refusal else candidate.fits,
            is_refused=bool(candidate.refusal),
            mark="★ best" if candidate.is_best else "",
            is_chosen=candidate.is_taken,
        )


def rows_of_places(bars: Iterable[MemoryBar]) -> Iterator[BarRow]:
    """A row for each device, the host and the disk."""
    for bar in bars:
        words = f"needs {format_bytes(bar.needed)}"
        words += f" of {format_bytes(bar.capacity)}" if bar.capacity else ""
        if bar.lacking:
            words = f"✗ {words}: {format_bytes(bar.lacking)} too little"
        yield BarRow(name=bar.label, bar=bar, words=words, fits=not bar.lacking)


def verdict_text(candidate: Candidate) -> str:
    """Whether it fits, in a few words and with a sign: ``✓ 3.3 GiB free``."""
    if candidate.refusal:
        return candidate.refusal
    bars = () if candidate.need is None else candidate.need.bars
    for bar in bars:
        if bar.lacking:
            place = "" if bar is bars[0] else f" on {bar.place}"
            return f"✗ {format_bytes(bar.lacking)} too little{place}"
    with_words = " with checkpointing" if candidate.recomputes else ""
    return f"✓ {candidate.verdict}{with_words}" if candidate.fits else candidate.verdict


class BarScale:
    """How memory is drawn: all rows have one scale, of the largest need where all are small."""

    def __init__(self, bars: Iterable[MemoryBar | None]) -> None:
        self._bars = [bar for bar in bars if bar is not None]
        self._capacity = max((bar.capacity for bar in self._bars), default=0)
        needed = max((bar.needed for bar in self._bars), default=0)
        self._is_enlarged = 0 < needed < _SMALL_SHARE * self._capacity
        most = max((bar.used for bar in self._bars), default=0)
        if self._is_enlarged:
            most = needed
        elif self._capacity:
            most = min(max(most, self._capacity), round(_MOST_CAPACITIES * self._capacity))
        self.full_width = max(most, 1)

    def track(self, bar: MemoryBar, name: str) -> str:
        """A bar, and where its memory ends."""
        segments = "".join(
            f'<span class="nbaccel-segment nbaccel-{one.kind}" title="{escape(one.text)}" '
            f'style="width:{100 * one.bytes / self.full_width:.3f}%"></span>'
            for one in self._drawn(bar)
        )
        cut_class = mark = ""
        if bar.capacity and not self._is_enlarged:
            cut_class = " nbaccel-cut" if bar.used > self.full_width else ""
            place = 100 * min(1.0, bar.capacity / self.full_width)
            mark = f'<span class="nbaccel-mark" style="left:{place:.2f}%"></span>'
        return (
            f'<span class="nbaccel-track{cut_class}" role="img" '
            f'aria-label="{escape(f"{name}: {bar.text()}")}">{segments}</span>{mark}'
        )

    def legend(self) -> str:
        """What the colours mean, and what there is."""
        drawn = {segment.kind for bar in self._bars for segment in self._drawn(bar)}
        kinds = "".join(
            f'<li><span class="nbaccel-swatch nbaccel-{kind}"></span>'
            f"{escape(SEGMENT_NAMES.get(kind, kind))}</li>"
            for kind in ("others", *SEGMENT_KINDS)
            if kind in drawn
        )
        words = "┆ what there is"
        if self._is_enlarged:
            times = round(self._capacity / self.full_width)
            words = f"all that there is: {times:,} times as wide"
        return f'<ul class="nbaccel-legend">{kinds}<li>{words}</li></ul>' if kinds else ""

    def _drawn(self, bar: MemoryBar) -> list[BarSegment]:
        left_out = ("free", "others") if self._is_enlarged else ("free",)
        return [one for one in bar.segments if one.bytes and one.kind not in left_out]


def table_html(rows: Iterable[BarRow]) -> str:
    """A bar for each row, against the line of what there is, and what the colours mean."""
    table_rows = list(rows)
    scale = BarScale(row.bar for row in table_rows)
    lines = "".join(_row_html(row, scale) for row in table_rows)
    return f'<table class="nbaccel-rows"><tbody>{lines}</tbody></table>{scale.legend()}'


def _row_html(row: BarRow, scale: BarScale) -> str:
    classes = f"nbaccel-strip-row {_FITS_CLASSES[row.fits]}".rstrip()
    words_class = "nbaccel-refused" if row.is_refused else "nbaccel-word"
    track = '<span class="nbaccel-track"></span>'
    if row.bar is not None:
        track = scale.track(row.bar, row.name)
    chosen = '<span class="nbaccel-chosen">● chosen </span>' if row.is_chosen else ""
    # Buttons say the name to a screen reader.
    return (
        f'<tr class="{classes}">'
        f'<th scope="row" class="nbaccel-way" aria-hidden="true">{escape(row.name)}</th>'
        f'<td class="nbaccel-track-place">{track}</td>'
        f'<td class="{words_class}">{escape(row.words)}</td>'
        f'<td class="nbaccel-best">{chosen}{escape(row.mark)}</td></tr>'
    )


def taken_html(model: PickerModel) -> str:
    """What is chosen now, what it does, whether it fits, and its bar for narrow windows."""
    candidate = next((one for one in model.candidates() if one.is_taken), None)
    num_processes = 1 if model.plan is None else model.plan.world_size
    verdict = model.verdict
    name = "Chosen settings"
    clauses = [verdict.remedy]
    below = ""
    if candidate is not None:
        name = candidate.name
        # Why nothing can be estimated, or how much is missing, is the reason of a candidate, too.
        if candidate.reason and candidate.reason not in f"{verdict.text} {verdict.remedy}":
            clauses.append(f"{candidate.reason[:1].upper()}{candidate.reason[1:]}.")
        drawing = _way_drawing(candidate.placement, num_processes)
        sentence = escape(way_sentence(candidate.placement, num_processes))
        below = f'<div class="nbaccel-does">{drawing}<span>{sentence}</span></div>'
        if candidate.need is not None:
            bar = candidate.need.bars[0]
            below += f'<div class="nbaccel-taken-bar">{BarScale([bar]).track(bar, name)}</div>'
    clauses.append(model.samples_of_step)
    return (
        f'<div class="nbaccel-taken {_FITS_CLASSES[verdict.fits]}" role="status">'
        f'<b role="heading" aria-level="3">{escape(name)}</b> '
        f'<span class="nbaccel-word">{_FITS_SIGNS[verdict.fits]}{escape(verdict.text)}</span> '
        f'<span class="nbaccel-pale">{escape(" ".join(filter(None, clauses)))}</span>'
        f"</div>{below}"
    )


def way_sentence(placement: StatePlacement, num_processes: int) -> str:
    """What a way does."""
    parts = f"cut into {num_processes} parts"
    words = "The process holds the whole model and its optimizer"
    if num_processes > 1:
        words = (
            f"Each of {num_processes} processes holds the whole model and its optimizer; gradients "
            "are averaged while they are computed",
            f"The optimizer is {parts}, one for each process; weights and gradients are whole",
            f"Gradients and optimizer are {parts}, one for each process; weights are whole in each",
            f"Weights, gradients and optimizer are {parts}; layers are fetched when they compute",
        )[placement.divided]
    outside = {"cpu": "in host memory", "nvme": "on disk"}
    if placement.parameters in outside:
        words += f"; all of it lies {outside[placement.parameters]}"
    elif placement.optimizer in outside:
        words += f"; the optimizer lies {outside[placement.optimizer]}"
    return f"{words}."


_MOST_DRAWN = 4


def _way_drawing(placement: StatePlacement, num_processes: int) -> str:
    """A box for each process, with a bar for weights, gradients and optimizer: its part of each."""
    outside = {"optimizer": placement.optimizer, "parameters": placement.parameters}
    divided = ("optimizer", "gradients", "parameters")[: placement.divided]
    boxes = ""
    for number in range(min(num_processes, _MOST_DRAWN)):
        bars = ""
        for kind in ("parameters", "gradients", "optimizer"):
            width = 100 / num_processes if kind in divided else 100.0
            left = number * width if kind in divided else 0.0
            css_class = " nbaccel-outside" if outside.get(kind, "none") != "none" else ""
            bars += (
                f'<span class="nbaccel-track" title="{kind}"><span class="nbaccel-segment '
                f'nbaccel-{kind}{css_class}" style="width:{width:.1f}%;margin-left:{left:.1f}%">'
                "</span></span>"
            )
        boxes += f'<span class="nbaccel-process">{bars}</span>'
    more = f"<span>… {num_processes}</span>" if num_processes > _MOST_DRAWN else ""
    words = escape(way_sentence(placement, num_processes))
    return f'<span class="nbaccel-drawing" role="img" aria-label="{words}">{boxes}{more}</span>'


def proposal_html(proposal: Proposal) -> str:
    """A proposal: why, and why not the others."""
    whys = "".join(f"<li>{escape(why)}</li>" for why in proposal.why)
    others = "".join(f"<li>{escape(other)}</li>" for other in proposal.not_chosen)
    others_html = f"<details><summary>Why not the others</summary><ul>{others}</ul></details>"
    return f'<ul class="nbaccel-why">{whys}</ul>{others_html if others else ""}'


def use_html(variable: str) -> str:
    """How what was chosen is used."""
    return (
        '<span class="nbaccel-pale">use it:</span> '
        f"<code>notebook_launcher(train, (model,), config={escape(variable)})</code>"
    )


_MAX_LINE_CHARS = 60


def front_html(hidden_class: str) -> str:
    """The style, whose `onload` runs the script: scripts in the HTML of a widget are not run."""
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


def error_html(messages: Iterable[str]) -> str:
    """Mistakes, with a word and a sign besides the colour."""
    return "".join(
        f'<div class="nbaccel-error" role="alert">⚠ <b>Not taken:</b> {escape(message)}</div>'
        for message in messages
    )


def text_mistakes_html(mistakes: Sequence[TextMistake], text: str, otherwise: str) -> str:
    """The mistakes of a text that is being edited, each with the line that it is in."""
    if not mistakes:
        return f'<div class="nbaccel-note" role="status">{escape(otherwise)}</div>'
    lines = text.splitlines()
    items = "".join(_text_mistake(line, message, lines) for line, message in mistakes)
    count_text = count_noun(len(mistakes), "mistake")
    return (
        f'<div role="status"><b class="nbaccel-word">⚠ {count_text}</b>'
        f'<ul class="nbaccel-mistakes">{items}</ul></div>'
    )


def _text_mistake(line: int | None, message: str, lines: Sequence[str]) -> str:
    if line is None:
        return f"<li>{escape(message)}</li>"
    text = lines[line - 1].strip() if line <= len(lines) else ""
    code = f" <code>{escape(text[:_MAX_LINE_CHARS])}</code>" if text else ""
    return (
        f'<li><button type="button" class="nbaccel-to-line" data-line="{line}" '
        f'onclick="{escape(_part("select_line.js"))}" title="Select this line">'
        f"line {line}</button>{code} {escape(message)}</li>"
    )


def remarks_html(remarks: Iterable[str]) -> str:
    """Remarks on what else the last change has changed."""
    parts = "".join(f'<div class="nbaccel-remark">{escape(text)}</div>' for text in remarks)
    return f'<div role="status">{parts}</div>' if parts else ""


def face_html(name: str, text: str) -> str:
    """The configuration in one language, with a button that copies it."""
    return (
        f'<div class="nbaccel-face"><pre tabindex="0" aria-label="{escape(name)}">'
        f"{escape(text)}</pre>"
        f'<button type="button" class="nbaccel-copy" title="Copy {escape(name)}" '
        f'onclick="{escape(_part("copy.js"))}">Copy</button></div>'
    )


def resolved_html(choices: Sequence[Choice]) -> str:
    """The open settings and what they are resolved to, with the reasons."""
    if not choices:
        return '<p class="nbaccel-note">Nothing is left open.</p>'
    table_rows = "".join(
        f'<tr><th scope="row">{escape(choice.name)}</th><td>{escape(str(choice.value))}</td>'
        f"<td>{escape(choice.reason)}</td></tr>"
        for choice in choices
    )
    heads = "".join(f'<th scope="col">{word}</th>' for word in ("setting", "value", "why"))
    # With `tabindex` the keyboard can scroll the table.
    return (
        '<div class="nbaccel-scroll" tabindex="0"><table class="nbaccel-resolved">'
        f"<thead><tr>{heads}</tr></thead><tbody>{table_rows}</tbody></table></div>"
    )


TABLE_CHARS = 78  # two less than a terminal has: what is below a heading is indented
_INDENT = "  "


def picker_text(model: PickerModel, panels: Sequence[str] = PANELS) -> str:
    """The picker for a terminal: the choices, their memory, and the plan."""
    return "\n\n".join(picker_sections(model, panels))


def picker_sections(model: PickerModel, panels: Sequence[str] = PANELS) -> Iterator[str]:
    """The same, one section after the other: the first ones need no measurement."""
    if tuple(panels) == PANELS:
        batch = f"batch {model.batch_shapes}" if model.batch_shapes else "no batch"
        nothing = ["nothing yet: configure(model, batch) shows what fits"]
        trained = [model.trained, batch] if model.trained else nothing
        yield _section("1. What is trained", _folded(trained))
        parts = [f"{label} (used)" if is_used else label for label, is_used in model.machine_parts]
        processes = shown_value(model, "num_processes")
        if reason := outcome_of(model, model.setting("num_processes")).reason:
            processes = f"{processes} ({reason})"
        chosen = f"{processes} · precision {shown_value(model, 'mixed_precision')}"
        yield _section("2. On what", _folded([*parts, chosen]))
        if model.is_memory_postponed:
            yield _section("3. What fits", [model.verdict.text])
        elif model.candidates():
            lines = ways_lines(model.candidates())
            if not any(candidate.is_taken for candidate in model.candidates()):
                lines.append("What is chosen is none of these ways; its memory is below.")
            yield _section("3. What fits", lines)
    for panel in panels:
        if rows := list(_setting_rows(model, panel)):
            yield _section(title_of(panel), _aligned(rows))
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
        wrapped = textwrap.wrap(line, TABLE_CHARS, subsequent_indent=indent, break_on_hyphens=False)
        folded += wrapped if len(line) > TABLE_CHARS else [line]
    return folded


def _aligned(rows: Sequence[tuple[str, str, str]]) -> list[str]:
    """Columns side by side; the last one is folded."""
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    indent = " " * (sum(widths) + 2 * len(_INDENT))
    lines = [f"{row[0]:<{widths[0]}}  {row[1]:<{widths[1]}}  {row[2]}" for row in rows]
    return _folded(lines, indent)


def _setting_rows(model: PickerModel, panel: str) -> Iterator[tuple[str, str, str]]:
    """The common choices of a panel, and those of the others that are set."""
    for setting in settings(panel):
        value = model.value(setting.name)
        is_common = not setting.section and not model.refusal(setting.name)
        if model.is_shown(setting.name) and (is_common or value not in (None, setting.default)):
            meanings = [one.meaning for one in setting.options if one.value == value]
            meaning = next(filter(None, meanings), setting.meaning)
            yield setting.label, shown_value(model, setting.name), meaning


def ways_lines(candidates: Sequence[Candidate], *, knows_free: bool = True) -> list[str]:
    """The table for a terminal; what fits is told where it is known what is free."""
    rows = []
    for one in candidates:
        bars = () if one.need is None else one.need.bars
        # The first is what the table is about.
        needed = [bar.needed for place, bar in enumerate(bars) if not place or bar.place == HOST]
        clauses = [
            "chosen" if one.is_taken else "",
            f"★ best: {one.reason}" if one.is_best else "",
            verdict_text(one) if (knows_free and not one.is_best) or one.refusal else "",
        ]
        told = " + ".join(format_bytes(number) for number in filter(None, needed))
        rows.append((one.name, told, "; ".join(filter(None, clauses))))
    place = place_text(candidates)
    beside = ", + of the host" if any("+" in told for _, told, _ in rows) else ""
    head = f"{place[:1].upper()}{place[1:]}{beside}" if place else ""
    return [*filter(None, [head]), *_aligned(rows)]
