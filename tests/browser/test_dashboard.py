"""The dashboard as a person sees it: it moves, its Stop button stops, and its summary stays."""

from __future__ import annotations

import contextlib
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
            print("epoch", step // 50, flush=True)

notebook_launcher(os.getpid, (), 2)
print(os.getpid())"""
# The ports of process groups are open from here on.
START = """\
%%accelerate -n 2
from nbaccel import Accelerator
Accelerator().wait_for_everyone()"""
LAUNCH, CELL, WIDGETS = 3, 4, 5
CELLS = [
    SETUP,
    "%load_ext nbaccel",
    START,
    "notebook_launcher(train, (30_000,), 2)",
    "%%accelerate\ntrain(30_000)",
    "from ipywidgets.widgets.widget import _instances\nprint(len(_instances), 'widgets')",
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
    found = set()
    for process in psutil.Process(int(page.text(0).split()[-1])).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.status() != psutil.STATUS_ZOMBIE and process.name() != TEMPLATE_NAME:
                found.add(process.pid)
    return found


@pytest.mark.parametrize("number", [LAUNCH, CELL], ids=["launch", "cell"])
def test_it_moves_and_stop_stops(page: NotebookPage, number: int) -> None:
    before = workers(page)
    page.run_cell(number, wait=False)
    cell, stop = page.cell(number), page.find("nbaccel-stop")
    expect(stop).to_be_visible()
    rows = cell.locator("table tbody tr")
    expect(rows).to_have_count(2)
    heads = cell.locator("table thead th")
    expect(heads).to_contain_text(
        ["rank", "state", "step", "steps/s", "loss", "memory", "last line"]
    )
    names = heads.all_inner_texts()
    loss = rows.first.locator("th, td").nth(names.index("loss"))
    expect(loss).to_contain_text("▁")
    seen = loss.inner_text()
    expect(loss).not_to_have_text(seen)
    expect(rows.last.locator("th, td").nth(names.index("last line"))).to_have_text("epoch 3")

    clicked = time.monotonic()
    stop.click()
    page.wait_idle()
    assert time.monotonic() - clicked < BOUND_S
    assert "KeyboardInterrupt" in page.text(number)
    expect(stop).to_have_count(0)
    assert wait_for(lambda: workers(page) == before)


def test_its_summary_stays_as_plain_output_and_unfolds(page: NotebookPage) -> None:
    for number in (LAUNCH, CELL):
        shown = [o["data"] for o in page.outputs(number) if o["output_type"] == "display_data"]
        assert [VIEW in data for data in shown] == [False]
        details = page.cell(number).locator("details")
        expect(details).to_contain_text("2 ranks · stopped after")
        expect(details.locator("table")).to_be_hidden()
        details.locator("summary").click()
        expect(details.locator("tbody tr")).to_have_count(2)
        expect(details.locator("table")).to_contain_text("most memory")


def test_no_widget_is_left_in_the_kernel(page: NotebookPage) -> None:
    page.run_cell(WIDGETS)
    assert page.text(WIDGETS) == "0 widgets\n"


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
