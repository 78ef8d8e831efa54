"""Hooks around ``forward``."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch import nn

from nbaccel.big_modeling import attach_layerwise_casting_hooks
from nbaccel.errors import ConfigError
from nbaccel.hooks import (
    CpuOffload,
    LayerwiseCastingHook,
    ModelHook,
    SequentialHook,
    UserCpuOffloadHook,
    add_hook_to_module,
    remove_hook_from_module,
    remove_hook_from_submodules,
)


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([2.0]))

    def forward(self, numbers, *, offset=0.0):
        """Scale numbers."""
        return numbers * self.weight + offset


class AddOne(ModelHook):
    def pre_forward(self, module, *args, **kwargs):
        return (args[0] + 1, *args[1:]), kwargs


class TimesTen(ModelHook):
    def post_forward(self, module, output):
        return output * 10


class Recording(ModelHook):
    def __init__(self):
        self.events = []

    def init_hook(self, module):
        self.events.append("init")
        return module

    def detach_hook(self, module):
        self.events.append("detach")
        return module


class WithoutGradient(ModelHook):
    no_grad = True


X = torch.tensor([1.0, 2.0])


def test_a_hook_changes_what_goes_in_and_what_comes_out_and_the_signature_stays():
    module = Scaled()
    assert add_hook_to_module(module, AddOne()) is module
    assert torch.equal(module(X, offset=1.0), torch.tensor([5.0, 7.0]))
    add_hook_to_module(module, TimesTen())
    assert torch.equal(module(X), torch.tensor([20.0, 40.0])), "replaced, not added"
    add_hook_to_module(module, AddOne(), append=True)
    assert isinstance(module._hf_hook, SequentialHook)
    assert torch.equal(module(X), torch.tensor([40.0, 60.0]))
    module = Scaled()
    before = inspect.signature(module.forward)
    add_hook_to_module(module, AddOne())
    assert inspect.signature(module.forward) == before
    assert module.forward.__doc__ == "Scale numbers."


def test_hooks_are_told_when_they_go_and_the_module_is_as_before():
    module, first, second = Scaled(), Recording(), Recording()
    add_hook_to_module(module, first)
    assert first.events == ["init"]
    add_hook_to_module(module, second, append=True)
    assert first.events == ["init", "detach", "init"]
    assert second.events == ["init"]
    remove_hook_from_module(module)
    assert first.events[-1] == second.events[-1] == "detach"
    module = Scaled()
    attributes = set(vars(module))
    add_hook_to_module(module, AddOne())
    assert {"_hf_hook", "_old_forward", "forward"} == set(vars(module)) - attributes
    module.to = module.to  # what dispatching puts there
    remove_hook_from_module(module)
    assert set(vars(module)) == attributes
    assert torch.equal(module(X), X * 2)
    remove_hook_from_module(module)
    assert torch.equal(module(X), X * 2)


@pytest.mark.parametrize("recurse", [True, False])
def test_submodules_keep_their_hooks_unless_asked(recurse):
    model = nn.Sequential(Scaled(), nn.Sequential(Scaled()))
    for module in (model, model[0], model[1][0]):
        add_hook_to_module(module, AddOne())
    remove_hook_from_module(model, recurse=recurse)
    assert not hasattr(model, "_hf_hook")
    assert hasattr(model[1][0], "_hf_hook") is not recurse
    remove_hook_from_submodules(model)
    assert not any(hasattr(module, "_hf_hook") for module in model.modules())


@pytest.mark.parametrize("appended", [False, True])
def test_a_hook_may_turn_gradients_off(appended):
    module = Scaled()
    add_hook_to_module(module, WithoutGradient())
    if appended:
        add_hook_to_module(module, TimesTen(), append=True)
    assert not module(X).requires_grad
    remove_hook_from_module(module)
    assert module(X).requires_grad


def test_a_traced_module_can_be_hooked_and_another_compiled():
    traced = torch.fx.symbolic_trace(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
    expected = traced(X)
    add_hook_to_module(traced, TimesTen())
    assert torch.equal(traced(X), expected * 10)
    remove_hook_from_module(traced)
    assert torch.equal(traced(X), expected)
    add_hook_to_module(traced, TimesTen())
    for node in traced.graph.nodes:
        if node.op == "output":
            with traced.graph.inserting_before(node):
                negated = traced.graph.call_function(torch.neg, node.args)
            node.args = (negated,)
    traced.recompile()
    assert torch.equal(traced(X), -expected)
    module = nn.Sequential(Scaled(), Scaled())
    add_hook_to_module(module[0], TimesTen())
    add_hook_to_module(module[0], AddOne(), append=True)
    expected = module(X).detach()
    compiled = torch.compile(module, backend="eager")
    with torch.no_grad():
        assert torch.equal(compiled(X), expected)
        assert torch.equal(compiled(X), expected)
    torch.compiler.reset()


# ------------------------------------------------------------------------- whole modules


def test_models_take_turns_in_a_pipeline():
    first, second = Scaled(), Scaled()
    hooks = []
    for model in (first, second):
        hook = CpuOffload("meta", prev_module_hook=hooks[-1] if hooks else None)
        add_hook_to_module(model, hook, append=True)
        hooks.append(UserCpuOffloadHook(model, hook))
    assert first(X).is_meta
    assert first.weight.is_meta
    first.to_empty(device="cpu")
    second(X)
    assert second.weight.is_meta
    hooks[1].remove()
    assert not hasattr(second, "_hf_hook")


# ------------------------------------------------------------------------- formats


def make_layers() -> nn.Module:
    torch.manual_seed(0)
    return nn.ModuleDict(
        {
            "attention": nn.Linear(4, 4),
            "norm": nn.LayerNorm(4),
            "head_norm": nn.Sequential(nn.Linear(4, 4)),
            "conv": nn.Conv1d(4, 4, 1),
        }
    )


@pytest.mark.parametrize(
    ("skipped", "cast"),
    [
        ({}, {"attention", "head_norm.0", "conv"}),
        ({"skip_modules_pattern": "norm"}, {"attention", "conv"}),
        ({"skip_modules_pattern": ("^conv$", "att")}, {"head_norm.0"}),
        ({"skip_modules_classes": (nn.Conv1d,)}, {"attention", "head_norm.0"}),
    ],
)
def test_layers_are_kept_in_another_format(skipped, cast):
    layers = make_layers()
    attach_layerwise_casting_hooks(layers, torch.float8_e4m3fn, torch.float32, **skipped)
    found = {
        name
        for name, module in layers.named_modules()
        if getattr(module, "weight", None) is not None
        and module.weight.dtype is torch.float8_e4m3fn
    }
    assert found == cast


def test_layers_compute_in_their_format_which_has_fractions():
    layer, rows = nn.Linear(4, 4), torch.randn(2, 4)
    stored = layer.weight.detach().to(torch.bfloat16).float()
    bias = layer.bias.detach().to(torch.bfloat16).float()
    attach_layerwise_casting_hooks(layer, torch.bfloat16, torch.float32)
    assert torch.equal(layer(rows), nn.functional.linear(rows, stored, bias))
    assert layer.weight.dtype is torch.bfloat16
    with pytest.raises(
        ConfigError, match=r"(?s)2 settings.*storage_dtype.*'fp8'.*compute_dtype.*int8"
    ):
        LayerwiseCastingHook("fp8", torch.int8, False)
