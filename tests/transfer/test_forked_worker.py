from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.transfer.forked_worker import Forked


@pytest.fixture
def pool() -> Iterator[Forked]:
    forked = Forked()
    yield forked
    forked.close()


NET = """
import torch
from torch import nn

scale = 3

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(512, 512)
        self.twice = lambda x: 2 * x

    def forward(self, x):
        return self.twice(self.head(x)) * scale

net = Net()
"""


def test_a_model_of_a_cell_is_trained_in_the_worker_and_comes_home(pool: Forked) -> None:
    pool.notebook(NET)
    before = pool.ns["net"].head.weight.detach().clone()
    pool.cell("""
sgd = torch.optim.SGD(net.parameters(), lr=0.1)
net(torch.ones(2, 512)).sum().backward()
sgd.step()
answer = net.head.weight.detach().clone()
""")
    assert set(pool.sent or ()) == {"torch", "nn", "net", "scale"}
    home = pool.ns["net"].head.weight
    assert torch.equal(home, pool.pull("answer")["answer"])
    assert torch.allclose(home, before - 0.1 * 2 * 2 * 3)


def test_nothing_is_sent_twice_and_a_changed_global_of_a_method_is(pool: Forked) -> None:
    pool.notebook(NET)
    pool.cell("net")
    assert pool.cell("net") is None
    assert pool.sent is None
    pool.notebook("scale = 5")
    x = torch.ones(1, 512)
    there = pool.cell("import torch\nanswer = net(torch.ones(1, 512)).detach()")
    assert pool.sent == ("scale",)
    assert torch.allclose(there, pool.ns["net"](x), rtol=1e-4)


def test_a_method_changed_in_the_notebook_changes_in_the_worker(pool: Forked) -> None:
    pool.notebook(NET)
    pool.cell("kept = net")
    pool.notebook("def extra(self): return 'new'\nNet.extra = extra")
    assert pool.cell("answer = net is kept and net.extra()") == "new"


def test_a_class_of_a_cell_is_the_same_class_out_and_home(pool: Forked) -> None:
    pool.notebook(
        "class Point:\n"
        "    def __init__(self, x): self.x = x\n"
        "    def plus(self): return Point(self.x + step)\n"
        "step = 2\npoint = Point(1)"
    )
    moved = pool.cell("answer = point.plus()")
    assert type(moved) is pool.ns["Point"]
    assert moved.x == 3
    pool.cell("other = Point(7)")
    assert pool.cell("answer = type(other) is type(point), other.plus().x") == (True, 9)
    assert pool.ns["Point"].plus.__globals__ is pool.ns, "the notebook's class stays the notebook's"
    pool.notebook("step = 10")
    assert moved.plus().x == 13


def test_a_class_and_a_function_of_the_worker_come_to_the_notebook(pool: Forked) -> None:
    pool.cell("class Made:\n    def get(self): return word\nword = 'there'\nmade = Made()")
    found = pool.pull("made", "Made")
    assert type(found["made"]) is found["Made"]
    pool.ns["word"] = "here"
    assert found["made"].get() == "here"


def test_what_the_worker_raises_while_unpacking_is_told(pool: Forked) -> None:
    pool.notebook("class Bad:\n    def __reduce__(self): return int, ('x',)\nbad = Bad()")
    with pytest.raises(RuntimeError, match="invalid literal for int"):
        pool.cell("bad")
