from __future__ import annotations

import pytest

from nbaccel.errors import ConfigError
from nbaccel.plan.training import Asked, Found, plan_training

CPU = Found(device="cpu", device_name="cpu")
PAIR = Found(device="cpu", device_name="cpu", world_size=2, rank=1, backend="gloo")


def gpu(*capability: int) -> Found:
    return Found(
        device="cuda", device_name="cuda:0", compute_capability=(capability[0], capability[1])
    )


def why(asked: Asked, found: Found, name: str) -> str:
    plan = plan_training(asked, found)
    return next(choice.reason for choice in plan.choices if choice.name == name)


def test_one_process_several_and_shards_have_their_strategies() -> None:
    assert plan_training(Asked(), CPU).strategy == "single"
    assert plan_training(Asked(), PAIR).strategy == "ddp"
    assert plan_training(Asked(fsdp=True), PAIR).strategy == "fsdp"
    assert plan_training(Asked(fsdp=True), CPU).strategy == "fsdp"


def test_without_a_launcher_nothing_is_sharded_and_the_plan_says_so() -> None:
    alone = Found(device="cpu", device_name="cpu", can_meet=False)
    plan = plan_training(Asked(fsdp=True), alone)
    assert plan.strategy == "single"
    assert "fsdp_plugin has no effect" in plan.explain()
    assert "fsdp_plugin" not in plan_training(Asked(), alone).explain()


def test_the_headline_says_it_in_one_line() -> None:
    assert plan_training(Asked(), CPU).headline() == "one process, on CPU, float32"
    asked = Asked(mixed_precision="bf16", accumulation_steps=4)
    assert plan_training(asked, PAIR).headline() == (
        "data parallel, 2 processes, on CPU, bf16, 4 batches per step"
    )


def test_every_choice_has_its_reason() -> None:
    assert why(Asked(), CPU, "device") == "no GPU was found"
    assert why(Asked(cpu=True), CPU, "device") == "the CPU was asked for"
    assert why(Asked(), gpu(9, 0), "device") == "a GPU was found"
    assert why(Asked(), CPU, "num_processes") == "started without a launcher, or with one worker"
    assert why(Asked(), PAIR, "num_processes") == "from the process group (gloo); this is process 1"
    sources = {
        "argument": "asked for",
        "config": "from the configuration",
        "environment": "from the environment (the launcher's request)",
    }
    for source, reason in sources.items():
        asked = Asked(mixed_precision="bf16", precision_source=source)  # type: ignore[arg-type]
        assert why(asked, CPU, "mixed_precision") == reason
    assert why(Asked(), CPU, "mixed_precision") == "float32, as nothing was asked"
    launched = Asked(precision_source="environment")
    assert why(launched, PAIR, "mixed_precision") == (
        "float32, as the launcher asked for nothing else"
    )
    assert "slice of every batch" in why(Asked(split_batches=True), PAIR, "batches")
    assert "2 x batch_size per step" in why(Asked(), PAIR, "batches")


def test_the_explanation_is_a_table_with_warnings_under_it() -> None:
    plan = plan_training(Asked(mixed_precision="fp16", precision_source="argument"), CPU)
    text = plan.explain()
    assert text == str(plan)
    assert text.splitlines()[0] == plan.headline()
    for choice in plan.choices:
        assert choice.name in text
    assert "Warnings:" in text
    assert 'mixed_precision="fp16" on cpu is slow' in text
    assert max(map(len, text.splitlines())) <= 100


def test_unknown_and_impossible_precisions_are_refused() -> None:
    with pytest.raises(ConfigError, match="mixed_precision='int4' is unknown"):
        plan_training(Asked(mixed_precision="int4"), CPU)
    with pytest.raises(ConfigError, match="cannot be had on cpu"):
        plan_training(Asked(mixed_precision="fp8"), CPU)
    with pytest.raises(ConfigError, match="cannot be had on cuda:0"):
        plan_training(Asked(mixed_precision="fp8"), gpu(8, 0))


def test_imitated_precisions_are_warned_of() -> None:
    assert plan_training(Asked(mixed_precision="bf16"), gpu(8, 0)).warnings == ()
    (warning,) = plan_training(Asked(mixed_precision="bf16"), gpu(7, 5)).warnings
    assert "only imitated by this GPU" in warning
