"""Processes of one group without a launcher: as a script has them that creates its group by itself.

`python -m tests.train.plain_ranks FOLDER` does all scenarios: for each it forks some processes that
run the function, and leave what it returns in the folder.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from nbaccel.abc.place import Place
from nbaccel.errors import CollectiveTimeout
from nbaccel.train import page_setup
from nbaccel.train.call_check import default_group_check
from nbaccel.train.collectives import Collectives
from tests.process import memory_files

_NEW_PROCESS_NUMBERS, _NEW_MOUNTS = 0x20000000, 0x00020000  # CLONE_… of <sched.h>
_PRIVATE_BELOW = 0x4000 | 0x40000  # MS_REC | MS_PRIVATE of <sys/mount.h>


@functools.cache  # to import torch takes longer than all scenarios
def run_plainly() -> dict[str, list[Any]]:
    """What the processes of each scenario have returned, by rank; None if one ended before."""
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, "-m", "tests.train.plain_ranks", folder],
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        return {
            scenario: [_read(Path(folder) / scenario / f"{rank}.json") for rank in range(n)]
            for scenario, n in SCENARIOS.items()
        }


def _read(file: Path) -> Any:
    return json.loads(file.read_text()) if file.exists() else None


def held() -> tuple[int, int]:
    """Memory files that are open, and those of collectives that are mapped."""
    mapped = Path("/proc/self/maps").read_text().count("memfd:nbaccel-collectives")
    return memory_files(), mapped


def join(rank: int, folder: Path, n: int = 2) -> Collectives:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=n)
    return Collectives(Place(device=torch.device("cpu"), rank=rank, world_size=n), 60)


def told_by(call: Callable[[], Any]) -> str:
    try:
        call()
    except CollectiveTimeout as error:
        return str(error)
    return "came"


# ------------------------------------------------------------------------- what they do


def leaving(rank: int, folder: Path) -> str:
    collectives = join(rank, folder)
    collectives.barrier("warm up")
    if rank == 1:
        dist.destroy_process_group()
        gc.collect()
        while not (folder / "0.json").exists():  # process 0 must notice while this one lives
            time.sleep(0.01)
        return ""
    return told_by(lambda: collectives.reduce(torch.ones(1)))


def ending(rank: int, folder: Path) -> str:
    collectives = join(rank, folder)
    collectives.barrier("warm up")
    return told_by(lambda: collectives.gather(torch.ones(1))) if rank == 0 else ""


def silenced(rank: int, folder: Path) -> str:
    """Process 0 has announced its call, and ends before it says what the other host announced."""
    page_setup._suggest_host = lambda: f"host {rank // 2}"
    collectives = join(rank, folder, 3)
    collectives.barrier("warm up")
    if rank == 0:
        default_group_check()._exchange._exchange_with_hosts = lambda *_: os._exit(0)
    if rank == 2:
        return ""
    return told_by(collectives.barrier)


def destroying(rank: int, folder: Path) -> Any:
    found = [held()]
    join(rank, folder).gather(torch.ones(100_000))
    found.append(held())
    dist.destroy_process_group()
    gc.collect()
    return [*found, held()]


def apart(rank: int, folder: Path) -> Any:
    """Process 1 has numbers and a /proc of its own, as in a container; the suggestion is wrong."""
    if rank == 1:
        libc = ctypes.CDLL(None)
        assert libc.mount(b"none", b"/", None, _PRIVATE_BELOW, None) == 0
        assert libc.mount(b"proc", b"/proc", b"proc", 0, None) == 0
    page_setup._suggest_host = lambda: "the same"
    collectives = join(rank, folder)
    gathered = collectives.gather(torch.tensor([rank])).tolist()
    return os.getpid() == 1, default_group_check().hosts, gathered


SCENARIOS = {"leaving": 2, "ending": 2, "silenced": 3, "destroying": 2, "apart": 2}
"""How many processes each has."""


def run_scenario(scenario: str, n: int, folder: Path) -> None:
    folder.mkdir()
    children = []
    for rank in range(n):
        if scenario == "apart" and rank == 1:
            ctypes.CDLL(None).unshare(_NEW_PROCESS_NUMBERS | _NEW_MOUNTS)
        child = os.fork()
        if child == 0:
            found = json.dumps(globals()[scenario](rank, folder))
            partial = folder / f"{rank}.partial"
            partial.write_text(found)
            partial.rename(folder / f"{rank}.json")
            os._exit(0)
        children.append(child)
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * n


def main() -> None:
    for scenario, n in SCENARIOS.items():
        # The last one, because this process's further children would have other numbers, too.
        if scenario != "apart" or os.geteuid() == 0:
            run_scenario(scenario, n, Path(sys.argv[1]) / scenario)


if __name__ == "__main__":
    main()
