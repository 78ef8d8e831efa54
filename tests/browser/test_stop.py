"""Stop as a person presses it: the code that people have ends after its step, and has learned."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from playwright.sync_api import expect

from tests.browser.conftest import Open
from tests.browser.page import NotebookPage
from tests.browser.test_seen_loops import COURSE, PLAIN, SETUP, TRAINER

pytestmark = [pytest.mark.slow, pytest.mark.browser]

ENDLESS = {
    "course": COURSE.replace("num_epochs = 4", "num_epochs = 4000"),
    "trainer": TRAINER.replace("max_steps=90", "max_steps=90_000"),
    "one process": PLAIN.replace("range(2)", "range(2000)"),
}
RESUMED = ENDLESS["course"].replace("num_processes=2)", "num_processes=2, resume=True)")
CHANGE = """\
now = model.lm_head.weight.sum().item()
print("learned", now != before); before = now"""


@pytest.fixture(scope="module")
def page(open_notebook: Open) -> Iterator[NotebookPage]:
    cells = [SETUP + "\nbefore = model.lm_head.weight.sum().item()"]
    for code in (*ENDLESS.values(), RESUMED):
        cells += [code, CHANGE]
    found = open_notebook("stop", cells)
    found.run_cell(0)
    yield found
    found.close()


@pytest.mark.parametrize("number", [1, 3, 5, 7], ids=[*ENDLESS, "resume"])
def test_the_model_has_learned(page: NotebookPage, number: int) -> None:
    page.run_cell(number, wait=False)
    page.page.wait_for_timeout(6_000)
    stop = page.cell(number).get_by_role("button", name="Stop")
    if number == 5:
        # One process has no button: the kernel is interrupted, as its users do.
        page.press("Escape", "i", "i")
    else:
        stop.click()
    page.wait_idle()
    cell = page.cell(number)
    expect(cell).to_contain_text(re.compile(r"stopped at step \d+; its weights are in `model`"))
    expect(stop).to_have_count(0)
    page.run_cell(number + 1)
    assert page.text(number + 1).strip() == "learned True"


def test_the_same_cell_goes_on(page: NotebookPage) -> None:
    page.run_cell(7, wait=False)
    page.page.wait_for_timeout(4_000)
    expect(page.cell(7)).to_contain_text("goes on where it was stopped")
    page.cell(7).get_by_role("button", name="Stop").click()
    page.wait_idle()
    expect(page.cell(7)).to_contain_text("run it again to go on from there")
