"""``advise(try_it=True)``: real steps by real engines in workers that end with them."""

from __future__ import annotations

import gc
import logging
import os
import signal
import tempfile
import warnings
from typing import Any

import psutil
import pytest
import torch
from torch import nn

from nbaccel import RunConfig, WorkerFailed, advise, notebook_launcher
from nbaccel.base import env
from nbaccel.deepspeed import library
from nbaccel.deepspeed.advise import is_want_of_memory, training_step
from nbaccel.deepspeed.engines import make_engine
from nbaccel.deepspeed.zero_config import ZeroConfig
from nbaccel.strategies.model_blocks import enable_gradient_checkpointing
from nbaccel.workers.failure import FailureRecord, RaisedError
from tests.deepspeed import needs, operations
from tests.deepspeed.advisor.models import WIDTH, Blocks, machine
from tests.deepspeed.needs import marked
from tests.worker_functions import rank

pytestmark = pytest.mark.slow


def step_through(configs: list[tuple[dict[str, Any], bool]]) -> list[tuple[int, bool]]:
    """One optimizer step with each: its stage, and whether the weights have changed."""
    import deepspeed

    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    env.update({"PATH": library.path_with_ninja()})
    found = []
    for config, again in configs:
        torch.manual_seed(0)
        model = Blocks()
        before = sum(p.double().sum().item() for p in model.parameters())
        if again:
            enable_gradient_checkpointing(model)
        made = ZeroConfig.from_dict(config)
        engine = make_engine(model, None, None, made, moe_layers=None, has_several=False)
        training_step(engine, torch.randn(config["train_micro_batch_size_per_gpu"], WIDTH))
        with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
            after = sum(p.double().sum().item() for p in engine.module.parameters())
        found.append((engine.zero_optimization_stage(), abs(after - before) > 1e-3))
        engine.destroy()
        del engine, model
        gc.collect()
    return found


MIB = 2**20


class Greedy(Blocks):
    """Without gradient checkpointing it takes memory that torch knows nothing of."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = bytearray(0 if self.is_gradient_checkpointing else 2**10 * MIB)
        out = super().forward(x)
        del kept
        return out


class Broken(Blocks):
    """Its forward fails in a worker for a reason that no configuration cures."""

    def __init__(self) -> None:
        super().__init__()
        self.notebook = os.getpid()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if os.getpid() != self.notebook:
            raise LookupError("no such token")
        return super().forward(x)


class Killed(Broken):
    """Without gradient checkpointing the system ends one rank, as it does when memory is short."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.is_gradient_checkpointing and os.getpid() != self.notebook and rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return Blocks.forward(self, x)


HERE = machine(0)


# ---------------------------------------------------------------- a rung that runs out of memory
@marked
def test_a_rung_that_runs_out_of_memory_is_survived_and_the_next_is_chosen(
    tmp_path_factory, monkeypatch
):
    folder = tmp_path_factory.mktemp("tried")
    # Test processes beside this one give advice too, and their folders are in the common one.
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    model, batch = Greedy(), torch.randn(256, WIDTH)
    before = [p.clone() for p in model.parameters()]
    seed, processes = torch.get_rng_state(), set(psutil.Process().children())
    limits = {"host_memory": 48 * MIB, "max_trials": 8, "inventory": HERE}
    found = advise(model, batch, precision="fp32", try_it=True, **limits)
    first = found.rungs[0]
    assert (first.name, first.verdict) == ("ZeRO-0", "out of memory")
    assert "Memory ran out in a real step: rank 0 raised MemoryError" in first.reason
    assert first.estimate.fits, "by estimate it was to work"
    assert (found.chosen.name, found.chosen.verdict) == ("ZeRO-0, gradient checkpointing", "works")
    assert found.config["zero_optimization"]["stage"] == 0
    assert found.gradient_checkpointing
    assert "fits by a real step" in found.headline()
    assert {rung.verdict for rung in found.rungs[2:7]} == {"fits"}, "slower ones are only estimated"
    assert found.batch_size == 256, "the step stays as it was asked for"
    # The user's model and process are as before, but for the template, which every launch shares.
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert all(p.grad is None and p.requires_grad for p in model.parameters())
    assert not model.is_gradient_checkpointing
    assert torch.equal(seed, torch.get_rng_state())
    assert len(set(psutil.Process().children()) - processes) <= 1
    assert list(folder.glob("nbaccel-trial-*")) == []


# ---------------------------------------------------------------- several processes
@marked
def test_the_kill_of_a_rank_is_survived_and_the_next_rung_found():
    """The system ends a process that way when memory is short: nothing in it can tell."""
    batch = {"x": torch.randn(8, WIDTH)}
    limits = {"host_memory": 2**30, "max_trials": 2, "inventory": HERE}
    found = advise(Killed(), batch, num_processes=2, precision="bf16", try_it=True, **limits)
    first, second = found.rungs[:2]
    assert first.verdict == "out of memory"
    assert "rank 1 was killed by SIGKILL" in first.reason
    assert second is found.chosen
    assert second.verdict == "works"


@marked
def test_a_failure_that_is_not_about_memory_is_the_users_to_see():
    with pytest.raises(LookupError, match="no such token") as caught:
        advise(Broken(), torch.randn(4, WIDTH), try_it=True, inventory=HERE)
    assert isinstance(caught.value, WorkerFailed)


@marked
def test_the_configuration_of_every_rung_runs(tmp_path):
    """Two processes, one launch: an engine and a step with each."""
    can_swap = not operations.not_built(operations.DISK)
    found = advise(
        Blocks(),
        torch.randn(4, WIDTH),
        num_processes=2,
        nvme_path=tmp_path if can_swap else None,
        precision="bf16",
        inventory=HERE,
    )
    had = [rung for rung in found.rungs if rung.config is not None]
    assert len(had) == (11 if can_swap else 9), [rung.reason for rung in found.rungs]
    configs = [(rung.config, rung.gradient_checkpointing) for rung in had]
    config = RunConfig(num_processes=2, device="cpu", start_method="template")
    for values in notebook_launcher(step_through, (configs,), config=config):
        assert values == [(rung.config["zero_optimization"]["stage"], True) for rung in had]


# ---------------------------------------------------------------- what an end means
def failed(**what):
    return FailureRecord(rank=0, time=0.0, **what)


def raised(kind, message, traceback=""):
    error = RaisedError(type_name=kind, message=message, frames=())
    return {"raised": error, "traceback": traceback}


@pytest.mark.parametrize(
    "what",
    [
        raised("torch.OutOfMemoryError", "CUDA out of memory. Tried to allocate 2.00 GiB"),
        raised("MemoryError", ""),
        raised("numpy._core._exceptions._ArrayMemoryError", "Unable to allocate 7 GiB"),
        raised("RuntimeError", "DefaultCPUAllocator: can't allocate memory: you tried to allocate"),
        raised("OSError", "[Errno 12] Cannot allocate memory"),
        raised("ValueError", "oh", "MemoryError\n\nDuring handling of it"),
        {"exit_status": -9},
    ],
)
def test_ends_for_want_of_memory_are_known(what):
    assert is_want_of_memory(failed(**what))


@pytest.mark.parametrize("what", [raised("ValueError", "bad shape"), {"exit_status": -11}])
def test_other_ends_are_not(what):
    assert not is_want_of_memory(failed(**what))


@needs.DEEPSPEED
@pytest.mark.filterwarnings("ignore")
def test_a_linear_layer_alone_gets_advice_too():
    found = advise(nn.Linear(4, 4), torch.ones(2, 4), inventory=HERE)
    assert found.chosen.name == "ZeRO-0"
