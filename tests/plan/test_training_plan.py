from __future__ import annotations

import pytest

from nbaccel.abc.asking import Said
from nbaccel.config import Fp8Config, RunConfig, capabilities
from nbaccel.config.handlers import FullyShardedDataParallelPlugin
from nbaccel.errors import ConfigError
from nbaccel.plan import registry
from nbaccel.plan.contracts.training import TrainingRequest
from nbaccel.plan.training_plan import ProcessFacts, plan_training
from tests.needs import DEEPSPEED_ROW

CPU = ProcessFacts(device="cpu", device_name="cpu")
FSDP = TrainingRequest(
    strategy=registry.wanted_strategy(
        Said(arguments={"fsdp_plugin": FullyShardedDataParallelPlugin()})
    )
)
PAIR = ProcessFacts(device="cpu", device_name="cpu", world_size=2, rank=1, backend="gloo")


def gpu(*capability: int) -> ProcessFacts:
    return ProcessFacts(
        device="cuda", device_name="cuda:0", compute_capability=(capability[0], capability[1])
    )


def why(asked: TrainingRequest, found: ProcessFacts, name: str) -> str:
    plan = plan_training(asked, found)
    return next(choice.reason for choice in plan.choices if choice.name == name)


def test_each_has_its_strategy_and_the_headline_says_it():
    assert plan_training(TrainingRequest(), CPU).strategy == "single"
    assert plan_training(TrainingRequest(), PAIR).strategy == "ddp"
    assert plan_training(FSDP, PAIR).strategy == "fsdp"
    assert plan_training(FSDP, CPU).strategy == "fsdp"
    alone = ProcessFacts(device="cpu", device_name="cpu", can_join=False)
    plan = plan_training(FSDP, alone)
    assert plan.strategy == "single"
    assert "fsdp_plugin has no effect" in plan.explain()
    assert "fsdp_plugin" not in plan_training(TrainingRequest(), alone).explain()
    assert plan_training(TrainingRequest(), CPU).headline() == "one process, on CPU, float32"
    asked = TrainingRequest(mixed_precision="bf16", accumulation_steps=4)
    assert plan_training(asked, PAIR).headline() == (
        "data parallel, 2 processes, on CPU, bf16, 4 batches per step"
    )


def test_every_choice_has_its_reason():
    assert why(TrainingRequest(), CPU, "device") == "no GPU was found"
    assert why(TrainingRequest(device="cpu"), CPU, "device") == "the CPU was asked for"
    assert why(TrainingRequest(), gpu(9, 0), "device") == "this process computes on cuda:0"
    assert (
        why(TrainingRequest(), CPU, "num_processes")
        == "started without a launcher, or with one worker"
    )
    assert (
        why(TrainingRequest(), PAIR, "num_processes")
        == "from the process group (gloo); this is process 1"
    )
    sources = {
        "argument": "asked for",
        "config": "from the configuration",
        "environment": "from the environment (the launcher's request)",
    }
    for source, reason in sources.items():
        asked = TrainingRequest(mixed_precision="bf16", precision_source=source)  # type: ignore[arg-type]
        assert why(asked, CPU, "mixed_precision") == reason
    assert why(TrainingRequest(), CPU, "mixed_precision") == "float32, as nothing was asked"
    launched = TrainingRequest(precision_source="environment")
    assert why(launched, PAIR, "mixed_precision") == (
        "float32, as the launcher asked for nothing else"
    )
    assert "slice of every batch" in why(TrainingRequest(split_batches=True), PAIR, "batches")
    assert "2 x batch_size per step" in why(TrainingRequest(), PAIR, "batches")


def test_the_explanation_is_a_table_with_warnings_under_it():
    plan = plan_training(TrainingRequest(mixed_precision="fp16", precision_source="argument"), CPU)
    text = plan.explain()
    assert text == str(plan)
    assert text.splitlines()[0] == plan.headline()
    for choice in plan.choices:
        assert choice.name in text
    assert "Warnings:" in text
    assert 'mixed_precision="fp16" on cpu is slow' in text
    assert max(map(len, text.splitlines())) <= 100


def test_precisions_that_are_unknown_impossible_or_imitated(monkeypatch):
    with pytest.raises(ConfigError, match="mixed_precision='int4' is unknown"):
        plan_training(TrainingRequest(mixed_precision="int4"), CPU)
    with pytest.raises(ConfigError, match="'te' needs transformer_engine"):
        plan_training(TrainingRequest(mixed_precision="fp8", fp8=Fp8Config(backend="te")), CPU)
    monkeypatch.setattr(capabilities, "is_installed", lambda name: True)
    request = TrainingRequest(mixed_precision="fp8", fp8=Fp8Config(backend="te"))
    for found in (CPU, gpu(8, 0)):
        with pytest.raises(ConfigError, match=r"needs .*compute capability 8\.9.*native.*emulates"):
            plan_training(request, found)
    assert "fp8.recipe" in plan_training(request, gpu(9, 0)).explain()
    assert plan_training(TrainingRequest(mixed_precision="bf16"), gpu(8, 0)).warnings == ()
    (warning,) = plan_training(TrainingRequest(mixed_precision="bf16"), gpu(7, 5)).warnings
    assert "only imitated by this GPU" in warning


@pytest.mark.parametrize(
    ("strategy", "found", "said"), [("ddp", CPU, "one process"), ("single", PAIR, "2 processes")]
)
def test_a_strategy_that_does_not_fit_the_number_of_processes_is_refused(strategy, found, said):
    wanted = registry.wanted_strategy(Said(run=RunConfig(strategy=strategy)))
    assert wanted is not None
    assert wanted.source == "config"
    with pytest.raises(ConfigError, match=f'strategy="{strategy}" is not supported with {said}'):
        plan_training(TrainingRequest(strategy=wanted), found)


@DEEPSPEED_ROW
def test_two_strategies_are_refused_unless_one_has_more_say():
    both = Said(run=RunConfig(strategy="fsdp", zero_stage=2))
    with pytest.raises(ConfigError, match=r"strategy=\"fsdp\" and zero_stage=2 were both given"):
        registry.wanted_strategy(both)
    plugin = {"fsdp_plugin": FullyShardedDataParallelPlugin()}
    wanted = registry.wanted_strategy(Said(run=RunConfig(zero_stage=2), arguments=plugin))
    assert wanted is not None
    assert (wanted.strategy, wanted.source) == ("fsdp", "argument")
