"""A DeepSpeed configuration as an object: round trips, names, and mistakes told all at once."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from nbaccel.config import RunConfig
from nbaccel.config.field_rules import rule_of
from nbaccel.deepspeed.library import quiet_logger
from nbaccel.deepspeed.schema import deepspeed_schema
from nbaccel.deepspeed.zero_config import (
    ZERO,
    OffloadOptimizer,
    OffloadParam,
    ZeroConfig,
    config_fields,
    section_of,
)
from nbaccel.errors import ConfigError
from nbaccel.notebook.picker.choices import by_name, settings as picker_settings
from tests.deepspeed import needs

KEYS = [
    pytest.param(place, name, entry, id=f"{place}.{name}")
    for place, name, entry in config_fields()
    if section_of(entry) is None
]


def good_value(name: str, entry):
    """A value of the right kind, told from the kind alone."""
    kind = rule_of(entry)
    if kind.allowed:
        return kind.allowed[-1]
    if name == "stage":
        return 3
    for start, value in {
        "a whole": 7,
        "a number": 0.5,
        "true": True,
        "text": "words",
        "a list": ["a.B"],
        "a mapping": {"lr": 1e-3, "betas": [0.9, 0.95], "deep": {"er": None}},
    }.items():
        if kind.must.startswith(start):
            return value
    raise AssertionError(f"no example for {kind.must!r}")


@pytest.mark.parametrize(("place", "name", "entry"), KEYS)
def test_every_key_round_trips_says_what_it_means_and_refuses_what_is_no_value(place, name, entry):
    path = [*filter(None, place.split(".")), name]
    settings = nested(path, good_value(name, entry))
    made = ZeroConfig.from_dict(settings)
    assert made.to_dict() == settings
    assert made.extra == {}, "a named key belongs in its field"
    assert ZeroConfig.from_json(made.to_json()) == made
    assert len(entry.description) > 8
    with pytest.raises(ConfigError, match=f"^{'.'.join(path)} must be {rule_of(entry).must}: got"):
        ZeroConfig.from_dict(nested(path, []))


def nested(path, value):
    for part in reversed(path):
        value = {part: value}
    return value


# ------------------------------------------------------------------------------ by hand
def test_a_short_word_stands_for_a_section_and_copies_are_independent():
    config = ZeroConfig(stage=3, offload_optimizer="cpu", offload_param=OffloadParam(device="cpu"))
    assert config.offload_optimizer == OffloadOptimizer(device="cpu")
    cpu = {"device": "cpu"}
    made = {ZERO: {"stage": 3, "offload_optimizer": cpu, "offload_param": cpu}}
    assert config.to_dict() == made
    config = ZeroConfig(stage=1)
    assert config.changed(stage=2).stage == 2
    assert config.stage == 1
    with pytest.raises(ConfigError, match="Did you mean 'stage'"):
        config.changed(stge=2)
    adam = {"type": "Adam", "params": {"lr": 1}}
    config = ZeroConfig.from_dict({"optimizer": adam, "x": {"y": [1]}})
    out = config.to_dict()
    out["optimizer"]["params"]["lr"] = 2
    out["x"]["y"].append(2)
    assert config.optimizer.params == {"lr": 1}
    assert config.to_dict()["x"] == {"y": [1]}


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ({ZERO: {"stage": "2"}}, {ZERO: {"stage": 2}}),
        ({ZERO: {"reduce_bucket_size": 5e8}}, {ZERO: {"reduce_bucket_size": 500_000_000}}),
        ({"fp16": {"enabled": "true"}}, {"fp16": {"enabled": True}}),
        ({"steps_per_print": math.inf}, {"steps_per_print": math.inf}),
        ({ZERO: {"offload_param": None}, "aio": None}, {}),
        ({"optimizer": {"params": {"a": (1, 2)}}}, {"optimizer": {"params": {"a": [1, 2]}}}),
        ({"wandb": {"project": Path("/a")}}, {"wandb": {"project": "/a"}}),
        ({"bfloat16": {"enabled": True}}, {"bf16": {"enabled": True}}),
        ({ZERO: {"cpu_offload": True}}, {ZERO: {"offload_optimizer": {"device": "cpu"}}}),
        ({ZERO: {"prefetch_bucket_size": 9}}, {ZERO: {"stage3_prefetch_bucket_size": 9}}),
        ({ZERO: True}, {ZERO: {"stage": 1}}),
        ({"overlap_comm": True}, {"overlap_comm": True}),
    ],
    ids=str,
)  # fmt: skip
def test_values_become_what_deepspeed_reads(given, kept):
    assert ZeroConfig.from_dict(given).to_dict() == kept


def test_all_mistakes_are_told_at_once_each_where_it_stands():
    zero = {"stage": 4, "offload_optimizer": {"device": "gpu"}, "overlap_comm": 2}
    with pytest.raises(ConfigError) as caught:
        ZeroConfig.from_dict({ZERO: zero, "gradient_clipping": "much", "bf16": 3})
    starts = [mistake.split(" must be ")[0] for mistake in caught.value.mistakes]
    of_zero = ("stage", "overlap_comm", "offload_optimizer.device")
    assert set(starts) == {*(f"{ZERO}.{key}" for key in of_zero), "gradient_clipping", "bf16"}
    for value in ("4", "'gpu'", "'much'"):
        assert f"got {value}." in str(caught.value)


def test_a_typo_by_hand_is_refused_wherever_it_stands():
    with pytest.raises(ConfigError) as caught:
        ZeroConfig(stge=2, fp16={"enable": True}, offload_param={"devise": "cpu"})
    assert [mistake.split(" is no setting")[0] for mistake in caught.value.mistakes] == [
        "offload_param.devise", "fp16.enable", "stge",
    ]  # fmt: skip
    assert str(caught.value).count("Did you mean") == 3
    with pytest.raises(ConfigError, match="Did you mean 'device'"):
        OffloadParam(devise="cpu")


def test_files_are_read_and_written_with_what_json_can_hold(tmp_path):
    config = ZeroConfig(stage=3, gradient_clipping=0.5, extra={"vocabulary_size": 64})
    config.to_file(tmp_path / "ds.json")
    assert ZeroConfig.from_file(tmp_path / "ds.json") == config
    assert ZeroConfig.from_file(str(tmp_path / "ds.json")).extra == {"vocabulary_size": 64}
    with pytest.raises(ConfigError, match="JSON cannot hold"):
        ZeroConfig.from_dict({"x": {1, 2}})
    with pytest.raises(ConfigError, match=r"got .*\{1\}"):
        ZeroConfig(extra={"x": {1}})


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (None, "cannot be read: .*No such file"),
        ("{", "cannot be read from JSON"),
        ("[1]", "from JSON of list"),
        ('{"bf16": {}, "bf16": {}}', "names bf16 more than once"),
        ('{"zero_optimization": 3}', "zero_optimization must be a section: got 3"),
    ],
)
def test_a_file_that_is_none_says_so_with_its_path(tmp_path, text, says):
    path = tmp_path / "ds.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=says):
        ZeroConfig.from_file(path)


# ------------------------------------------------------------------------------ in the pickers
def test_every_key_is_a_choice():
    fields = {setting.run_field.partition(".")[0] for setting in by_name().values()}
    assert fields == set(RunConfig.model_fields)
    known = ", ".join(s.strategy_key for s in by_name().values())
    assert not [
        name for _, name, entry in config_fields() if not section_of(entry) and name not in known
    ]


@needs.DEEPSPEED
def test_defaults_are_those_of_the_installed_deepspeed():
    with quiet_logger():
        models = deepspeed_schema().models
    for setting in picker_settings("zero"):
        section, _, key = setting.name.rpartition(".")
        if setting.default is None or section not in models:
            continue
        theirs = models[section].model_fields.get(key)
        if theirs is not None:
            assert setting.default == theirs.default, setting.name
