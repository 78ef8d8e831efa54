"""Weights that a cell trained come to the notebook all or nothing, whatever happens on the way."""

from __future__ import annotations

import errno
import os
import re
import signal
import time
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
import torch
from torch import nn

from nbaccel import Pool, WorkerDied, WorkerFailed, notebook_launcher
from nbaccel.base.processes import uninterrupted
from nbaccel.calls.pool_planning import PoolState
from nbaccel.transfer import memfd
from nbaccel.workers.messaging import PoolTask
from tests.process import descriptors, stop_pressed_when

TRAIN = """
import torch
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
for p in model.parameters(): p.grad = torch.ones_like(p)
optimizer.step()
"""

FILL = """
import torch
with torch.no_grad():
    for p in model.parameters(): p.add_(-0.5)
"""

DIE_HALF_WAY = """
import os, signal
from nbaccel.transfer import memfd as memory
whole = memory.write_at
def half(fd, data, offset):
    whole(fd, data[: data.nbytes // 2], offset)
    os.kill(os.getpid(), signal.{signal})
memory.write_at = half
"""

DIE_AT_THE_END = """
import os, signal
from nbaccel.transfer.received_modules import ReceivedModules
write = ReceivedModules._write
def last(self, *modules, **settings):
    ReceivedModules._write = write
    write(self, *modules, **settings)
    os.kill(os.getpid(), signal.{signal})
ReceivedModules._write = last
"""


NO_ROOM = "import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, (4096, -1))\n"
ROOM = "resource.setrlimit(resource.RLIMIT_FSIZE, (-1, -1))\n"


@pytest.fixture
def model(fresh: Pool) -> Iterator[nn.Module]:
    """A model of many pages that the pool's notebook calls `model`."""
    found = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256))
    fresh._namespace["model"] = found
    yield found
    assert not [target for target in descriptors().values() if "nbaccel-staging" in target]
    fresh._namespace.clear()


def values(module: nn.Module) -> list[torch.Tensor]:
    return [p.detach().clone() for p in module.parameters()]


def equal(module: nn.Module, expected: list[torch.Tensor]) -> bool:
    return all(torch.equal(p, v) for p, v in zip(module.parameters(), expected, strict=True))


@pytest.mark.parametrize(
    ("train", "end", "asked"),
    [
        (TRAIN, DIE_AT_THE_END, []),
        (FILL, DIE_AT_THE_END, []),
        (FILL, DIE_HALF_WAY, []),
        (f"{TRAIN}v = 1\n", DIE_AT_THE_END, ["v"]),
    ],
    ids=["optimizer", "by hand", "half way", "a value is asked for"],
)
def test_a_worker_that_dies_on_the_way_leaves_the_model_old_and_is_told(
    fresh, model, train, end, asked
):
    old = values(model)
    with pytest.raises(WorkerDied, match="SIGKILL") as caught:
        fresh.run(train + end.format(signal="SIGKILL"), ranks=[0], out=asked)
    assert equal(model, old)
    text = str(caught.value)
    assert "the weights that it trained in model" in text
    assert "model is as before the cell" in text
    assert fresh.state is PoolState.BROKEN
    fresh.run(TRAIN)
    assert equal(model, [v - 0.5 for v in old]), "new workers train as if nothing had been"


@pytest.mark.parametrize("train", [TRAIN, FILL], ids=["optimizer", "by hand"])
def test_a_worker_without_room_tells_and_the_next_cell_brings_the_weights(fresh, model, train):
    old = values(model)
    with pytest.raises(OSError, match="File too large") as caught:
        fresh.run(NO_ROOM + train)
    assert isinstance(caught.value, WorkerFailed)
    assert "model is as before the cell" in str(caught.value)
    assert "the next cell writes them back" in str(caught.value)
    assert equal(model, old)
    fresh.run(ROOM)
    assert equal(model, [v - 0.5 for v in old])


def test_a_cell_that_fails_tells_that_its_weights_did_not_come_home(fresh, model, capsys):
    old = values(model)
    with pytest.raises(ZeroDivisionError):
        fresh.run(TRAIN + DIE_AT_THE_END.format(signal="SIGKILL") + "1 / 0")
    assert equal(model, old)
    assert "model is as before the cell" in capsys.readouterr().err


@pytest.mark.timeout(120)
def test_stop_on_the_way_is_told_and_leaves_the_model_old(fresh, model):
    old = values(model)
    rank_0 = fresh.call(os.getpid)[0]
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt, match="the weights that it trained in model"):
        with stop_pressed_when(lambda: psutil.Process(rank_0).status() == psutil.STATUS_STOPPED):
            fresh.run(TRAIN + DIE_AT_THE_END.format(signal="SIGSTOP"), ranks=[0])
    assert time.monotonic() - began < 30
    assert equal(model, old)
    assert fresh.state is PoolState.IDLE, "Stop lets a stopped process go on, to hear it"
    fresh.run("1")
    assert equal(model, [v - 0.5 for v in old]), "the weights come home with the next cell"


def test_stop_between_the_cell_and_what_follows_it_is_not_lost(fresh):
    rank_0 = fresh.call(os.getpid)[0]
    group = fresh._workers
    assert group is not None
    os.kill(rank_0, signal.SIGSTOP)
    with uninterrupted():
        signal.raise_signal(signal.SIGINT)
        result = group.everyone(PoolTask("share_equal_pages"))
    assert result.interrupted
    assert not result.lost
    assert fresh.call(os.getpid)[0] == rank_0


def test_stop_while_a_rank_writes_keeps_the_workers_and_the_weights(fresh, model, tmp_path):
    old = values(model)
    sign = tmp_path / "writes"
    slow = (
        "import time\nfrom pathlib import Path\n"
        "from nbaccel.transfer.received_modules import ReceivedModules\n"
        "write = ReceivedModules._write\n"
        "def late(self, *modules, **settings):\n    ReceivedModules._write = write\n"
        f"    Path({str(sign)!r}).touch()\n    time.sleep(60)\n"
        "ReceivedModules._write = late\n"
    )
    with pytest.raises(KeyboardInterrupt, match="the next cell writes them back"):
        with stop_pressed_when(sign.exists):
            fresh.run(TRAIN + slow, ranks=[0])
    assert equal(model, old)
    fresh.run("1 + 1")
    assert equal(model, [v - 0.5 for v in old])


def test_a_death_after_the_weights_have_come_takes_nothing_away(fresh, model):
    old = values(model)
    end = (
        "import os\nfrom nbaccel.transfer.received_modules import ReceivedModules\n"
        "ReceivedModules.share_equal_pages = lambda self: os.kill(os.getpid(), 9)\n"
    )
    fresh.run(TRAIN + end, ranks=[0])
    assert equal(model, [v - 0.5 for v in old])
    with pytest.raises(WorkerDied, match="rank 0 of 2 was killed by SIGKILL"):
        fresh.run("1")
    assert equal(model, [v - 0.5 for v in old])


def test_the_notebook_without_descriptors_keeps_the_old_weights_and_says_so(
    fresh, model, monkeypatch
):
    old = values(model)
    fresh.run("model")
    took = fresh._namespace_sync.records

    def none_left(keys: Any) -> Any:
        def refuse(name: str, nbytes: int) -> int:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

        monkeypatch.setattr(memfd, "create_file", refuse)
        return took(keys)

    monkeypatch.setattr(fresh._namespace_sync, "records", none_left)
    with pytest.raises(WorkerFailed, match="no room for the trained weights: Too many open files"):
        fresh.run(TRAIN)
    monkeypatch.undo()
    assert equal(model, old)
    fresh.run("1")
    assert equal(model, [v - 0.5 for v in old])


def test_rank_0_trains_in_a_file_and_shares_the_arena_again_afterwards(fresh, model, capfd):
    loss = model(torch.ones(1, 256, requires_grad=True)).sum()
    look = (
        "from pathlib import Path\n"
        "def maps(): return Path('/proc/self/maps').read_text().count('nbaccel-staging')\n"
    )
    fresh.run(look + TRAIN + "during = maps()")
    fresh.run("after = maps(); there = [p.detach() for p in model.parameters()]")
    assert fresh.pull("during", ranks=[0])["during"] > 0
    assert fresh.pull("during", ranks=[1])["during"] == 0
    assert fresh.pull("after") == {"after": [0, 0]}
    assert "trained weights of model" not in capfd.readouterr().err
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()  # it needs the old weights
    assert all(equal(model, there) for there in fresh.pull("there")["there"])


CHANGES = {
    "del model[1]": "do not fit .*1.weight is gone.* so it is as it was. Pull",
    "model.append(torch.nn.Linear(2, 2))": "do not fit .*2.weight is new",
    "model[1].weight = model[0].weight": "1.weight was replaced",
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_a_cell_changes_besides_values_is_told_of_each_model(fresh, model, change, capfd):
    fresh.run(f"import torch\n{change}\nNone")
    assert re.search(CHANGES[change], " ".join(capfd.readouterr().err.split()))
    fresh.run("None")
    assert "trained weights of model" not in capfd.readouterr().err, "told once"
    # The cell that makes the model is run again, and then the one that changes it.
    fresh._namespace["model"] = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256))
    fresh.run(f"import torch\n{change}\nNone")
    assert re.search(CHANGES[change], " ".join(capfd.readouterr().err.split()))


@pytest.mark.parametrize("fails", [False, True])
def test_rank_0_has_left_its_weights_at_its_return_unless_another_rank_fails(fails, tmp_path):
    sign = tmp_path / "pid"

    def waits(pid: int) -> bool:
        """Whether rank 0 has returned and waits for a message."""
        try:
            return psutil.Process(pid).status() == psutil.STATUS_SLEEPING
        except psutil.NoSuchProcess:
            return False

    def train(model: nn.Linear) -> None:
        if os.environ["RANK"] == "0":
            with torch.no_grad():
                model.weight.add_(1)
            sign.write_text(str(os.getpid()))
            return
        while not sign.exists() or not sign.read_text() or not waits(int(sign.read_text())):
            time.sleep(0.02)
        if fails:
            raise ValueError("too late")
        os.kill(int(sign.read_text()), signal.SIGKILL)

    model = nn.Linear(256, 256, bias=False)
    nn.init.zeros_(model.weight)
    if fails:
        with pytest.raises(WorkerFailed, match="too late"):
            notebook_launcher(train, (model,), 2, start_method="template")
    else:
        notebook_launcher(train, (model,), 2, start_method="template")
    assert (model.weight == 1 - fails).all()
