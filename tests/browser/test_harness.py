"""The harness sees what is there, and complains of what should not be."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.browser.conftest import Open
from tests.browser.page import NotebookPage

pytestmark = [pytest.mark.slow, pytest.mark.browser]


@pytest.fixture(scope="module")
def page(open_notebook: Open) -> Iterator[NotebookPage]:
    """In JupyterLab; that Notebook 7 is served as well, every test of a form there shows."""
    found = open_notebook("harness", ["1 + 1"])
    found.run_cell(0)
    yield found
    found.close()


def test_complaints_of_the_browser_and_requests_to_the_outside_are_seen(page):
    page.page.evaluate("console.error('a complaint')")
    page.page.evaluate("fetch('https://example.org/x').catch(() => 0)")
    with pytest.raises(AssertionError, match="a complaint"):
        page.check()
    assert "request: https://example.org/x" in page.complaints
    page.complaints.clear()
