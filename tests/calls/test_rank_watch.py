"""A rank that waits for others is told of, with the place of each."""

from __future__ import annotations

import re
import time
from typing import Any

import pytest
import torch.distributed as dist

from nbaccel import Pool, WorkerFailed, notebook_launcher
from nbaccel.calls import supervisor
from nbaccel.calls.status_table import StatusTable
from nbaccel.output.panel.facts import RankStatus
from tests.html_reader import Html

LOOK_S = 1.5


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "LOOK_S", LOOK_S)


def shown(capfd: pytest.CaptureFixture[str]) -> str:
    texts = capfd.readouterr()
    return texts.out + texts.err


def test_a_launch_says_who_waits_and_where_the_others_are(capfd):
    def train(meets: bool) -> None:
        dist.init_process_group("gloo")
        dist.barrier()
        if dist.get_rank() == 0 and meets:
            dist.barrier()
        else:
            time.sleep((7 if meets else 5) * LOOK_S)
            if meets:
                dist.barrier()

    notebook_launcher(train, (True,), num_processes=2)
    text = shown(capfd)
    assert "where rank 0 waited for more than 3.0 s:" in text
    assert re.search(r"rank 0: waiting in barrier \(test_rank_watch.py:\d+\)", text)
    assert re.search(r"rank 1: running \(test_rank_watch.py:\d+\)", text)
    assert text.count("not all ranks have come") == 1
    notebook_launcher(train, (False,), num_processes=2)
    assert "not all ranks have come" not in shown(capfd), "nobody waits"


def test_a_cell_says_it_of_a_rank_that_compares_a_call(capfd):
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


def test_a_cell_whose_ranks_wait_for_what_has_finished_or_rests_ends_or_says_so(capfd):
    with Pool(2, namespace={}, timeout=12 * LOOK_S) as pool:
        pool.run("import time, torch.distributed as dist\nrank = dist.get_rank()")
        for late_s in (0, 6 * LOOK_S):  # before and after it is told of
            with pytest.raises(WorkerFailed, match="0 of 2 waited for rank 1, which had already"):
                pool.run(f"dist.barrier() if rank == 0 else time.sleep({late_s})")
        assert "rank 1: has finished" in shown(capfd)
        pool.run("dist.barrier()")
        with pytest.raises(TimeoutError):
            pool.run("dist.barrier()", ranks=[0])
        assert "rank 1: has not been given this cell or call" in shown(capfd)
        pool.run("dist.barrier()")


GIB = 2**30


def row(rank: int, doing: str = "", **more: Any) -> RankStatus:
    settled = {"state": "running", "seconds": 2.0, "rss_bytes": GIB} | more
    return RankStatus(rank=rank, doing=doing, **settled)


def test_the_table_is_read_as_text_and_its_html_runs_nothing():
    rows = [row(0, "waiting in all_reduce"), row(10, state="idle", seconds=75, rss_bytes=GIB // 2)]
    assert str(StatusTable(rows)).splitlines() == [
        "rank  state    for    memory     doing",
        "0     running  2.0 s  1.0 GiB    waiting in all_reduce",
        "10    idle     1 min  512.0 MiB  -",
    ]
    assert repr(StatusTable(rows)) == str(StatusTable(rows))

    # A board of workers that do nothing must not change every second.
    seconds = (0.3, 59.9, 60, 3599, 3600, 9000)
    table = StatusTable([row(0, state="idle", seconds=spent) for spent in seconds])
    told = [re.split("  +", line)[2] for line in str(table).splitlines()[1:]]
    assert told == ["under 1 min", "under 1 min", "1 min", "59 min", "1 h", "2 h"]
    gone = StatusTable([row(1, state="gone", seconds=75, rss_bytes=0)])
    assert str(gone).splitlines()[1].split() == ["1", "gone"]

    nasty = "in <lambda> & <script>"
    html = StatusTable([row(0, nasty)])._repr_html_()
    assert "in &lt;lambda&gt; &amp; &lt;script&gt;" in html
    page = Html(html)
    assert not [name for name, _ in page.attributes if name.startswith("on")]
    assert set(page.kinds) <= {"div", "table", "thead", "tbody", "tr", "th", "td"}
    assert not re.search(r"color\s*:|#[0-9a-f]{3}|rgb|background:(?!none)", html)
