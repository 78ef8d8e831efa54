"""What is seen of a colleague's notebook, whose outputs Jupyter does not trust but sanitizes.

Its outputs were made in a kernel here, and nobody has signed the file.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import nbformat
import pytest
from nbclient import NotebookClient
from playwright.sync_api import Locator, expect

from tests.browser.conftest import APPLICATIONS, Open
from tests.browser.page import NotebookPage

pytestmark = [pytest.mark.slow, pytest.mark.browser]

TRAIN = """\
import time
from nbaccel import Accelerator, notebook_launcher

def train():
    accelerator = Accelerator()
    for epoch in range(2):
        for batch in accelerator.progress(list(range(40))):
            time.sleep(0.01 * (1 + accelerator.process_index))
            accelerator.log({"loss": 2.5 / (1 + 40 * epoch + batch), "lr": 0.1})
            if batch % 10 == 0:
                accelerator.wait_for_everyone()

results = notebook_launcher(train, (), 2)"""
CELLS = [TRAIN, "results.report()", "%load_ext nbaccel", "%%accelerate -n 2\nx = 1", "%accelerate"]
SUMMARY, REPORT, BOARD = 0, 1, 4
# How much of a picture is drawn at all: a broken one has no pixels of its own.
DRAWN = "(image) => image.complete && image.naturalWidth > 0"


@pytest.fixture(scope="module")
def sent_cells() -> list[nbformat.NotebookNode]:
    """Cells with the outputs that they had on the colleague's machine."""
    notebook = nbformat.v4.new_notebook(
        cells=[nbformat.v4.new_code_cell(source) for source in CELLS],
        metadata={"kernelspec": {"name": "python3", "display_name": "", "language": "python"}},
    )
    NotebookClient(notebook, timeout=400).execute()
    return list(notebook.cells)


@pytest.fixture(scope="module", params=APPLICATIONS)
def page(
    request: pytest.FixtureRequest, open_notebook: Open, sent_cells: list[nbformat.NotebookNode]
) -> Iterator[NotebookPage]:
    found = open_notebook(f"untrusted_{request.param}", sent_cells, application=request.param)
    trusted = "window.jupyterapp.shell.currentWidget.content.widgets.some((c) => c.model.trusted)"
    assert found.page.evaluate(trusted) is False
    yield found
    found.close()


def output_of(page: NotebookPage, number: int) -> Locator:
    return page.cell(number).locator(".jp-OutputArea").first


def test_the_chart_of_a_summary_is_drawn_and_no_text_runs_together(page):
    summary = output_of(page, SUMMARY)
    expect(summary.locator("summary").first).to_contain_text("2 ranks · ")
    chart = summary.get_by_alt_text(re.compile("^loss: from .+ at step"))
    expect(chart).to_be_visible()
    assert chart.evaluate(DRAWN)
    for closed in summary.locator("details").all():
        closed.evaluate("(details) => { details.open = true; }")
    expect(summary.get_by_alt_text(re.compile("^lr: from .+ at step"))).to_be_visible()
    rows = summary.locator("table").last.locator("tbody tr")
    expect(rows).to_have_count(2)
    expect(rows.first).to_contain_text("80")
    # Words of a chart that is sanitized away: its axis, its legend.
    assert not re.search(r"\dstep|smoothed", summary.inner_text())


@pytest.mark.parametrize("number", [SUMMARY, REPORT], ids=["summary", "report"])
def test_parts_of_the_time_keep_their_colours_and_numbers(page, number):
    output = output_of(page, number)
    for closed in output.locator("details").all():
        closed.evaluate("(details) => { details.open = true; }")
    looks = output.locator("[title^='waiting for others']").first.evaluate(
        "(part) => getComputedStyle(part).backgroundColor"
    )
    assert looks == "rgb(123, 135, 148)"
    expect(output).to_contain_text("waiting for others")
    expect(output).to_contain_text(re.compile(r"[1-9]\d? %"))


def test_the_charts_of_a_report_are_drawn_and_the_board_of_workers_is_a_table(page):
    charts = output_of(page, REPORT).locator("img")
    expect(charts).to_have_count(2)
    assert all(chart.evaluate(DRAWN) for chart in charts.all())
    board = output_of(page, BOARD)
    expect(board.locator("tbody tr")).to_have_count(2)
    expect(board.locator("thead")).to_contain_text("memory")
    expect(board).to_contain_text("idle. 2 CPU workers")
