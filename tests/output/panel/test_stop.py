"""Stopped from another thread, as a click on the button does it: exactly as by an interrupt."""

from __future__ import annotations

import os
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
            self._seen.shows[-1]._interrupt()
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


def test_a_click_that_comes_late_stops_nothing(seen: Seen) -> None:
    assert list(notebook_launcher(workers.rank, (), 2)) == [0, 1]
    (watched,) = seen.watched
    for _ in range(3):
        seen.shows[-1]._interrupt()
        watched.interrupt()
    assert list(notebook_launcher(workers.rank, (), 2)) == [0, 1]
    time.sleep(0.01)  # where an interrupt that was left behind would be raised


@pytest.mark.slow
def test_clicks_race_with_the_end_of_launches_and_are_harmless(seen: Seen) -> None:
    """A storm of clicks at earlier launches, while others begin and end: no late one does harm."""
    through = threading.Event()

    def storm() -> None:
        while not through.is_set():
            for watched in seen.watched[:-1]:  # the last one may be running
                watched.interrupt()
            time.sleep(0.0005)

    thread = threading.Thread(target=storm)
    thread.start()
    try:
        for _ in range(10):
            assert list(notebook_launcher(workers.rank, (), 2)) == [0, 1]
            seen.watched.append(seen.watched[-1])
    finally:
        through.set()
        thread.join()


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
