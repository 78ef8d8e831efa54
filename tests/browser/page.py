"""A notebook as a person has it before him: cells are run, widgets are used, outputs are read.

Every wait waits for something that is seen; none sleeps. What the browser complains of, and every
request that would leave the machine, is kept and fails the test when the page is closed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

import nbformat
from playwright.sync_api import (
    BrowserContext,
    ConsoleMessage,
    Error,
    Locator,
    Page,
    Request,
    expect,
)

from tests.browser.server import Server

WAIT_S = 300.0
STILL_S = 0.3  # how long a kernel is idle before it is believed: a queue may bring the next cell
# What the applications say of themselves: JupyterLab in a second tab of one browser, Notebook 7 of
# its settings.
APPLICATIONS_OWN = (
    'Window name candidate "null" already exists',
    "Cannot read properties of undefined (reading 'schema')",
)
THEMES = {"light": "JupyterLab Light", "dark": "JupyterLab Dark"}

_PANEL = "window.jupyterapp?.shell?.currentWidget"
_READY = f"() => {_PANEL}?.content?.widgets?.length > 0 && {_PANEL}.sessionContext?.session?.kernel"
# True once the kernel has been idle, and no cell waiting, for a while without a break.
_IDLE = f"""(still) => {{
    const kernel = {_PANEL}?.sessionContext?.session?.kernel;
    const waits = {_PANEL}?.content?.widgets.some(
        (cell) => cell.model.type === "code" && cell.model.executionState !== "idle");
    if (!kernel || kernel.connectionStatus !== "connected" || kernel.status !== "idle" || waits) {{
        window.nbaccelIdleSince = undefined;
        return false;
    }}
    window.nbaccelIdleSince ??= performance.now();
    return performance.now() - window.nbaccelIdleSince >= still;
}}"""


_RUN_CELL = f"""(number) => {{
    const content = {_PANEL}.content;
    content.activeCellIndex = number;
    content.deselectAll();
    void window.jupyterapp.commands.execute("notebook:run-cell");
}}"""
_OUTPUTS = f"(number) => {_PANEL}.content.widgets[number].model.outputs.toJSON()"

# What is shown with less contrast than guidelines for the web ask for: 4.5.
CONTRAST = """(root) => {
    const parse = (colour) => colour.match(/[\\d.]+/g).map(Number);
    const light = ([r, g, b]) => [r, g, b].map((part) => {
        const s = part / 255;
        return s <= 0.03928 ? s / 12.92 : ((s + 0.055) / 1.055) ** 2.4;
    }).reduce((sum, part, i) => sum + part * [0.2126, 0.7152, 0.0722][i], 0);
    const paper = (element) => {
        for (let e = element; e; e = e.parentElement) {
            const colour = parse(getComputedStyle(e).backgroundColor);
            if (colour.length < 4 || colour[3] > 0.9) return colour;
        }
        return [255, 255, 255];
    };
    const found = [];
    for (const e of root.querySelectorAll("*")) {
        const text = [...e.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim());
        if (!text || !e.checkVisibility() || e.matches("style, :disabled")) continue;
        const [a, b] = [light(parse(getComputedStyle(e).color)), light(paper(e))];
        const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
        if (ratio < 4.5) found.push(`${ratio.toFixed(2)} ${e.className} ${e.textContent}`);
    }
    return found;
}"""


class NotebookPage:
    """One notebook in one tab."""

    def __init__(
        self,
        context: BrowserContext,
        server: Server,
        *,
        application: str,
        name: str,
        cells: Sequence[str | nbformat.NotebookNode],
    ) -> None:
        self.name, self.path = name, server.write(name, cells)
        self._server = server
        self.complaints: list[str] = []
        self.page: Page = context.new_page()
        self.page.set_default_timeout(WAIT_S * 1000)
        self.page.on("console", self._on_console)
        self.page.on("pageerror", self._on_error)
        self.page.on("request", self._on_request)
        self._address = server.address(application, name)
        self.come_back()
        self.wait_idle()
        # So far no cell has run: what went wrong while the application was loaded is its own.
        self.complaints = [text for text in self.complaints if text.startswith("request")]

    def leave(self) -> None:
        """Close the notebook; its kernel goes on."""
        self.page.goto("about:blank")

    def come_back(self) -> None:
        """Open the notebook, or open it again."""
        self.page.goto(self._address, wait_until="commit")
        self.page.wait_for_function(_READY)

    def reload(self) -> None:
        """Reload the page, whatever its cells do."""
        self.page.reload(wait_until="commit")
        self.page.wait_for_function(_READY)

    def restart_kernel(self) -> None:
        """Restart the kernel, as the menu does once it has asked."""
        self.page.evaluate(f"() => {_PANEL}.sessionContext.restartKernel()")

    def end_kernel(self) -> None:
        """End the kernel, and what it has started."""
        self._server.end_kernel(self.name)

    def run_cell(self, number: int, *, wait: bool = True) -> None:
        """Run one cell, counted from 0."""
        self.wait_idle()
        self.page.evaluate(_RUN_CELL, number)
        if wait:
            self.wait_idle()

    def wait_idle(self) -> None:
        """Wait until no cell waits and the kernel has been idle for a moment."""
        self.page.wait_for_function(_IDLE, arg=STILL_S * 1000, polling=50)

    def outputs(self, number: int) -> list[dict[str, Any]]:
        """The outputs of a cell, as the file would have them."""
        found: list[dict[str, Any]] = self.page.evaluate(_OUTPUTS, number)
        return found

    def text(self, number: int) -> str:
        """What a cell has printed, with the text of its displays and its error."""
        return "".join(_text_of(output) for output in self.outputs(number))

    def save(self) -> None:
        """Save the notebook, and wait until it is saved."""
        self.page.evaluate("() => window.jupyterapp.commands.execute('docmanager:save')")

    def find(self, css_class: str) -> Locator:
        """Everything with a class, in the outputs of cells."""
        return self.page.locator(f".jp-OutputArea .{css_class}")

    def cell(self, number: int) -> Locator:
        """The whole of a cell."""
        return self.page.locator(".jp-Notebook .jp-Cell").nth(number)

    def press(self, *keys: str) -> None:
        """Press keys, one after another, wherever the focus is."""
        for key in keys:
            self.page.keyboard.press(key)

    def focused(self) -> Locator:
        """The element that has the keyboard."""
        return self.page.locator("*:focus")

    def set_theme(self, theme: str) -> None:
        """Change to the `light` or the `dark` theme."""
        self.page.evaluate(
            "(theme) => window.jupyterapp.commands.execute('apputils:change-theme', {theme})",
            THEMES[theme],
        )
        is_light = "true" if theme == "light" else "false"
        expect(self.page.locator("body")).to_have_attribute("data-jp-theme-light", is_light)
        # What covers the window meanwhile: JupyterLab stumbles over two changes at once.
        expect(self.page.locator("#jupyterlab-splash")).to_have_count(0)

    def check(self) -> None:
        """Fail if the browser complained, or a request was to leave the machine."""
        assert not self.complaints, "\n".join(self.complaints)

    def close(self) -> None:
        """Close the tab and end the kernel, unless that has been done."""
        if not self.page.is_closed():
            self.page.close()
            self._server.end_kernel(self.name)

    def _on_console(self, message: ConsoleMessage) -> None:
        if message.type == "error":
            self.complaints.append(f"console: {message.text} ({message.location['url']})")

    def _on_error(self, error: Error) -> None:
        if error.message not in APPLICATIONS_OWN:
            self.complaints.append(f"error: {error.message}")

    def _on_request(self, request: Request) -> None:
        address = urlsplit(request.url)
        if address.hostname not in (None, "127.0.0.1"):  # None: data: and blob:
            self.complaints.append(f"request: {request.url}")


def _text_of(output: dict[str, Any]) -> str:
    if output["output_type"] == "error":
        return "\n".join(output["traceback"])
    found = output.get("text") or output.get("data", {}).get("text/plain", "")
    return found if isinstance(found, str) else "".join(found)
