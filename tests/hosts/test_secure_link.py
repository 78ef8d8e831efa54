"""The connection between relay and agent: who lacks the token, or changes a frame, is out."""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from nbaccel.abc.engine import AgentHello
from nbaccel.hosts import connecting
from nbaccel.hosts.door import Door
from nbaccel.hosts.event_loop import EventLoop
from nbaccel.hosts.secure_link import FileBytes, SecureLink

TOKEN = "ab" * 32


@pytest.fixture
def ends() -> Iterator[tuple[SecureLink, SecureLink]]:
    first, second = tcp_pair()
    links = (
        SecureLink(first, b"k" * 32, is_relay=True),
        SecureLink(second, b"k" * 32, is_relay=False),
    )
    yield links
    for link in links:
        link.close()


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        client = socket.create_connection(server.getsockname())
        accepted, _ = server.accept()
    return accepted, client


def pass_on(sender: SecureLink, receiver: SecureLink, frames: int) -> list[Any]:
    received: list[Any] = []
    while len(received) < frames:
        sender.write()
        for frame in receiver.read():
            is_piece = isinstance(frame, FileBytes)
            received.append(
                (frame.file, frame.offset, bytes(frame.content), frame.is_weights)
                if is_piece
                else frame
            )
    return received


def test_records_and_bytes_arrive_and_what_is_urgent_first(
    ends: tuple[SecureLink, SecureLink],
) -> None:
    relay, agent = ends
    content = memoryview(bytes(range(256)) * 4096)
    relay.send_in_order(
        iter(
            [
                FileBytes(file=2, offset=7, content=content, is_weights=True),
                FileBytes(file=2, offset=9, content=content[:5], is_weights=False),
                "last",
            ]
        )
    )
    relay.send({"urgent": 1})
    assert pass_on(relay, agent, 4) == [
        {"urgent": 1},
        (2, 7, bytes(content), True),
        (2, 9, bytes(content[:5]), False),
        "last",
    ]


@pytest.mark.parametrize("where", [0, 4, 20, 30, 40])
def test_a_changed_frame_is_noticed(ends: tuple[SecureLink, SecureLink], where: int) -> None:
    relay, agent = ends
    relay.send("a record that somebody changes on its way")
    first, second = tcp_pair()
    with first, second:
        tapped = SecureLink(first, b"k" * 32, is_relay=True)
        tapped.send("a record that somebody changes on its way")
        tapped.write()
        frame = bytearray(second.recv(4096))
    frame[where] ^= 1
    relay._socket.sendall(frame)
    with pytest.raises((ConnectionError, BlockingIOError, StopIteration)):  # a longer body: no end
        next(agent.read())


def test_a_frame_that_is_sent_again_is_noticed(ends: tuple[SecureLink, SecureLink]) -> None:
    relay, agent = ends
    first, second = tcp_pair()
    with first, second:
        tapped = SecureLink(first, b"k" * 32, is_relay=True)
        tapped.send("once")
        tapped.write()
        frame = second.recv(4096)
    relay._socket.sendall(frame * 2)
    reading = agent.read()
    assert next(reading) == "once"
    with pytest.raises(ConnectionError, match="changed on its way"):
        next(reading)


class OpenDoor:
    """A door that a thread keeps open, and who came in."""

    def __init__(self) -> None:
        self.events = EventLoop()
        self.admitted: list[SecureLink] = []
        listener = socket.create_server(("127.0.0.1", 0))
        self.port = listener.getsockname()[1]
        self.door = Door(self.events, listener, TOKEN, self.admitted.append)
        self.is_over = False
        self.thread = threading.Thread(target=self.serve)
        self.thread.start()

    def serve(self) -> None:
        while not self.is_over:
            self.events.run_once(0.05)
            self.door.close_silent()

    def hello(self, token: str) -> AgentHello:
        return AgentHello(addresses=("127.0.0.1",), port=self.port, token=token, host="a")

    def close(self) -> None:
        self.is_over = True
        self.thread.join()
        self.door.close()
        self.events.close()
        for link in self.admitted:
            link.close()


@pytest.fixture
def open_door() -> Iterator[OpenDoor]:
    made = OpenDoor()
    yield made
    made.close()


def test_only_who_knows_the_token_gets_in(open_door: OpenDoor) -> None:
    # Someone who says nothing keeps nobody waiting.
    with socket.create_connection(("127.0.0.1", open_door.port)):
        with pytest.raises(ConnectionError, match="is not the notebook that started this agent"):
            connecting.connect_to_relay(open_door.hello("cd" * 32))
        link = connecting.connect_to_relay(open_door.hello(TOKEN))
        # The agent has the proof before the door has told of it.
        deadline = time.monotonic() + 10
        while not open_door.admitted and time.monotonic() < deadline:
            time.sleep(0.01)
        link.close()
    assert len(open_door.admitted) == 1


def test_who_resets_at_once_keeps_nobody_out(open_door: OpenDoor) -> None:
    for _ in range(20):
        with socket.create_connection(("127.0.0.1", open_door.port)) as stranger:
            # Closing sends a reset instead of an end.
            stranger.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    link = connecting.connect_to_relay(open_door.hello(TOKEN))
    link.close()
    assert open_door.thread.is_alive()


def test_an_agent_does_not_trust_a_relay_without_the_token() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        hello = AgentHello(
            addresses=("127.0.0.1",), port=server.getsockname()[1], token=TOKEN, host="a"
        )

        def pretend() -> None:
            connection, _ = server.accept()
            with connection:
                connection.sendall(b"n" * 32)
                connection.recv(64)
                connection.sendall(b"p" * 32)

        thread = threading.Thread(target=pretend)
        thread.start()
        with pytest.raises(ConnectionError, match="is not the notebook"):
            connecting.connect_to_relay(hello)
        thread.join()


def test_an_address_where_nobody_listens_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    hello = AgentHello(addresses=("127.0.0.1",), port=port, token=TOKEN)
    with pytest.raises(ConnectionError, match=rf"127\.0\.0\.1:{port} \(Connection refused\)"):
        connecting.connect_to_relay(hello)


def test_the_hello_is_one_line() -> None:
    hello = AgentHello(addresses=("10.0.0.1", "::1"), port=7, token=TOKEN, host="a\nb")
    assert hello.to_line().count("\n") == 1
    assert AgentHello.from_line(hello.to_line()) == hello
