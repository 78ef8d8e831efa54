"""A page that is reloaded, closed or opened elsewhere while it trains, and what the file draws."""

from __future__ import annotations

import re
from collections.abc import Iterator

import nbformat
import psutil
import pytest
from playwright.sync_api import Locator, expect

from tests.browser.conftest import APPLICATIONS, Open
from tests.browser.page import NotebookPage
from tests.browser.test_dashboard import VIEW

pytestmark = [pytest.mark.slow, pytest.mark.browser]

SETUP = """\
import os, time
from nbaccel import Accelerator, notebook_launcher

def train(num_steps):
    accelerator = Accelerator()
    for step in range(1, num_steps + 1):
        time.sleep(0.02)
        accelerator.log({"loss": 2.5 / step ** 0.5, "lr": 0.1})

def alone(num_steps):
    train(num_steps)

notebook_launcher(os.getpid, (), 2)
print(os.getpid())"""
LONG, ALONE = range(1, 3)
CELLS = [SETUP, "notebook_launcher(train, (60_000,), 2)", "notebook_launcher(alone, (60_000,), 1)"]


@pytest.fixture(params=APPLICATIONS)
def page(request: pytest.FixtureRequest, open_notebook: Open) -> Iterator[NotebookPage]:
    name = f"reloads_{request.param}_{request.function.__name__}"
    found = open_notebook(name, CELLS, application=request.param)
    found.run_cell(0)
    yield found
    found.close()
    # Of a page that is left, and of a kernel that has been ended, the browser complains.
    found.complaints = [text for text in found.complaints if text.startswith("request")]


def panel_of(page: NotebookPage, number: int) -> Locator:
    return page.cell(number).locator(".nbaccel-panel")


def moves(panel: Locator) -> None:
    """Wait until the panel has another step."""
    seen = re.search(r"step [\d,]+", panel.inner_text())
    assert seen is not None
    expect(panel).not_to_contain_text(seen[0])


def test_a_reloaded_page_shows_the_run_again_and_can_stop_it(page, open_notebook):
    page.run_cell(LONG, wait=False)
    panel = panel_of(page, LONG)
    expect(panel).to_contain_text("step")
    page.save()
    sent = nbformat.read(page.path, as_version=4)
    page.reload()
    expect(panel).to_contain_text("step")
    moves(panel)
    moves(panel)
    panel.get_by_role("button", name="Stop").click()
    expect(page.cell(LONG)).to_contain_text("2 ranks · stopped after")
    expect(panel).to_have_count(0)
    page.wait_idle()

    # One process has the same panel, with its Stop button.
    page.run_cell(ALONE, wait=False)
    panel = panel_of(page, ALONE)
    moves(panel)
    panel.get_by_role("button", name="Stop").click()
    page.wait_idle()
    expect(page.cell(ALONE)).to_contain_text("1 rank · stopped after")

    # A colleague who does not trust it sees it, too.
    colleague = open_notebook(f"{page.name}_sent", sent.cells)
    seen = colleague.cell(LONG)
    expect(seen).to_contain_text("2 ranks · ")
    expect(seen).to_contain_text("Stop: interrupt the cell (■)")
    expect(seen.get_by_role("button", name="Stop")).to_have_count(0)
    colleague.close()


def test_a_restart_is_told_and_the_file_draws_without_a_kernel_and_holds_no_widget(page):
    page.run_cell(LONG, wait=False)
    panel = panel_of(page, LONG)
    expect(panel).to_contain_text("step")
    page.restart_kernel()
    expect(panel).to_contain_text("The kernel has been restarted since this run.")
    expect(panel.get_by_role("button", name="Stop")).to_have_count(0)

    page.run_cell(0)
    page.run_cell(LONG, wait=False)
    expect(panel).to_contain_text("step")
    page.save()
    saved = nbformat.read(page.path, as_version=4)
    assert [VIEW in output.get("data", {}) for output in saved.cells[LONG].outputs] == [False]
    kernel = psutil.Process(int(page.text(0)))
    page.leave()
    page.end_kernel()
    assert not kernel.is_running()
    page.come_back()
    expect(panel).to_contain_text("The kernel of this run has ended.")
    expect(panel).to_contain_text(re.compile(r"known of it on \d\d \w+, \d\d:\d\d:\d\d"))
    expect(panel.locator("svg").first).to_be_visible()
    expect(panel.get_by_role("button", name="Stop")).to_have_count(0)
