"""Lets a test see the boards of the launches that it makes, and who kept them."""

from __future__ import annotations

import pytest

from nbaccel.base.training_metrics import Metrics
from nbaccel.output.panel.display import Dashboard, WatchedCall
from nbaccel.output.panel.facts import RunBoard


class Seen:
    """What the dashboards of a test were told; they work as ever."""

    def __init__(self) -> None:
        self.shows: list[Dashboard] = []
        self.watched: list[WatchedCall] = []
        self.heard: list[tuple[int, Metrics]] = []

    @property
    def board(self) -> RunBoard:
        """The newest one."""
        return self.shows[-1].board

    def messages_of(self, rank: int) -> list[Metrics]:
        return [message for who, message in self.heard if who == rank]


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    found = Seen()
    begin, receive, poll = (Dashboard.__init__, RunBoard.receive, Dashboard.poll)

    def noting_begin(self: Dashboard, *args: object, **more: object) -> None:
        begin(self, *args, **more)
        found.shows.append(self)

    def noting_hear(self: RunBoard, rank: int, message: Metrics) -> None:
        found.heard.append((rank, message))
        receive(self, rank, message)

    def noting_look(self: Dashboard, watched: WatchedCall) -> None:
        if watched not in found.watched:
            found.watched.append(watched)
        poll(self, watched)

    monkeypatch.setattr(Dashboard, "__init__", noting_begin)
    monkeypatch.setattr(RunBoard, "receive", noting_hear)
    monkeypatch.setattr(Dashboard, "poll", noting_look)
    return found
