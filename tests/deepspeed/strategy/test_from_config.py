"""A `RunConfig` with a DeepSpeed configuration reaches the engine, however it is given."""

from __future__ import annotations

import functools

import pytest
import torch

from nbaccel import Accelerator, ConfigError, Pool, RunConfig, notebook_launcher
from nbaccel.calls import launch as launching
from nbaccel.deepspeed.plugin import DeepSpeedPlugin
from nbaccel.plan.topology import run_variables
from tests.deepspeed import needs

pytestmark = [*needs.ENGINE]

CONFIG = RunConfig(
    num_processes=2,
    device="cpu",
    mixed_precision="bf16",
    zero_stage=2,
    gradient_accumulation_steps=2,
    deepspeed={
        "zero_optimization": {"offload_optimizer": {"device": "cpu"}, "reduce_bucket_size": 4096},
        "gradient_clipping": 0.25,
    },
)


def train(model, config):
    """With `config`, or by what the launcher has said in the environment."""
    accelerator = Accelerator() if config is None else Accelerator(config=config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = torch.utils.data.DataLoader(torch.randn(8, 4), batch_size=2)
    engine, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for batch in loader:
        with accelerator.accumulate(engine):
            accelerator.backward(engine(batch.bfloat16()).float().square().mean())
            optimizer.step()
            optimizer.zero_grad()
    settings = accelerator.deepspeed_config
    return (
        engine.zero_optimization_stage(),
        (accelerator.gradient_accumulation_steps, engine.global_steps),
        settings["zero_optimization"]["offload_optimizer"]["device"],
        engine.zero_reduce_bucket_size(),
        engine.gradient_clipping(),
        accelerator.mixed_precision,
    )


def train_in_both_ways(models):
    """As the launcher said, and as an argument says."""
    return [train(model, given) for model, given in zip(models, (None, CONFIG), strict=True)]


@pytest.mark.slow
def test_the_engine_has_what_was_picked():
    models = (torch.nn.Linear(4, 2), torch.nn.Linear(4, 2))
    for by_launcher, by_argument in notebook_launcher(train_in_both_ways, (models,), config=CONFIG):
        assert by_launcher == by_argument == (2, (2, 1), "cpu", 4096, 0.25, "bf16")


def test_accelerate_reads_the_same(monkeypatch):
    """The peer's plugin, from the variables that a worker has."""
    from accelerate import DeepSpeedPlugin as Peer

    for name, value in run_variables(CONFIG).items():
        monkeypatch.setenv(name, value)
    ours, theirs = DeepSpeedPlugin(), Peer()
    assert (
        ours.deepspeed_config["zero_optimization"] == (theirs.deepspeed_config["zero_optimization"])
    )
    assert ours.zero_stage == theirs.zero_stage == 2
    assert theirs.deepspeed_config["gradient_clipping"] == 0.25
    assert theirs.gradient_accumulation_steps == ours.gradient_accumulation_steps == 2


@pytest.mark.parametrize("start", [functools.partial(notebook_launcher, print), Pool])
def test_mistakes_are_told_before_any_process_starts(start, monkeypatch):
    monkeypatch.setattr(launching, "launch_plan", lambda *_: pytest.fail("a process was started"))
    wrong = RunConfig(
        num_processes=2,
        device="cpu",
        zero_stage=2,
        deepspeed={"gradient_cliping": 1.0, "zero_optimization": {"offload_param": "cpu"}},
    )
    with pytest.raises(ConfigError) as caught:
        start(config=wrong)
    assert "Did you mean 'gradient_clipping'?" in str(caught.value)
    assert "needs stage 3: got stage 2" in str(caught.value)
