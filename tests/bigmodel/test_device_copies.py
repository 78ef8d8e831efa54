"""Weights copied to a GPU while it computes: the same results, in less memory than the model."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from nbaccel.bigmodel.offload_folder import OffloadedWeightsLoader, offload_state_dict
from nbaccel.bigmodel.prefetching import ExecutionOrder, start_copies
from nbaccel.hooks import attach_align_device_hook
from tests.isolation import isolated

WIDTH, LAYERS = 2048, 12
LAYER_BYTES = 4 * WIDTH * (WIDTH + 1)


def make_model() -> nn.Module:
    torch.manual_seed(0)
    layers = (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(LAYERS))
    return nn.Sequential(*layers).eval()


def offloaded(folder: str, source: str, prefetch: bool) -> nn.Module:
    model = make_model()
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    if source == "folder":
        offload_state_dict(folder, weights)
        weights = OffloadedWeightsLoader(save_folder=folder)
    attach_align_device_hook(model, "cuda:0", offload=True, weights_map=weights, prefetch=prefetch)
    return model


class FakeBlock:
    """Notes what it is told; its bytes fill any window."""

    weight_bytes = 10**9
    weights_map, offloaded_names = None, ()

    def __init__(self, name, told):
        self.name, self.told = name, told

    def copy_ahead(self):
        self.told.append(("copy", self.name))

    def drop_copies(self):
        self.told.append(("drop", self.name))


def run_blocks(order, blocks, names):
    for name in names:
        order.enter(blocks[name])
        order.end_block()


def test_the_next_block_is_copied_when_one_has_been_queued():
    told = []
    order, blocks = ExecutionOrder(), {name: FakeBlock(name, told) for name in "abc"}
    for block in blocks.values():
        order.register(block)
    run_blocks(order, blocks, "abc")
    assert told == [("copy", "b"), ("copy", "c")]
    told.clear()
    run_blocks(order, blocks, "aaabc")
    assert told == [("copy", "b"), ("copy", "c")], "not again for a block that repeats"
    told.clear()
    run_blocks(order, blocks, "ac")
    assert told == [("copy", "b"), ("drop", "b")]
    told = []
    order, blocks = ExecutionOrder(), {name: FakeBlock(name, told) for name in "xabc"}
    for _ in range(2):
        told.clear()
        run_blocks(order, blocks, "xabac")
    assert told == [("copy", "a"), ("copy", "b"), ("copy", "a"), ("copy", "c")]
    told = []
    order, blocks = ExecutionOrder(), {name: FakeBlock(name, told) for name in "Pab"}
    for _ in range(2):
        told.clear()
        order.enter(blocks["P"])
        run_blocks(order, blocks, "ab")
        order.end_block()
    assert told == [("copy", "b")]


@pytest.mark.gpu
@pytest.mark.parametrize("source", ["memory", "folder"])
@pytest.mark.parametrize("prefetch", [True, False])
@isolated(timeout_s=300)
def test_outputs_are_those_of_the_cpu(tmp_path, source, prefetch):
    rows = torch.randn(8, WIDTH)
    model = offloaded(str(tmp_path), source, prefetch)
    with torch.no_grad():
        expected = make_model()(rows)
        for _ in range(3):
            found = model(rows.to("cuda:0"))
            torch.testing.assert_close(found.cpu(), expected, rtol=1e-4, atol=1e-4)
    assert all(p.is_meta for p in model.parameters())


@pytest.mark.gpu
@isolated(timeout_s=300)
def test_with_and_without_prefetching_outputs_are_equal(tmp_path):
    rows = torch.randn(8, WIDTH, device="cuda:0")
    models = [offloaded(str(tmp_path), "memory", prefetch) for prefetch in (True, False)]
    with torch.no_grad():
        # Often, because memory that is used again too early shows by chance only.
        for _ in range(30):
            found = [model(rows) for model in models]
            assert torch.equal(*found)


@pytest.mark.gpu
@isolated(timeout_s=300)
def test_the_peak_of_memory_is_that_of_a_few_layers(tmp_path):
    model = offloaded(str(tmp_path), "folder", prefetch=True)
    rows = torch.randn(8, WIDTH, device="cuda:0")
    with torch.no_grad():
        for _ in range(3):
            model(rows)
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() < LAYERS * LAYER_BYTES / 2


@pytest.mark.gpu
@isolated(timeout_s=300)
def test_copies_leave_stream_and_device_as_they_were():
    before = torch.accelerator.current_stream(), torch.accelerator.current_device_index()
    copies = start_copies({"w": torch.arange(10**6)}, torch.device("cuda"))
    after = torch.accelerator.current_stream(), torch.accelerator.current_device_index()
    assert after == before
    found = copies.finish()["w"]
    assert torch.equal(found.cpu(), torch.arange(10**6))
    assert start_copies({"w": found}, torch.device("cuda")) is None
