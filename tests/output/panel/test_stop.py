"""Stopped as the button and `nbaccel status --stop` do it: by an interrupt of this process."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from nbaccel import Pool, notebook_launcher
from tests import worker_functions as workers
from tests.output.panel.conftest import Seen

BOUND_S = 60.0  # it ends a hang; how fast Stop is, the benchmarks measure


class Clicker:
    """Clicks when all ranks have said that they run."""

    def __init__(self, seen: Seen, *, ranks: int = 2, clicks: int = 1) -> None:
        self._seen, self._ranks, self._clicks = seen, ranks, clicks
        self.reads, self.writes = os.pipe()
        self.clicked = 0.0
        self._thread = threading.Thread(target=self._click)
        self._thread.start()

    def _click(self) -> None:
        said = b""
        while len(said) < self._ranks:
            said += os.read(self.reads, 8)
        # A button is there a second later; these ranks may run before anybody listens to them.
        while self._seen.shows[-1]._watched is None:
            time.sleep(0.01)
        self.clicked = time.monotonic()
        for _ in range(self._clicks):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.3)

    def close(self) -> None:
        self._thread.join(10)
        os.close(self.reads)
        os.close(self.writes)


@pytest.fixture
def clicker(seen: Seen) -> Iterator[Callable[..., Clicker]]:
    made: list[Clicker] = []

    def make(**settings: int) -> Clicker:
        made.append(Clicker(seen, **settings))
        return made[-1]

    yield make
    for one in made:
        one.close()


def wait_for_stop(fd: int) -> None:
    os.write(fd, b"r")
    time.sleep(workers.FOREVER_S)


def unwinding_for_ever(fd: int) -> None:
    os.write(fd, b"r")
    try:
        time.sleep(workers.FOREVER_S)
    finally:
        time.sleep(workers.FOREVER_S)


@pytest.mark.forks
def test_a_click_ends_a_launch_as_an_interrupt_does(
    seen: Seen, clicker: Callable[..., Clicker]
) -> None:
    one = clicker()
    with pytest.raises(KeyboardInterrupt, match="workers have been stopped"):
        notebook_launcher(wait_for_stop, (one.writes,), 2, start_method="fork")
    assert time.monotonic() - one.clicked < BOUND_S
    assert seen.board.ending == "stopped"
    assert [facts.state for facts in seen.board.ranks.values()] == ["stopped", "stopped"]


@pytest.mark.forks
def test_a_second_click_waits_no_longer(seen: Seen, clicker: Callable[..., Clicker]) -> None:
    one = clicker(clicks=2)
    with pytest.raises(KeyboardInterrupt):
        notebook_launcher(unwinding_for_ever, (one.writes,), 2, start_method="fork")
    assert time.monotonic() - one.clicked < 2.0, "one that unwinds has seconds otherwise"


def test_a_click_ends_a_cell_and_its_workers_live_on(
    seen: Seen, clicker: Callable[..., Clicker]
) -> None:
    one = clicker()
    names = {"fd_path": f"/proc/{os.getpid()}/fd/{one.writes}"}
    with Pool(2, namespace=names) as pool:
        pool.run("import os, time; pid = os.getpid()")
        before = pool.pull("pid")
        with pytest.raises(KeyboardInterrupt, match="live on"):
            pool.run(
                "fd = os.open(fd_path, os.O_WRONLY)\nos.write(fd, b'r')\nos.close(fd)\n"
                "time.sleep(600)"
            )
        assert time.monotonic() - one.clicked < BOUND_S
        assert seen.board.ending == "stopped"
        assert pool.pull("pid") == before
