from __future__ import annotations

from typing import Any

import pytest
import torch

from nbaccel.train.progress import Progress
from tests.train.data import ALONE


def test_a_bar_counts_batches_and_samples_and_is_closed_when_the_loop_is_left_or_fails(capsys):
    batches = [torch.ones(4, 2), torch.ones(3, 2)]
    shown = Progress(batches, ALONE, "evaluation")
    assert len(shown) == 2
    found = []
    for batch in shown:
        found.append(batch)
        shown.note_loss(torch.tensor([1.0, 2.0]))
    assert all(a is b for a, b in zip(found, batches, strict=True))
    assert (shown.samples, shown.bar.n, shown.bar.total) == (7, 2, 2)
    text = capsys.readouterr().err
    assert "evaluation: 100%" in text
    assert "loss=1.5" in text
    assert "processes" not in text
    shown = Progress(range(5), ALONE)
    for number in shown:
        if number == 2:
            break
    assert shown.bar.disable  # what tqdm sets when it closes
    assert shown.bar.n == 2

    def failing() -> Any:
        yield 1
        raise OSError("the disk is gone")

    other = Progress(failing(), ALONE)
    with pytest.raises(OSError, match="the disk is gone"):
        list(other)
    assert other.bar.disable
