from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DeviceMesh, DTensor, Replicate, Shard
from torch.nn.parallel import DistributedDataParallel

from nbaccel.transfer.arena import named_tensors
from tests.transfer.worker_pair import Pair

pytestmark = pytest.mark.no_memfd_growth

TRAIN = """
loss = model(torch.ones(4, 256)).pow(2).sum()
loss.backward()
with torch.no_grad():
    for p in model.parameters():
        p -= rate * p.grad
        p.grad = None
del p, loss
"""


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair(2)
    made.ns |= {"torch": torch, "nn": nn, "model": nn.Linear(256, 256), "rate": 0.01}
    yield made
    made.close()


@pytest.fixture
def group_without_ports() -> Iterator[None]:
    """What a mesh needs to tell pieces apart; torch's caches of it outlive a test."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def sharded(tensor: torch.Tensor, placement: Any) -> DTensor:
    """A DTensor over this one process, whose mesh opens no group (and no port) of its own."""
    mesh = DeviceMesh("cpu", [0], _init_backend=False)
    return DTensor.from_local(tensor, mesh, [placement], run_check=False)


def same(one: nn.Module, other: nn.Module) -> bool:
    pairs = zip(named_tensors(one), named_tensors(other), strict=True)
    return all(torch.equal(a, b.to(a.dtype)) for (_, a), (_, b) in pairs)


def weights(pair: Pair) -> list[nn.Module]:
    return [worker.ns["model"] for worker in pair.workers]


def test_what_rank_0_trained_comes_home_and_equal_ranks_share_memory_again(pair):
    before = pair.ns["model"].weight.detach().clone()
    for number in range(3):
        sent = pair.cell(TRAIN)
        assert (sent is None) == (number > 0), "coming home is no change of the notebook's"
        assert same(pair.ns["model"], weights(pair)[0])
        assert same(pair.ns["model"], weights(pair)[1])
        assert [worker.written() for worker in pair.workers] == [[], []]
    assert not torch.equal(before, pair.ns["model"].weight)
    pair.cell("model.weight.data.zero_()", 1)
    pair.need("model", force=True)
    assert same(pair.ns["model"], weights(pair)[1])


def test_a_rank_with_other_weights_keeps_them(pair):
    pair.cell(TRAIN)
    pair.cell("rate = 0.5", 1)
    pair.cell(TRAIN)
    one, other = weights(pair)
    assert same(pair.ns["model"], one)
    assert not same(one, other)
    assert pair.workers[0].written() == []
    assert pair.workers[1].written() != []
    assert not pair.workers[1].namespace.modules.dirty(), "they stay there"


def test_only_the_pages_that_differ_are_kept(pair):
    pair.ns["model"] = nn.Linear(1024, 1024)
    pair.cell("model.weight.data.add_(1)")
    pair.cell("model.weight.data.add_(1); model.weight.data[512, 0] = 9", 1)
    pair.cell("model.weight.data.add_(1)", 0)
    pair.home()
    ((start, stop),) = pair.workers[1].written()
    assert stop - start == 4096
    assert weights(pair)[1].weight[512, 0] == 9
    assert weights(pair)[1].weight[511, 0] == pair.ns["model"].weight[511, 0]


def test_what_the_notebook_writes_is_seen_by_all_ranks(pair):
    pair.cell(TRAIN)
    pair.cell("model.weight.data.zero_()", 1)
    state = {name: torch.full_like(t, 2) for name, t in pair.ns["model"].state_dict().items()}
    pair.ns["model"].load_state_dict(state)
    pair.cell("model")
    assert all(same(pair.ns["model"], model) for model in weights(pair))
    assert [worker.written() for worker in pair.workers] == [[], []]
    pair.cell("model.weight.data.zero_()", 1)
    pair.cell("model")
    assert weights(pair)[1].weight.count_nonzero() == 0, "the notebook wrote nothing since"


def test_adopting_one_of_two_modules_that_share_pages_leaves_the_other(pair):
    pair.notebook("""
    pool = nn.Linear(16, 16)
    class Part(nn.Module):
        def __init__(self, tensor):
            super().__init__()
            self.tensor = tensor
    whole = nn.ParameterDict({'a': torch.randn(8), 'b': torch.randn(2000), 'c': torch.randn(8)})
    """)
    pair.cell("whole")
    pair.notebook("part = Part(whole['b'])")
    pair.cell("part.tensor is whole['b'] or 1 / 0")
    pair.cell("""
    with torch.no_grad():
        for t in whole.values():
            t.fill_(5)
    """, 1)  # fmt: skip
    with torch.no_grad():
        pair.ns["part"].tensor.fill_(3)
    pair.need("part")
    there = pair.workers[1].ns["whole"]
    assert (there["b"] == 3).all()
    assert (there["a"] == 5).all()
    assert (there["c"] == 5).all()


def test_tensors_that_left_the_arena_come_home_and_a_step_makes_them_dirty(pair):
    pair.cell("model.double()")
    pair.cell(TRAIN.replace("torch.ones(4, 256)", "torch.ones(4, 256).double()"))
    assert pair.ns["model"].weight.dtype is torch.float32
    assert torch.equal(pair.ns["model"].weight, weights(pair)[0].weight.float())
    assert not pair.workers[0].namespace.modules.dirty()
    nn.init.ones_(pair.ns["model"].weight)
    pair.cell("model")
    assert all((model.weight == 1).all() for model in weights(pair))
    assert not pair.workers[0].namespace.modules.dirty(), "it has what the notebook has"

    pair.cell("model.double(); optimizer = torch.optim.SGD(model.parameters(), lr=1)")
    namespace = pair.workers[0].namespace
    assert not namespace.modules.dirty()
    pair.worker["optimizer"].step()
    assert namespace.modules.dirty()
    pair.home()
    assert not namespace.modules.dirty()


def test_untouched_weights_are_not_dirty(pair):
    pair.cell("model(torch.ones(1, 256))")
    assert not any(worker.namespace.modules.dirty() for worker in pair.workers)
    weights(pair)[1].weight.data.add_(1)
    weights(pair)[0].bias.data.add_(1)
    assert all(worker.namespace.modules.dirty() for worker in pair.workers), (
        "rank 1's would be lost"
    )
    pair.home()
    assert not any(worker.namespace.modules.dirty() for worker in pair.workers), "told once"


def test_a_sharded_model_comes_home_from_its_pieces(group_without_ports, pair):
    pair.cell("model", 0)
    model = pair.worker["model"]
    model.weight = nn.Parameter(sharded(model.weight.data.clone(), Shard(0)))
    with torch.no_grad():
        model.weight.to_local().fill_(3)
    assert pair.workers[0].namespace.modules.dirty()
    pair.home(0)
    assert (pair.ns["model"].weight == 3).all()
    nn.init.ones_(pair.ns["model"].weight)
    pair.cell("model", 0)
    assert (model.weight.to_local() == 1).all(), "its piece of what the notebook wrote"


def test_a_cell_s_names_are_those_bound_rebound_or_deleted(pair):
    namespace, ns = pair.workers[0].namespace, pair.worker
    ns |= {"kept": [1], "changed": 1, "gone": 2}
    namespace.begin()
    ns |= {"changed": "new", "made": 3, "_": 4, "In": [], "_7": 1, "_mine": 5}
    ns["kept"].append(2)
    del ns["gone"]
    assert sorted(namespace.bound()) == ["_mine", "changed", "gone", "made"]


def test_values_come_to_the_notebook_as_they_are(pair):
    pair.cell("""
    def f(x): return x + rate
    values = {'t': torch.ones(3, requires_grad=True), 'p': nn.Parameter(torch.ones(2)), 'f': f}
    shown = model(torch.ones(1, 256))
    """)
    found = pair.workers[0].pull("values", "f", "shown", into=pair.ns)
    assert found["values"]["f"] is found["f"]
    assert found["f"].__globals__ is pair.ns
    assert found["f"](1) == 1.01
    assert found["values"]["t"].requires_grad
    assert isinstance(found["values"]["p"], nn.Parameter)
    assert torch.equal(found["shown"], pair.worker["shown"])


def test_of_a_sharded_tensor_a_rank_s_piece_comes_with_a_word_and_a_ddp_model_without_it(
    group_without_ports, pair, capsys
):
    ns = pair.worker
    ns["whole"] = {"w": sharded(torch.arange(4.0), Replicate())}
    found: Any = pair.workers[0].pull("whole", into=pair.ns)
    assert type(found["whole"]["w"]) is torch.Tensor
    assert capsys.readouterr().err == ""
    ns["piece"] = nn.Parameter(sharded(torch.arange(4.0), Shard(0)))
    found = pair.workers[0].pull("piece", into=pair.ns)
    assert isinstance(found["piece"], nn.Parameter)
    assert "rank 0 has only a piece of 1 sharded tensor(s) in piece" in capsys.readouterr().err
    pair.cell("model", 0)
    ns["wrapped"] = [DistributedDataParallel(ns["model"])]
    model = pair.workers[0].pull("wrapped", into=pair.ns)["wrapped"][0]
    assert type(model) is nn.Linear
    assert same(model, pair.ns["model"])
