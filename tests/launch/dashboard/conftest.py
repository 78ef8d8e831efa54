"""Lets a test see the boards of the launches that it makes, and who kept them."""

from __future__ import annotations

import pytest

from nbaccel.launch import wire
from nbaccel.launch.dashboard.board import Board
from nbaccel.launch.dashboard.following import Following, Watched


class Seen:
    """What the dashboards of a test were told; they work as ever."""

    def __init__(self) -> None:
        self.shows: list[Following] = []
        self.watched: list[Watched] = []
        self.heard: list[tuple[int, wire.Metrics]] = []

    @property
    def board(self) -> Board:
        """The newest one."""
        return self.shows[-1]._dashboard.board

    def messages_of(self, rank: int) -> list[wire.Metrics]:
        return [message for who, message in self.heard if who == rank]


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    found = Seen()
    begin, hear, look = Following.__init__, Following.hear, Following.look

    def noting_begin(self: Following, *args: object, **more: object) -> None:
        begin(self, *args, **more)
        found.shows.append(self)

    def noting_hear(self: Following, rank: int, message: wire.Metrics) -> None:
        found.heard.append((rank, message))
        hear(self, rank, message)

    def noting_look(self: Following, watched: Watched) -> None:
        if watched not in found.watched:
            found.watched.append(watched)
        look(self, watched)

    monkeypatch.setattr(Following, "__init__", noting_begin)
    monkeypatch.setattr(Following, "hear", noting_hear)
    monkeypatch.setattr(Following, "look", noting_look)
    return found
