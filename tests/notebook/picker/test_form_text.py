"""The form as text: the ways to train in each precision, in a terminal's width."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from nbaccel.base.units import format_bytes
from nbaccel.config import RunConfig
from nbaccel.memory.ways import Candidate
from nbaccel.notebook.picker.choices import (
    groups_of_ways,
    is_shown_once,
    name_with_precision,
    precision_label,
)
from nbaccel.notebook.picker.form_text import (
    TABLE_CHARS,
    picker_sections,
    picker_text,
    precision_table_lines,
)
from nbaccel.notebook.picker.model import PickerModel
from tests import needs
from tests.notebook.machines import V5E_8, WITHOUT_GPU, with_gpus
from tests.notebook.picker.test_candidates import TOKENS, language
from tests.notebook.picker.test_form_html import GIB, bar, candidate, need_of
from tests.notebook.shown import big

IN_HALF = RunConfig(mixed_precision="bf16")
ENOUGH = bar(parameters=4 * GIB, free=5 * GIB)
LACKING = bar(parameters=14 * GIB, lacking=5 * GIB)
MACHINES = {
    "two GPUs": with_gpus(2, total=40, free=39),
    "one small GPU": with_gpus(1, total=8, free=7, capability=(7, 5)),
    "cores": WITHOUT_GPU,
    "TPU": V5E_8,
}


@pytest.fixture(scope="module", params=MACHINES)
def picker(request) -> PickerModel:
    return PickerModel(model=language(), sample_batch=TOKENS, inventory=MACHINES[request.param])


def compared(picker: PickerModel) -> tuple[Candidate, ...]:
    """What the form shows once precisions are compared."""
    picker.compare_precisions(is_on=True)
    shown = picker.shown_candidates()
    picker.compare_precisions(is_on=False)
    return shown


def cells_of_text(picker: PickerModel, way_names: list[str]) -> dict[tuple[str, str], list[str]]:
    """The lines of each cell, by the way that its row is of and its column's heading."""
    fits = picker_text(picker).partition("3. What fits\n")[2].partition("\n\n")[0]
    _, heading, *rows = [line[2:] for line in fits.splitlines()]
    labels = heading.split()
    starts = [heading.index(label) for label in labels]
    ends = [*starts[1:], TABLE_CHARS]
    cells: dict[tuple[str, str], list[str]] = {}
    names, is_whole = list(way_names), True
    for row in rows:
        # A long name goes on in the next lines.
        if (name_part := row[: starts[0]].strip()) and is_whole:
            if not names:
                break
            way, name = names.pop(0), name_part
        elif name_part:
            name = f"{name} {name_part}"
        is_whole = name == way
        for label, start, end in zip(labels, starts, ends, strict=True):
            if text := row[start:end].strip():
                cells.setdefault((way, label), []).append(text)
    assert not names
    return cells


def test_a_terminal_has_the_numbers_of_the_form_s_strip(picker):
    groups = list(groups_of_ways(compared(picker)))
    cells = cells_of_text(picker, [way_name for way_name, _ in groups])
    shown = [one for _, of_way in groups if not is_shown_once(of_way) for one in of_way]
    assert len(shown) >= 4
    for one in shown:
        size, *rest = cells[one.name, precision_label(one.precision)]
        assert size == f"{'✓' if one.fits else '✗'} {format_bytes(one.need.bars[0].needed)}"
        words = [("chosen", one.is_taken), ("★ best", one.is_best)]
        marks = [word for word, is_true in words if is_true]
        _, *others = one.need.bars
        host = [f"+ {format_bytes(bar.needed)}" for bar in others if bar.is_host and bar.needed]
        assert rest == [*host, *marks]


def test_no_line_is_wider_than_a_terminal(picker):
    sections = {text.partition("\n")[0]: text for text in picker_sections(picker)}
    for title, section in sections.items():
        if title not in ("Python", "Command line", "YAML", "DeepSpeed JSON"):
            assert max(map(len, section.splitlines())) <= 80, section


def test_the_chosen_and_the_best_are_told_in_words_and_once_each(picker):
    picker.choose("mixed_precision", "bf16")
    text = picker_text(picker).partition("3. What fits\n")[2].partition("Precision\n")[0]
    best = next((one for one in compared(picker) if one.is_best), None)
    assert text.count("chosen") == 1
    assert text.count("★ best") == (best is not None)
    if best is not None:
        assert f"★ {name_with_precision(best)}: {best.reason}." in " ".join(text.split())
    picker.undo()


def test_a_way_that_lacks_memory_elsewhere_says_where():
    on_host = replace(bar(parameters=GIB, lacking=2 * GIB), label="host memory · 2 processes")
    short = [
        candidate(name="ZeRO-3", need=need_of(ENOUGH, on_host)),
        candidate(name="ZeRO-3", need=need_of(ENOUGH, on_host), config=IN_HALF),
    ]
    lines = precision_table_lines(short)
    note = "ZeRO-3: ✗ 2.0 GiB too little on host memory in fp32, bf16."
    assert note in lines
    on_device = [candidate(name="ZeRO-3", need=need_of(LACKING))]
    assert not any("too little" in line for line in precision_table_lines(on_device))


def test_what_one_precision_refuses_is_told_below_and_what_all_refuse_in_the_row():
    ways = [
        candidate(name="FSDP", need=need_of(ENOUGH)),
        candidate(name="FSDP", config=IN_HALF, refusal="this card cannot"),
        candidate(name="ZeRO-3, all on disk", refusal="needs a folder"),
    ]
    text = "\n".join(precision_table_lines(ways))
    assert "not possible" in text
    assert "FSDP: this card cannot in bf16." in text
    assert "ZeRO-3, all on disk  needs a folder" in text


def test_a_way_that_a_precision_lacks_leaves_its_cell_empty():
    ways = [
        candidate(name="FSDP", need=need_of(ENOUGH)),
        candidate(name="FSDP", need=need_of(ENOUGH), config=IN_HALF),
        candidate(name="ZeRO-1", need=need_of(ENOUGH), config=IN_HALF),
    ]
    assert any(line.split()[:2] == ["ZeRO-1", "—"] for line in precision_table_lines(ways))


def test_free_memory_is_told_where_all_devices_have_the_same():
    named = replace(ENOUGH, label="cuda:0 · A"), replace(ENOUGH, label="cuda:1 · A")
    assert precision_table_lines([candidate(need=need_of(*named))])[0].startswith(
        "Memory of each GPU (10.0 GiB free): ✓"
    )
    fuller = replace(LACKING, label="cuda:1 · A", capacity=8 * GIB)
    assert precision_table_lines([candidate(need=need_of(named[0], fuller))])[0].startswith(
        "Memory of each GPU: ✓"
    )


@needs.DEEPSPEED_ROW
def test_settings_that_are_no_way_of_the_table_are_told():
    picker = PickerModel(RunConfig(zero_stage=0, deepspeed={}), model=big(), inventory=with_gpus(2))
    text = picker_text(picker)
    assert "What is chosen is none of these ways; its memory is below." in text
    assert "chosen" not in text.partition("3. What fits\n")[2].partition("What is chosen")[0]


# ----------------------------------------------------------------------- nothing waits for it
def measurements(picker: PickerModel, monkeypatch) -> list[str]:
    """The precisions that are measured from now on."""
    memory_model, told = picker._memory_model, []
    measure = memory_model.activation_bytes

    def telling(config, batch_size):
        known = len(memory_model._activations)
        found = measure(config, batch_size)
        if len(memory_model._activations) > known:
            told.append(config.mixed_precision)
        return found

    monkeypatch.setattr(memory_model, "activation_bytes", telling)
    return told


def test_the_text_beside_a_form_measures_no_other_precision(monkeypatch):
    picker = PickerModel(
        model=language(width=64, layers=1), sample_batch=TOKENS, inventory=with_gpus(2)
    )
    told = measurements(picker, monkeypatch)
    text = picker_text(picker, measures=False)
    assert told == ["no"]
    assert "fp16" not in text.partition("Precision\n")[0]
    for estimate in picker.later_estimates():
        estimate()
    told.clear()
    labels = ["fp32", "fp16", "bf16", "fp8"]
    lines = picker_text(picker, measures=False).splitlines()
    assert labels in [line.split() for line in lines]
    assert told == []


def test_a_terminal_shows_model_and_machine_before_anything_is_measured(monkeypatch):
    picker = PickerModel(
        model=language(width=64, layers=1), sample_batch=TOKENS, inventory=with_gpus(2)
    )
    told = measurements(picker, monkeypatch)
    sections = picker_sections(picker)
    assert [next(sections).partition("\n")[0] for _ in range(2)] == [
        "1. What is trained",
        "2. On what",
    ]
    assert told == []
    assert "fp8" in next(sections)
    assert {"no", "bf16"} & set(told)


def test_what_cannot_be_estimated_has_no_table():
    picker = PickerModel(model=torch.nn.Linear(2, 2), sample_batch=torch.ones(4, 7))
    text = picker_text(picker)
    assert "Linear does not run with this sample_batch" in " ".join(text.split())
    assert max(map(len, text.partition("Precision\n")[0].splitlines())) <= 80
