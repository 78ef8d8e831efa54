"""Parameters of optimizers and schedules are judged before they reach a first step."""

from __future__ import annotations

import pytest

from nbaccel.config import RunConfig
from nbaccel.deepspeed.checking import check_config, value_mistakes
from nbaccel.errors import ConfigError
from tests.deepspeed import needs

WRONG = [
    ("optimizer", "lr", "fast", "Give for example 3e-5"),
    ("optimizer", "lr", -1, "a number of at least 0: got -1"),
    ("optimizer", "lr", True, "got True"),
    ("optimizer", "lr", float("inf"), "got inf"),
    ("optimizer", "betas", 0.9, "two numbers from 0 to below 1: got 0.9"),
    ("optimizer", "betas", [0.9, 0.99, 0.999], "two numbers"),
    ("optimizer", "betas", [0.9, 1.5], "below 1"),
    ("optimizer", "weight_decay", -0.1, "at least 0"),
    ("scheduler", "warmup_num_steps", "ten", "a whole number above 0: got 'ten'"),
    ("scheduler", "warmup_num_steps", 0.5, "above 0: got 0.5"),
    ("scheduler", "total_num_steps", 0, "above 0: got 0"),
    ("scheduler", "warmup_type", "cosine", "one of log, linear: got 'cosine'"),
    ("scheduler", "warmup_type", "liner", "Did you mean 'linear'?"),
]


@pytest.mark.parametrize(("section", "name", "value", "says"), WRONG)
def test_a_wrong_value_is_told_with_what_to_write(section, name, value, says):
    (told,) = value_mistakes(section, {name: value})
    assert told.startswith(f"{section}.params.{name} must be ")
    assert says in told


def test_right_values_are_left_alone():
    optimizer = {"lr": 3e-5, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0, "momentum": 0.9}
    assert not list(value_mistakes("optimizer", optimizer))
    assert not list(value_mistakes("optimizer", dict.fromkeys(optimizer, "auto")))
    schedule = {"warmup_min_lr": 0, "warmup_max_lr": [1e-3, 1e-4], "warmup_num_steps": 1e3}
    assert not list(value_mistakes("scheduler", {**schedule, "warmup_type": "log"}))


@needs.DEEPSPEED
def test_a_check_tells_them():
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": "fast", "betas": [0.9]}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_type": "cosine"}},
    }
    with pytest.raises(ConfigError) as caught:
        check_config(settings, check_tools=False)
    assert [text.partition(" ")[0] for text in caught.value.mistakes] == [
        "optimizer.params.lr",
        "optimizer.params.betas",
        "scheduler.params.warmup_type",
    ]


@needs.DEEPSPEED
def test_numbers_written_as_text_are_read_as_numbers():
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": "3e-5", "betas": ["0.9", "0.999"], "eps": "1e-8"},
        },
        "scheduler": {
            "type": "WarmupLR",
            "params": {"warmup_max_lr": "3e-5", "warmup_num_steps": "10", "warmup_type": "linear"},
        },
        "zero_optimization": {"stage": 2, "reduce_bucket_size": "5e8"},
    }
    made = check_config(settings, check_tools=False).config.to_dict()
    assert made["optimizer"]["params"] == {"lr": 3e-5, "betas": [0.9, 0.999], "eps": 1e-8}
    assert made["scheduler"]["params"] == {
        "warmup_max_lr": 3e-5,
        "warmup_num_steps": 10,
        "warmup_type": "linear",
    }
    assert made["zero_optimization"]["reduce_bucket_size"] == 500_000_000
    # What Accelerate and the Trainer read in workers is the run's own copy.
    kept = RunConfig(num_processes=2, deepspeed=settings).deepspeed
    assert kept is not None
    assert kept["optimizer"]["params"] == made["optimizer"]["params"]
