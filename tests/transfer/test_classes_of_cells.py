"""What cells define, in a worker: a process of its own, with its own classes of these names."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from nbaccel import Pool
from nbaccel.transfer.namespace_sync import NamespaceSync, PreparedUpdate


class Notebook:
    """Its names, one live worker, and which names went there for the last cell."""

    def __init__(self, pool: Pool, names: dict[str, Any]) -> None:
        self.pool = pool
        self.ns = names
        self.sent: tuple[str, ...] | None = None

    def notebook(self, text: str) -> None:
        exec(compile(text, "<cell>", "exec"), self.ns)

    def cell(self, text: str) -> Any:
        """Run a cell in the worker; what it has then bound to `answer` is given back."""
        self.sent = None
        asked = ["answer"] if "answer" in text else []
        done = self.pool.run(text, out=asked)
        return done.out["answer"][0] if asked else None


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> Iterator[Notebook]:
    names: dict[str, Any] = {"__name__": "__main__"}
    taken = NamespaceSync.taken

    def note(sync: NamespaceSync, shipment: PreparedUpdate) -> None:
        found.sent = tuple(shipment.parts[0].tokens)
        taken(sync, shipment)

    monkeypatch.setattr(NamespaceSync, "taken", note)
    with Pool(1, namespace=names) as started:
        found = Notebook(started, names)
        yield found


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


def test_nothing_is_sent_twice_and_what_a_method_uses_or_becomes_is(pool):
    pool.notebook(NET)
    pool.cell("kept = net")
    assert pool.sent is not None
    pool.cell("net;")
    assert pool.sent is None
    pool.notebook("scale = 5")
    x = torch.ones(1, 512)
    there = pool.cell("import torch\nanswer = net(torch.ones(1, 512)).detach()")
    assert pool.sent == ("scale",)
    assert torch.allclose(there, pool.ns["net"](x), rtol=1e-4)
    pool.notebook("def extra(self): return 'new'\nNet.extra = extra")
    assert pool.cell("answer = net is kept and net.extra()") == "new"


def test_a_class_of_a_cell_is_the_same_class_out_and_home(pool):
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
    # One that the worker has made.
    pool.cell("class Made:\n    def get(self): return word\nword = 'there'\nmade = Made()")
    found = {name: value for name, (value,) in pool.pool.pull("made", "Made").items()}
    assert type(found["made"]) is found["Made"]
    pool.ns["word"] = "here"
    assert found["made"].get() == "here"
    pool.notebook("class Bad:\n    def __reduce__(self): return int, ('x',)\nbad = Bad()")
    with pytest.raises(ValueError, match="invalid literal for int"):
        pool.cell("bad")
