from __future__ import annotations

import json
import sys

import pytest

from nbaccel.config import RunConfig
from nbaccel.errors import ConfigError
from nbaccel.notebook.picker.config_text import mistakes_in_text
from nbaccel.notebook.picker.model import PickerModel
from tests import needs
from tests.notebook.machines import WITHOUT_GPU

FILE = {"zero_optimization": {"stage": 2}, "bf16": {"enabled": True}, "gradient_clipping": 0.5}


@pytest.fixture
def picker():
    return PickerModel(RunConfig(num_processes=2), inventory=WITHOUT_GPU)


@needs.DEEPSPEED
@pytest.mark.parametrize("form", ["mapping", "text", "file"])
def test_deepspeeds_file_is_laid_over_the_run(picker, form, tmp_path):
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(FILE))
    picker.load({"mapping": FILE, "text": json.dumps(FILE), "file": path}[form])

    assert picker.config == RunConfig(num_processes=2, deepspeed=FILE)
    picker.undo()
    assert picker.config == RunConfig(num_processes=2)


@needs.DEEPSPEED
def test_a_file_of_something_else_is_refused_and_all_mistakes_are_told(picker):
    before = picker.config
    with pytest.raises(ConfigError, match=r"none of these keys.*architectures, n_embd"):
        picker.load({"architectures": ["GPT2LMHeadModel"], "n_embd": 768})
    assert picker.config == before
    picker.load({"activation_checkpointing": {}, "steps_per_print": 9})
    assert picker.config.deepspeed == {"activation_checkpointing": {}, "steps_per_print": 9}

    wrong = {
        "zero_optimization": {"stge": 2, "reduce_bucket_size": -1},
        "gradient_cliping": 1.0,
        "train_batch_size": "many",
    }
    before = picker.config
    with pytest.raises(ConfigError) as caught:
        picker.load(wrong)

    assert picker.config == before
    told = str(caught.value)
    for words in (
        "got -1",
        "got 'many'",
        "Did you mean 'stage'?",
        "Did you mean 'gradient_clipping'?",
    ):
        assert words in told


@needs.DEEPSPEED_ROW
def test_misspelt_keys_are_told_where_deepspeed_is_not_installed(picker, monkeypatch):
    monkeypatch.setitem(sys.modules, "deepspeed", None)  # Python refuses its import
    wrong = {
        "zero_optimization": {
            "stge": 2,
            "reduce_bucket_size": -1,
            "offload_optimizer": {"devise": "cpu"},
        },
        "gradient_cliping": 1.0,
        "optimiser": {"param": {}},
        "overlap_comm": True,
    }
    before = picker.config
    with pytest.raises(ConfigError) as caught:
        picker.load(wrong)
    told = str(caught.value)
    for given, meant in (
        ("zero_optimization.stge=2", "'stage'"),
        ("zero_optimization.offload_optimizer.devise='cpu'", "'device'"),
        ("gradient_cliping=1.0", "'gradient_clipping'"),
        ("optimiser={", "'optimizer'"),
        ("optimizer.param={}", "'params'"),
    ):
        assert f"got {given}" in told
        assert f"Did you mean {meant}?" in told
    assert "overlap_comm is no key that nbaccel knows of DeepSpeed" in told
    assert "It belongs in zero_optimization." in told
    assert "got -1" in told
    assert picker.config == before


@needs.DEEPSPEED_ROW
def test_saving_is_whole_or_not_at_all(picker, tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("what was there")
    with pytest.raises(ConfigError, match="There is no 'DeepSpeed JSON' to save"):
        picker.save(path, "DeepSpeed JSON")
    assert path.read_text() == "what was there"

    picker.save(path)
    assert RunConfig.from_yaml(path.read_text()) == picker.config
    picker.choose("zero_stage", 3)
    picker.save(tmp_path / "ds.json", "DeepSpeed JSON")
    assert json.loads((tmp_path / "ds.json").read_text())["zero_optimization"] == {"stage": 3}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ds.json", "run.yaml"]
    with pytest.raises(ConfigError, match="cannot be written"):
        picker.save(tmp_path / "no" / "folder" / "run.yaml")


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ({"num_proceses": 4}, "Did you mean 'num_processes'?"),
        ({"mixed_precison": "bf16", "num_processes": 2}, "Did you mean 'mixed_precision'?"),
        ({"num_processes": 4, "zero_stage": 2, "foo": 1}, "foo is no setting of RunConfig"),
        ('{"zero_optimization": {', "cannot be read from JSON"),
        ("a: b: c\nd", "cannot be read from JSON or YAML"),
        ("[1, 2]", "holds no settings"),
        ("hello", "holds no settings"),
        ("no/such/file.json", "cannot be read"),
        ("   ", "is empty"),
        ('{"gradient_clipping": 1, "gradient_clipping": 2}', "more than once"),
        ("num_processes: 0\n", "num_processes must be"),
    ],
)
def test_what_cannot_be_read_or_is_misspelt_is_told(picker, source, told):
    before = picker.config
    with pytest.raises(ConfigError) as caught:
        picker.load(source)
    assert told in str(caught.value)
    assert isinstance(source, str) or "DeepSpeed" not in str(caught.value), "no file of a strategy"
    assert picker.config == before


@pytest.mark.parametrize(
    ("text", "line", "told"),
    [
        ('{\n  "num_processes": 2\n  "device": "cpu"\n}', 3, "delimiter"),
        ('{\n  "num_processes": 2', 2, "delimiter"),
        ('{\n  // both\n  "num_processes": 2\n}', 2, "double quotes"),
        ("{\n  'num_processes': 2\n}", 2, "double quotes"),
        ("num_processes: 2\nmixed_precision: bf17\n", 2, "bf17"),
        ("num_processes: 2\n  device: cpu\n", 2, "YAML"),
        ('{\n"num_processes": 0,\n"num_nodes": 0\n}', 2, "num_processes"),
        ('{"num_processes": 2}', None, ""),
        ("mixed_precision: bf16", None, ""),
    ],
)
def test_the_line_of_the_first_mistake(text, line, told):
    mistakes = mistakes_in_text(text, PickerModel(inventory=WITHOUT_GPU).read)
    if line is None:
        assert mistakes == ()
    else:
        assert (mistakes[0][0], told in mistakes[0][1]) == (line, True)
