"""The panel as a person sees it: it moves, its Stop button stops, and its summary stays."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Iterator

import psutil
import pytest
from playwright.sync_api import expect

from tests.browser.conftest import APPLICATIONS, Open
from tests.browser.page import NotebookPage
from tests.kernel.kernel import wait_for
from tests.leak_police import TEMPLATE_NAME

pytestmark = [pytest.mark.slow, pytest.mark.browser]

VIEW = "application/vnd.jupyter.widget-view+json"
BOUND_S = 60.0  # it ends a hang; how fast Stop is, the benchmarks measure

SETUP = """\
import os, time
from nbaccel import Accelerator, notebook_launcher

def train(num_steps):
    accelerator = Accelerator()
    for step in range(1, num_steps + 1):
        time.sleep(0.02)
        accelerator.log({"loss": 2.5 / step ** 0.5, "lr": 0.1})
        if step % 50 == 0:
            accelerator.wait_for_everyone()  # or lines of a rank that lags are not folded
            print("epoch", step // 50, flush=True)

def talk():
    for line in range(10_000):
        print("rank", os.environ["RANK"], "line", line, flush=line % 500 == 0)
    print("all is said", flush=True)
    time.sleep(600)

notebook_launcher(os.getpid, (), 2)
print(os.getpid())"""
# The ports of process groups are open from here on.
START = """\
%%accelerate -n 2
from nbaccel import Accelerator
Accelerator().wait_for_everyone()"""
LAUNCH, CELL, WIDGETS, TALK = range(3, 7)
CELLS = [
    SETUP,
    "%load_ext nbaccel",
    START,
    "notebook_launcher(train, (30_000,), 2)",
    "%%accelerate\ntrain(30_000)",
    "from ipywidgets.widgets.widget import _instances\nprint(len(_instances), 'widgets')",
    "notebook_launcher(talk, (), 2)",
]


@pytest.fixture(scope="module", params=APPLICATIONS)
def page(request: pytest.FixtureRequest, open_notebook: Open) -> Iterator[NotebookPage]:
    found = open_notebook(f"dashboard_{request.param}", CELLS, application=request.param)
    for number in range(LAUNCH):
        found.run_cell(number)
    yield found
    found.close()


def workers(page: NotebookPage) -> set[int]:
    """The kernel's living descendants but templates, of which each cell may bring another."""
    return children_of(psutil.Process(int(page.text(0).split()[-1])))


def children_of(kernel: psutil.Process) -> set[int]:
    found = set()
    for process in kernel.children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.status() != psutil.STATUS_ZOMBIE and process.name() != TEMPLATE_NAME:
                found.add(process.pid)
    return found


@pytest.mark.parametrize("number", [LAUNCH, CELL], ids=["launch", "cell"])
def test_it_moves_and_stop_stops_and_a_summary_stays(page: NotebookPage, number: int) -> None:
    before = workers(page)
    page.run_cell(number, wait=False)
    cell, stop = page.cell(number), page.find("nbaccel-stop")
    expect(stop).to_be_visible()
    rows = cell.locator("table tbody tr")
    expect(rows).to_have_count(2)
    heads = cell.locator("table thead th")
    expect(heads).to_contain_text(["rank", "state", "step", "steps/s", "loss", "memory"])
    names = heads.all_inner_texts()
    loss = rows.first.locator("th, td").nth(names.index("loss"))
    seen = loss.inner_text()
    expect(loss).not_to_have_text(seen)
    charts = page.find("nbaccel-panel").locator("svg")
    expect(charts.first).to_be_visible()
    expect(charts.first).to_have_attribute("aria-label", re.compile("loss"))
    expect(charts.last).to_be_hidden()
    page.find("nbaccel-panel").get_by_text("1 other metric").click()
    expect(charts.last).to_be_visible()
    expect(charts.last).to_have_attribute("aria-label", re.compile("lr"))
    renewed = loss.inner_text()
    expect(loss).not_to_have_text(renewed)
    expect(charts.last).to_be_visible()
    expect(cell).to_contain_text("[0-1] epoch 3")
    outputs = cell.locator(".jp-OutputArea-child").all_inner_texts()
    assert "2 ranks" in outputs[0], "at the top"

    clicked = time.monotonic()
    stop.click()
    page.wait_idle()
    assert time.monotonic() - clicked < BOUND_S
    assert "KeyboardInterrupt" in page.text(number)
    expect(stop).to_have_count(0)
    assert wait_for(lambda: workers(page) == before)

    shown = [o["data"] for o in page.outputs(number) if o["output_type"] == "display_data"]
    assert [VIEW in data for data in shown] == [False], "plain output"
    details = cell.locator(".jp-OutputArea-child").first.locator("details").first
    expect(details).to_contain_text("2 ranks · stopped after")
    expect(cell.get_by_alt_text(re.compile("^loss: from")).last).to_be_visible()
    ranks = details.locator("table").last
    expect(ranks).to_be_hidden()
    details.locator("summary").first.click()
    expect(ranks.locator("tbody tr")).to_have_count(2)
    expect(ranks).to_contain_text("most host memory")


def test_the_button_is_reached_and_pressed_by_keys(page: NotebookPage) -> None:
    page.run_cell(CELL, wait=False)
    stop = page.find("nbaccel-stop")
    expect(stop).to_be_visible()
    stop.focus()
    page.press("Enter")
    page.wait_idle()
    assert "the cell was stopped" in page.text(CELL)
    page.run_cell(WIDGETS)
    assert page.text(WIDGETS) == "0 widgets\n"


def test_stop_is_in_reach_with_ten_thousand_lines(page: NotebookPage) -> None:
    page.run_cell(TALK, wait=False)
    stop, cell = page.find("nbaccel-stop"), page.cell(TALK)
    expect(cell).to_contain_text("rank 1 line 9999")
    # To the end of all that was printed, as a person scrolls who wants to see it.
    cell.evaluate("(element) => element.scrollIntoView({block: 'end'})")
    expect(stop).to_be_in_viewport()
    clicked = time.monotonic()
    stop.click()
    page.wait_idle()
    assert time.monotonic() - clicked < BOUND_S
    printed = [o["text"] for o in page.outputs(TALK) if o["output_type"] == "stream"]
    for rank in (0, 1):
        shown = [x for x in "".join(printed).splitlines() if f"rank {rank} line" in x]
        assert len(shown) == 10_000, "nothing is lost"
    page.page.evaluate("window.jupyterapp.commands.execute('notebook:clear-all-cell-outputs')")
