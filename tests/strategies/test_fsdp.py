from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo  # a forked worker's first optimizer would import it: seconds
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from nbaccel import debug_launcher
from nbaccel.abc.bundle import Bundle
from nbaccel.abc.place import Place
from nbaccel.abc.strategy import ModelShards, ShardedCheckpoints
from nbaccel.config.handlers import FullyShardedDataParallelPlugin
from nbaccel.errors import ConfigError, PlatformUnsupported
from nbaccel.precision.native import Bf16, Fp32
from nbaccel.strategies.fsdp import FsdpStrategy
from tests.accelerator.loops import told
from tests.precision.test_native import made
from tests.strategies.needs import SHARDING
from tests.strategies.test_ddp import largest_difference
from tests.strategies.workers import Recipe, Tower, Training, place, train

pytestmark = SHARDING

CPU = torch.device("cpu")
FSDP = Recipe(strategy="fsdp")


def fsdp(here: Place | None = None, kind: Any = Fp32, **settings: Any) -> FsdpStrategy:
    plugin = FullyShardedDataParallelPlugin(**settings)
    return FsdpStrategy(here or Place(device=CPU), plugin, made(kind))


def beside_ddp(recipe: Recipe) -> tuple[dict[str, Any], dict[str, Any]]:
    """The same training sharded and replicated; both as rank 0 saw them."""
    sharded, empty = debug_launcher(train, (recipe,))
    assert empty["weights"] == {}
    assert empty["optimizer"] == {}
    whole, _ = debug_launcher(train, (replace(recipe, strategy="ddp", settings={}),))
    return sharded, whole


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["SGD", "AdamW"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_it_trains_exactly_as_ddp_does(optimizer, accumulate):
    sharded, whole = beside_ddp(replace(FSDP, optimizer=optimizer, accumulate=accumulate))
    assert sharded["losses"] == whole["losses"]
    assert largest_difference(sharded["weights"], whole["weights"]) == 0
    assert sharded["optimizer"]["param_groups"] == whole["optimizer"]["param_groups"]
    assert sharded["optimizer"]["state"].keys() == whole["optimizer"]["state"].keys()
    for number, state in sharded["optimizer"]["state"].items():
        assert largest_difference(state, whole["optimizer"]["state"][number]) == 0


SETTINGS = {
    "root only": {"auto_wrap_policy": "no_wrap"},
    "every layer": {"transformer_cls_names_to_wrap": ["Linear", "LayerNorm", "Block"]},
    "by size": {"auto_wrap_policy": "size_based_wrap", "min_num_params": 60},
    "a function": {"auto_wrap_policy": lambda module: isinstance(module, nn.LayerNorm)},
    "ZeRO-2": {"reshard_after_forward": False},
    "recomputed": {"activation_checkpointing": True},
    "in host memory": {"cpu_offload": True},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SETTINGS)
def test_what_is_sharded_and_how_does_not_change_the_result(name):
    recipe = replace(FSDP, optimizer="AdamW", accumulate=2, settings=SETTINGS[name])
    sharded, whole = beside_ddp(recipe)
    assert sharded["losses"] == pytest.approx(whole["losses"], abs=1e-6)
    assert largest_difference(sharded["weights"], whole["weights"]) < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("max_norm", [0.1, 100.0])
def test_gradients_are_clipped_to_a_norm_over_all_shards(max_norm):
    recipe = replace(FSDP, max_norm=max_norm)
    ranks = debug_launcher(train, (recipe,))
    whole, _ = debug_launcher(train, (replace(recipe, strategy="ddp"),))
    assert ranks[0]["norms"] == ranks[1]["norms"]
    assert ranks[0]["norms"] == pytest.approx(whole["norms"], rel=1e-6)
    assert largest_difference(ranks[0]["weights"], whole["weights"]) < 1e-6


def late_reduction() -> list[bool]:
    training = Training(FSDP, place())
    strategy, model = training.strategy, training.model
    weight = model.embed.weight
    with strategy.no_sync(model):
        training.loss(model, 0, training.place.rank).backward()
        kept_back = weight.grad is None
        with strategy.sync_in_backward(model):
            training.loss(model, 1, training.place.rank).backward()
        reduced = weight.grad.full_tensor().clone()
        training.loss(model, 2, training.place.rank).backward()
        quiet_again = torch.equal(weight.grad.full_tensor(), reduced)
    expected = torch.zeros_like(reduced)
    whole = Tower()
    whole.load_state_dict(
        {
            name: tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            for name, tensor in model.state_dict().items()
        }
    )
    for rank in range(2):
        for step in range(2):
            expected += torch.autograd.grad(
                training.loss(whole, step, rank) / 2, whole.embed.weight
            )[0]
    return [kept_back, torch.allclose(reduced, expected, atol=1e-6), quiet_again]


def test_a_backward_can_reduce_what_was_kept_back_and_silence_returns_after_it():
    assert debug_launcher(late_reduction) == [[True, True, True]] * 2


def test_processes_that_built_different_models_start_from_that_of_process_0():
    sharded, whole = beside_ddp(replace(FSDP, seed_by_rank=True))
    assert sharded["losses"] == whole["losses"]
    assert largest_difference(sharded["weights"], whole["weights"]) == 0


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_short_formats_train_nearly_as_under_ddp(precision):
    sharded, whole = beside_ddp(replace(FSDP, precision=precision, optimizer="AdamW"))
    assert sharded["losses"] == pytest.approx(whole["losses"], rel=2e-2)
    kept = {tensor.dtype for tensor in sharded["weights"].values()}
    assert kept == {torch.float32, torch.bool}


def overflow() -> tuple[bool, float]:
    training = Training(replace(FSDP, precision="fp16"), place())
    before = [p.to_local().clone() for p in training.model.parameters()]
    loss = training.loss(training.model, 0, 0)
    factor = float("inf") if training.place.rank == 1 else 1.0
    training.precision.scaler.scale(loss * factor).backward()
    training.step(training.precision.scaler)
    after = [p.to_local() for p in training.model.parameters()]
    same = all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    return same, training.precision.scaler.get_scale()


def test_infinite_gradients_on_one_process_skip_the_step_on_all():
    assert debug_launcher(overflow) == [(True, 512.0)] * 2


# ------------------------------------------------------------------------- who is whose


def order_of_preparing(together: bool) -> tuple[bool, float]:
    here = place()
    torch.manual_seed(0)
    model = Tower()
    groups = [{"params": [model.embed.weight], "lr": 0.5}, {"params": model.blocks.parameters()}]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    strategy = fsdp(here)
    if together:
        strategy.wrap(Bundle(models=(model,), optimizers=(optimizer,)))
    else:
        strategy.wrap(Bundle(models=(model,)))
        strategy.wrap(Bundle(optimizers=(optimizer,)))
    held = [p for group in optimizer.param_groups for p in group["params"]]
    same = all(one is other for one, other in zip(held, model.parameters(), strict=True))
    assert model.head.weight is model.embed.weight
    assert all(isinstance(p, DTensor) for p in held)
    again = strategy.wrap(Bundle(models=(model,), optimizers=(optimizer,)))
    assert again.models == (model,)
    assert isinstance(strategy.unwrap(model), Tower)
    return same, optimizer.param_groups[0]["lr"]


@pytest.mark.parametrize("together", [True, False])
def test_an_optimizer_follows_its_model_whenever_it_is_prepared(together):
    assert debug_launcher(order_of_preparing, (together,)) == [(True, 0.5)] * 2


@pytest.mark.parametrize("optimizer", ["AdamW", "Adagrad"])
def test_state_that_an_optimizer_has_already_goes_on_in_shards(optimizer):
    recipe = replace(FSDP, optimizer=optimizer, steps_before=2)
    sharded, whole = beside_ddp(recipe)
    assert sharded["losses"] == whole["losses"]
    assert largest_difference(sharded["weights"], whole["weights"]) < 1e-6
    assert sharded["optimizer"]["state"][0]["step"] == 2 + recipe.steps


def what_is_refused(folder: str) -> list[str]:
    here = place()
    with torch.device("meta"):
        empty = Tower()
    training = Training(replace(FSDP, steps=1), here)
    strategy, model, optimizer = training.strategy, training.model, training.optimizer
    state = strategy.optimizer_state(model, optimizer)
    fewer = torch.optim.SGD(list(model.parameters())[:2], lr=0.1)
    assert isinstance(strategy, ShardedCheckpoints)
    shards = ModelShards(model=model, optimizer=None, folder=Path(folder))
    strategy.save_sharded(shards)
    dist.barrier()
    strategy.load_sharded(shards)
    return [
        told(lambda: strategy.load_sharded(replace(shards, optimizer=optimizer))),
        told(lambda: fsdp(here).wrap(Bundle(models=(empty,)))),
        told(lambda: strategy.load_optimizer_state(model, fewer, state)),
        told(lambda: Training(replace(FSDP, optimizer="Adafactor", steps_before=1), here)),
    ]


def test_models_and_states_that_are_not_there_or_cannot_be_cut_are_refused(tmp_path):
    for without, on_meta, other, uncut in debug_launcher(what_is_refused, (str(tmp_path),)):
        assert "has no optimizer in it" in without
        assert "Tower.embed.weight is on the meta device" in on_meta
        assert "saved optimizer has 19 parameters and this one has 2" in other
        assert re.search(r"'row_var' of shape \(11, 1\).*before the first step", uncut)


def partly_ignored() -> list[bool]:
    here = place()
    torch.manual_seed(0)
    model = Tower()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    strategy = fsdp(here, ignored_modules=r"blocks\.0")
    strategy.wrap(Bundle(models=(model,), optimizers=(optimizer,)))
    model(torch.zeros(2, 3, dtype=torch.long)).square().mean().backward()
    assert strategy.clip_grad_norm(model.parameters(), 0.1) > 0.1
    optimizer.step()
    kinds = {isinstance(p, DTensor) for p in model.blocks[0].parameters()}
    return [kinds == {False}, isinstance(model.blocks[1], FSDPModule)]


def test_ignored_modules_are_left_alone_and_still_trained():
    assert debug_launcher(partly_ignored) == [[True, True]] * 2


# ------------------------------------------------------------------------- precision


def test_the_policy_follows_the_settings_and_a_gpu_that_workers_share_is_refused():
    inner, root = fsdp(kind=Bf16)._inner, fsdp(kind=Bf16)._root
    assert inner.param_dtype == torch.bfloat16
    assert inner.reduce_dtype == torch.float32
    assert (inner.output_dtype, root.output_dtype) == (None, torch.float32)
    assert fsdp()._root == MixedPrecisionPolicy()
    assert fsdp(mixed_precision_policy="fp16")._inner.param_dtype == torch.float16
    own = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.bfloat16)
    assert fsdp(mixed_precision_policy=own)._root is own
    named = fsdp(mixed_precision_policy={"param_dtype": "bf16", "cast_forward_inputs": False})
    assert named._root == MixedPrecisionPolicy(torch.bfloat16, cast_forward_inputs=False)
    with pytest.raises(ConfigError, match=r"'fp12'.*Give one of"):
        fsdp(mixed_precision_policy="fp12")
    # Seen on an H100 with torch 2.11: both workers were killed by SIGSEGV in get_state_dict.
    shared = Place(device=torch.device("cuda", 0), world_size=2, backend="gloo")
    with pytest.raises(PlatformUnsupported, match=r"2 processes talk by gloo .* cuda:0 .*NCCL"):
        fsdp(shared)
    assert fsdp(replace(shared, backend="nccl")).place.backend == "nccl"


# ------------------------------------------------------------------------- checkpoints


def kept(recipe: Recipe, loads: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """Train and save, or load; the state then."""
    training = Training(recipe, place())
    strategy, model, optimizer = training.strategy, training.model, training.optimizer
    shards = ModelShards(model=model, optimizer=optimizer, folder=Path(recipe.folder))
    if loads:
        strategy.load_sharded(shards)
    else:
        training.run()
        strategy.save_sharded(shards)
    return strategy.model_state(model), strategy.optimizer_state(model, optimizer)


def test_shards_of_two_processes_are_read_by_three_and_by_torchs_tools(tmp_path):
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    recipe = replace(FSDP, optimizer="AdamW", folder=str(tmp_path / "kept"))
    weights, state = debug_launcher(kept, (recipe, False))[0]
    again, again_state = debug_launcher(kept, (recipe, True), num_processes=3)[0]
    assert largest_difference(weights, again) == 0
    assert again_state["param_groups"] == state["param_groups"]
    for number, entry in state["state"].items():
        assert largest_difference(entry, again_state["state"][number]) == 0
    dcp_to_torch_save(recipe.folder, tmp_path / "whole.pt")
    whole = torch.load(tmp_path / "whole.pt", weights_only=False)["model"]
    assert largest_difference(weights, whole) == 0
