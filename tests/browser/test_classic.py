"""The form, a cell of workers and an error in Notebook 6 with ipywidgets 7: Colab's generation.

Colab's own page cannot be had, but its widgets and its kernel's packages are these.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.metadata import version
from importlib.util import find_spec
from typing import TYPE_CHECKING

import pytest

from tests.browser.server import Server

if TYPE_CHECKING:
    from playwright.sync_api import BrowserContext, Locator, Page

_IS_CLASSIC = find_spec("notebook") is not None and version("notebook").startswith("6.")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.browser,
    pytest.mark.skipif(not _IS_CLASSIC, reason="needs Notebook 6: make lane LANE=colab has it"),
]

WAIT_S = 300.0
CELLS = [
    "import torch\n"
    "from torch import nn\n"
    "import nbaccel\n"
    "%load_ext nbaccel\n"
    "from nbaccel import notebook_launcher\n"
    "notebook_launcher(print, (), 2)\n"
    "model, batch = nn.Linear(64, 8), torch.randn(4, 64)",
    "picker = nbaccel.configure(model, batch)",
    "print(repr(picker.config))",
    "def steps():\n"
    "    import time\n"
    "    from nbaccel import Accelerator\n"
    "    accelerator = Accelerator()\n"
    "    for batch in accelerator.progress(list(range(100))):\n"
    "        accelerator.log({'loss': 1 / (1 + batch)})\n"
    "        time.sleep(0.04)\n"
    "    accelerator.print('trained')\n"
    "notebook_launcher(steps, (), 2);",
]
FORM, PRINT, STEPS = range(1, 4)
_READY = "() => window.Jupyter?.notebook?.kernel?.is_connected()"
_RUN = """(number) => {
    window.nbaccelRan = window.Jupyter.notebook.get_cell(number);
    window.Jupyter.notebook.execute_cells([number]);
}"""
_DONE = """() => {
    const cell = window.nbaccelRan;
    return !cell.element.hasClass("running") && cell.input_prompt_number !== "*";
}"""


class Classic:
    """One notebook in one tab of Notebook 6."""

    def __init__(self, context: BrowserContext, server: Server) -> None:
        server.write("classic", CELLS)
        self.errors: list[str] = []
        self.page: Page = context.new_page()
        self.page.set_default_timeout(WAIT_S * 1000)
        self.page.on("pageerror", lambda error: self.errors.append(error.message))
        self.page.goto(server.address("classic", "classic"), wait_until="commit")
        self.page.wait_for_function(_READY)

    def run(self, number: int) -> Locator:
        """Run a cell to its end; returns its output area."""
        self.page.evaluate(_RUN, number)
        self.page.wait_for_function(_DONE, polling=50)
        return self.cell(number).locator(".output_wrapper")

    def cell(self, number: int) -> Locator:
        return self.page.locator("#notebook .cell").nth(number)


@pytest.fixture(scope="module")
def classic(browser: BrowserContext) -> Iterator[Classic]:
    server = Server(classic=True)
    try:
        found = Classic(browser, server)
        found.run(0)
        yield found
        found.page.close()
        server.end_kernel("classic")
        assert not found.errors
    finally:
        server.close()


def test_the_form_is_a_form_and_what_is_pressed_is_what_python_holds(classic):
    from playwright.sync_api import expect

    classic.run(FORM)
    root = classic.cell(FORM).locator(".nbaccel-picker")
    expect(root).to_be_visible()
    expect(classic.cell(FORM).locator(".nbaccel-static").first).to_be_hidden()
    bf16 = root.locator(".nbaccel-option-bf16")
    bf16.click()
    expect(bf16).to_have_class(re.compile("mod-active"))
    expect(bf16).to_have_attribute("aria-checked", "true")
    line = root.locator(".nbaccel-num_processes input")
    line.fill("2")
    line.press("Enter")
    expect(line).to_have_value("2")
    root.locator(".nbaccel-opens-faces").click()
    expect(root.locator("pre")).to_contain_text("bf16")
    root.locator(".nbaccel-candidates").get_by_text("FSDP", exact=True).click()
    expect(root.locator(".nbaccel-taken")).to_contain_text("FSDP")
    root.locator(".nbaccel-undo").click()
    expect(root.locator(".nbaccel-taken")).to_contain_text("one copy each")
    expect(classic.run(PRINT)).to_contain_text("RunConfig(num_processes=2, mixed_precision='bf16')")


def test_a_training_has_its_panel_at_the_top_and_nothing_of_an_error(classic):
    from playwright.sync_api import expect

    classic.page.evaluate(_RUN, STEPS)
    outputs = classic.cell(STEPS).locator(".output_area")
    expect(outputs.first.locator(".nbaccel-stop")).to_be_visible()
    expect(outputs.first.locator("svg[role=img]").first).to_be_visible()
    expect(outputs.first).to_contain_text("of 100")
    classic.page.wait_for_function(_DONE, polling=50)
    expect(outputs.first.locator("details").first).to_contain_text("2 ranks")
    expect(outputs.first.locator("img[alt^='loss: from']")).to_be_visible()
    expect(outputs.nth(1)).to_contain_text("[0] trained")
    expect(classic.cell(STEPS).locator(".output_stderr")).to_have_count(0)
