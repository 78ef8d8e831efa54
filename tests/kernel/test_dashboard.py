"""The dashboard in real kernels: what stays in a notebook, and what a page that comes back is told.

What its script does in a page is in `tests/browser/test_reloads.py`.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import nbformat
import pytest
from nbclient import NotebookClient
from traitlets.config import Config

from tests.kernel.kernel import WAIT_S, Cell, Kernel, wait_for

pytestmark = pytest.mark.slow

BOUND_S = 60.0  # it ends a hang; how fast Stop is, the benchmarks measure

TRAIN = """
import os, sys, time
from nbaccel import Accelerator, notebook_launcher
def train(seconds):
    accelerator = Accelerator()
    start = time.monotonic()
    print("running", flush=True)
    while time.monotonic() < start + seconds:
        time.sleep(0.01)
        accelerator.log({"loss": 1.0 / (1 + time.monotonic() - start)})
"""
LAUNCH = "notebook_launcher(train, (600,), 2)"
LIVE = "%load_ext nbaccel"
START = """\
%%accelerate -n 2
from nbaccel import Accelerator
Accelerator().wait_for_everyone()  # the ports of process groups are open from here on
"""
CELL = "%%accelerate\ntrain(600)"

BAR = """
def draw(seconds):
    import sys
    for step in range(int(seconds * 50)):
        time.sleep(0.02)
        sys.stdout.write(f"\\r half of {step}")
        sys.stdout.flush()
notebook_launcher(draw, (2.5,), 2)
"""

CALM = """
import gc, signal, threading
def state():
    widgets = __import__("sys").modules.get("ipywidgets.widgets.widget")
    comms = get_ipython().kernel.comm_manager.comms
    return (sorted(t.name for t in threading.enumerate() if not t.name.startswith("subshell")),
            signal.getsignal(signal.SIGINT), len(widgets._instances) if widgets else 0, len(comms))
"""


OTHER_PAGE = "the reloaded page"


def ask_for_run(kernel: Kernel, place: str) -> Cell:
    """Do what the script of a reloaded page does."""
    content = {"comm_id": uuid4().hex, "target_name": "nbaccel.run", "data": {"place": place}}
    asked = kernel.send("comm_open", content, page=OTHER_PAGE)
    kernel.wait_idle(asked)
    return asked[1]


def run_on_other_page(kernel: Kernel, code: str) -> Cell:
    return kernel.finish(kernel.begin(code, page=OTHER_PAGE))


def shown(cell: Cell) -> dict[str, Any]:
    (found,) = cell.outputs.values()
    return found


@pytest.fixture(scope="module")
def live() -> Iterator[Kernel]:
    """A kernel with two live workers, that has launched, too."""
    with Kernel() as found:
        for code in (TRAIN, CALM, LIVE, START, "notebook_launcher(os.getpid, (), 2);"):
            found.run(code).check()
        yield found


@pytest.mark.parametrize("code", [LAUNCH, CELL], ids=["launch", "cell"])
def test_stop_leaves_nothing_but_the_summary_and_a_report(live, code):
    live.run("before = state(); import ipywidgets").check()
    processes = {p.pid for p in live.workers()}
    run = live.begin(code)
    cell = run[1]
    live.until(run, lambda cell: cell.outputs and "loss" in shown(cell)["text/html"])
    assert shown(cell).keys() == {"text/plain", "text/html"}
    panel = shown(cell)["text/html"]
    assert "Stop: interrupt the cell" in panel, "for where the script does not run"
    assert "<script" not in panel, "no server has started this kernel"
    live.until(run, lambda cell: shown(cell)["text/html"] != panel)
    pressed = time.monotonic()
    live.interrupt()
    live.finish(run)
    assert time.monotonic() - pressed < BOUND_S
    assert cell.error == "KeyboardInterrupt"
    assert not cell.widgets
    assert "stopped after" in shown(cell)["text/plain"]
    assert "<details>" in shown(cell)["text/html"]
    assert "Stop" not in shown(cell)["text/html"]
    assert wait_for(lambda: {p.pid for p in live.workers()} == processes)
    found = live.run("after = state(); print(before == after, before, after)").check().stdout
    assert found.startswith("True"), found
    live.run("report = %accelerate report").check()
    told = live.run("print(report.facts.ending, *report.facts.curves)").check().stdout
    assert told == "stopped loss\n"
    told = live.run("print(sys.last_value.report().facts == report.facts)").check().stdout
    assert told == "True\n"


def test_pages_that_come_back_and_loops_of_launches_have_their_charts(live):
    cell = live.run("notebook_launcher(train, (1.5,), 2)").check()
    (place,) = cell.outputs
    asked = ask_for_run(live, place)
    assert (asked.outputs, asked.closed) == (cell.outputs, [])
    told = run_on_other_page(live, "1 + 1").outputs[""]
    number = re.search(r"In\[(\d+)\] has ended since its page was", told["text/plain"])
    assert number is not None
    assert told["text/html"].endswith(shown(cell)["text/html"])
    assert run_on_other_page(live, "1 + 1").outputs == {}, "it is said once"
    unknown = ask_for_run(live, "of another kernel")
    assert (unknown.outputs, len(unknown.closed)) == ({}, 1)

    cell = live.run(
        """
        def steps():
            accelerator = Accelerator()
            for step in accelerator.progress(range(3)):
                accelerator.log({"loss": 1.0 / (1 + step)})
        for _ in range(5):
            notebook_launcher(steps, (), 2)
        """
    ).check()
    assert ["<img" in data["text/html"] for data in cell.outputs.values()] == [True] * 5


def test_a_training_with_bars_and_logs_leaves_no_stderr(live):
    cell = live.run(
        """
        def bars():
            import logging
            from tqdm.auto import tqdm
            accelerator = Accelerator()
            for epoch in tqdm(range(3), desc="epochs"):
                for batch in accelerator.progress(list(range(20)), "train"):
                    time.sleep(0.01)
                    accelerator.log({"loss": 1 / (1 + batch)})
                for _ in tqdm(range(5), leave=False):
                    time.sleep(0.01)
                accelerator.print("epoch", epoch, "done")
        notebook_launcher(bars, (), 2);
        """
    ).check()
    assert cell.stderr == ""
    assert cell.stdout == "".join(f"[0] epoch {epoch} done\n" for epoch in range(3))
    html = cell.displays[-1]["text/html"]
    for told in ("train, 20 of 20", "epochs, 3 of 3", "<img", "<details>"):
        assert told in html
    # A short training keeps its summary at the top: its bars are nowhere else.
    cell = live.run(
        """
        def quick():
            from tqdm import tqdm
            for _ in tqdm(range(3), desc="quick"): print("step")
        notebook_launcher(quick, (), 2);
        """
    ).check()
    assert (cell.stderr, cell.stdout) == ("", "[0-1] step\n" * 3)
    assert "quick, 3 of 3" in cell.displays[-1]["text/html"]
    # A bar in the notebook itself is no error.
    alone = 'for _ in Accelerator().progress(list(range(5)), "alone"): time.sleep(0.01)'
    cell = live.run(alone).check()
    assert "alone: 100%" in cell.stdout
    assert cell.stderr == ""


def test_within_an_output_widget_it_is_told_in_lines(fresh_kernel):
    """An `Output` ignores updates of displays: a panel would say "running" for ever."""
    fresh_kernel.run(TRAIN).check()
    launch = "notebook_launcher(train, (2.5,), 2)"
    cell = fresh_kernel.run(f"import ipywidgets\nwith ipywidgets.Output():\n    {launch}").check()
    assert "nbaccel: 2 ranks · " in cell.stdout
    assert cell.displays == []


def test_an_executed_notebook_keeps_the_summary_and_no_widget(tmp_path):
    launch = "notebook_launcher(train, (2.5,), 2)"
    cells = [TRAIN, launch, LIVE, START, "%%accelerate\ntrain(2.5)", BAR]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(c) for c in cells])
    client = NotebookClient(
        notebook,
        timeout=WAIT_S,
        kernel_name="python3",
        config=Config(KernelManager={"transport": "ipc", "ip": f"{tmp_path}/k"}),
        resources={"metadata": {"path": str(tmp_path)}},
    )
    client.execute()
    assert "widgets" not in notebook.metadata
    for number in (1, 4):
        (shown,) = (o for o in notebook.cells[number].outputs if o.output_type == "display_data")
        assert shown.data.keys() == {"text/plain", "text/html"}
        assert "step" in shown.data["text/plain"]
        # A row for each rank, in the table of times and in that of steps.
        assert shown.data["text/html"].count('<th scope="row"') == 4
    for number in (1, 4, 5):
        assert notebook.cells[number].outputs[0].output_type == "display_data", "at the top"
    assert [o.output_type for o in notebook.cells[5].outputs[1:]] == ["stream", "execute_result"]
    assert notebook.cells[5].outputs[1].name == "stdout"
    (last,) = {line.strip() for line in notebook.cells[5].outputs[1].text.splitlines()}
    assert last == "[0-1]  half of 124", "a line that is no bar keeps its last state"
