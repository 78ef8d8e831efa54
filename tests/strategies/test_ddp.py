from __future__ import annotations

from typing import Any

import pytest
import torch
import torch._dynamo  # a forked worker's first optimizer would import it: seconds
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from nbaccel import Accelerator, WorkerFailed, debug_launcher
from nbaccel.abc.bundle import Bundle
from nbaccel.abc.place import Place
from nbaccel.abc.precision import Precision
from nbaccel.config.handlers import DistributedDataParallelKwargs
from nbaccel.errors import ConfigError
from nbaccel.strategies.ddp import DdpStrategy
from nbaccel.strategies.single import SingleStrategy
from tests.strategies.workers import Recipe, place, train

CPU = torch.device("cpu")


def ddp(here: Place | None = None, **settings: Any) -> DdpStrategy:
    return DdpStrategy(
        here or Place(device=CPU), DistributedDataParallelKwargs(**settings), Precision()
    )


def largest_difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    assert one.keys() == other.keys()
    return max((one[name].float() - other[name].float()).abs().max().item() for name in one)


def test_one_process_wraps_nothing():
    strategy = SingleStrategy(Place(device=CPU))
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    bundle = Bundle(models=(model,), optimizers=(optimizer,))
    assert strategy.wrap(bundle) is bundle
    assert strategy.unwrap(model) is model
    with strategy.no_sync(model), strategy.sync_in_backward(model), strategy.join([model]):
        model(torch.ones(1, 2)).sum().backward()
    assert strategy.clip_grad_norm(model.parameters(), 0.5).item() == pytest.approx(3**0.5)
    assert torch.linalg.vector_norm(model.weight.grad) < 0.5
    state = {name: tensor.clone() for name, tensor in strategy.model_state(model).items()}
    kept = strategy.optimizer_state(model, optimizer)
    optimizer.step()
    strategy.load_model_state(model, state, strict=True)
    strategy.load_optimizer_state(model, optimizer, kept)
    assert torch.equal(model.weight, state["weight"])


def test_processes_train_the_same_model_without_a_prefix_in_its_names():
    one, other = debug_launcher(train, (Recipe(max_norm=0.5),))
    assert one["losses"] != other["losses"]
    assert one["norms"] == other["norms"]
    assert largest_difference(one["weights"], other["weights"]) == 0
    assert "blocks.0.up.weight" in one["weights"]


def wrapped_cases() -> dict[str, Any]:
    here = place()
    strategy = ddp(here, find_unused_parameters=True, gradient_as_bucket_view=True, bucket_cap_mb=7)
    frozen = nn.Linear(2, 1).requires_grad_(False)
    trained = nn.Linear(2, 1)
    already = DistributedDataParallel(nn.Linear(2, 1))
    models = strategy.wrap(Bundle(models=(frozen, trained, already))).models
    return {
        "same": [
            one is other for one, other in zip(models, (frozen, trained, already), strict=True)
        ],
        "inner": [strategy.unwrap(model) is model for model in models],
        "settings": (
            models[1].find_unused_parameters,
            models[1].gradient_as_bucket_view,
            models[1].bucket_bytes_cap,
        ),
        "quiet": type(strategy.no_sync(frozen)).__name__,
    }


def test_a_model_without_gradients_and_a_wrapped_one_stay_as_they_are():
    found = debug_launcher(wrapped_cases)[0]
    assert found["same"] == [True, False, True]
    assert found["inner"] == [True, False, False]
    assert found["settings"] == (True, True, 7 * 1024 * 1024)
    assert found["quiet"] == "nullcontext"


def gradient_of(settings: dict[str, Any]) -> torch.Tensor:
    here = place()
    torch.manual_seed(0)
    model = nn.Linear(16, 16, bias=False)
    (model,) = ddp(here, **settings).wrap(Bundle(models=(model,))).models
    for step in range(4):
        model.zero_grad()
        generator = torch.Generator().manual_seed(10 * step + here.rank)
        model(torch.randn(8, 16, generator=generator)).square().sum().backward()
    return model.module.weight.grad.clone()


HOOKS = {
    "fp16": {"comm_hook": "fp16"},
    "fp16 around nothing": {"comm_wrapper": "fp16"},
    "power": {
        "comm_hook": "power_sgd",
        "comm_state_option": {"matrix_approximation_rank": 2, "start_powerSGD_iter": 2},
    },
    "fp16 around power": {
        "comm_hook": "power_sgd",
        "comm_wrapper": "fp16",
        "comm_state_option": {"matrix_approximation_rank": 16, "start_powerSGD_iter": 2},
    },
}


@pytest.mark.slow
def test_compression_is_really_used_and_equal_everywhere():
    exact = debug_launcher(gradient_of, ({},))[0]
    for name, settings in HOOKS.items():
        one, other = debug_launcher(gradient_of, (settings,))
        assert torch.equal(one, other), name
        assert not torch.equal(one, exact), f"{name}: not compressed"
        tolerance = 0.02 if "power" not in name or "16" in name else 1.5
        assert torch.linalg.vector_norm(one - exact) < tolerance * torch.linalg.vector_norm(exact)


def torch_takes_bf16() -> bool:
    """Whether torch itself compresses to bfloat16 over gloo: 2.6 does, 2.15 does again."""
    Accelerator(cpu=True)
    try:
        DistributedDataParallel(nn.Linear(2, 2)).register_comm_hook(None, bf16_compress_hook)
    except TypeError:
        return False
    return True


@pytest.mark.parametrize("settings", [{"comm_hook": "bf16"}, {"comm_wrapper": "bf16"}])
def test_compression_that_the_group_cannot_carry_is_a_mistake_with_a_remedy(settings):
    if debug_launcher(torch_takes_bf16)[0]:
        one, other = debug_launcher(gradient_of, (settings,))
        assert torch.equal(one, other)
        return
    with pytest.raises(WorkerFailed, match=r"'bf16'.*gloo") as failure:
        debug_launcher(gradient_of, (settings,))
    assert isinstance(failure.value, ConfigError)
    assert "Give 'fp16'" in str(failure.value)


def test_batched_power_sgd_warns_of_its_first_compressed_step_as_torchs_is_broken():
    with pytest.warns(UserWarning, match=r"'batched_power_sgd'.*number 1000.*'power_sgd'"):
        ddp(comm_hook="batched_power_sgd")


def test_settings_of_compression_that_contradict_each_other_are_listed_together():
    with pytest.raises(
        ConfigError, match=r"comm_wrapper='power_sgd'(.|\n)*comm_state_option="
    ) as e:
        ddp(comm_wrapper="power_sgd", comm_state_option={"start_powerSGD_iter": 2})
    assert len(e.value.mistakes) == 2
