"""A rank that waits for others is told of, with the place of each."""

from __future__ import annotations

import re
import time

import pytest
import torch
import torch.distributed as dist

from nbaccel import Accelerator, Pool, notebook_launcher
from nbaccel.calls import supervisor

LOOK_S = 1.5


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "LOOK_S", LOOK_S)


def shown(capfd: pytest.CaptureFixture[str]) -> str:
    texts = capfd.readouterr()
    return texts.out + texts.err


def test_a_launch_says_who_waits_and_where_the_others_are(
    capfd: pytest.CaptureFixture[str],
) -> None:
    def train() -> None:
        dist.init_process_group("gloo")
        if dist.get_rank() == 0:
            dist.barrier()
        else:
            time.sleep(7 * LOOK_S)
            dist.barrier()

    notebook_launcher(train, num_processes=2)
    text = shown(capfd)
    assert "where rank 0 waited for more than 3.0 s:" in text
    assert re.search(r"rank 0: waiting in barrier \(test_rank_watch.py:\d+\)", text)
    assert re.search(r"rank 1: running \(test_rank_watch.py:\d+\)", text)
    assert text.count("not all ranks have come") == 1


def test_a_cell_says_it_of_a_rank_that_compares_a_call(capfd: pytest.CaptureFixture[str]) -> None:
    """Its shapes are new, and the other ones are in the collective already."""
    with Pool(2, namespace={}, timeout=10 * LOOK_S) as pool:
        pool.run(
            "import torch\nfrom nbaccel import Accelerator\naccelerator = Accelerator(cpu=True)"
        )
        with pytest.raises(TimeoutError):
            pool.run(
                "for turn in range(3):\n"
                "    rows = 1 + accelerator.process_index * (turn == 2)\n"
                "    accelerator.gather(torch.ones(rows))"
            )
    text = shown(capfd)
    assert re.search(r"rank 0: waiting in gather \(", text)
    assert re.search(r"rank 1: waiting before gather, to compare calls \(", text)
    assert "NBACCEL_COLLECTIVE_CHECK=always" in text


def test_ranks_that_wait_for_no_rank_are_not_told_of(capfd: pytest.CaptureFixture[str]) -> None:
    def train() -> None:
        accelerator = Accelerator(cpu=True)
        accelerator.gather(torch.ones(1))
        time.sleep(6 * LOOK_S)

    notebook_launcher(train, num_processes=2)
    assert "not all ranks have come" not in shown(capfd)
