"""Models that are built on a device, be it one without memory."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

from nbaccel.big_modeling import init_empty_weights, init_on_device
from nbaccel.bigmodel.module_sizes import find_tied_parameters
from nbaccel.errors import ConfigError
from tests.bigmodel.families import build

REGISTERING = (nn.Module.register_parameter, nn.Module.register_buffer)


@pytest.fixture(autouse=True)
def _torch_is_as_before():
    yield
    assert (nn.Module.register_parameter, nn.Module.register_buffer) == REGISTERING
    assert torch.empty(0).device.type == "cpu"


class Tagged(nn.Parameter):
    """A parameter whose constructor asks for more."""

    def __new__(cls, data, tag):
        made = nn.Parameter.__new__(cls, data, False)
        made.tag = tag
        return made


def test_parameters_have_no_memory_and_buffers_do_unless_asked_for():
    with init_empty_weights():
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    assert {p.device.type for p in model.parameters()} == {"meta"}
    assert {b.device.type for b in model.buffers()} == {"cpu"}
    assert model[0].weight.shape == (4, 3)
    assert model[0].weight.is_leaf
    assert model[0].weight.requires_grad
    with init_empty_weights(include_buffers=True):
        model = nn.BatchNorm1d(4)
        model.register_buffer("from_numbers", torch.frombuffer(bytearray(8), dtype=torch.float32))
        loose = torch.zeros(2), torch.ones(2), torch.arange(3)
    assert {t.device.type for t in [*model.parameters(), *model.buffers(), *loose]} == {"meta"}


@pytest.mark.parametrize(("text", "kind"), [("1", "meta"), ("no", "cpu"), ("", "cpu")])
def test_the_environment_may_include_buffers_and_an_exception_ends_the_block(
    monkeypatch, text, kind
):
    monkeypatch.setenv("ACCELERATE_INIT_INCLUDE_BUFFERS", text)
    with init_empty_weights():
        assert nn.BatchNorm1d(2).running_mean.device.type == kind
    with init_empty_weights(include_buffers=False):
        assert nn.BatchNorm1d(2).running_mean.device.type == "cpu"
    with pytest.raises(ZeroDivisionError), init_empty_weights():
        nn.Linear(2, 2 // 0)
    assert not nn.BatchNorm1d(2).weight.is_meta


def test_what_is_tied_and_attributes_are_kept():
    class Holder(nn.Module):
        def __init__(self):
            super().__init__()
            self.tagged = Tagged(torch.ones(2), tag="mine")
            self.frozen = nn.Parameter(torch.ones(2, dtype=torch.float16), requires_grad=False)
            plain = nn.Parameter(torch.ones(2))
            plain.weight_loader = "by rows"
            self.plain = plain
            self.absent = None
            self.register_parameter("also_absent", None)

    with init_empty_weights():
        holder = Holder()
    assert type(holder.tagged) is Tagged
    assert holder.tagged.tag == "mine"
    assert [holder.tagged.requires_grad, holder.frozen.requires_grad] == [False, False]
    assert holder.frozen.dtype is torch.float16
    assert holder.plain.weight_loader == "by rows"
    assert holder.plain.requires_grad
    assert holder.also_absent is None
    assert {p.device.type for p in holder.parameters()} == {"meta"}
    with init_empty_weights():
        model = nn.ModuleDict({"a": nn.Linear(3, 3), "b": nn.Linear(3, 3)})
        model["b"].weight = model["a"].weight
        made_before = nn.Parameter(torch.ones(2))
        one, two = nn.Module(), nn.Module()
        one.shared, two.shared = made_before, made_before
    assert model["a"].weight is model["b"].weight
    assert one.shared is two.shared
    assert one.shared.is_meta
    assert not made_before.is_meta


def test_the_innermost_block_counts_where_there_are_values():
    with init_empty_weights():
        outer = nn.Linear(2, 2)
        with init_on_device("cpu"):
            inner = nn.Linear(2, 2)
        outer_again = nn.Linear(2, 2)
    assert outer.weight.is_meta
    assert outer_again.weight.is_meta
    assert not inner.weight.is_meta
    assert inner.weight.abs().sum() > 0
    with (
        init_empty_weights(include_buffers=True),
        init_on_device("cpu", include_buffers=False),
        pytest.raises(ConfigError, match=r"'weight' of Linear was made on meta.*include_buffers"),
    ):
        nn.Linear(2, 2)


def test_other_threads_build_with_memory():
    found: dict[str, str] = {}
    is_open, is_built = threading.Event(), threading.Event()

    def build_empty():
        with init_empty_weights(include_buffers=True):
            is_open.set()
            is_built.wait(10)
            found["empty"] = nn.BatchNorm1d(2).weight.device.type

    thread = threading.Thread(target=build_empty)
    thread.start()
    is_open.wait(10)
    found["plain"] = nn.BatchNorm1d(2).weight.device.type
    with init_on_device("cpu"):
        found["on cpu"] = nn.Linear(2, 2).weight.device.type
        is_built.set()
        thread.join()
        # The other thread's end must not end this thread's block.
        with pytest.raises(ConfigError, match="made on meta"):
            nn.Linear(2, 2, device="meta")
    assert found == {"plain": "cpu", "empty": "meta", "on cpu": "cpu"}


@pytest.mark.parametrize("device", ["disk", "nope:3", None, 2.5])
def test_what_is_no_device_is_refused(device):
    with pytest.raises(ConfigError, match="no device of this machine"), init_on_device(device):
        nn.Linear(2, 2)


@pytest.mark.parametrize("include_buffers", [False, True])
def test_models_of_transformers_are_built_empty(include_buffers):
    plain = build("gpt2")
    with init_empty_weights(include_buffers):
        model = build("gpt2")
    assert {p.device.type for p in model.parameters()} == {"meta"}
    assert find_tied_parameters(model) == find_tied_parameters(plain) != []
    found = {name: (p.shape, p.dtype, p.requires_grad) for name, p in model.named_parameters()}
    assert found == {n: (p.shape, p.dtype, p.requires_grad) for n, p in plain.named_parameters()}
