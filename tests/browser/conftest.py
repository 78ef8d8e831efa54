"""One server for a worker's browser tests, one browser for a file, one tab for a notebook.

A file's browser ends with it: as long as playwright is at work, an event loop runs in this thread,
and tests of other files could not run theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import pytest

from tests.browser import chromium
from tests.browser.server import Server

if TYPE_CHECKING:
    from nbformat import NotebookNode
    from playwright.sync_api import BrowserContext

    from tests.browser.page import NotebookPage

APPLICATIONS = ("lab", "notebook")
WINDOW = {"width": 1300, "height": 1000}
# /dev/shm is small in containers. With one process for all tabs none comes or goes during a test.
# The rest keeps the browser from asking its makers anything.
ARGUMENTS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--renderer-process-limit=1",
    "--disable-background-networking",
    "--disable-breakpad",
    "--disable-component-update",
    "--no-first-run",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
)
SEEN_WITHIN_MS = 20_000
Open = Callable[..., "NotebookPage"]


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    """JupyterLab and Notebook 7, for all browser tests of this worker."""
    found = Server()
    try:
        yield found
    finally:
        found.close()


@pytest.fixture(scope="module")
def browser() -> Iterator[BrowserContext]:
    """Chromium, for all tests of a file."""
    from playwright.sync_api import expect, sync_playwright

    # Its own five seconds pass on two busy cores, while the kernel answers.
    expect.set_options(timeout=SEEN_WITHIN_MS)
    with sync_playwright() as playwright:
        chrome = playwright.chromium.launch(
            executable_path=chromium.path(), args=list(ARGUMENTS), headless=True
        )
        context = chrome.new_context(
            viewport=WINDOW, permissions=["clipboard-read", "clipboard-write"]
        )
        context.new_page()  # the process of all tabs stays as long as one of them does
        try:
            yield context
        finally:
            context.close()
            chrome.close()


@pytest.fixture(scope="module")
def open_notebook(server: Server, browser: BrowserContext) -> Iterator[Open]:
    """Opens notebooks that stay open for all tests of a file: a page load takes seconds."""
    from tests.browser.page import NotebookPage

    opened: list[NotebookPage] = []

    def open_it(
        name: str, cells: Sequence[str | NotebookNode], *, application: str = "lab"
    ) -> NotebookPage:
        page = NotebookPage(browser, server, application=application, name=name, cells=cells)
        opened.append(page)
        return page

    yield open_it
    for page in opened:
        page.close()
    for page in opened:
        page.check()
