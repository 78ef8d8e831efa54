"""Single tensors of a module on devices, and the state of modules whose weights are offloaded."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn

from nbaccel.bigmodel.module_sizes import find_tied_parameters
from nbaccel.bigmodel.tensor_placing import retie_parameters, set_module_tensor_to_device
from nbaccel.errors import ConfigError
from nbaccel.hooks import AlignDevicesHook, ModelHook, add_hook_to_module, attach_align_device_hook
from nbaccel.utils import (
    align_module_device,
    get_state_dict_from_offload,
    get_state_dict_offloaded_model,
    has_offloaded_params,
)


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))


def test_parameters_and_buffers_go_and_come_back_with_a_value():
    model, value = make_model(), torch.randn(4, 3)
    set_module_tensor_to_device(model, "0.weight", "meta")
    assert model[0].weight.is_meta
    assert isinstance(model[0].weight, nn.Parameter)
    assert model[0].weight.requires_grad
    set_module_tensor_to_device(model, "0.weight", "cpu", value=value)
    assert torch.equal(model[0].weight, value)
    assert model[0].weight.data_ptr() == value.data_ptr(), "shared, not copied"
    assert model[0].weight.requires_grad
    assert model[0].weight.is_leaf
    model = make_model()
    model[1].register_buffer("fleeting", torch.ones(2), persistent=False)
    for name in ("1.running_mean", "1.fleeting"):
        set_module_tensor_to_device(model, name, "meta")
    assert model[1].running_mean.is_meta
    assert "1.fleeting" not in model.state_dict()
    set_module_tensor_to_device(model, "1.fleeting", "cpu", value=torch.zeros(2))
    assert "1.fleeting" not in model.state_dict()
    assert "1.running_mean" in model.state_dict()
    assert dict(model.named_buffers())["1.fleeting"].sum() == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("0.none", "cpu"), "no parameter or buffer 'none'.*It has: weight, bias"),
        (("9.weight", "cpu"), "no tensor '9.weight'"),
        (("0.weight", "disk"), "'disk' is no device"),
        (("0.weight", "cpu", torch.ones(3, 4)), r"shape \(4, 3\).*\(3, 4\)"),
        (("0.weight", "cpu", None, "float99"), "'float99' is no format"),
        (("0.weight", "cpu", None, None, torch.ones(1)), "fp16_statistics.*8-bit"),
        (("2.weight", "cpu"), "on meta, without values.*value="),
        (("3.bias", "cpu", torch.ones(2)), "'bias' of Linear is None"),
    ],
)
def test_what_cannot_be_placed_changes_nothing(arguments, message):
    model = nn.Sequential(
        nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 3, device="meta"), nn.Linear(2, 2, bias=False)
    )
    before = {name: id(p) for name, p in model.named_parameters()}
    with pytest.raises(ConfigError, match=message):
        set_module_tensor_to_device(model, *arguments)
    assert {name: id(p) for name, p in model.named_parameters()} == before


def test_tied_tensors_are_placed_once_and_tied_again():
    one, two = nn.Linear(3, 3), nn.Linear(3, 3)
    two.weight = one.weight
    value = one.weight.data
    places = {one.weight.data_ptr(): {}}
    set_module_tensor_to_device(one, "weight", "meta", tied_params_map=places)
    set_module_tensor_to_device(two, "weight", "meta", tied_params_map=places)
    assert one.weight is two.weight
    for module in (one, two):
        set_module_tensor_to_device(module, "weight", "cpu", value=value, tied_params_map=places)
    assert one.weight is two.weight
    assert [*places[value.data_ptr()]] == ["meta", "cpu"]
    set_module_tensor_to_device(one, "weight", "meta", tied_params_map={})
    model = nn.ModuleDict({"a": nn.Linear(3, 3), "b": nn.Linear(3, 3), "c": nn.Linear(3, 3)})
    model["b"].weight = model["a"].weight
    tied = find_tied_parameters(model)
    kept = model["b"].weight
    set_module_tensor_to_device(model, "a.weight", "meta")
    retie_parameters(model, tied)
    assert model["a"].weight is model["b"].weight is kept
    for name in ("a.weight", "b.weight"):
        set_module_tensor_to_device(model, name, "meta")
    retie_parameters(model, tied)
    assert model["a"].weight.is_meta
    with pytest.raises(ConfigError, match=r"no tensor 'd\.weight'"):
        retie_parameters(model, [["d.weight", "a.weight"]])


def offloaded_model() -> nn.Module:
    model = make_model()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    attach_align_device_hook(model, "cpu", offload=True, weights_map=state)
    return model


def test_offloading_is_noticed():
    assert has_offloaded_params(offloaded_model()[0])
    plain = nn.Linear(2, 2)
    assert not has_offloaded_params(plain)
    add_hook_to_module(plain, AlignDevicesHook("cpu"))
    assert not has_offloaded_params(plain)
    add_hook_to_module(plain, AlignDevicesHook("cpu", offload=True), append=True)
    add_hook_to_module(plain, ModelHook(), append=True)
    assert has_offloaded_params(plain), "also among others"


def test_an_offloaded_or_plain_module_has_its_weights_in_a_block():
    model, expected = offloaded_model(), make_model()
    with align_module_device(model[0]):
        assert torch.equal(model[0].weight, expected[0].weight)
        assert model[2].weight.is_meta
    assert model[0].weight.is_meta
    with align_module_device(model[0], "meta"):
        assert model[0].weight.is_meta
    assert model[0]._hf_hook.execution_device == "cpu"
    with pytest.raises(ZeroDivisionError), align_module_device(model[0]):
        model[0].weight / (1 // 0)
    assert model[0].weight.is_meta
    module = nn.Linear(2, 2)
    values = module.weight.detach().clone()
    with align_module_device(module):
        assert not module.weight.is_meta
    with align_module_device(module, "cpu"):
        assert torch.equal(module.weight, values)
    with pytest.raises(ConfigError, match="on meta"), align_module_device(module, "meta"):
        assert module.weight.is_meta


def test_states_are_filled_from_one_module_and_what_nothing_has_is_left_out(caplog):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
    with caplog.at_level(logging.WARNING, "nbaccel"):
        found = get_state_dict_offloaded_model(model)
    assert set(found) == {"0.weight", "0.bias"}
    assert "2 tensors are on meta" in caplog.text
    assert "1.weight" in caplog.text
    model, expected = offloaded_model(), make_model().state_dict()
    state = {"0.weight": "", "0.bias": "", "2.weight": ""}
    assert get_state_dict_from_offload(model[0], "0.weight", state) is state
    assert torch.equal(state["0.weight"], expected["0.weight"])
    assert torch.equal(state["0.bias"], expected["0.bias"])
    assert state["2.weight"] == ""
    plain = make_model()
    get_state_dict_from_offload(plain[2], "2.weight", state, "meta")
    assert not state["2.weight"].is_meta, "only offloaded ones move"
