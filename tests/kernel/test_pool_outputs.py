"""Outputs of live workers, as a real kernel sends them to the browser."""

from __future__ import annotations

import pytest

from tests.kernel.kernel import Kernel


@pytest.mark.slow
def test_the_status_of_a_cell_is_one_output_that_is_changed(kernel: Kernel) -> None:
    cell = kernel.run(
        """
        from nbaccel.output.panel.facts import RankStatus
        from nbaccel import RunConfig, resolve
        from nbaccel.output.panel.display import Dashboard
        now = [0.0]
        plan = resolve(RunConfig(num_processes=2))
        board = Dashboard([0, 1], plan=plan, read_clock=lambda: now[0])
        for _ in range(2):
            now[0] += 1
            board.update([RankStatus(rank=r, state="running", seconds=1, rss_bytes=2**30)
                         for r in (0, 1)])
        board.finish()
        """
    ).check()
    assert [data["text/plain"].splitlines()[0] for data in cell.displays] == [
        "2 ranks · 1.0 s",
        "2 ranks · 2.0 s",
        "2 ranks · 2.0 s · up to 1.0 GiB each",
    ]
    assert "\n" in cell.displays[1]["text/plain"]
    assert "\n" not in cell.displays[2]["text/plain"]
    assert cell.stderr == ""


def test_displays_of_ranks_come_between_their_lines(kernel: Kernel) -> None:
    cell = kernel.run(
        """
        from nbaccel.output.console import Console
        from nbaccel.workers.messaging import ClearOutput, Display
        from IPython.display import HTML
        console = Console([0, 1])
        for rank in (0, 1):
            console.feed(rank, "stdout", b"before\\n")
            for value in ("same", f"rank {rank}"):
                data, metadata = get_ipython().display_formatter.format(HTML(value))
                data["text/plain"] = value
                console.feed_display(rank, Display({"data": data, "metadata": metadata}))
        console.tick(is_final=True)
        """
    ).check()
    assert [data["text/html"] for data in cell.displays] == ["same", "rank 0", "rank 1"]
    assert cell.stdout.split() == ["[0-1]", "before", "[0]", "[1]"]
