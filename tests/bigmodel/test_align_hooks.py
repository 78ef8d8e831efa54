"""Weights that come for a module's ``forward`` and go after it."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

from nbaccel.bigmodel.offload_folder import OffloadedWeightsLoader, offload_state_dict
from nbaccel.bigmodel.prefetching import ExecutionOrder
from nbaccel.errors import ConfigError
from nbaccel.hooks import (
    AlignDevicesHook,
    add_hook_to_module,
    attach_align_device_hook,
    attach_align_device_hook_on_blocks,
    remove_hook_from_submodules,
)

X = torch.randn(2, 4, generator=torch.Generator().manual_seed(1))


def make_model(number_of_layers: int = 3) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(number_of_layers))).eval()


def state_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def look_inside(layer: nn.Module, look) -> None:
    """Call a function in the layer's `forward`: torch's own hooks run after those with weights."""
    inner_forward = layer.forward

    def forward(*args, **kwargs):
        look()
        return inner_forward(*args, **kwargs)

    layer.forward = forward


class RecordingSource(dict):
    """A map that reads ahead, and remembers everything that it is asked."""

    def __init__(self, weights):
        super().__init__(weights)
        self.told: list[tuple[str, str]] = []

    def __getitem__(self, name):
        self.told.append(("read", name))
        return super().__getitem__(name)

    def prefetch(self, names):
        self.told += [("prefetch", name) for name in names]

    def release(self, names):
        self.told += [("release", name) for name in names]

    def take(self, kind: str) -> list[str]:
        return [name for told_kind, name in self.told if told_kind == kind]


def layer_numbers(names: list[str]) -> list[int]:
    """The layers that names belong to, each once in a row."""
    numbers = [int(name.partition(".")[0]) for name in names]
    return [n for i, n in enumerate(numbers) if i == 0 or numbers[i - 1] != n]


# ------------------------------------------------------------------------- in and out


@pytest.mark.parametrize("where", ["memory", "folder", "nothing given"])
def test_weights_are_there_for_the_forward_only(tmp_path, where):
    model = make_model()
    expected, state = model(X), state_of(model)
    weights = {"memory": state, "nothing given": None}.get(where)
    if where == "folder":
        offload_state_dict(tmp_path, state)
        weights = OffloadedWeightsLoader(save_folder=tmp_path)
    attach_align_device_hook(model, "cpu", offload=True, weights_map=weights)
    for mode in (torch.no_grad, torch.inference_mode, torch.enable_grad):
        assert {p.device.type for p in model.parameters()} == {"meta"}
        assert all(isinstance(p, nn.Parameter) and p.requires_grad for p in model.parameters())
        with mode():
            assert torch.equal(model(X), expected)
    remove_hook_from_submodules(model)
    assert all(torch.equal(p, state[name]) for name, p in model.named_parameters())
    assert torch.equal(model(X), expected)


def test_only_what_runs_is_in_memory_and_what_the_map_lacks_is_named():
    model, there = make_model(), []
    for layer in model:
        look_inside(layer, lambda: there.append([not part.weight.is_meta for part in model]))
    attach_align_device_hook(model, "cpu", offload=True)
    model(X)
    assert there == [[True, False, False], [False, True, False], [False, False, True]]
    model = make_model()
    attach_align_device_hook(model, "cpu", offload=True, weights_map={"0.weight": torch.ones(4, 4)})
    with pytest.raises(ConfigError, match=r"'0\.bias' is offloaded.*lacks"):
        model(X)


class TakesMapping(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, rows, *, cache=None, mask=None):
        return {"rows": rows.device.type, "cache": cache["k"].device.type, "mask": mask.device.type}


def test_arguments_are_moved_but_those_to_skip():
    module = TakesMapping()
    add_hook_to_module(module, AlignDevicesHook("meta", skip_keys="cache"))
    found = module(X, cache={"k": X}, mask=X)
    assert found == {"rows": "meta", "cache": "cpu", "mask": "meta"}


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_a_copy_of_an_offloaded_model_runs_by_itself(duplicate):
    model = make_model()
    expected = model(X)
    attach_align_device_hook(model, "cpu", offload=True)
    model(X)
    copied = duplicate(model)
    orders = {id(part._hf_hook.execution_order) for part in copied}
    assert len(orders) == 1
    assert orders.isdisjoint({id(part._hf_hook.execution_order) for part in model})
    for _ in range(2):
        assert torch.equal(copied(X), expected)
        assert torch.equal(model(X), expected)
    remove_hook_from_submodules(copied)
    with torch.no_grad():
        copied[0].weight.zero_()
    assert not torch.equal(copied(X), expected)
    assert torch.equal(model(X), expected)


# ------------------------------------------------------------------------- parts and ties


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.middle = nn.Linear(4, 4)
        self.head = nn.Linear(4, 8, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        return self.head(self.middle(self.embed(tokens)))


def test_tied_weights_share_what_is_placed():
    model, tokens = Tied(), torch.tensor([[1, 2]])
    expected, state = model(tokens), state_of(model)
    places = {model.embed.weight.data_ptr(): {}}
    seen = []
    look_inside(model.head, lambda: seen.append(model.head.weight))
    attach_align_device_hook_on_blocks(
        model,
        execution_device={"": "cpu", "embed": "cpu", "middle": "cpu", "head": "cpu"},
        offload={"embed": False, "middle": True, "head": True},
        weights_map=RecordingSource(state),
        tied_params_map=places,
    )
    assert torch.equal(model(tokens), expected)
    assert seen[0] is model.embed.weight
    assert "head.weight" not in model.head._hf_hook.weights_map.dataset.take("read")
    assert model.head.weight.is_meta


def test_tied_weights_that_are_both_offloaded_leave_nothing_behind(tmp_path):
    model, tokens = Tied(), torch.tensor([[1, 2]])
    expected = model(tokens)
    offload_state_dict(tmp_path, model.state_dict())
    group = {}
    attach_align_device_hook(
        model,
        "cpu",
        offload=True,
        weights_map=OffloadedWeightsLoader(save_folder=tmp_path),
        tied_params_map={model.embed.weight.data_ptr(): group},
    )
    group.clear()  # what placing on meta noted
    assert model.head._hf_hook.tied_params_names == {"weight"}
    for _ in range(2):
        assert torch.equal(model(tokens), expected)
        assert group == {}
    with pytest.raises(IndexError):
        model(torch.tensor([99]))
    assert torch.equal(model(tokens), expected)
    assert all(p.is_meta for p in model.parameters())
    assert group == {}


# ------------------------------------------------------------------------- ahead of time


def attach_recorded(model: nn.Module, **settings) -> RecordingSource:
    source = RecordingSource(state_of(model))
    attach_align_device_hook(model, "cpu", offload=True, weights_map=source, **settings)
    return source


def test_every_weight_is_asked_for_once_in_each_pass_before_it_is_read():
    model = make_model(5)
    expected = model(X)
    source = attach_recorded(model, order=ExecutionOrder(window_bytes=100))
    names = sorted(source)
    assert torch.equal(model(X), expected)
    assert sorted(source.take("prefetch")) == names
    assert source.take("read") == source.take("prefetch")
    assert layer_numbers(source.take("prefetch")) == [0, 1, 2, 3, 4]
    for _ in range(2):
        source.told.clear()
        model(X)
        # The first ones of this pass were asked for at the end of the last one.
        assert sorted(source.take("read")) == sorted(source.take("release")) == names
    assert sorted(source.take("prefetch")) == names


def test_no_more_than_the_window_is_near():
    model = make_model(8)
    layer_bytes = sum(p.nbytes for p in model[0].parameters())
    source = attach_recorded(model, order=ExecutionOrder(window_bytes=3 * layer_bytes))
    model(X)
    near, most = set(), 0
    for kind, name in source.told:
        if kind == "prefetch":
            near.add(name)
        elif kind == "release":
            near.discard(name)
        most = max(most, len(near))
    assert most == 2 * (3 + 1), "three layers ahead, and the one that runs"


@pytest.mark.parametrize(
    "settings", [{"prefetch": False}, {"order": ExecutionOrder(prefetch=False)}]
)
def test_asking_ahead_can_be_switched_off(settings):
    model = make_model()
    expected = model(X)
    source = attach_recorded(model, **settings)
    assert torch.equal(model(X), expected)
    assert source.take("prefetch") == []
    assert len(source.take("read")) == 6


class Backwards(nn.Module):
    """Runs its layers in an order that is not that of their registration."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, rows, numbers=(3, 2, 1, 0)):
        for number in numbers:
            rows = self.layers[number](rows)
        return rows


def attach_backwards(window_bytes: int = 1) -> tuple[Backwards, RecordingSource]:
    model = Backwards()
    source = attach_recorded(model, order=ExecutionOrder(window_bytes))
    source.update({name.removeprefix("layers."): weight for name, weight in source.items()})
    for layer_number, layer in enumerate(model.layers):
        layer._hf_hook.weights_map.prefix = f"{layer_number}."
    return model, source


def test_the_order_is_learnt_and_what_was_asked_for_in_vain_is_given_back():
    model, source = attach_backwards()
    model(X)
    for _ in range(2):
        source.told.clear()
        model(X)
    assert layer_numbers(source.take("prefetch")) == [2, 1, 0, 3]
    assert source.take("read")[:2] == ["3.weight", "3.bias"]
    assert sorted(source.take("prefetch")) == sorted(n for n in source if "layers" not in n)
    source.told.clear()
    model(X, (3, 0))
    assert "2.weight" in source.take("prefetch")
    assert "2.weight" not in source.take("read")
    assert "2.weight" in source.take("release")


@pytest.mark.parametrize(
    "numbers", [(3, 3, 3, 1), (3, 0, 3, 0, 2), (1,), (0, 0, 0), (2, 1, 1, 1, 0)]
)
def test_layers_that_run_several_times_are_right(numbers):
    model, source = attach_backwards(window_bytes=10**6)
    plain = Backwards()
    for _ in range(3):
        source.told.clear()
        assert torch.equal(model(X, numbers), plain(X, numbers))
        assert len(source.take("read")) == 2 * len(numbers)
    asked = layer_numbers(source.take("prefetch"))
    assert set(asked) <= set(numbers)
    # A pass ends where its first layer comes again, so some orders are not learnt as a whole.
    assert len(asked) <= 2 * len(numbers)


def test_a_hook_that_is_removed_is_not_asked_for():
    model = make_model(3)
    source = attach_recorded(model)
    model(X)
    remove_hook_from_submodules(model[1])
    source.told.clear()
    for _ in range(2):
        model(X)
    assert 1 not in layer_numbers(source.take("prefetch"))
    assert not model[1].weight.is_meta
