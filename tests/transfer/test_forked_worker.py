"""A worker's side of the flow in a process of its own, forked before the notebook's cells run."""

from __future__ import annotations

import importlib
import os
import sys
import traceback
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from nbaccel.calls.launch import staged
from nbaccel.transfer import arena
from nbaccel.transfer.arena import Sharing
from nbaccel.transfer.free_names import names_of
from nbaccel.transfer.memfd import closing_files
from nbaccel.transfer.namespace_sync import NamespaceSync
from nbaccel.transfer.pickling import unpack
from nbaccel.transfer.worker_namespace import Namespace
from nbaccel.workers import messaging
from nbaccel.workers.fork_safety import pause_pools
from tests.transfer.worker_pair import run


class Forked:
    """A notebook in this process, and one worker in a child."""

    def __init__(self) -> None:
        self.ns: dict[str, Any] = vars(sys.modules["__main__"]) | {"__name__": "__main__"}
        self.flow = NamespaceSync(self.ns, [0])
        self._channel, theirs = messaging.Channel.pair()
        importlib.import_module("torch._dynamo")  # by the first optimizer; once, not in each child
        pause_pools()  # the child must be able to start its own
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of forks with threads
            self._pid = os.fork()
        if self._pid == 0:
            self._channel.close()
            _serve(theirs)
        theirs.close()

    def notebook(self, text: str) -> None:
        run(text, self.ns)

    def cell(self, text: str) -> Any:
        """Run a cell in the worker; what it has then bound to `answer` is given back."""
        shipment = self.flow.prepare(names_of(text), [0])
        if shipment is not None:
            (part,) = shipment.parts
            self._ask(("take", part.message), part.fds)
            self.flow.taken(shipment)
            shipment.close()
        (bound, dirty), _ = self._ask(("run", text))
        self.flow.bound(0, bound)
        self._home(dirty)
        self.sent = tuple(part.tokens) if shipment is not None else None
        return self.pull("answer")["answer"] if "answer" in bound else None

    def _home(self, dirty: tuple[str, ...]) -> None:
        records = self.flow.records(dirty)
        arenas = {key: found for record in records for key, found in record.sharing.arenas.items()}
        with staged(
            Sharing.joined(record.sharing for record in records), arenas
        ) as weight_receiver:
            files = [weight_receiver.staging[key] for key in arenas]
            (report, keys), whole = self._ask(("home", tuple(arenas)), files)
            with closing_files(*whole), self.flow.taking_weights(records):
                weight_receiver.apply([report], dict(zip(keys, whole, strict=True)))
        self._ask(("settle",))

    def pull(self, *names: str) -> dict[str, Any]:
        box, (fd,) = self._ask(("pull", names))
        with closing_files(fd):
            return unpack(box, fd, {}, namespace=self.ns)

    def _ask(self, question: tuple[Any, ...], fds: Any = ()) -> tuple[Any, list[int]]:
        self._channel.send(question, fds)
        (answer, error), fds = self._channel.receive()
        if error:
            raise RuntimeError(error)
        return answer, fds

    def close(self) -> None:
        self._channel.close()
        os.waitpid(self._pid, 0)


def _serve(channel: messaging.Channel) -> None:
    try:
        arena.make_arenas_private()
        torch.set_num_threads(1)
        ns = vars(sys.modules["__main__"])
        namespace = Namespace(ns, rank=0, device="cpu")
        while True:
            question, fds = channel.receive()
            with closing_files(*fds):
                _answer(channel, namespace, ns, question, fds)
    except EOFError:
        os._exit(0)
    finally:
        os._exit(1)


def _answer(
    channel: messaging.Channel,
    namespace: Namespace,
    ns: dict[str, Any],
    question: Any,
    fds: list[int],
) -> None:
    answer: Any = None
    out: list[int] = []
    try:
        match question:
            case ("take", cargo):
                namespace.take(cargo, fds)
            case ("run", text):
                namespace.begin()
                run(text, ns)
                answer = (namespace.bound(), namespace.modules.dirty())
            case ("home", keys):
                report, whole = namespace.modules.write_changed(dict(zip(keys, fds, strict=True)))
                answer = (report, tuple(whole))
                channel.send((answer, None), list(whole.values()))
                return
            case ("settle",):
                namespace.modules.share_equal_pages()
            case ("pull", names):
                answer, fd = namespace.pack(names)
                out.append(fd)
    except Exception:
        channel.send((None, traceback.format_exc()))
        return
    with closing_files(*out):
        channel.send((answer, None), out)


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
