"""The strip of candidates and the three questions: as HTML, and as text where there is none."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from nbaccel.config import RunConfig
from nbaccel.notebook.picker import html as html_module
from nbaccel.notebook.picker import strip_html as strip_module
from nbaccel.notebook.picker.candidates import Candidate
from nbaccel.notebook.picker.compared_ways import hint_of
from nbaccel.notebook.picker.memory_model import SEGMENT_KINDS, BarSegment, MemoryNeed
from nbaccel.notebook.picker.model import FitVerdict, PickerModel
from nbaccel.notebook.picker.static_table import (
    candidate_bars,
    picker_html,
    picker_text,
    text_bar,
)
from nbaccel.notebook.picker.suggesting import Proposal
from nbaccel.notebook.picker.text_mistakes import TextMistake
from tests import needs
from tests.notebook.machines import WITHOUT_GPU, with_gpus
from tests.notebook.picker.test_drawing import EVIL, GIB, Reader, bar
from tests.notebook.shown import big, net


def need_of(*bars) -> MemoryNeed:
    model = PickerModel(model=net(), inventory=WITHOUT_GPU)
    return replace(model.need, bars=bars)


def candidate(**facts) -> Candidate:
    return Candidate(**{"name": EVIL, "config": RunConfig(), "reason": EVIL, **facts})


EVIL_CANDIDATE = candidate(
    need=need_of(bar(parameters=2 * GIB, free=7 * GIB)), step_s=1.5, step_words=EVIL, is_best=True
)
EVIL_PROPOSAL = Proposal(
    title=EVIL,
    config=RunConfig(),
    candidate=EVIL_CANDIDATE,
    why=(EVIL,),
    not_chosen=(EVIL,),
    batch_size=None,
    accumulation=1,
)
DRAWN = {
    "strip": strip_module.strip_html([EVIL_CANDIDATE]),
    "refused": strip_module.strip_html([candidate(refusal=EVIL)]),
    "compared": strip_module.compared_html([EVIL_CANDIDATE]),
    "hint": strip_module.strip_html([candidate()], EVIL),
    "taken": strip_module.taken_html(EVIL_CANDIDATE, FitVerdict(True, EVIL, EVIL), EVIL),
    "proposal": strip_module.proposal_html(EVIL_PROPOSAL),
    "mistakes": html_module.text_mistakes_html([TextMistake(line=1, message=EVIL)], EVIL, ""),
    "no mistakes": html_module.text_mistakes_html([], "", EVIL),
    "note": html_module.note_html(EVIL, outcome=EVIL, docs_link=EVIL),
}


@pytest.mark.parametrize("what", DRAWN)
def test_text_is_shown_as_it_is_and_never_run(what):
    read = Reader(DRAWN[what])
    assert "script" not in {tag for tag, _ in read.tags}
    told = " ".join([*read.words, *(v for _, a in read.tags for v in a.values() if v)])
    assert EVIL in told


def test_the_name_of_a_model_is_text_too():
    model = type(EVIL, (torch.nn.Linear,), {})(2, 2)
    html = strip_module.trained_html(PickerModel(model=model, inventory=WITHOUT_GPU))
    assert EVIL in " ".join(Reader(html).words)


def test_all_bars_have_one_scale_and_a_line_where_the_memory_ends():
    fits = candidate(need=need_of(bar(parameters=4 * GIB, free=5 * GIB)))
    lacks = candidate(need=need_of(bar(parameters=14 * GIB, lacking=5 * GIB)))
    read = Reader(strip_module.strip_html([fits, lacks]))
    widths = [a["style"] for a in read.of("nbaccel-segment")]
    assert widths == ["width:26.667%", "width:6.667%", "width:93.333%", "width:6.667%"]
    marks = [a["style"] for a in read.of("nbaccel-mark") if "style" in a]
    assert marks == ["left:66.67%", "left:66.67%"]
    assert [a["class"].split()[-1] for a in read.of("nbaccel-strip-row")] == [
        "nbaccel-fits",
        "nbaccel-lacks",
    ]
    assert any("✗ 5.0 GiB too little" in word for word in read.words)


def test_compared_bars_are_grouped_by_way_with_one_scale():
    need = need_of(bar(parameters=4 * GIB, free=5 * GIB))
    large = need_of(bar(parameters=14 * GIB, lacking=5 * GIB))
    in_half = RunConfig(mixed_precision="bf16")
    html = strip_module.compared_html(
        [
            candidate(name="ZeRO-2", need=large),
            candidate(name="ZeRO-2", need=need, config=in_half, step_s=1.0, is_best=True),
            candidate(name="ZeRO-3", refusal="needs a folder"),
        ]
    )
    read = Reader(html)
    assert [a["class"] for a in read.of("nbaccel-strip-row")] == [
        "nbaccel-strip-row nbaccel-first nbaccel-lacks",
        "nbaccel-strip-row nbaccel-fits",
        "nbaccel-strip-row nbaccel-first",
    ]
    assert [word.strip() for word in read.words if word.strip()][:7] == [
        "ZeRO-2",
        "fp32",
        "✗ 5.0 GiB too little",
        "—",
        "bf16",
        "✓ 5.0 GiB free",
        "≈ 1.0 s/step",
    ]
    assert html.count("fp32") == 2, "a way that cannot be taken has no precision beside it"
    told = [a["aria-label"] for a in read.of("nbaccel-track") if "aria-label" in a]
    assert [text.partition(":")[0] for text in told] == ["ZeRO-2 in fp32", "ZeRO-2 in bf16"]
    marks = [a["style"] for a in read.of("nbaccel-mark") if "style" in a]
    assert marks == ["left:66.67%", "left:66.67%"]


def test_a_precision_is_named_where_it_alone_fits_or_is_clearly_faster():
    def best(precision: str, step_s: float | None) -> Candidate:
        config = RunConfig(mixed_precision=precision)
        return candidate(name="ZeRO-1", config=config, step_s=step_s, is_best=True)

    lacking = candidate(need=need_of(bar(parameters=14 * GIB, lacking=5 * GIB)))
    assert hint_of([lacking], [lacking, best("bf16", 1.0)]) == "In bf16, ZeRO-1 would fit."
    told = hint_of([best("no", 2.0)], [best("bf16", 1.3)])
    assert told == "In bf16, ZeRO-1 would take about 1.3 s a step."
    assert hint_of([best("no", 1.36)], [best("bf16", 1.3)]) == "", "as fast, as estimates go"
    assert hint_of([best("no", None)], [best("bf16", None)]) == ""
    assert hint_of([best("bf16", 1.3)], [best("bf16", 1.3)]) == ""
    assert hint_of([lacking], [lacking]) == ""


def test_a_need_far_beyond_what_there_is_is_cut_so_that_others_can_be_read():
    huge = candidate(need=need_of(bar(parameters=1000 * GIB, lacking=991 * GIB)))
    assert strip_module.strip_scale([huge]) == 17 * GIB
    assert Reader(strip_module.strip_html([huge])).of("nbaccel-cut")


def test_what_is_lacking_elsewhere_is_told_with_its_place():
    on_host = replace(bar(parameters=GIB, lacking=2 * GIB), label="host memory · 2 processes")
    short = candidate(need=need_of(bar(parameters=GIB, free=GIB), on_host))
    assert strip_module.verdict_text(short) == "✗ 2.0 GiB too little on host memory"


@pytest.mark.parametrize(
    ("seconds", "told"), [(None, "—"), (0.0001, "< 1 ms/step"), (1.94, "≈ 1.9 s/step")]
)
def test_seconds_of_a_step(seconds, told):
    assert strip_module.step_text(candidate(step_s=seconds)) == told


# ------------------------------------------------------------------------------ as text
def test_a_bar_of_letters_is_as_long_as_it_is_big():
    half = bar(20 * GIB, parameters=9 * GIB)
    assert text_bar(half, 20 * GIB) == f"{'P' * 18}BB{' ' * 20}|"
    over = bar(10 * GIB, parameters=14 * GIB)
    assert text_bar(over, 20 * GIB) == f"{'P' * 20}|{'P' * 8}BB"
    assert text_bar(over, 10 * GIB) == f"{'P' * 39}>|"


def test_every_kind_has_a_letter_of_its_own():
    kinds = ("others", *SEGMENT_KINDS)
    every = replace(bar(0, parameters=GIB), segments=tuple(BarSegment(kind, GIB) for kind in kinds))
    assert len(set(text_bar(every, len(kinds) * GIB))) == len(kinds)


@needs.DEEPSPEED
def test_terminal_and_saved_notebook_show_the_three_questions_and_the_strip():
    model = PickerModel(RunConfig(mixed_precision="bf16"), model=big(), inventory=with_gpus(2))
    text, html = picker_text(model), " ".join(Reader(picker_html(model)).words)
    for part in (
        "1. What is trained",
        "5.91 B parameters in 44 tensors",
        "2. On what",
        "GPU 1 · NVIDIA H100",
        "(used)",
        "2 processes (one per GPU, 2 found)",
        "3. What fits",
        "(•) one copy each (DDP)",
        "chosen",
        "PPPP",
        "110.0 GiB",
        "★ best",
        "P parameters, G gradients, O optimizer",
    ):
        assert part in text, part
        assert part in html, part
    names = [name[4:] for name, _ in candidate_bars(model.candidates())]
    assert all(name in text for name in names)


def test_without_a_model_the_text_says_how_to_give_one():
    text = picker_text(PickerModel(inventory=WITHOUT_GPU))
    assert "configure(model, batch) shows what fits" in text
    assert "3. What fits" not in text
