"""After one rank's error, DDP models, Accelerators and optimizers go on in new process groups."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from nbaccel import Pool, WorkerFailed

TIMEOUT_S = 120.0

PLAIN = """
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
rank = dist.get_rank()
ddp = DDP(model)
optimizer = torch.optim.Adam(ddp.parameters(), lr=0.1)

def step(k):
    torch.manual_seed(10 * k + rank)
    optimizer.zero_grad()
    ddp(torch.randn(4, 3)).square().mean().backward()
    optimizer.step()
"""
PREPARED = """
import torch
from nbaccel import Accelerator
accelerator = Accelerator()
rank = accelerator.process_index
optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
ddp, optimizer = accelerator.prepare(model, optimizer)

def step(k):
    torch.manual_seed(10 * k + rank)
    optimizer.zero_grad()
    accelerator.backward(ddp(torch.randn(4, 3)).square().mean())
    optimizer.step()
"""
FACTS = """
inner = getattr(optimizer, "optimizer", optimizer)
steps = [int(state["step"]) for state in inner.state.values()]
weights = torch.cat([p.detach().flatten() for p in model.parameters()])
"""
MIXED = pytest.mark.parametrize("made", [PLAIN, PREPARED], ids=["ddp", "accelerator"])


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))


def facts(pool: Pool) -> dict[str, Any]:
    pool.run(FACTS)
    found = pool.pull("steps", "weights")
    assert found["steps"][0] == found["steps"][1]
    assert torch.equal(*found["weights"])
    return {name: values[0] for name, values in found.items()}


@pytest.mark.slow
@MIXED
def test_training_goes_on_as_if_nothing_had_happened(made, capfd):
    expected = {}
    for fails in (False, True):
        model = net()
        with Pool(2, namespace={"model": model}, timeout=TIMEOUT_S) as pool:
            pool.run(made)
            pool.run("for k in range(2): step(k)")
            if fails:
                with pytest.raises(ValueError, match="no data") as caught:
                    pool.run("if rank == 1: raise ValueError('no data')\nstep(7)")
                assert "DDP models and Accelerators go on" in str(caught.value)
                capfd.readouterr()
            pool.run("for k in range(2, 4): step(k)")
            found = facts(pool)
        told = capfd.readouterr().err
        assert ("goes on in new process groups" in told) == fails
        if not fails:
            expected = found
        else:
            assert found["steps"] == [4] * 6
            torch.testing.assert_close(found["weights"], expected["weights"])
            at_home = torch.cat([p.detach().flatten() for p in model.parameters()])
            assert torch.equal(at_home, found["weights"])


@MIXED
def test_a_rank_that_was_a_step_ahead_gets_what_rank_0_has(made, capfd):
    with Pool(2, namespace={"model": net()}, timeout=TIMEOUT_S) as pool:
        pool.run(made)
        pool.run("step(0)")
        with pytest.raises(ValueError, match="ahead"):
            pool.run(
                "if rank == 1:\n"
                "    optimizer.step()\n"  # with the gradients of the step before
                "    raise ValueError('ahead')\n"
                "step(1)"
            )
        pool.run("step(1)")
        assert facts(pool)["steps"] == [2] * 6
    assert "ranks were at different steps" in capfd.readouterr().err


@pytest.mark.parametrize("call", ["wait_for_everyone()", "gather(torch.ones(1))"])
def test_ranks_that_made_different_numbers_of_calls_meet_again(call):
    """What is compared before a collective is none of torch's, whose numbers stay equal."""
    with Pool(2, namespace={}, timeout=TIMEOUT_S) as pool:
        pool.run(
            "import torch\nfrom nbaccel import Accelerator\naccelerator = Accelerator()\n"
            "rank = accelerator.process_index\naccelerator.wait_for_everyone()"
        )
        with pytest.raises(ValueError, match="odd"):
            pool.run(f"if rank: raise ValueError('odd')\naccelerator.{call}")
        pool.run(f"accelerator.{call}\nfound = accelerator.gather(torch.tensor([rank])).tolist()")
        assert pool.pull("found") == {"found": [[0, 1]] * 2}
        # A rank that goes on without the others, and is not waiting when the other one fails.
        with pytest.raises(ValueError, match="odd"):
            pool.run(
                "import time\nfrom nbaccel.errors import CollectiveTimeout\n"
                "from nbaccel.train.collectives import Collectives\n"
                "if rank:\n    time.sleep(1)\n    raise ValueError('odd')\n"
                "try:\n    Collectives(accelerator.state._place, 0.2).barrier()\n"
                "except CollectiveTimeout:\n    pass"
            )
        pool.run("found = accelerator.gather(torch.tensor([rank + 1])).tolist()")
        assert pool.pull("found") == {"found": [[1, 2]] * 2}


def test_it_goes_on_a_second_time_and_keeps_what_hangs_on_the_wrapper():
    with Pool(2, namespace={"model": net()}, timeout=TIMEOUT_S) as pool:
        pool.run(PLAIN)
        pool.run(
            "from torch.distributed.algorithms.ddp_comm_hooks import default_hooks\n"
            "calls = []\n"
            "def hook(state, bucket):\n"
            "    calls.append(1)\n"
            "    return default_hooks.allreduce_hook(state, bucket)\n"
            "ddp.register_comm_hook(None, hook)"
        )
        for turn in range(2):
            with pytest.raises(ValueError, match="odd"):
                pool.run("if rank: raise ValueError('odd')\nstep(7)")
            pool.run("calls.clear()")
            pool.run(f"step({turn})")
            assert all(pool.pull("calls")["calls"])
        assert facts(pool)["steps"] == [2] * 6


def test_a_with_block_is_left_wherever_it_waits_and_an_old_group_is_told_as_such():
    with Pool(2, namespace={}, timeout=TIMEOUT_S) as pool:
        pool.run(
            "import time, torch, torch.distributed as dist\n"
            "rank = dist.get_rank()\n"
            "class Waits:\n"
            "    def __enter__(self): pass\n"
            "    def __exit__(self, *raised):\n"
            "        while True: time.sleep(0.01)"
        )
        with pytest.raises(ValueError, match="odd"):
            pool.run("if rank: raise ValueError('odd')\nwith Waits(): pass")
        pool.run("found = dist.get_rank()\nold, x = dist.group.WORLD, torch.ones(1)")
        assert pool.pull("found") == {"found": [0, 1]}
        with pytest.raises(ValueError, match="odd"):
            # What DDP calls to send buffers; public functions have more `with` blocks inside.
            # Python handles the interrupt right after it: at the first line of `__exit__`.
            pool.run(
                "if rank: raise ValueError('odd')\n"
                "with torch.no_grad(): dist._broadcast_coalesced(old, [x], 1000, 1)"
            )
        pool.run("found = torch.is_grad_enabled()")
        assert pool.pull("found") == {"found": [True, True]}
        with pytest.raises(WorkerFailed) as caught:
            pool.run("dist.all_reduce(x, group=old)")
        first = str(caught.value).splitlines()[0]
        assert "used a process group that all ranks have left, because a cell was ended" in first
        assert "the cells again that make them" in " ".join(str(caught.value).split())
