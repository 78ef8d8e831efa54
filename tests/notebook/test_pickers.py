"""Pickers with their real widgets, driven as a front end drives them: by setting traits."""

from __future__ import annotations

import json
import sys

import pytest
import torch

from nbaccel.config import RunConfig
from nbaccel.notebook.picker.choices import by_name, settings
from nbaccel.notebook.pickers import LaunchPicker, Picker, PrecisionPicker, ZeroPicker
from tests import needs
from tests.isolation import ROOT
from tests.needs import DEEPSPEED
from tests.notebook.machines import WITHOUT_GPU, with_gpus
from tests.notebook.shown import BUCKET, OPTIMIZER_PLACE, below, css_of, net, show
from tests.programs import run_program

__all__ = ["show"]


@DEEPSPEED
def test_what_is_pressed_is_what_python_holds(show):
    shown = show()
    first = shown.picker.config
    shown.press("mixed_precision", "bf16")
    shown.press("zero_stage", "3")
    shown.press(OPTIMIZER_PLACE, "cpu")
    shown.field("num_processes").value = "2"
    assert first == RunConfig()
    assert shown.picker.config == RunConfig(
        num_processes=2,
        mixed_precision="bf16",
        zero_stage=3,
        deepspeed={"zero_optimization": {"offload_optimizer": {"device": "cpu"}}},
    )
    shown.button("mixed_precision", "bf16").value = False  # pressed again it stays chosen
    assert shown.on("mixed_precision") == ["bf16"]
    assert shown.on("zero_stage") == ["3"]
    shown.one("nbaccel-opens-faces").value = True
    assert "&quot;stage&quot;: 3" in shown.everything()


@needs.DEEPSPEED_ROW
def test_what_python_sets_is_what_is_shown(show):
    shown = show()
    seen = []
    shown.picker.observe(lambda change: seen.append(change["new"]), "config")
    shown.picker.choose("mixed_precision", "fp16")
    assert shown.on("mixed_precision") == ["fp16"]
    shown.picker.config = RunConfig(mixed_precision="bf16", zero_stage=2, num_processes=2)
    assert shown.on("mixed_precision") == ["bf16"]
    assert shown.on("zero_stage") == ["2"]
    assert shown.field("num_processes").value == "2"
    assert [config.mixed_precision for config in seen] == ["fp16", "bf16"]
    assert seen[-1] is shown.picker.config
    shown.picker.undo()
    assert shown.on("mixed_precision") == ["fp16"]


@DEEPSPEED
def test_a_change_rebuilds_no_widget(show):
    """Else the keyboard would lose its place."""
    shown = show(model=net())
    shown.looked_up("zero_stage")
    before = [w.model_id for w in below(shown.view.root)]
    shown.press("zero_stage", "3")
    shown.press("mixed_precision", "bf16")
    shown.take("ZeRO-2")
    shown.picker.undo()
    shown.picker.undo()
    after = [w.model_id for w in below(shown.view.root)]
    # The place for a mistake is made with the first one: where DeepSpeed is not installed.
    assert [model_id for model_id in after if model_id in before] == before


def test_what_cannot_be_chosen_is_greyed_and_says_why(show):
    shown = show(inventory=WITHOUT_GPU)
    button = shown.button("device", "cuda")
    assert button.disabled
    assert "GPU" in button.tooltip
    assert f"Cuda: {button.tooltip}" in shown.text("device")
    assert not shown.button("device", "cpu").disabled
    shown.press("device", "cuda")  # as a front end that is behind may let it be pressed
    assert shown.picker.config == RunConfig()
    assert shown.on("device") == ["auto"]
    assert "Not taken" in shown.text("device")


@needs.DEEPSPEED_ROW
def test_a_wrong_number_is_told_beside_its_field_and_stays_to_be_mended(show):
    shown = show(config=RunConfig(zero_stage=2))
    before = shown.picker.config
    shown.field(BUCKET).value = "many"
    assert shown.picker.config is before
    assert "Not taken" in shown.text(BUCKET)
    assert "many" in shown.text(BUCKET)
    shown.press("mixed_precision", "bf16")  # something else does not take it away
    assert shown.field(BUCKET).value == "many"
    assert "Not taken" in shown.text(BUCKET)
    shown.field(BUCKET).value = "1000"
    assert "Not taken" not in shown.everything()
    assert shown.picker.config.deepspeed == {"zero_optimization": {"reduce_bucket_size": 1000}}


@DEEPSPEED
def test_yes_no_and_neither_tables_as_json_and_what_needs_another_choice(show):
    overlap = "zero_optimization.overlap_comm"
    shown = show()
    assert shown.field(BUCKET).disabled
    assert "Choose a ZeRO stage first" in shown.text(BUCKET)
    shown.press("zero_stage", "2")
    assert not shown.field(BUCKET).disabled
    assert "Choose a ZeRO stage first" not in shown.text(BUCKET)
    for label, kept in (("no", False), ("yes", True)):
        shown.pick(overlap, label)
        assert shown.picker.config.deepspeed == {"zero_optimization": {"overlap_comm": kept}}
    shown.pick(overlap, "default (no)")
    assert shown.picker.config.deepspeed == {}
    shown.press("zero_stage", "3")
    assert shown.field(overlap).options[0] == "default (yes)"
    shown = show(config=RunConfig(zero_stage=2, deepspeed={"optimizer": {"type": "AdamW"}}))
    shown.field("optimizer.params").value = '{"lr": 0.1}'
    assert shown.picker.config.deepspeed["optimizer"]["params"] == {"lr": 0.1}
    shown.field("optimizer.params").value = "lr = 0.2"
    assert "Not taken" in shown.text("optimizer.params")
    assert shown.picker.config.deepspeed["optimizer"]["params"] == {"lr": 0.1}


def test_what_is_shown_first_is_little_and_every_section_of_all_settings_opens(show):
    """Every widget is a message to the page, and time until the form is seen."""
    shown = show(model=net(), config=RunConfig(zero_stage=3))
    first = [field.setting.name for field in shown.view._first]
    assert first[:2] == ["num_processes", "mixed_precision"]
    assert len(first) <= 10
    assert not shown.view._listed
    assert len(list(below(shown.view.root))) < 100
    assert not shown.all("nbaccel-section")
    shown.one("nbaccel-opens-all").value = True
    assert not shown.view._listed
    for heading in shown.all("nbaccel-listed", "nbaccel-opens"):
        heading.value = True
    made = list(shown.view._listed)
    every = [s.name for panel in shown.picker._panels for s in settings(panel)]
    assert sorted(made) == sorted(every)


@needs.DEEPSPEED_ROW
def test_opening_makes_what_is_below_that_heading_and_nothing_else(show):
    shown = show(ZeroPicker(RunConfig(zero_stage=3), inventory=with_gpus(2)))
    first, fields = list(below(shown.view.root)), list(shown.view._listed)
    assert len([w for w in first if "nbaccel-opens" in w._dom_classes]) >= 5
    shown.one("nbaccel-panel-zero", "nbaccel-opens-zero").value = True
    made = [name for name in shown.view._listed if name not in fields]
    assert made == [
        setting.name
        for setting in settings("zero")
        if setting.section == by_name()["zero_optimization.sub_group_size"].section
    ]
    all_widgets = list(below(shown.view.root))
    shown.one("nbaccel-panel-zero", "nbaccel-opens-zero").value = False
    shown.one("nbaccel-panel-zero", "nbaccel-opens-zero").value = True
    assert list(below(shown.view.root)) == all_widgets, "opened again, nothing is made again"
    assert set(first) < set(all_widgets), "what was there stays: the keyboard keeps its place"


@DEEPSPEED
def test_what_was_set_before_a_section_is_made_is_right_when_it_is_opened(show, tmp_path):
    group = "zero_optimization.sub_group_size"
    gathers = "zero_optimization.stage3_gather_16bit_weights_on_model_save"
    shown = show(ZeroPicker(RunConfig(zero_stage=3), inventory=with_gpus(2)))
    shown.picker.choose(group, 1_000_000)
    path = tmp_path / "ds.json"
    path.write_text(
        json.dumps(
            {
                "zero_optimization": {
                    "stage": 3,
                    "sub_group_size": 7,
                    "stage3_gather_16bit_weights_on_model_save": False,
                }
            }
        )
    )
    shown.picker.load(path)
    assert not shown.all(css_of(group))
    section = shown.one("nbaccel-panel-zero", "nbaccel-opens-zero")
    assert section.description == "ZeRO (2 set)"
    section.value = True
    assert shown.field(group).value == "7"
    assert shown.field(gathers).options[shown.field(gathers).index] == "no"
    shown.picker.undo()
    assert shown.field(group).value == "1000000"
    assert section.description == "ZeRO (1 set)"


def test_fp8_opens_its_section_and_a_batch_that_does_not_fit_is_told_in_the_form(show):
    panel = show(PrecisionPicker(inventory=with_gpus(2)))
    section = panel.one("nbaccel-panel-precision", "nbaccel-opens-fp8")
    assert not section.value
    panel.press("mixed_precision", "fp8")
    assert section.value
    shown = show()
    backend = next(field for field in shown.view._first if field.setting.name == "fp8.backend")
    assert not backend.is_visible
    shown.press("mixed_precision", "fp8")
    assert backend.is_visible

    shown = show(Picker(model=torch.nn.Linear(10, 10), sample_batch=torch.ones(4, 7)))
    text = shown.everything()
    assert "Memory cannot be estimated" in text
    assert "Linear does not run with this sample_batch" in text
    assert "being estimated" not in text
    taken = next(line for line in text.splitlines() if "Memory cannot be estimated" in line)
    assert taken.count("does not run with this sample_batch") == 1


@needs.DEEPSPEED_ROW
@pytest.mark.parametrize(
    ("kind", "has", "lacks"),
    [
        (PrecisionPicker, "mixed_precision", "zero_stage"),
        (ZeroPicker, "zero_stage", "num_processes"),
        (LaunchPicker, "num_processes", "mixed_precision"),
    ],
)
def test_a_picker_of_one_panel_shows_that_alone(show, kind, has, lacks):
    shown = show(kind(inventory=WITHOUT_GPU))
    assert shown.all(css_of(has))
    assert not shown.all(css_of(lacks))
    assert not shown.all("nbaccel-suggest")
    labels = [shown.view._model.setting(name).label for name in (has, lacks)]
    assert [f"  {label}  " in str(shown.picker) for label in labels] == [True, False]
    assert repr(shown.picker) == f"{kind.__name__}(config=RunConfig())"


CELL = """
from nbaccel.notebook.pickers import configure
picker = configure()
picker.choose("mixed_precision", "bf16")
picker
"""


@needs.DEEPSPEED_ROW
def test_in_a_terminal_it_is_text():
    done = run_program(
        [sys.executable, "-m", "IPython", "--no-banner", "--simple-prompt", "-c", CELL], cwd=ROOT
    )
    assert "Every process holds the whole model" in done.stdout
    assert "picker.choose(name, value)" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr


def test_a_cell_shows_it_once_the_next_one_again_and_what_is_kept_follows(kernel):
    view = "application/vnd.jupyter.widget-view+json"
    setup = "from nbaccel.notebook.pickers import configure\npicker = configure()\npicker"
    first = kernel.run(setup).check()
    assert [view in shown for shown in first.displays] == [True, False]
    assert "nbaccel-static" in first.displays[1]["text/html"]
    model_id = first.displays[0][view]["model_id"]
    again = kernel.run("picker").check()
    assert again.displays[0][view]["model_id"] == model_id
    assert len(kernel.run("picker.show()\npicker").check().displays) == 2

    kernel.run("from nbaccel.notebook.pickers import configure\npicker = configure()").check()
    changes = 'picker.choose("mixed_precision", "fp16"); picker.choose("mixed_precision", "bf16")'
    told = kernel.run(changes).check().updates
    assert len(told) == 1, "two changes in a moment renew it once"
    assert "bf16" in told[0]["text/html"]
    assert "bf16" in told[0]["text/plain"]


SCRIPT = """
import sys
blocked = sys.argv[1:]
sys.modules.update(dict.fromkeys(blocked))
import nbaccel
try:
    picker = nbaccel.configure(config=nbaccel.RunConfig(num_processes=2))
    print(picker.config, "2 processes" in str(picker), "IPython" in sys.modules)
except nbaccel.NbaccelError as error:
    print(type(error).__name__, error)
"""


@pytest.mark.parametrize(
    ("blocked", "told"),
    [
        ([], "RunConfig(num_processes=2) True False"),
        (["ipywidgets", "IPython"], "RunConfig(num_processes=2) True True"),
        (["traitlets"], "MissingBackend A picker needs traitlets: traitlets is not installed"),
    ],
)
def test_in_a_script_it_needs_no_notebook(blocked, told):
    done = run_program([sys.executable, "-c", SCRIPT, *blocked], cwd=ROOT)
    assert told in done.stdout
