"""The animation at the top of the README: a person chooses, trains, and sees how it went.

Recorded here, so that it shows what the package does today. Written to docs/pages/images only when
asked for: NBACCEL_RECORD=1 python -m pytest tests/browser/test_animation.py
"""

from __future__ import annotations

import io
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from PIL import Image
from playwright.sync_api import expect

from nbaccel.base import env
from tests.browser.conftest import Open
from tests.browser.page import NotebookPage
from tests.house.source import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.browser]

WIDTH = 900  # pixels, as wide as GitHub shows a README
COLOURS = 64
STILL_MS, LAST_MS = 800, 4000
FEWEST_PICTURES = 7  # fewer would not show a panel that moves
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


@pytest.fixture(scope="module")
def page(open_notebook: Open) -> Iterator[NotebookPage]:
    found = open_notebook("animation", CELLS)
    found.page.set_viewport_size({"width": 1300, "height": 860})
    found.run_cell(0)
    yield found
    found.close()


def test_a_person_chooses_trains_and_looks_back(page: NotebookPage, tmp_path: Path) -> None:
    recorder = Recorder(page)

    page.run_cell(CHOOSE)
    _scroll_to(page, CHOOSE)
    time.sleep(1)
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
    _scroll_to(page, TRAIN)
    expect(page.find("nbaccel-stop")).to_be_visible()
    deadline = time.monotonic() + 60
    while page.find("nbaccel-stop").is_visible() and time.monotonic() < deadline:
        recorder.take(STILL_MS)
        time.sleep(STILL_MS / 1000)
    page.wait_idle()
    _scroll_to(page, TRAIN)
    time.sleep(1)
    recorder.take(2000)
    page.run_cell(REPORT)
    _scroll_to(page, REPORT)
    time.sleep(1)
    recorder.take(LAST_MS)
    assert len(recorder.pictures) >= FEWEST_PICTURES, "the panel moves while it trains"

    is_kept = env.flag("NBACCEL_RECORD") is True
    path = ROOT / "docs" / "pages" / "images" / "training.gif" if is_kept else tmp_path / "a.gif"
    recorder.save(path)


def _scroll_to(page: NotebookPage, number: int) -> None:
    """Put a cell at the top of the window."""
    page.cell(number).evaluate("cell => cell.scrollIntoView({block: 'start'})")
