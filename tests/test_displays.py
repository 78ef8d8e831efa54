"""Publishing by a real ipykernel: text that was printed before an output is shown before it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from typing import Any

import pytest
import zmq
from ipykernel.iostream import IOPubThread, OutStream
from ipykernel.zmqshell import ZMQDisplayPublisher
from jupyter_client.session import Session

from nbaccel.base import ipython_private


class Kernel:
    """The part of a kernel that sends outputs, and a front end that reads them."""

    def __init__(self) -> None:
        self._context = zmq.Context()
        sender = self._context.socket(zmq.PUB)
        port = sender.bind_to_random_port("tcp://127.0.0.1")
        self._reader = self._context.socket(zmq.SUB)
        self._reader.connect(f"tcp://127.0.0.1:{port}")
        self._reader.subscribe(b"")
        self._thread = IOPubThread(sender)
        self._thread.start()
        self.session = Session(key=b"secret")
        self.streams = [
            OutStream(self.session, self._thread, name, watchfd=False)
            for name in ("stdout", "stderr")
        ]
        self.publisher = ZMQDisplayPublisher(
            session=self.session, pub_socket=self._thread.background_socket
        )
        self.flushes = 0
        for stream in self.streams:
            stream.flush = self._counted(stream.flush)
        while not self._reader.poll(10):  # a subscription takes a moment
            self.publisher.publish(data={"text/plain": "hello"})
        time.sleep(0.1)
        while self._reader.poll(0):
            self._reader.recv_multipart()

    def _counted(self, flush: Any) -> Any:
        def counted() -> None:
            self.flushes += 1
            flush()

        return counted

    def read(self, count: int) -> list[tuple[str, str]]:
        """Kind and text of the next outputs."""
        found = []
        while len(found) < count:
            assert self._reader.poll(5_000), found
            _, parts = self.session.feed_identities(self._reader.recv_multipart())
            message = self.session.deserialize(parts)
            content = message["content"]
            text = content["text"] if "text" in content else content["data"]["text/plain"]
            found.append((message["msg_type"], text))
        return found

    def close(self) -> None:
        self._thread.stop()
        self._thread.close()
        self._reader.close()
        self._context.destroy()


@pytest.fixture(scope="module")
def shared() -> Iterator[Kernel]:
    found = Kernel()
    yield found
    found.close()


@pytest.fixture
def kernel(shared: Kernel) -> Kernel:
    shared.flushes = 0
    return shared


def show(kernel: Kernel, text: str) -> None:
    # Here and not in the fixture: pytest sets its own streams for the test itself.
    with redirect_stdout(kernel.streams[0]), redirect_stderr(kernel.streams[1]):
        ipython_private.publish_display(
            kernel.publisher, {"data": {"text/plain": text}, "metadata": {}}
        )


def test_nothing_is_flushed_where_nothing_was_printed(kernel: Kernel) -> None:
    for number in range(3):
        show(kernel, str(number))
    assert kernel.read(3) == [("display_data", str(number)) for number in range(3)]
    assert kernel.flushes == 0
    assert "_flush_streams" not in vars(kernel.publisher)


@pytest.mark.parametrize("stream", [0, 1], ids=["stdout", "stderr"])
def test_what_was_printed_comes_first(kernel: Kernel, stream: int) -> None:
    kernel.streams[stream].write("before")
    show(kernel, "output")
    kernel.streams[stream].write("after")
    kernel.streams[stream].flush()
    assert kernel.read(3) == [("stream", "before"), ("display_data", "output"), ("stream", "after")]
    assert kernel.flushes == 2 + 1


def test_a_flush_that_is_under_way_comes_first_too(kernel: Kernel) -> None:
    """Text is flushed by ipykernel's own thread at some moment around that of the output."""
    kernel.streams[0].flush_interval = 0.001
    for number in range(150):
        kernel.streams[0].write("text")
        time.sleep(0.00002 * number)
        show(kernel, "output")
        assert kernel.read(2) == [("stream", "text"), ("display_data", "output")], number
