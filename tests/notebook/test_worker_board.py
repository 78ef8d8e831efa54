"""The board of `%accelerate`: what workers are, have and hold, after each cell."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.kernel.kernel import Kernel


@pytest.fixture
def kernel_with_workers() -> Iterator[Kernel]:
    found = Kernel()
    try:
        found.run("%load_ext nbaccel").check()
        found.run("%accelerate restart -n 2").check()
        yield found
    finally:
        found.close()


def test_the_board_of_workers_follows_the_cells_until_they_are_stopped(
    kernel_with_workers: Kernel,
) -> None:
    (board,) = kernel_with_workers.run("%accelerate").check().displays
    assert "names" not in board["text/plain"]
    assert "group" not in board["text/plain"]
    changed = kernel_with_workers.run(
        "%%accelerate\n_hidden, one, two = 0, 1, 2\n"
        "from nbaccel import Accelerator\nAccelerator().wait_for_everyone()"
    ).check()
    (update,) = changed.updates
    rows = update["text/plain"].splitlines()[2:]
    assert len(rows) == 2
    for row in rows:
        assert "idle" in row
        assert "gloo, 2 ranks" in row
        assert "one, two, Accelerator" in row
        assert "_hidden" not in row
    assert "gloo, 2 ranks" in update["text/html"]
    (again,) = kernel_with_workers.run("1;").check().updates
    assert "one, two" in again["text/plain"]
    kernel_with_workers.run("%accelerate stop").check()
    assert kernel_with_workers.run("1;").check().updates == []
