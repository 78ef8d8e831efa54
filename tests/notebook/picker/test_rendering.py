"""What pickers draw: the right numbers, readable by all, and nobody's text is taken for HTML."""

from __future__ import annotations

import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from nbaccel.config import RunConfig
from nbaccel.memory.estimate import BarSegment, MemoryBar, MemoryNeed
from nbaccel.memory.ways import Candidate, Proposal
from nbaccel.notebook.picker import rendering
from nbaccel.notebook.picker.model import PickerModel
from nbaccel.notebook.picker.rendering import picker_sections, picker_text, ways_lines
from nbaccel.notebook.pickers import Picker
from nbaccel.plan.launch_plan import Choice
from tests import needs
from tests.html_reader import Html
from tests.notebook.machines import V5E_8, WITHOUT_GPU, with_gpus
from tests.notebook.picker.test_candidates import of_language
from tests.notebook.shown import big, net

GIB = 2**30
EVIL = "<script>alert('&\"')</script>"


def bar(capacity: int = 10 * GIB, *, parameters: int, free: int = 0, lacking: int = 0) -> MemoryBar:
    sizes = {"parameters": parameters, "buckets": GIB, "free": free}
    segments = tuple(BarSegment(*one) for one in sizes.items())
    needed = parameters + GIB
    return MemoryBar(
        label=EVIL, capacity=capacity, segments=segments, needed=needed, lacking=lacking
    )


def need_of(*bars) -> MemoryNeed:
    model = PickerModel(model=net(), inventory=WITHOUT_GPU)
    return replace(model.need, bars=bars)


def candidate(**facts) -> Candidate:
    return Candidate(**{"name": EVIL, "config": RunConfig(), "reason": EVIL, **facts})


def table(*candidates) -> str:
    model = SimpleNamespace(candidates=lambda: candidates)
    return rendering.table_html(rendering.shown_rows(model))


ENOUGH = bar(parameters=4 * GIB, free=5 * GIB)
LACKING_BAR = bar(parameters=14 * GIB, lacking=5 * GIB)
FITTING = candidate(need=need_of(ENOUGH))
LACKING = candidate(need=need_of(LACKING_BAR))
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
    "note": rendering.note_html(EVIL, refusal=EVIL, reasons=[EVIL]),
    "reasons": rendering.note_html(EVIL, reasons=[EVIL, EVIL]),
    "outcome": rendering.note_html(EVIL, outcome=EVIL, docs_link=EVIL),
    "error": rendering.error_html([EVIL]),
    "remarks": rendering.remarks_html([EVIL]),
    "heading": rendering.heading_html(EVIL),
    "label": rendering.label_html(EVIL),
    "face": rendering.face_html(EVIL, EVIL),
    "resolved": rendering.resolved_html([Choice(EVIL, EVIL, EVIL)]),
    "mistakes": rendering.text_mistakes_html([(1, EVIL)], EVIL, ""),
    "no mistakes": rendering.text_mistakes_html([], "", EVIL),
    "kept": rendering.kept_html("kept", [], EVIL),
    "ways": table(replace(FITTING, is_best=True)),
    "refused": table(candidate(refusal=EVIL)),
    "places": rendering.table_html(rendering.rows_of_places([bar(parameters=GIB)])),
    "proposal": rendering.proposal_html(PROPOSAL),
    "model": rendering.trained_html(
        PickerModel(model=type(EVIL, (torch.nn.Linear,), {})(2, 2), inventory=WITHOUT_GPU)
    ),
}


@pytest.mark.parametrize("what", DRAWN)
def test_text_is_shown_as_it_is_and_never_run(what):
    read = Html(DRAWN[what])
    assert "script" not in {tag for tag, _ in read.tags}
    told = " ".join([*read.words, *(v for _, a in read.tags for v in a.values() if v)])
    assert EVIL in told


def test_every_rule_of_the_style_is_the_pickers_own_and_asks_nobody_for_anything():
    front = rendering.front_html("nbaccel-static-1")
    assert not re.search(r"https?://|@import|url\(", front)
    assert ".nbaccel-static-1 { display: none }" in front
    style = Html(front).words[0]
    style = re.sub(r"/\*.*?\*/", "", style, flags=re.DOTALL)
    style = re.sub(r"@media[^{]*\{((?:[^{}]*\{[^{}]*\})*)\s*\}", r"\1", style)
    selectors = [s.strip() for rule in re.findall(r"([^{}]+)\{", style) for s in rule.split(",")]
    assert len(selectors) > 50
    assert not [s for s in selectors if not s.startswith(".nbaccel-")]


def test_all_bars_have_one_scale_and_each_place_a_row_with_its_numbers():
    read = Html(table(FITTING, replace(LACKING, name="other")))
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

    places = [bar(parameters=2 * GIB, free=7 * GIB), bar(parameters=19 * GIB, lacking=10 * GIB)]
    read = Html(rendering.table_html(rendering.rows_of_places(places)))
    assert "needs 3.0 GiB of 10.0 GiB" in read.words
    assert "✗ needs 20.0 GiB of 10.0 GiB: 10.0 GiB too little" in read.words
    unknown = Html(rendering.table_html(rendering.rows_of_places([bar(0, parameters=3 * GIB)])))
    assert [a["style"] for a in unknown.of("nbaccel-segment")] == ["width:75.000%", "width:25.000%"]


def test_a_huge_need_is_cut_and_a_small_one_enlarged_without_what_others_use():
    huge = bar(parameters=1000 * GIB, lacking=991 * GIB)
    assert rendering.BarScale([huge]).full_width == 17 * GIB
    assert Html(table(candidate(need=need_of(huge)))).of("nbaccel-cut")
    small = bar(1000 * GIB, parameters=4 * GIB, free=595 * GIB)
    others = BarSegment("others", 400 * GIB)
    small = replace(small, segments=(others, *small.segments))
    read = Html(table(candidate(need=need_of(small))))
    widths = [a["style"] for a in read.of("nbaccel-segment")]
    assert widths == ["width:80.000%", "width:20.000%"]
    assert not read.of("nbaccel-mark")
    assert not read.of("nbaccel-cut")
    assert "all that there is: 200 times as wide" in read.words


@needs.DEEPSPEED
def test_terminal_and_saved_notebook_show_the_three_questions_and_what_is_best():
    config = RunConfig(mixed_precision="bf16")
    picker = Picker(config, model=big(), inventory=with_gpus(2))
    kept = picker._kept_output()
    text, drawn = kept["text/plain"], " ".join(Html(kept["text/html"]).words)
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
        assert rendering.verdict_text(one) in drawn
    assert "Each of 2 processes holds the whole model" in drawn


def test_before_the_estimate_and_without_a_model_it_says_so():
    waiting = Picker(model=net(), inventory=WITHOUT_GPU)
    waiting._model.postpone_memory()
    assert "Memory is being estimated …" in waiting._kept_output()["text/html"]
    kept = Picker(inventory=WITHOUT_GPU)._kept_output()
    assert "configure(model, batch)" in kept["text/html"]
    assert "configure(model, batch) shows what fits" in kept["text/plain"]
    assert "3. What fits" not in picker_text(PickerModel(inventory=WITHOUT_GPU))
    if needs.HAS_DEEPSPEED_ROW:  # settings that are no way of the table
        config = RunConfig(zero_stage=0, deepspeed={})
        text = picker_text(PickerModel(config, model=big(), inventory=with_gpus(2)))
        assert "What is chosen is none of these ways; its memory is below." in text
        table = text.partition("3. What fits\n")[2].partition("What is chosen")[0]
        assert "chosen" not in table


MACHINES = {
    "two GPUs": with_gpus(2, total=40, free=39),
    "one small GPU": with_gpus(1, total=8, free=7, capability=(7, 5)),
    "cores": WITHOUT_GPU,
    "TPU": V5E_8,
}


@pytest.fixture(scope="module", params=MACHINES)
def picker(request) -> PickerModel:
    return of_language(MACHINES[request.param])


def test_no_line_is_wider_than_a_terminal(picker):
    sections = {text.partition("\n")[0]: text for text in picker_sections(picker)}
    for title, section in sections.items():
        if title not in ("Python", "Command line", "YAML", "DeepSpeed JSON"):
            assert max(map(len, section.splitlines())) <= 80, section


def test_a_line_tells_what_a_way_needs_and_why_it_cannot_be_taken():
    on_host = replace(bar(parameters=GIB, lacking=2 * GIB), label="host memory · 2 processes")
    lines = ways_lines(
        [
            candidate(
                name="FSDP", need=need_of(ENOUGH), is_best=True, is_taken=True, reason="fast"
            ),
            candidate(name="ZeRO-3", need=need_of(ENOUGH, on_host)),
            candidate(name="ZeRO-3, all on disk", refusal="needs a folder"),
        ]
    )
    text = "\n".join(lines)
    assert "FSDP                 5.0 GiB            chosen; ★ best: fast" in text
    assert "5.0 GiB + 2.0 GiB  ✗ 2.0 GiB too little on host memory" in text
    assert "needs a folder" in text
