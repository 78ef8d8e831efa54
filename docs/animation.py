"""Record the animation at the top of the README: a person chooses, trains, and sees how it went.

python -m docs.animation      # in JupyterLab, with the browser of the tests: a minute
"""

from __future__ import annotations

import io
import time
from pathlib import Path

from PIL import Image
from playwright.sync_api import expect, sync_playwright

from tests.browser import chromium
from tests.browser.conftest import ARGUMENTS
from tests.browser.page import NotebookPage
from tests.browser.server import Server

PICTURE = Path(__file__).resolve().parent / "pages" / "images" / "training.gif"
WIDTH = 900  # pixels, as wide as GitHub shows a README
COLOURS = 64
STILL_MS, LAST_MS = 800, 4000
CELLS = [
    "import torch, transformers\n"
    "from sklearn.datasets import load_digits\n"
    "from nbaccel import Accelerator, configure, notebook_launcher\n"
    "torch.manual_seed(0)\n"
    "pixels, labels = (torch.tensor(found) for found in load_digits(return_X_y=True))\n"
    "digits = torch.utils.data.TensorDataset(pixels.float() / 16, labels)\n"
    "model = torch.nn.Sequential(\n"
    "    torch.nn.Linear(64, 2048), torch.nn.ReLU(),\n"
    "    torch.nn.Linear(2048, 2048), torch.nn.ReLU(),\n"
    "    torch.nn.Linear(2048, 2048), torch.nn.ReLU(), torch.nn.Linear(2048, 10))\n"
    "\n"
    "def train(model, epochs=4):\n"
    "    accelerator = Accelerator()\n"
    "    loader = torch.utils.data.DataLoader(digits, batch_size=16, shuffle=True)\n"
    "    optimizer = torch.optim.Adam(model.parameters(), 1e-4)\n"
    "    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)\n"
    "    for epoch in range(epochs):\n"
    "        for rows, targets in accelerator.progress(loader):\n"
    "            loss = torch.nn.functional.cross_entropy(model(rows), targets)\n"
    "            accelerator.backward(loss)\n"
    "            optimizer.step()\n"
    "            optimizer.zero_grad()\n"
    "            accelerator.log({'loss': loss.item()})\n"
    "        accelerator.print(f'epoch {epoch + 1}: loss {loss:.3f}')\n"
    "    accelerator.end_training()\n"
    "notebook_launcher(print, ('ready',), 2)",
    "picker = configure(model, pixels[:16].float())",
    "results = notebook_launcher(train, (model,), config=picker)",
    "results.report()",
]
CHOOSE, TRAIN, REPORT = 1, 2, 3


class Recorder:
    """Pictures of a page, one behind the other."""

    def __init__(self, page: NotebookPage) -> None:
        self._page = page
        self.pictures: list[Image.Image] = []
        self._times_ms: list[int] = []

    def take(self, for_ms: int) -> None:
        """Add a picture; one that is as the last one only makes that stay longer."""
        raw = Image.open(io.BytesIO(self._page.page.screenshot()))
        height = raw.height * WIDTH // raw.width
        picture = raw.convert("RGB").resize((WIDTH, height), Image.Resampling.LANCZOS)
        if self.pictures and picture.tobytes() == self.pictures[-1].tobytes():
            self._times_ms[-1] += for_ms
            return
        self.pictures.append(picture)
        self._times_ms.append(for_ms)

    def save(self, path: Path) -> None:
        """Write them as one GIF that begins anew at its end."""
        first, *others = [
            picture.quantize(COLOURS, dither=Image.Dither.NONE) for picture in self.pictures
        ]
        options = {"duration": self._times_ms, "loop": 0, "optimize": True}
        first.save(path, "GIF", save_all=True, append_images=others, **options)


def record(page: NotebookPage) -> Recorder:
    """Do as a person does, and take pictures of it."""
    recorder = Recorder(page)
    page.run_cell(0)
    page.run_cell(CHOOSE)
    _look_at(page, CHOOSE)
    recorder.take(2000)
    form = page.cell(CHOOSE)
    form.locator(".nbaccel-suggest").click()
    proposal = form.locator(".nbaccel-proposal button").first
    expect(proposal).to_be_visible()
    time.sleep(0.5)
    recorder.take(2500)
    proposal.click()
    time.sleep(1)
    recorder.take(2000)
    page.run_cell(TRAIN, wait=False)
    _look_at(page, TRAIN)
    expect(page.find("nbaccel-stop")).to_be_visible()
    deadline = time.monotonic() + 60
    while page.find("nbaccel-stop").is_visible() and time.monotonic() < deadline:
        recorder.take(STILL_MS)
        time.sleep(STILL_MS / 1000)
    page.wait_idle()
    _look_at(page, TRAIN)
    recorder.take(2000)
    page.run_cell(REPORT)
    _look_at(page, REPORT)
    recorder.take(LAST_MS)
    return recorder


def _look_at(page: NotebookPage, number: int) -> None:
    """Put a cell at the top of the window."""
    page.cell(number).evaluate("cell => cell.scrollIntoView({block: 'start'})")
    time.sleep(1)


def main() -> None:
    """Record it, and write the picture of the README."""
    server = Server()
    try:
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(
                executable_path=chromium.path(), args=list(ARGUMENTS)
            )
            context = browser.new_context(viewport={"width": 1300, "height": 860})
            page = NotebookPage(context, server, application="lab", name="animation", cells=CELLS)
            record(page).save(PICTURE)
            page.close()
    finally:
        server.close()


if __name__ == "__main__":
    main()
