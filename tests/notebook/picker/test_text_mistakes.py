"""Mistakes of a configuration are told at the lines of its text."""

from __future__ import annotations

import json

import pytest

from nbaccel.errors import ConfigError
from nbaccel.notebook.picker.model import PickerModel
from nbaccel.notebook.picker.text_mistakes import key_lines, mistakes_in_text
from tests import needs
from tests.notebook.machines import WITHOUT_GPU

CONFIG = {
    "train_batch_size": "many",
    "optimizer": {"type": "AdamW", "params": {"lr": 0.1, "betas": [0.9, 0.99]}},
    "zero_optimization": {
        "stge": 2,
        "offload_optimizer": {"device": "cpu"},
        "offload_param": {"device": "cpu"},
    },
}


def lines_of(text: str) -> dict[str, int]:
    return {".".join(path): line for path, line in key_lines(text).items()}


def test_keys_of_json_are_found_in_their_sections():
    text = json.dumps(CONFIG, indent=2)
    lines = lines_of(text)
    written = text.splitlines()
    for key, line in lines.items():
        assert f'"{key.rpartition(".")[2]}"' in written[line - 1], key
    first, second = (
        lines[f"zero_optimization.{name}.device"] for name in ("offload_optimizer", "offload_param")
    )
    assert second == first + 3


def test_keys_of_json_in_one_line_in_lists_and_behind_tabs():
    assert lines_of(json.dumps(CONFIG))["zero_optimization.stge"] == 1
    text = '{"a": {\n\t"b": [1, {"c": 2}],\n"d": "x: {y"}}'
    assert lines_of(text) == {"a": 1, "a.b": 2, "a.b.c": 2, "a.d": 3}


def test_keys_of_yaml_are_found_by_their_indentation():
    text = "a: 1\nzero:\n  stage: 2\n  offload:\n    device: cpu\nb: 2\n"
    wanted = {"a": 1, "zero": 2, "zero.stage": 3, "zero.offload": 4}
    assert lines_of(text) == {**wanted, "zero.offload.device": 5, "b": 6}


@pytest.fixture
def model():
    return PickerModel(inventory=WITHOUT_GPU)


@needs.DEEPSPEED_ROW
@pytest.mark.parametrize("indent", [0, 2])
def test_each_mistake_is_at_its_key(model, indent):
    text = json.dumps(CONFIG, indent=indent)
    found = mistakes_in_text(text, model.check_source)
    written = text.splitlines()
    told = {written[mistake.line - 1].strip() for mistake in found if mistake.line}
    assert '"train_batch_size": "many",' in told
    assert '"stge": 2,' in told
    assert [mistake.line for mistake in found] == sorted(mistake.line for mistake in found)
    assert any("Did you mean 'stage'?" in mistake.message for mistake in found)


@pytest.mark.parametrize(
    ("text", "line", "told"),
    [
        ('{\n  "num_processes": 2\n  "device": "cpu"\n}', 3, "delimiter"),
        ('{\n  "num_processes": 2', 2, "cut off"),
        ('{\n  // both\n  "num_processes": 2\n}', 2, "no comments"),
        ('{\n  "num_processes": 2 # both\n}', 2, "no comments"),
        ('{\n  "num_processes": 2,\n}', 2, "one too many"),
        ("{\n  'num_processes': 2\n}", 2, "double quotes"),
        ('{\n  "device":\n  \u201ccpu\u201d}', 3, "double quotes"),
        ("num_processes: 2\nmixed_precision: bf17\n", 2, "bf17"),
        ("num_processes: 2\n  device: cpu\n", 2, "YAML"),
        ('{\n"num_processes": 0,\n"num_nodes": 0\n}', 2, "num_processes"),
    ],
)
def test_the_line_of_the_first_mistake(model, text, line, told):
    first, *_ = mistakes_in_text(text, model.check_source)
    assert (first.line, told in first.message) == (line, True)


def test_a_right_text_has_no_mistakes(model):
    assert mistakes_in_text('{"num_processes": 2}', model.check_source) == ()
    assert mistakes_in_text("mixed_precision: bf16", model.check_source) == ()


def test_a_mistake_of_the_whole_has_no_line():
    def refuse(_: str) -> None:
        raise ConfigError("These do not go together.", "device=3 is no device.")

    found = mistakes_in_text('{"device": 3}', refuse)
    assert [(mistake.line, mistake.message) for mistake in found] == [
        (1, "device=3 is no device."),
        (None, "These do not go together."),
    ]
