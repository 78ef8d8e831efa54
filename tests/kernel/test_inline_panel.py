"""One process, in the notebook itself: loops are rows of the panel, not bars among the prints."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.kernel.kernel import Kernel

TRAIN = """
import torch, time
from nbaccel import Accelerator, notebook_launcher

def train(num_epochs, fails=False):
    accelerator = Accelerator()
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loader = torch.utils.data.DataLoader(torch.randn(20, 4), batch_size=2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for epoch in range(num_epochs):
        for rows in accelerator.progress(loader):
            loss = model(rows).pow(2).mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            accelerator.log({"loss": loss.item()})
            time.sleep(0.08)
        print("epoch", epoch + 1)
    if fails:
        raise ValueError("no labels")
"""


@pytest.fixture(scope="module")
def kernel() -> Iterator[Kernel]:
    found = Kernel()
    try:
        found.run(TRAIN).check()
        yield found
    finally:
        found.close()


def test_a_loop_is_shown_above_what_it_prints_and_nothing_is_an_error(kernel: Kernel) -> None:
    cell = kernel.run("results = notebook_launcher(train, (3,), num_processes=1)").check()
    assert cell.stderr == ""
    assert cell.stdout == "epoch 1\nepoch 2\nepoch 3\n"
    place, *_, summary = cell.displays
    assert not any(place.values()), "the place is kept before anything is printed"
    assert "10 of 10" in summary["text/html"], "the loop's bar is in the summary"
    assert "<img" in summary["text/html"]
    assert "step 30" in summary["text/plain"]


def test_a_function_without_a_loop_leaves_no_trace(kernel: Kernel) -> None:
    cell = kernel.run("notebook_launcher(print, ('hello',), num_processes=1);")
    assert (cell.stdout, cell.displays) == ("hello\n", [])


def test_a_failure_says_so_in_the_summary(kernel: Kernel) -> None:
    cell = kernel.run("notebook_launcher(train, (1, True), num_processes=1)")
    assert cell.error == "ValueError"
    assert "failed after" in cell.displays[-1]["text/plain"]
