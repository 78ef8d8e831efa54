"""DeepSpeed's shared memory is there for workers that add up through it, and gone after them."""

from __future__ import annotations

import mmap
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from nbaccel import Pool, notebook_launcher
from nbaccel.errors import WorkerDied
from nbaccel.plan import topology
from nbaccel.plan.topology import Topology
from tests.deepspeed import needs


def files(port: str) -> list[str]:
    """Those of one launch: tests beside this one make some of their own."""
    pattern = f"deepspeed_allreduce_buffer_{os.getuid()}_*_{port}_*"
    return sorted(path.name for path in topology.SHARED_MEMORY.glob(pattern))


def add_up(told: Path, ends: str = "") -> tuple[list[float], int]:
    """Add up through shared memory; ``told`` gets the port, for the ends that return nothing."""
    import deepspeed

    if ends == "lacks room":
        os.environ["LOCAL_SIZE"] = "0"
    deepspeed.init_distributed("gloo")
    rank = deepspeed.comm.get_rank()
    values = torch.full((1000,), float(rank + 1))
    deepspeed.comm.inference_all_reduce(values)
    port = os.environ["MASTER_PORT"]
    told.write_text(port)
    count = len(files(port))
    deepspeed.comm.barrier()
    if ends == "killed" and rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if ends == "raises" and rank == 1:
        raise RuntimeError("on purpose")
    return values.unique().tolist(), count


@pytest.mark.filterwarnings("ignore")
class TestInWorkers:
    pytestmark = needs.ENGINE

    @pytest.mark.slow
    def test_a_launch_adds_up_and_leaves_nothing_however_it_ends(self, tmp_path):
        told = tmp_path / "port"
        for ends, error in (("killed", WorkerDied), ("raises", RuntimeError)):
            with pytest.raises(error):
                notebook_launcher(add_up, (told, ends), num_processes=2)
            assert not files(told.read_text())
        assert notebook_launcher(add_up, (told,), num_processes=2) == [([3.0], 2)] * 2
        assert not files(told.read_text())

    def test_a_crash_for_want_of_it_is_explained(self, tmp_path):
        with pytest.raises(WorkerDied, match="SIGSEGV") as caught:
            notebook_launcher(add_up, (tmp_path / "port", "lacks room"), num_processes=2)
        assert "DeepSpeed adds up through shared memory" in str(caught.value)
        assert "--shm-size" in str(caught.value)

    def test_a_pool_leaves_nothing(self, tmp_path):
        told = tmp_path / "port"
        with Pool(num_processes=2) as pool:
            assert pool.launch(add_up, (told,)).values == [([3.0], 2)] * 2
            assert len(files(told.read_text())) == 2, "they live as long as the workers"
        assert not files(told.read_text())


# ------------------------------------------------------------------------------ files alone
def places(port: int) -> tuple[Topology, ...]:
    return Topology.of_hosts([2], master_addr="127.0.0.1", master_port=port)


@pytest.fixture
def made(monkeypatch, tmp_path) -> Any:
    """Makes a file as DeepSpeed names it, in a folder of its own."""
    monkeypatch.setattr(topology, "SHARED_MEMORY", tmp_path)

    def make(port: int, rank: int, age_s: float = 0) -> Path:
        name = f"deepspeed_allreduce_buffer_{os.getuid()}_127.0.0.1_{port}_{rank}"
        path = tmp_path / name
        path.write_bytes(bytes(4096))
        then = time.time() - age_s
        os.utime(path, (then, then))
        return path

    return make


def test_the_files_of_a_launch_are_removed_and_no_others(made):
    own, others = [made(1234, rank) for rank in (0, 1)], [made(1235, 0), made(1234, 2)]
    topology.remove_shared_memory(places(1234))
    assert not any(path.exists() for path in own)
    assert all(path.exists() for path in others)


def test_what_a_killed_notebook_left_is_removed_once_nobody_has_it(made):
    old, young, used = made(1, 0, age_s=3600), made(2, 0), made(3, 0, age_s=3600)
    with used.open("r+b") as file, mmap.mmap(file.fileno(), 0):
        topology.remove_orphans()
        assert [old.exists(), young.exists(), used.exists()] == [False, True, True]
    topology.remove_orphans()
    assert not used.exists()


def test_the_variable_counts_workers_where_they_share_a_machine_with_room(monkeypatch):
    place = places(1)[0]
    assert topology.shared_memory_variables(place, "cpu") == {"LOCAL_SIZE": "2"}
    assert topology.shared_memory_variables(Topology(master_port=1), "cpu") == {}, (
        "it adds up nothing"
    )
    monkeypatch.setattr(topology, "SHARED_MEMORY", Path("/no/such/folder"))
    assert topology.shared_memory_variables(place, "cpu") == {"LOCAL_SIZE": "0"}
    assert topology.shared_memory_variables(place, "cuda") == {"LOCAL_SIZE": "2"}
