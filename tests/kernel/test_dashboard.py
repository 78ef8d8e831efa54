"""The dashboard in real kernels: what stays in a notebook, and what a page that comes back is told.

What its script does in a page is in `tests/browser/test_reloads.py`.
"""

from __future__ import annotations

import queue
import re
import textwrap
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

import nbformat
import pytest
from nbclient import NotebookClient
from traitlets.config import Config

from tests.kernel.kernel import WAIT_S, Kernel, wait_for

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


class FrontEnd:
    """One page that shows a notebook."""

    def __init__(self, kernel: Kernel, page: str = "") -> None:
        self.kernel = kernel
        self._page = page or kernel.client.session.session

    def begin(self, code: str) -> Run:
        content = {"code": textwrap.dedent(code), "silent": False, "store_history": True}
        return Run(self, self._send("execute_request", content))

    def ask_for_run(self, place: str) -> Run:
        """Do what the script of a reloaded page does."""
        content = {"comm_id": uuid4().hex, "target_name": "nbaccel.run", "data": {"place": place}}
        return Run(self, self._send("comm_open", content))

    def _send(self, kind: str, content: dict[str, Any]) -> str:
        client = self.kernel.client
        message = client.session.msg(kind, content)
        message["header"]["session"] = self._page
        client.shell_channel.send(message)
        return str(message["header"]["msg_id"])


@dataclass
class Run:
    """A running cell, and what the front end has before it."""

    front_end: FrontEnd
    ident: str
    open: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Comm → its widget's state."""
    outputs: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Display → its content now."""
    closed: list[str] = field(default_factory=list)
    """Comms that the kernel has closed."""
    text: str = ""
    error: str = ""
    done: bool = False

    def until(self, condition: Any) -> None:
        deadline = time.monotonic() + WAIT_S
        while not condition(self):
            assert time.monotonic() < deadline, self
            try:
                message = self.front_end.kernel.client.get_iopub_msg(timeout=1)
            except queue.Empty:
                continue
            self._note(message)

    def _note(self, message: dict[str, Any]) -> None:
        kind, content = message["msg_type"], message["content"]
        if kind == "comm_open":
            self.open[content["comm_id"]] = content["data"]["state"]
        elif kind == "comm_msg" and content["data"].get("method") == "update":
            self.open[content["comm_id"]].update(content["data"]["state"])
        elif kind == "comm_close":
            self.open.pop(content["comm_id"], None)
            self.closed.append(content["comm_id"])
        elif message["parent_header"].get("msg_id") != self.ident:
            return
        elif kind in ("display_data", "update_display_data"):
            shown_as = content["transient"].get("display_id", "")
            self.outputs[shown_as] = content["data"]
        elif kind == "stream":
            self.text += content["text"]
        elif kind == "error":
            self.error = content["ename"]
        elif kind == "status":
            self.done = content["execution_state"] == "idle"

    def finish(self) -> Run:
        self.until(lambda run: run.done)
        client = self.front_end.kernel.client
        while client.get_shell_msg(timeout=WAIT_S)["parent_header"].get("msg_id") != self.ident:
            continue
        return self

    @property
    def shown(self) -> dict[str, Any]:
        (found,) = self.outputs.values()
        return found

    def facts(self) -> str:
        return "".join(
            state["value"]
            for state in self.open.values()
            if state.get("_model_name") == "HTMLModel"
        )


@pytest.fixture(scope="module")
def live() -> Iterator[Kernel]:
    """A kernel with two live workers, that has launched, too."""
    with Kernel() as found:
        for code in (TRAIN, CALM, LIVE, START, "notebook_launcher(os.getpid, (), 2);"):
            found.run(code).check()
        yield found


@pytest.mark.parametrize("code", [LAUNCH, CELL], ids=["launch", "cell"])
def test_stop_leaves_nothing_but_the_summary(live: Kernel, code: str) -> None:
    live.run("before = state(); import ipywidgets").check()
    processes = {p.pid for p in live.workers()}
    run = FrontEnd(live).begin(code)
    run.until(lambda r: r.outputs and "loss" in r.shown["text/html"])
    assert run.shown.keys() == {"text/plain", "text/html"}
    panel = run.shown["text/html"]
    assert "Stop: interrupt the cell" in panel, "for where the script does not run"
    assert "<script" not in panel, "no server has started this kernel"
    run.until(lambda r: r.shown["text/html"] != panel)
    pressed = time.monotonic()
    live.interrupt()
    run.finish()
    assert time.monotonic() - pressed < BOUND_S
    assert run.error == "KeyboardInterrupt"
    assert not run.open, "no widget"
    assert "stopped after" in run.shown["text/plain"]
    assert "<details>" in run.shown["text/html"]
    assert "Stop" not in run.shown["text/html"]
    assert wait_for(lambda: {p.pid for p in live.workers()} == processes)
    found = live.run("after = state(); print(before == after, before, after)").check().stdout
    assert found.startswith("True"), found


def test_a_page_that_comes_back_gets_the_summary_and_other_pages_are_told_once(
    live: Kernel,
) -> None:
    run = FrontEnd(live).begin("notebook_launcher(train, (1.5,), 2)").finish()
    assert run.error == ""
    (place,) = run.outputs
    back = FrontEnd(live, "the reloaded page")
    asked = back.ask_for_run(place)
    asked.until(lambda r: r.done)
    assert (asked.outputs, asked.closed) == ({place: run.shown}, [])
    told = back.begin("1 + 1").finish().outputs[""]
    number = re.search(r"In\[(\d+)\] has ended since its page was", told["text/plain"])
    assert number is not None
    assert told["text/html"].endswith(run.shown["text/html"])
    assert back.begin("1 + 1").finish().outputs == {}, "it is said once"
    unknown = back.ask_for_run("of another kernel")
    unknown.until(lambda r: r.done)
    assert (unknown.outputs, len(unknown.closed)) == ({}, 1)


def test_a_stopped_launch_has_a_report(live: Kernel) -> None:
    run = live.begin(LAUNCH)
    live.until(run, "running")
    live.interrupt()
    assert live.finish(run).error == "KeyboardInterrupt"
    live.run("report = %accelerate report").check()
    told = live.run("print(report.facts.ending, *report.facts.curves)").check().stdout
    assert told == "stopped loss\n"
    told = live.run("print(sys.last_value.report().facts == report.facts)").check().stdout
    assert told == "True\n"


def test_a_training_with_bars_and_logs_leaves_no_stderr(live: Kernel) -> None:
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


def test_of_a_loop_of_launches_the_last_charts_are_in_sight(live: Kernel) -> None:
    run = FrontEnd(live).begin(
        """
        def steps():
            accelerator = Accelerator()
            for step in accelerator.progress(range(3)):
                accelerator.log({"loss": 1.0 / (1 + step)})
        for _ in range(5):
            notebook_launcher(steps, (), 2)
        """
    )
    assert run.finish().error == ""
    charts = [data["text/html"].rpartition("<img") for data in run.outputs.values()]
    assert all(mark for _, mark, _ in charts), "none is lost"
    is_folded = ["</details>" in behind for _, _, behind in charts]
    assert is_folded == [True, True, False, False, False]


def test_a_short_training_keeps_its_summary_at_the_top(live: Kernel) -> None:
    """Its bars are nowhere else."""
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


def test_a_bar_in_the_notebook_itself_is_no_error(live: Kernel) -> None:
    cell = live.run(
        """
        for _ in Accelerator().progress(list(range(5)), "alone"): time.sleep(0.01)
        """
    ).check()
    assert "alone: 100%" in cell.stdout
    assert cell.stderr == ""


def test_within_an_output_widget_the_place_is_a_widget_that_changes(fresh_kernel: Kernel) -> None:
    """An `Output` ignores updates of displays: the panel would say "running" for ever."""
    fresh_kernel.run(TRAIN).check()
    run = FrontEnd(fresh_kernel).begin(
        """
        import ipywidgets
        with ipywidgets.Output():
            notebook_launcher(train, (2.5,), 2)
        """
    )
    run.until(lambda r: "Stop: interrupt the cell" in r.facts())
    assert run.finish().error == ""
    run.until(lambda r: "✓ <b>2 ranks" in r.facts())
    assert "Stop: interrupt" not in run.facts()


def test_it_comes_back_after_a_worker_has_cleared_the_cell(live: Kernel) -> None:
    cell = live.run(
        """
        %%accelerate
        from IPython.display import clear_output
        train(2.5)
        clear_output()
        train(2.5)
        """
    ).check()
    assert "<details>" in cell.displays[-1]["text/html"]


def test_an_executed_notebook_keeps_the_summary_and_no_widget(tmp_path: Path) -> None:
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
