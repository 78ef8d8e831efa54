"""What pickers draw: the right numbers, readable by all, and nobody's text is taken for HTML."""

from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest
import torch

from nbaccel.config import RunConfig
from nbaccel.memory.estimate import SEGMENT_KINDS, BarSegment, MemoryBar, MemoryNeed
from nbaccel.memory.ways import Candidate, Proposal
from nbaccel.notebook.picker import form_html
from nbaccel.notebook.picker.choices import hint_of
from nbaccel.notebook.picker.form_text import picker_text
from nbaccel.notebook.picker.model import PickerModel
from nbaccel.notebook.picker.text_mistakes import TextMistake
from nbaccel.notebook.pickers import Picker
from nbaccel.plan.launch_plan import Choice
from tests import needs
from tests.notebook.machines import WITHOUT_GPU, with_gpus
from tests.notebook.shown import big, net

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


def need_of(*bars) -> MemoryNeed:
    model = PickerModel(model=net(), inventory=WITHOUT_GPU)
    return replace(model.need, bars=bars)


def candidate(**facts) -> Candidate:
    return Candidate(**{"name": EVIL, "config": RunConfig(), "reason": EVIL, **facts})


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


def table(*candidates, compares: bool = False, hint: str = "") -> str:
    return form_html.table_html(form_html.rows_of_ways(candidates, compares=compares), hint)


FITTING = candidate(need=need_of(bar(parameters=4 * GIB, free=5 * GIB)))
LACKING = candidate(need=need_of(bar(parameters=14 * GIB, lacking=5 * GIB)))
PROPOSAL = Proposal(
    title=EVIL,
    config=RunConfig(),
    candidate=FITTING,
    why=(EVIL,),
    not_chosen=(EVIL,),
    batch_size=None,
    accumulation=1,
)
DRAWN = {
    "note": form_html.note_html(EVIL, refusal=EVIL, reasons=[EVIL]),
    "reasons": form_html.note_html(EVIL, reasons=[EVIL, EVIL]),
    "outcome": form_html.note_html(EVIL, outcome=EVIL, docs_link=EVIL),
    "error": form_html.error_html([EVIL]),
    "remarks": form_html.remarks_html([EVIL]),
    "heading": form_html.heading_html(EVIL),
    "label": form_html.label_html(EVIL),
    "face": form_html.face_html(EVIL, EVIL),
    "resolved": form_html.resolved_html([Choice(EVIL, EVIL, EVIL)]),
    "mistakes": form_html.text_mistakes_html([TextMistake(line=1, message=EVIL)], EVIL, ""),
    "no mistakes": form_html.text_mistakes_html([], "", EVIL),
    "kept": form_html.kept_html("kept", [], EVIL),
    "ways": table(replace(FITTING, is_best=True)),
    "refused": table(candidate(refusal=EVIL)),
    "compared": table(FITTING, compares=True),
    "hint": table(candidate(), hint=EVIL),
    "places": form_html.table_html(form_html.rows_of_places([bar(parameters=GIB)])),
    "proposal": form_html.proposal_html(PROPOSAL),
}


@pytest.mark.parametrize("what", DRAWN)
def test_text_is_shown_as_it_is_and_never_run(what):
    read = Reader(DRAWN[what])
    assert "script" not in {tag for tag, _ in read.tags}
    told = " ".join([*read.words, *(v for _, a in read.tags for v in a.values() if v)])
    assert EVIL in told


def test_the_name_of_a_model_is_text_too():
    model = type(EVIL, (torch.nn.Linear,), {})(2, 2)
    html = form_html.trained_html(PickerModel(model=model, inventory=WITHOUT_GPU))
    assert EVIL in " ".join(Reader(html).words)


# ------------------------------------------------------------------------------ styles
def test_what_is_only_a_style_asks_nobody_for_anything():
    front = form_html.front_html("nbaccel-static-1")
    assert not re.search(r"https?://|@import|url\(", front)
    assert ".nbaccel-static-1 { display: none }" in front


def test_every_rule_of_the_style_is_the_pickers_own():
    style = Reader(form_html.front_html("nbaccel-static-1")).words[0]
    style = re.sub(r"/\*.*?\*/", "", style, flags=re.DOTALL)
    style = re.sub(r"@media[^{]*\{((?:[^{}]*\{[^{}]*\})*)\s*\}", r"\1", style)
    selectors = [s.strip() for rule in re.findall(r"([^{}]+)\{", style) for s in rule.split(",")]
    assert len(selectors) > 50
    assert not [s for s in selectors if not s.startswith(".nbaccel-")]


def test_every_kind_of_memory_has_a_colour():
    style = Reader(form_html.kept_html("x", ["a"], "")).words[0]
    for kind in (*SEGMENT_KINDS, "others", "free"):
        assert f".nbaccel-{kind} {{ background" in style


def test_nothing_to_say_is_nothing_shown():
    assert form_html.note_html("") == ""
    assert form_html.error_html([]) == ""
    assert form_html.remarks_html([]) == ""


@pytest.mark.parametrize(
    ("name", "css"),
    [
        ("zero_optimization.stage", "zero_optimization-stage"),
        (None, "none"),
        ("A b/<c>", "a-b--c-"),
    ],
)
def test_names_become_classes(name, css):
    assert form_html.css_name(name) == css


# ------------------------------------------------------------------------------ the table of bars
def test_all_bars_have_one_scale_and_a_line_where_the_memory_ends():
    read = Reader(table(FITTING, replace(LACKING, name="other")))
    widths = [a["style"] for a in read.of("nbaccel-segment")]
    assert widths == ["width:26.667%", "width:6.667%", "width:93.333%", "width:6.667%"]
    assert [a["style"] for a in read.of("nbaccel-mark")] == ["left:66.67%", "left:66.67%"]
    assert [a["class"].split()[-1] for a in read.of("nbaccel-strip-row")] == [
        "nbaccel-fits",
        "nbaccel-lacks",
    ]
    assert any("✗ 5.0 GiB too little" in word for word in read.words)
    for told in ("parameters 4.0 GiB", "buffers 1.0 GiB", "5.0 GiB left free"):
        assert told in read.of("nbaccel-track")[0]["aria-label"]


def test_compared_bars_are_grouped_by_way_with_one_scale():
    in_half = RunConfig(mixed_precision="bf16")
    html = table(
        replace(LACKING, name="ZeRO-2"),
        replace(FITTING, name="ZeRO-2", config=in_half, is_best=True),
        candidate(name="ZeRO-3", refusal="needs a folder"),
        compares=True,
    )
    read = Reader(html)
    assert [a["class"] for a in read.of("nbaccel-strip-row")] == [
        "nbaccel-strip-row nbaccel-first nbaccel-lacks",
        "nbaccel-strip-row nbaccel-fits",
        "nbaccel-strip-row nbaccel-first",
    ]
    assert [word for word in read.words if word.strip()][:7] == [
        "ZeRO-2",
        "fp32",
        "✗ 5.0 GiB too little",
        "bf16",
        "✓ 5.0 GiB free",
        "★ best",
        "ZeRO-3",
    ]
    assert html.count("fp32") == 2, "a way that cannot be taken has no precision beside it"
    told = [a["aria-label"] for a in read.of("nbaccel-track") if "aria-label" in a]
    assert [text.partition(":")[0] for text in told] == ["ZeRO-2 in fp32", "ZeRO-2 in bf16"]


def test_a_precision_is_named_where_it_alone_fits_or_is_faster():
    def best(precision: str) -> Candidate:
        config = RunConfig(mixed_precision=precision)
        return candidate(name="ZeRO-1", config=config, is_best=True)

    assert hint_of([LACKING], [LACKING, best("bf16")]) == "In bf16, ZeRO-1 would fit."
    told = hint_of([best("no")], [best("bf16")])
    assert told == "In bf16, ZeRO-1 would fit, too, and is usually faster."
    assert hint_of([best("bf16")], [best("bf16")]) == ""
    assert hint_of([LACKING], [LACKING]) == ""


def test_a_need_far_beyond_what_there_is_is_cut_so_that_others_can_be_read():
    huge = bar(parameters=1000 * GIB, lacking=991 * GIB)
    assert form_html.BarScale([huge]).full_width == 17 * GIB
    assert Reader(table(candidate(need=need_of(huge)))).of("nbaccel-cut")


def test_a_small_model_is_enlarged_without_what_others_use():
    small = bar(1000 * GIB, parameters=4 * GIB, free=595 * GIB)
    others = BarSegment("others", 400 * GIB)
    small = replace(small, segments=(others, *small.segments))
    read = Reader(table(candidate(need=need_of(small))))
    widths = [a["style"] for a in read.of("nbaccel-segment")]
    assert widths == ["width:80.000%", "width:20.000%"]
    assert not read.of("nbaccel-mark")
    assert not read.of("nbaccel-cut")
    assert "all that there is: 200 times as wide" in read.words


def test_what_is_lacking_elsewhere_is_told_with_its_place():
    on_host = replace(bar(parameters=GIB, lacking=2 * GIB), label="host memory · 2 processes")
    short = candidate(need=need_of(bar(parameters=GIB, free=GIB), on_host))
    assert form_html.verdict_text(short) == "✗ 2.0 GiB too little on host memory"


def test_each_place_has_a_row_with_its_numbers():
    places = [bar(parameters=2 * GIB, free=7 * GIB), bar(parameters=19 * GIB, lacking=10 * GIB)]
    read = Reader(form_html.table_html(form_html.rows_of_places(places)))
    assert "needs 3.0 GiB of 10.0 GiB" in read.words
    assert "✗ needs 20.0 GiB of 10.0 GiB: 10.0 GiB too little" in read.words
    unknown = Reader(form_html.table_html(form_html.rows_of_places([bar(0, parameters=3 * GIB)])))
    assert [a["style"] for a in unknown.of("nbaccel-segment")] == ["width:75.000%", "width:25.000%"]


# ------------------------------------------------------------------------------ as it is kept
@needs.DEEPSPEED
def test_terminal_and_saved_notebook_show_the_three_questions_and_what_is_best():
    config = RunConfig(mixed_precision="bf16")
    picker = Picker(config, model=big(), inventory=with_gpus(2))
    kept = picker._showing._kept_output()
    text, drawn = kept["text/plain"], " ".join(Reader(kept["text/html"]).words)
    for part in (
        "What is trained",
        "5.91 B parameters in 44 tensors",
        "On what",
        "GPU 1 · NVIDIA H100",
        "(used)",
        "2 processes (one per GPU, 2 found)",
        "What fits",
        "★ best",
    ):
        assert part in text, part
        assert part in drawn, part
    for one in picker._model.candidates():
        assert one.name in drawn
        assert form_html.verdict_text(one) in drawn
    assert "Each of 2 processes holds the whole model" in drawn


def test_before_the_estimate_and_without_a_model_it_says_so():
    waiting = Picker(model=net(), inventory=WITHOUT_GPU)
    waiting._model.postpone_memory()
    assert "Memory is being estimated …" in waiting._showing._kept_output()["text/html"]
    kept = Picker(inventory=WITHOUT_GPU)._showing._kept_output()
    assert "configure(model, batch)" in kept["text/html"]
    assert "configure(model, batch) shows what fits" in kept["text/plain"]
    assert "3. What fits" not in picker_text(PickerModel(inventory=WITHOUT_GPU))
