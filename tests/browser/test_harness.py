"""The harness sees what is there, and complains of what should not be."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from playwright.sync_api import expect

from tests.browser.conftest import Open
from tests.browser.page import NotebookPage

pytestmark = [pytest.mark.slow, pytest.mark.browser]

CELLS = [
    "import ipywidgets\n"
    "choice = ipywidgets.Dropdown(options=['fp32', 'bf16'], description='precision')\n"
    "choice.add_class('t-choice');\n"
    "choice",
    "print('chosen', choice.value)",
]


@pytest.fixture(scope="module")
def page(open_notebook: Open) -> Iterator[NotebookPage]:
    """In JupyterLab; that Notebook 7 is served as well, every test of a form there shows."""
    found = open_notebook("harness", CELLS)
    found.run_all()
    yield found
    found.close()


def printed(page: NotebookPage, expected: str, tries: int = 20) -> str:
    """What the second cell prints, run again until it is what is expected.

    JupyterLab sends a widget's messages to a subshell of the kernel: they may overtake a cell, and
    be overtaken by one.
    """
    for _ in range(tries):
        page.run_cell(1)
        if expected in page.text(1):
            break
    return page.text(1)


def test_what_is_chosen_in_the_browser_is_what_python_prints(page):
    page.find("t-choice").locator("select").select_option("bf16")
    assert printed(page, "bf16") == "chosen bf16\n"


@pytest.mark.parametrize("theme", ["dark", "light"])
def test_the_theme_changes(page, theme):
    page.set_theme(theme)


def test_keys_reach_what_has_the_focus(page):
    page.find("t-choice").locator("select").focus()
    expect(page.focused()).to_have_count(1)
    page.press("f")
    assert printed(page, "fp32") == "chosen fp32\n"


def test_complaints_of_the_browser_and_requests_to_the_outside_are_seen(page):
    page.page.evaluate("console.error('a complaint')")
    page.page.evaluate("fetch('https://example.org/x').catch(() => 0)")
    with pytest.raises(AssertionError, match="a complaint"):
        page.check()
    assert "request: https://example.org/x" in page.complaints
    page.complaints.clear()


def test_a_notebook_opened_by_a_test_leaves_nothing(open_notebook):
    """The police of all tests look for its kernel, and for what that started."""
    page = open_notebook("alone", ["import subprocess; subprocess.Popen(['sleep', '60']).pid"])
    page.run_all()
    assert int(page.text(0))
    page.close()
