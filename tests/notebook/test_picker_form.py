"""The form: what fits, proposals, the list of all settings, the editor and its files."""

from __future__ import annotations

import html
import json
import re
import threading

import pytest

from nbaccel.config import RunConfig
from nbaccel.notebook.picker import widgets
from nbaccel.notebook.picker.choices import by_name
from nbaccel.notebook.picker.widgets import search_settings
from nbaccel.notebook.pickers import Picker
from tests import needs
from tests.needs import DEEPSPEED
from tests.notebook.machines import WITHOUT_GPU, with_gpus
from tests.notebook.shown import BUCKET, Shown, big, net, show

__all__ = ["show"]


def test_a_press_that_another_thread_hands_on_while_the_state_is_shown_is_not_lost(
    show, monkeypatch
):
    """JupyterLab hands the messages of widgets on in several threads."""
    shown = show(model=big(), config=RunConfig(mixed_precision="bf16"))
    presser = threading.Thread(target=shown.take, args=("FSDP",))
    told = widgets._candidate_text

    def press_meanwhile(candidate):
        if not presser.ident:
            presser.start()
            presser.join(0.2)  # it waits for what this thread holds
        return told(candidate)

    monkeypatch.setattr(widgets, "_candidate_text", press_meanwhile)
    shown.picker.choose("mixed_precision", "fp16")
    presser.join()
    assert shown.picker.config == RunConfig(mixed_precision="fp16", strategy="fsdp")
    assert shown.taken() == ["FSDP"]


@DEEPSPEED
def test_one_click_takes_a_way_and_pressed_again_it_stays_taken(show):
    shown = show(model=big(), config=RunConfig(mixed_precision="bf16"))
    shown.take("ZeRO-2")
    assert shown.taken() == ["ZeRO-2"]
    assert shown.picker.config.zero_stage == 2
    assert "ZeRO-2" in shown.one("nbaccel-taken-line").value
    next(w for w in shown.candidates() if w.value).value = False
    assert shown.taken() == ["ZeRO-2"]
    shown.one("nbaccel-undo").click()
    assert shown.taken() == ["one copy each (DDP)"]
    assert shown.one("nbaccel-undo").disabled


def test_the_machine_is_drawn_with_what_is_used_and_what_cannot_be_taken_is_greyed(
    show, monkeypatch
):
    shown = show(model=net(), inventory=with_gpus(3))
    shown.field("num_processes").value = "2"
    drawn = shown.one("nbaccel-machine").value
    assert drawn.count("nbaccel-used") == 2
    assert "GPU 2" in drawn
    shown.field("num_processes").value = ""
    assert shown.field("num_processes").placeholder == "3 processes"

    shown = show(model=net(), inventory=WITHOUT_GPU)
    fsdp = next(w for w in shown.candidates() if w.description == "FSDP")
    assert fsdp.disabled
    assert "two processes" in fsdp.tooltip
    assert "two processes" in shown.one("nbaccel-bars").value

    def fail(name: str) -> None:
        raise ZeroDivisionError(name)

    shown = show(model=net())
    monkeypatch.setattr(shown.view._model, "take", fail)
    shown.take("FSDP")
    assert "ZeroDivisionError: FSDP" in shown.everything(), "what nobody expects, as well"
    assert shown.picker.config == RunConfig()


def test_open_fields_show_what_they_come_to_and_without_a_model_how_to_give_one(show):
    shown = show(model=net(), config=RunConfig(zero_stage=2))
    assert shown.field("num_processes").placeholder == "2 processes"
    assert "One per GPU, 2 found." in shown.text("num_processes")
    assert shown.field("timeout").placeholder == "no limit"
    assert shown.field("hostfile").placeholder == "none"
    assert shown.field(BUCKET).placeholder == "500,000,000 elements"
    assert "https://www.deepspeed.ai/docs/" in shown.text(BUCKET)
    shown.field(BUCKET).value = "7"
    assert "Default." not in shown.text(BUCKET)

    shown = show()
    assert not shown.candidates()
    assert "configure(model, batch)" in shown.everything()
    assert "With a model" in shown.everything()
    button = shown.one("nbaccel-suggest")
    assert button.disabled
    assert "model" in button.tooltip

    shown = show(config=RunConfig(zero_stage=2))
    shown.one("nbaccel-opens-all").value = True
    shown.one("nbaccel-search").value = "restarts"
    assert shown.all("nbaccel-found", "nbaccel-max_restarts")
    assert "nbaccel-hidden" in shown.one("nbaccel-listed")._dom_classes
    assert "1 found" in shown.one("nbaccel-found-count").value
    shown.one("nbaccel-search").value = "no such thing at all"
    assert "Nothing found" in shown.one("nbaccel-found-count").value
    shown.one("nbaccel-search").value = ""
    assert "nbaccel-hidden" not in shown.one("nbaccel-listed")._dom_classes
    assert shown.one("nbaccel-found-count").value == ""


@needs.DEEPSPEED_ROW
def test_suggest_proposes_and_a_click_takes_one(show):
    shown = show(model=big())
    assert "would fit" in shown.one("nbaccel-taken-line").value
    shown.one("nbaccel-suggest").click()
    assert shown.picker.config == RunConfig(), "a proposal is nothing that was taken"
    proposals = shown.all("nbaccel-take")
    assert 1 <= len(proposals) <= 3
    assert all(proposal.description.startswith("Use this: ") for proposal in proposals)
    assert "Why not the others" in shown.everything()
    assert shown.one("nbaccel-suggest").description == "Suggest"
    proposals[0].click()
    assert shown.picker.config != RunConfig()
    assert "Fits: " in shown.one("nbaccel-taken-line").value
    assert "Suggested: " in shown.everything()
    assert "nbaccel-hidden" in shown.one("nbaccel-proposals")._dom_classes
    shown.one("nbaccel-undo").click()
    assert shown.picker.config == RunConfig()
    assert shown.one("nbaccel-undo").disabled


@DEEPSPEED
def test_memory_is_shown_place_by_place_when_asked_for(show):
    shown = show(model=big())
    shown.one("nbaccel-opens-memory-place-by-place").value = True
    told = shown.one("nbaccel-memory").value
    assert "cuda:1" in told
    assert "host memory" in told
    shown.take("ZeRO-3")
    assert shown.one("nbaccel-memory").value != told


@needs.DEEPSPEED_ROW
@pytest.mark.parametrize(
    ("words", "first"),
    [
        ("bucket", BUCKET),
        ("reduce_bucket", BUCKET),
        ("clipping", "gradient_clipping"),
        ("zero_optimization.stage", "zero_stage"),
        ("restarts", "max_restarts"),
    ],
)
def test_a_setting_is_found_by_its_label_its_key_and_its_meaning(words, first):
    found = search_settings(words, list(by_name().values()))
    assert found[0].name == first


@pytest.fixture
def files(show) -> Shown:
    shown = show()
    shown.one("nbaccel-opens-editor").value = True
    return shown


@DEEPSPEED
def test_mistakes_of_what_is_typed_are_told_at_their_lines_before_anything_is_taken(files):
    wrong = {"gradient_clipping": "much", "zero_optimization": {"stage": 2, "overlap_com": True}}
    files.one("nbaccel-text").value = json.dumps(wrong, indent=2)
    assert files.picker.config == RunConfig()
    told = html.unescape(files.one("nbaccel-text-mistakes").value)
    assert "2 mistakes" in told
    assert re.search(r'data-line="2".*much.*data-line="5".*overlap_comm', told, re.DOTALL)
    assert files.one("nbaccel-apply").disabled

    right = {"gradient_clipping": 0.5, "zero_optimization": {"stage": 2, "overlap_comm": True}}
    files.one("nbaccel-text").value = json.dumps(right)
    assert "No mistakes" in files.one("nbaccel-text-mistakes").value
    files.one("nbaccel-apply").click()
    assert files.picker.config.zero_stage == 2
    assert files.field("gradient_clipping").value == "0.5"
    assert "Not taken" not in files.everything()
    assert json.loads(files.one("nbaccel-text").value).items() >= right.items()
    assert files.one("nbaccel-apply").disabled


def test_the_editor_follows_what_is_chosen_or_loaded_by_path(files, tmp_path):
    files.press("mixed_precision", "bf16")
    assert json.loads(files.one("nbaccel-text").value) == {"mixed_precision": "bf16"}
    files.one("nbaccel-text").value = '{"mixed_precision": "fp16"'
    files.picker.choose("num_processes", 2)
    assert files.one("nbaccel-text").value == '{"mixed_precision": "fp16"'
    assert 'data-line="1"' in files.one("nbaccel-text-mistakes").value
    files.one("nbaccel-revert").click()
    chosen = {"mixed_precision": "bf16", "num_processes": 2}
    assert json.loads(files.one("nbaccel-text").value) == chosen
    assert "mistake" not in files.one("nbaccel-text-mistakes").value

    path = tmp_path / "run.yaml"
    path.write_text("mixed_precision: bf16\n")
    files.one("nbaccel-path").value = str(path)
    files.one("nbaccel-load").click()
    assert files.picker.config.mixed_precision == "bf16"
    path.write_bytes(b"\xff\xfe\xff")
    files.one("nbaccel-load").click()
    assert "cannot be read" in files.one("nbaccel-load-errors").value
    assert files.picker.config.mixed_precision == "bf16"


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
    files.one("nbaccel-target").value = str(tmp_path / "nowhere" / "run.yaml")
    files.one("nbaccel-save").click()
    assert "cannot be written" in files.one("nbaccel-load-errors").value
