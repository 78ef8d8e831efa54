"""What pickers draw: the right numbers, readable by all, and nobody's text is taken for HTML."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import pytest

from nbaccel.notebook.picker import html as html_module
from nbaccel.notebook.picker.exporters import ConfigFace
from nbaccel.notebook.picker.memory_model import BarSegment, MemoryBar
from nbaccel.notebook.picker.model import FitVerdict
from nbaccel.plan.launch_plan import Choice

GIB = 2**30
EVIL = "<script>alert('&\"')</script>"


def bar(capacity: int = 10 * GIB, *, parameters: int, free: int = 0, lacking: int = 0) -> MemoryBar:
    segments = (
        BarSegment("parameters", parameters),
        BarSegment("buckets", GIB),
        BarSegment("free", free),
    )
    return MemoryBar(
        label=EVIL,
        capacity=capacity,
        segments=segments,
        needed=parameters + GIB,
        lacking=lacking,
    )


class Reader(HTMLParser):
    """Tags with their attributes, the text, and whether all that is opened is closed."""

    VOID = frozenset({"br", "input", "img"})

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self._open: list[str] = []
        self.feed(html)
        assert not self._open, f"not closed: {self._open}"

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag not in self.VOID:
            self._open.append(tag)

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def handle_data(self, text):
        self.words.append(text)

    def of(self, css_class: str) -> list[dict[str, str | None]]:
        return [a for _, a in self.tags if css_class in (a.get("class") or "").split()]


DRAWN = {
    "note": html_module.note_html(EVIL, refusal=EVIL, reasons=[EVIL]),
    "reasons": html_module.note_html(EVIL, reasons=[EVIL, EVIL]),
    "error": html_module.error_html([EVIL]),
    "remarks": html_module.remarks_html([EVIL]),
    "heading": html_module.heading_html(EVIL),
    "label": html_module.label_html(EVIL),
    "verdict": html_module.verdict_html(FitVerdict(False, EVIL, EVIL)),
    "bars": html_module.bars_html([bar(parameters=2 * GIB, free=7 * GIB)]),
    "lacking": html_module.bars_html([bar(parameters=20 * GIB, lacking=11 * GIB)]),
    "face": html_module.face_html(ConfigFace(EVIL, "json", EVIL)),
    "resolved": html_module.resolved_html([Choice(EVIL, EVIL, EVIL)]),
}


@pytest.mark.parametrize("what", DRAWN)
def test_text_is_shown_as_it_is_and_never_run(what):
    read = Reader(DRAWN[what])
    assert "script" not in {tag for tag, _ in read.tags}
    told = " ".join([*read.words, *(v for _, a in read.tags for v in a.values() if v)])
    assert EVIL in told


def test_what_is_only_a_style_asks_nobody_for_anything():
    front = html_module.front_html("nbaccel-static-1")
    assert not re.search(r"https?://|@import|url\(", front)
    assert ".nbaccel-static-1 { display: none }" in front


def test_every_rule_of_the_style_is_the_pickers_own():
    style = Reader(html_module.front_html("nbaccel-static-1")).words[0]
    style = re.sub(r"/\*.*?\*/", "", style, flags=re.DOTALL)
    style = re.sub(r"@media[^{]*\{((?:[^{}]*\{[^{}]*\})*)\s*\}", r"\1", style)
    selectors = [s.strip() for rule in re.findall(r"([^{}]+)\{", style) for s in rule.split(",")]
    assert len(selectors) > 50
    assert not [s for s in selectors if not s.startswith(".nbaccel-picker")]


def test_parts_of_a_bar_are_as_wide_as_they_are_big():
    read = Reader(html_module.bars_html([bar(parameters=2 * GIB, free=7 * GIB)]))
    widths = [a["style"] for a in read.of("nbaccel-segment")]
    assert widths == ["width:20.000%", "width:10.000%", "width:70.000%"]
    assert not read.of("nbaccel-capacity")
    assert not read.of("nbaccel-lacks")
    (track,) = read.of("nbaccel-track")
    assert track["role"] == "img"
    for told in ("parameters 2.0 GiB", "buffers 1.0 GiB", "7.0 GiB left free"):
        assert told in track["aria-label"]


def test_devices_that_hold_the_same_share_one_legend():
    same, other = (bar(parameters=size * GIB) for size in (2, 3))
    read = Reader(html_module.bars_html([same, same, same, other]))
    assert len(read.of("nbaccel-track")) == 4
    assert len(read.of("nbaccel-legend")) == 2


def test_where_it_does_not_fit_the_capacity_is_marked_and_told_in_words():
    read = Reader(html_module.bars_html([bar(parameters=19 * GIB, lacking=10 * GIB)]))
    assert read.of("nbaccel-lacks")
    (mark,) = read.of("nbaccel-capacity")
    assert mark["style"] == "left:50.00%"
    assert any("does not fit: 10.0 GiB too little" in word for word in read.words)


def test_every_kind_of_memory_has_a_colour():
    from nbaccel.notebook.picker.memory_model import SEGMENT_KINDS

    style = Reader(html_module.front_html("x")).words[0]
    for kind in (*SEGMENT_KINDS, "others", "free"):
        assert f".nbaccel-{kind} {{ background" in style


def test_a_place_of_unknown_size_is_drawn():
    read = Reader(html_module.bars_html([bar(0, parameters=3 * GIB)]))
    assert [a["style"] for a in read.of("nbaccel-segment")] == ["width:75.000%", "width:25.000%"]


def test_nothing_to_say_is_nothing_shown():
    assert html_module.note_html("") == ""
    assert html_module.error_html([]) == ""
    assert html_module.remarks_html([]) == ""
    assert html_module.bars_html([]) == ""
    assert html_module.verdict_html(FitVerdict(None, "", "")) == ""


@pytest.mark.parametrize(
    ("name", "css"),
    [
        ("zero_optimization.stage", "zero_optimization-stage"),
        (None, "none"),
        ("A b/<c>", "a-b--c-"),
    ],
)
def test_names_become_classes(name, css):
    assert html_module.css_name(name) == css
