"""Pickers with their real widgets, driven as a front end drives them: by setting traits."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import datetime, timezone

import ipywidgets
import pytest
import torch
from traitlets import TraitError

from nbaccel.config import RunConfig
from nbaccel.errors import ConfigError
from nbaccel.notebook.picker.choices import by_name
from nbaccel.notebook.picker.fields import as_value
from nbaccel.notebook.picker.widgets import PickerView
from nbaccel.notebook.pickers import LaunchPicker, Picker, PrecisionPicker, ZeroPicker
from tests import needs
from tests.isolation import ROOT
from tests.kernel.kernel import Kernel
from tests.needs import DEEPSPEED
from tests.notebook.machines import WITHOUT_GPU, with_gpus

BUCKET = "zero_optimization.reduce_bucket_size"
OPTIMIZER_PLACE = "zero_optimization.offload_optimizer.device"


class Shown:
    """A picker as a front end has it."""

    def __init__(self, picker: Picker) -> None:
        self.picker = picker
        self.view: PickerView = picker._showing._live_view()

    def all(self, *css_classes: str) -> list[ipywidgets.Widget]:
        """Widgets with the last class, below one with each class before it."""
        found = [self.view.root]
        for css_class in css_classes:
            found = [w for top in found for w in _below(top) if css_class in w._dom_classes]
        return found

    def one(self, *css_classes: str) -> ipywidgets.Widget:
        found = self.all(*css_classes)
        assert len(found) == 1, f"{len(found)} widgets for {css_classes}"
        return found[0]

    def press(self, setting: str, option: str) -> None:
        self.one(_css(setting), f"nbaccel-option-{option}").value = True

    def field(self, setting: str) -> ipywidgets.Widget:
        """The line or list of a setting."""
        kinds = (ipywidgets.Text, ipywidgets.Dropdown)
        return next(w for w in _below(self.one(_css(setting))) if isinstance(w, kinds))

    def pick(self, setting: str, label: str) -> None:
        """Take an item of a list."""
        self.field(setting).index = self.field(setting).options.index(label)

    def text(self, setting: str) -> str:
        """What is written around a field."""
        return _text(self.one(_css(setting)))

    def everything(self) -> str:
        return _text(self.view.root)

    def on(self, setting: str) -> list[str]:
        """The options that are pressed."""
        buttons = _below(self.one(_css(setting)))
        return [w.description for w in buttons if getattr(w, "value", None) is True]


def _css(setting: str) -> str:
    return f"nbaccel-{setting.replace('.', '-')}"


def _below(widget: ipywidgets.Widget) -> Iterator[ipywidgets.Widget]:
    for child in getattr(widget, "children", ()):
        yield child
        yield from _below(child)


def _text(widget: ipywidgets.Widget) -> str:
    return "\n".join(
        w.value
        for w in _below(widget)
        if isinstance(w, ipywidgets.HTML) and "nbaccel-front" not in w._dom_classes
    )


def net(width: int = 8) -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.Linear(width, 2))


def big() -> torch.nn.Module:
    with torch.device("meta"):
        return torch.nn.Sequential(*(torch.nn.Linear(16384, 16384) for _ in range(22)))


@pytest.fixture
def show() -> Iterator[Callable[..., Shown]]:
    def show_it(picker: Picker | None = None, **arguments: object) -> Shown:
        return Shown(picker or Picker(**{"inventory": with_gpus(2), **arguments}))

    yield show_it
    ipywidgets.Widget.close_all()


# ------------------------------------------------------------------------------ two ways in
@DEEPSPEED
def test_what_is_pressed_is_what_python_holds(show):
    shown = show()
    shown.press("mixed_precision", "bf16")
    shown.press("zero_stage", "3")
    shown.press(OPTIMIZER_PLACE, "cpu")
    shown.field("num_processes").value = "2"
    assert shown.picker.config == RunConfig(
        num_processes=2,
        mixed_precision="bf16",
        zero_stage=3,
        deepspeed={"zero_optimization": {"offload_optimizer": {"device": "cpu"}}},
    )
    assert shown.on("mixed_precision") == ["bf16"]
    assert shown.on("zero_stage") == ["3"]
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


def test_only_a_configuration_is_a_configuration():
    picker = Picker(inventory=WITHOUT_GPU)
    with pytest.raises(TraitError):
        picker.config = {"mixed_precision": "bf16"}
    assert picker.config == RunConfig()


def test_a_refused_choice_leaves_picker_and_trait_alone():
    picker = Picker(inventory=WITHOUT_GPU)
    with pytest.raises(ConfigError, match="int4"):
        picker.choose("mixed_precision", "int4")
    assert picker.config == RunConfig()


def test_one_picker_begins_where_another_stands():
    first = PrecisionPicker(RunConfig(mixed_precision="bf16"), inventory=WITHOUT_GPU)
    assert ZeroPicker(first, inventory=WITHOUT_GPU).config == first.config


def test_pressing_what_is_chosen_leaves_it_chosen(show):
    shown = show()
    shown.press("mixed_precision", "bf16")
    shown.one("nbaccel-mixed_precision", "nbaccel-option-bf16").value = False
    assert shown.on("mixed_precision") == ["bf16"]
    assert shown.picker.config.mixed_precision == "bf16"


@needs.DEEPSPEED_ROW
def test_a_change_rebuilds_no_widget(show):
    """Else the keyboard would lose its place."""
    shown = show(model=net())
    before = [w.model_id for w in _below(shown.view.root)]
    shown.press("zero_stage", "3")
    shown.press("mixed_precision", "bf16")
    shown.picker.undo()
    after = [w.model_id for w in _below(shown.view.root)]
    # The place for a mistake is made with the first one: where DeepSpeed is not installed.
    assert [model_id for model_id in after if model_id in before] == before


# ------------------------------------------------------------------------------ greyed
def test_what_cannot_be_chosen_is_greyed_and_says_why(show):
    shown = show(inventory=WITHOUT_GPU)
    button = shown.one("nbaccel-device", "nbaccel-option-cuda")
    assert button.disabled
    assert "GPU" in button.tooltip
    assert f"cuda: {button.tooltip}" in shown.text("device")
    assert not shown.one("nbaccel-device", "nbaccel-option-cpu").disabled


def test_a_greyed_option_that_is_pressed_all_the_same_is_refused_in_sight(show):
    """A front end that is behind may let it be pressed."""
    shown = show(inventory=WITHOUT_GPU)
    shown.press("device", "cuda")
    assert shown.picker.config == RunConfig()
    assert shown.on("device") == ["auto"]
    assert "Not taken" in shown.text("device")


@DEEPSPEED
def test_a_whole_setting_is_greyed_until_what_it_needs_is_chosen(show):
    shown = show()
    assert shown.field(BUCKET).disabled
    assert "choose a ZeRO stage first" in shown.text(BUCKET)
    shown.press("zero_stage", "2")
    assert not shown.field(BUCKET).disabled
    assert "choose a ZeRO stage first" not in shown.text(BUCKET)


# ------------------------------------------------------------------------------ typed
@needs.DEEPSPEED_ROW
@pytest.mark.parametrize(
    ("typed", "kept"),
    [
        ("5e8", 500_000_000),
        ("500_000_000", 500_000_000),
        ("500,000,000", 500_000_000),
        (" 7 ", 7),
        ("auto", "auto"),
    ],
)
def test_a_number_is_read_as_people_type_it(show, typed, kept):
    shown = show(config=RunConfig(zero_stage=2))
    shown.field(BUCKET).value = typed
    assert shown.picker.config.deepspeed == {"zero_optimization": {"reduce_bucket_size": kept}}
    assert shown.field(BUCKET).value == str(kept)
    shown.field(BUCKET).value = ""
    assert shown.picker.config.deepspeed == {}


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


@needs.DEEPSPEED_ROW
def test_undo_takes_wrong_text_back_too(show):
    shown = show(config=RunConfig(zero_stage=2))
    shown.picker.choose("mixed_precision", "bf16")
    shown.field(BUCKET).value = "many"
    shown.one("nbaccel-undo").click()
    assert shown.field(BUCKET).value == ""
    assert "Not taken" not in shown.everything()


@needs.DEEPSPEED_ROW
def test_yes_no_and_neither(show):
    overlap = "zero_optimization.overlap_comm"
    shown = show(config=RunConfig(zero_stage=2))
    for label, kept in (("no", False), ("yes", True)):
        shown.pick(overlap, label)
        assert shown.picker.config.deepspeed == {"zero_optimization": {"overlap_comm": kept}}
    shown.pick(overlap, "default")
    assert shown.picker.config.deepspeed == {}


# ------------------------------------------------------------------------------ advanced
@needs.DEEPSPEED_ROW
def test_advanced_settings_are_made_when_they_are_opened(show):
    shown = show(config=RunConfig(zero_stage=3))
    group = "zero_optimization.sub_group_size"
    assert not shown.all(_css(group))
    shown.one("nbaccel-panel-zero", "nbaccel-opens-advanced").value = True
    assert not shown.all(_css(group))
    shown.one("nbaccel-panel-zero", "nbaccel-opens-zero").value = True
    shown.field(group).value = "1e6"
    assert shown.picker.config.deepspeed == {"zero_optimization": {"sub_group_size": 1_000_000}}
    assert shown.one("nbaccel-panel-zero", "nbaccel-opens-zero").description == "ZeRO (1 set)"
    assert shown.one("nbaccel-panel-zero", "nbaccel-opens-advanced").description.endswith("set)")


def test_every_advanced_section_opens(show):
    """All of the more than a hundred fields can be made, and none is made twice."""
    shown = show(config=RunConfig(zero_stage=3))
    for _ in range(2):  # those inside others the second time
        for heading in shown.all("nbaccel-opens"):
            heading.value = True
    made = list(shown.view._fields)
    assert len(made) == len(set(made))
    every = [s.name for panel in shown.picker._panels for s in shown.view._model.settings(panel)]
    assert sorted(made) == sorted(every)


def test_what_is_shown_first_has_the_common_fields_alone(show):
    """Every widget is a message to the page, and time until the form is seen."""
    shown = show(model=net(), config=RunConfig(zero_stage=3))
    common = [
        setting.name
        for panel in shown.picker._panels
        for setting in shown.view._model.settings(panel)
        if not setting.section
    ]
    assert list(shown.view._fields) == common
    assert len(list(_below(shown.view.root))) < 150
    assert not shown.all("nbaccel-section")


@needs.DEEPSPEED_ROW
def test_opening_makes_what_is_below_that_heading_and_nothing_else(show):
    shown = show(config=RunConfig(zero_stage=3))
    first, fields = list(_below(shown.view.root)), list(shown.view._fields)
    shown.one("nbaccel-panel-zero", "nbaccel-opens-advanced").value = True
    advanced = shown.one("nbaccel-panel-zero", "nbaccel-section")
    headings = [w for w in _below(advanced) if "nbaccel-opens" in w._dom_classes]
    assert len(headings) > 5
    assert list(shown.view._fields) == fields
    # One box around them, and a box with a button for each.
    assert len(list(_below(shown.view.root))) == len(first) + 1 + 2 * len(headings)

    shown.one("nbaccel-panel-zero", "nbaccel-opens-zero").value = True
    made = [name for name in shown.view._fields if name not in fields]
    assert made == [
        setting.name
        for setting in shown.view._model.settings("zero")
        if setting.section == by_name()["zero_optimization.sub_group_size"].section
    ]
    all_widgets = list(_below(shown.view.root))
    shown.one("nbaccel-panel-zero", "nbaccel-opens-zero").value = False
    shown.one("nbaccel-panel-zero", "nbaccel-opens-zero").value = True
    assert list(_below(shown.view.root)) == all_widgets, "opened again, nothing is made again"
    assert set(first) < set(all_widgets), "what was there stays: the keyboard keeps its place"


@DEEPSPEED
def test_what_was_set_before_a_section_is_made_is_right_when_it_is_opened(show, tmp_path):
    group, rounding = "zero_optimization.sub_group_size", "zero_optimization.round_robin_gradients"
    shown = show(config=RunConfig(zero_stage=3))
    shown.picker.choose(group, 1_000_000)
    assert "set)" in shown.one("nbaccel-panel-zero", "nbaccel-opens-advanced").description
    path = tmp_path / "ds.json"
    path.write_text(
        json.dumps(
            {"zero_optimization": {"stage": 3, "sub_group_size": 7, "round_robin_gradients": True}}
        )
    )
    shown.picker.load(path)
    assert not shown.all(_css(group))
    shown.one("nbaccel-panel-zero", "nbaccel-opens-advanced").value = True
    section = shown.one("nbaccel-panel-zero", "nbaccel-opens-zero")
    assert section.description == "ZeRO (2 set)"
    section.value = True
    assert shown.field(group).value == "7"
    assert shown.field(rounding).options[shown.field(rounding).index] == "yes"
    shown.picker.undo()
    assert shown.field(group).value == "1000000"
    assert section.description == "ZeRO (1 set)"


def test_each_kind_of_setting_can_be_typed():
    typed_kinds = {setting.kind for setting in by_name().values()} - {"one-of", "truth"}
    assert {str(as_value("7", kind)) for kind in typed_kinds} == {"7", "7.0", "['7']"}


@needs.DEEPSPEED_ROW
def test_a_table_is_typed_as_json(show):
    shown = show(config=RunConfig(zero_stage=2, deepspeed={"optimizer": {"type": "AdamW"}}))
    for _ in range(2):
        for heading in shown.all("nbaccel-opens"):
            heading.value = True
    shown.field("optimizer.params").value = '{"lr": 0.1}'
    assert shown.picker.config.deepspeed["optimizer"]["params"] == {"lr": 0.1}
    shown.field("optimizer.params").value = "lr = 0.2"
    assert "Not taken" in shown.text("optimizer.params")
    assert shown.picker.config.deepspeed["optimizer"]["params"] == {"lr": 0.1}


def test_fp8_opens_its_recipe(show, monkeypatch):
    shown = show()
    section = shown.one("nbaccel-panel-precision", "nbaccel-opens-fp8")
    assert not section.value
    shown.press("mixed_precision", "fp8")
    assert section.value
    assert shown.field("fp8.backend").options


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
    assert shown.all(_css(has))
    assert not shown.all(_css(lacks))
    assert not shown.all("nbaccel-suggest")
    labels = [shown.view._model.setting(name).label for name in (has, lacks)]
    assert [f"  {label}  " in str(shown.picker) for label in labels] == [True, False]


# ------------------------------------------------------------------------------ what it comes to
@DEEPSPEED
def test_memory_is_drawn_anew_with_each_change(show):
    shown = show(model=big())
    shown.press("mixed_precision", "bf16")
    bars = shown.one("nbaccel-bars")
    plain = bars.value
    assert "nbaccel-lacks" in plain
    assert "too little" in plain
    shown.press("zero_stage", "3")
    assert bars.value != plain


@needs.DEEPSPEED_ROW
def test_the_remedy_of_the_verdict_is_what_suggest_does(show):
    shown = show(model=big())
    assert "Suggest" in _text(shown.one("nbaccel-memory"))
    shown.one("nbaccel-suggest").click()
    assert shown.picker.config.uses_deepspeed
    assert "nbaccel-lacks" not in shown.everything()
    assert "Suggested" in shown.everything()
    assert shown.one("nbaccel-suggest").description == "Suggest"
    shown.one("nbaccel-undo").click()
    assert shown.picker.config == RunConfig()
    assert shown.one("nbaccel-undo").disabled


def test_suggest_says_when_nothing_fits(show):
    shown = show(model=big(), inventory=WITHOUT_GPU)
    shown.one("nbaccel-suggest").click()
    assert "Not taken" in shown.everything()
    assert shown.picker.config == RunConfig()


def test_without_a_model_suggest_is_greyed_and_says_why(show):
    button = show().one("nbaccel-suggest")
    assert button.disabled
    assert "model" in button.tooltip


@DEEPSPEED
def test_the_faces_are_those_of_the_model(show):
    shown = show()
    assert shown.one("nbaccel-face-deepspeed-json").disabled
    shown.press("mixed_precision", "bf16")
    shown.one("nbaccel-face-python").value = True
    assert "RunConfig(" in _text(shown.one("nbaccel-faces"))
    shown.one("nbaccel-face-resolved").value = True
    assert "<table" in _text(shown.one("nbaccel-faces"))
    shown.press("zero_stage", "1")
    shown.one("nbaccel-face-deepspeed-json").value = True
    assert "&quot;stage&quot;: 1" in _text(shown.one("nbaccel-faces"))


# ------------------------------------------------------------------------------ files
@pytest.fixture
def files(show) -> Shown:
    shown = show()
    shown.one("nbaccel-opens-load-or-save").value = True
    return shown


def uploaded(content: bytes) -> object:
    """A file as a front end sends it."""
    if ipywidgets.__version__.startswith("7."):
        return {"run.json": {"metadata": {"name": "run.json"}, "content": content}}
    when = datetime(2026, 1, 1, tzinfo=timezone.utc)
    return (
        {
            "name": "run.json",
            "type": "application/json",
            "size": len(content),
            "content": memoryview(content),
            "last_modified": when,
        },
    )


@DEEPSPEED
def test_mistakes_of_what_is_pasted_are_told_there_and_beside_their_fields(files):
    wrong = {"gradient_clipping": "much", "zero_optimization": {"stage": 2, "overlap_com": True}}
    files.one("nbaccel-paste").value = json.dumps(wrong)
    files.one("nbaccel-take-over").click()
    assert files.picker.config == RunConfig()
    told = files.one("nbaccel-load-errors").value
    assert "overlap_comm" in told
    assert "much" in told
    assert "much" in files.text("gradient_clipping")
    assert files.one("nbaccel-paste").value, "it stays to be mended"

    right = {"gradient_clipping": 0.5, "zero_optimization": {"stage": 2, "overlap_comm": True}}
    files.one("nbaccel-paste").value = json.dumps(right)
    files.one("nbaccel-take-over").click()
    assert files.picker.config.zero_stage == 2
    assert files.field("gradient_clipping").value == "0.5"
    assert "Not taken" not in files.everything()
    assert not files.one("nbaccel-paste").value


@needs.DEEPSPEED_ROW
def test_what_is_typed_wrong_stays_told_until_something_is_loaded(files):
    files.press("zero_stage", "2")
    files.field(BUCKET).value = "many"
    files.one("nbaccel-paste").value = "{"
    files.one("nbaccel-take-over").click()
    assert "Not taken" in files.text(BUCKET)
    files.one("nbaccel-paste").value = "{}"
    files.one("nbaccel-take-over").click()
    assert "Not taken" not in files.everything()
    assert files.field(BUCKET).value == ""


def test_a_file_is_loaded_by_path_and_by_upload(files, tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("mixed_precision: bf16\n")
    files.one("nbaccel-path").value = str(path)
    files.one("nbaccel-load").click()
    assert files.picker.config.mixed_precision == "bf16"
    upload = files.one("nbaccel-upload")
    upload.set_trait("value", uploaded(b'{"num_processes": 2}'))
    assert files.picker.config == RunConfig(num_processes=2)
    assert not upload.value


def test_what_nobody_expects_is_shown_as_well(files):
    files.one("nbaccel-upload").set_trait("value", uploaded(b"\xff\xfe\xff"))
    assert "UnicodeDecodeError" in files.everything()
    assert files.picker.config == RunConfig()


@DEEPSPEED
def test_what_is_saved_is_what_is_loaded(files, tmp_path):
    files.press("mixed_precision", "bf16")
    files.press("zero_stage", "2")
    path = tmp_path / "ds.json"
    files.one("nbaccel-target").value = str(path)
    saved_as = next(w for w in files.all("nbaccel-row", "nbaccel-save-as"))
    saved_as.value = "DeepSpeed JSON"
    files.one("nbaccel-save").click()
    assert f"Saved to {path}" in files.everything()
    assert json.loads(path.read_text())["zero_optimization"] == {"stage": 2}
    other = Picker(inventory=with_gpus(2))
    other.load(path)
    assert other.config.zero_stage == 2


def test_what_cannot_be_saved_is_told(files, tmp_path):
    files.one("nbaccel-target").value = str(tmp_path / "nowhere" / "run.yaml")
    files.one("nbaccel-save").click()
    assert "cannot be written" in files.one("nbaccel-load-errors").value


# ------------------------------------------------------------------------------ where it is shown
def test_a_picker_is_named_and_told():
    picker = Picker(RunConfig(mixed_precision="bf16"), inventory=WITHOUT_GPU)
    assert repr(picker) == "Picker(config=RunConfig(mixed_precision='bf16'))"
    assert eval(repr(picker.config)) == picker.config
    assert "bf16" in str(picker)
    assert "Memory" in str(picker)


CELL = """
from nbaccel.notebook.pickers import configure
picker = configure()
picker.choose("mixed_precision", "bf16")
picker
"""


@needs.DEEPSPEED_ROW
def test_in_a_terminal_it_is_text():
    done = subprocess.run(
        [sys.executable, "-m", "IPython", "--no-banner", "--simple-prompt", "-c", CELL],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    assert "Every process holds the whole model" in done.stdout
    assert "picker.choose(name, value)" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr


def test_a_cell_shows_it_once_and_the_next_cell_again(kernel: Kernel):
    view = "application/vnd.jupyter.widget-view+json"
    setup = "from nbaccel.notebook.pickers import configure\npicker = configure()\npicker"
    first = kernel.run(setup).check()
    assert [view in shown for shown in first.displays] == [True, False]
    model_id = first.displays[0][view]["model_id"]
    again = kernel.run("picker").check()
    assert again.displays[0][view]["model_id"] == model_id
    assert len(kernel.run("picker.show()\npicker").check().displays) == 2


TELL_MEASUREMENTS = """
import threading, torch
from nbaccel.memory import activations
from nbaccel.notebook.pickers import Picker
measure, calls = activations.measure_activations, []
def told(*arguments, **options):
    print("measured", flush=True)
    for call in calls:
        call()
    return measure(*arguments, **options)
activations.measure_activations = told
picker = Picker(model=torch.nn.Linear(4, 4), sample_batch=torch.randn(2, 4))
"""


@pytest.fixture
def measured(kernel: Kernel) -> Iterator[Kernel]:
    """A kernel with a picker, in which each measurement of activations is printed."""
    kernel.run(TELL_MEASUREMENTS).check()
    yield kernel
    kernel.run("activations.measure_activations = measure").check()


def test_the_form_is_sent_before_the_memory_is_estimated_and_its_table_has_it_in_the_end(
    measured: Kernel,
):
    running = measured.begin("picker.show()")
    measured.until(running, "measured")
    form, table = running[1].displays
    assert "application/vnd.jupyter.widget-view+json" in form
    assert "Memory is being estimated …" in table["text/html"]
    told = measured.finish(running).check()
    assert len(told.displays) == 3
    assert "Memory is being estimated" not in told.displays[-1]["text/html"]
    for words in ("host memory: needs", "activations", "Fits: "):
        assert words in told.displays[-1]["text/html"]
        assert words in told.displays[-1]["text/plain"]


def test_a_choice_does_not_wait_for_all_estimates(measured: Kernel):
    """A front end may hand it on in another thread."""
    choosing = """
    def choose():
        picker.choose("num_processes", 2)
        print("chosen", flush=True)
    chooser = threading.Thread(target=choose)
    calls.append(lambda: chooser.ident or chooser.start())
    picker.show()
    chooser.join()
    """
    said = measured.run(choosing).check().stdout.split()
    assert said.count("measured") > 1
    assert said.index("chosen") < len(said) - 1, "the last measurement came after it"


def test_the_table_beside_it_follows_at_the_latest_when_the_cell_ends(kernel: Kernel):
    kernel.run("from nbaccel.notebook.pickers import configure\npicker = configure()").check()
    changes = 'picker.choose("mixed_precision", "fp16"); picker.choose("mixed_precision", "bf16")'
    told = kernel.run(changes).check().displays
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
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *blocked],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=True,
        timeout=800,
    )
    assert told in done.stdout
