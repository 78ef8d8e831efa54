"""How long until a form is seen, in JupyterLab in Chromium.

    benchmark ── subprocess, PYTHONPATH=a checkout ──► this file ──► server, kernel; browser

Each run has a server, a browser and a kernel of its own, all of one checkout. What counts is the
time from the command that runs the cell to the first frame in which the thing can be seen.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

LIMIT_S = 200.0
SETUP = """
import torch, nbaccel
from transformers import LlamaConfig, LlamaForCausalLM
with torch.device("meta"):
    model = LlamaForCausalLM(LlamaConfig())
batch = {"input_ids": torch.zeros(1, 512, dtype=torch.long)}
"""
CELLS = [
    SETUP,
    "picker = nbaccel.configure(model, batch)",
    "import ipywidgets\nipywidgets.ToggleButton(description='one')",
]
FORM, TRIVIAL = 1, 2
SEEN = {
    "field": ".nbaccel-setting button",
    "end": ".nbaccel-files button",  # the last thing of the form
    "memory": ".nbaccel-bars .nbaccel-track",
    "trivial": ".jupyter-button",
}
# Looked at before each frame is drawn; a second run of the cell begins with its outputs cleared.
WATCH = """([number, selectors]) => {
    const content = window.jupyterapp.shell.currentWidget.content;
    const cell = content.widgets[number];
    content.activeCellIndex = number;
    content.deselectAll();
    cell.model.outputs.clear();
    const seen = window.nbaccelSeen = {};
    const begun = performance.now();
    const isSeen = (selector) => [...cell.node.querySelectorAll(selector)].some(
        (element) => element.checkVisibility() && element.getBoundingClientRect().width > 0);
    const look = () => {
        for (const [name, selector] of Object.entries(selectors)) {
            if (!(name in seen) && isSeen(selector)) seen[name] = performance.now() - begun;
        }
        if (Object.keys(seen).length < Object.keys(selectors).length) requestAnimationFrame(look);
    };
    requestAnimationFrame(look);
    void window.jupyterapp.commands.execute("notebook:run-cell");
}"""
DONE = "(count) => Object.keys(window.nbaccelSeen ?? {}).length === count"


def measure() -> dict[str, float]:
    """Milliseconds of one run: the first form of a kernel, another one, and a button alone."""
    from playwright.sync_api import sync_playwright

    from tests.browser import chromium
    from tests.browser.conftest import ARGUMENTS, WINDOW
    from tests.browser.page import NotebookPage
    from tests.browser.server import Server

    server = Server()
    try:
        with sync_playwright() as playwright:
            chrome = playwright.chromium.launch(
                executable_path=chromium.path(), args=list(ARGUMENTS), headless=True
            )
            context = chrome.new_context(viewport=WINDOW)
            context.new_page()
            page = NotebookPage(context, server, application="lab", name="paint", cells=CELLS)
            page.run_cell(0)
            form = ("field", "end", "memory")
            found = {f"first {name}": ms for name, ms in _watch(page, FORM, form).items()}
            found |= {f"again {name}": ms for name, ms in _watch(page, FORM, form).items()}
            _watch(page, TRIVIAL, ("trivial",))  # the first one of a page loads its scripts
            found |= _watch(page, TRIVIAL, ("trivial",))
            page.close()
            chrome.close()
    finally:
        server.close()
    return found


def _watch(page: Any, cell: int, names: tuple[str, ...]) -> dict[str, float]:
    page.wait_idle()
    page.page.evaluate(WATCH, [cell, {name: SEEN[name] for name in names}])
    page.page.wait_for_function(DONE, arg=len(names), polling=50)
    page.wait_idle()
    found: dict[str, float] = page.page.evaluate("window.nbaccelSeen")
    return found


def run(checkout: Path) -> dict[str, float]:
    """One run of a checkout."""
    finished = subprocess.run(
        [sys.executable, __file__],
        env={**os.environ, "PYTHONPATH": str(checkout)},
        cwd=tempfile.gettempdir(),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=LIMIT_S,
    )
    return dict(json.loads(finished.stdout.splitlines()[-1]))


if __name__ == "__main__":
    print(json.dumps(measure()))
