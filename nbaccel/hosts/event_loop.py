"""One `select` over many descriptors, each with what is to be done when it is ready."""

from __future__ import annotations

import selectors
from collections.abc import Callable

__all__ = ["EventLoop"]

_Callback = Callable[[], None]


class EventLoop:
    """Calls what was registered for descriptors that are ready. One thread, no timers.

    Not asyncio: the agent forks workers in the middle of it, and they must not inherit a loop that
    takes itself for running.
    """

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._readers: dict[int, _Callback] = {}
        self._writers: dict[int, _Callback] = {}

    def on_readable(self, file_descriptor: int, callback: _Callback | None) -> None:
        """Call this when the descriptor can be read."""
        self._set(self._readers, file_descriptor, callback)

    def on_writable(self, file_descriptor: int, callback: _Callback | None) -> None:
        """Call this when the descriptor can be written to; as :meth:`on_readable`."""
        self._set(self._writers, file_descriptor, callback)

    def forget(self, file_descriptor: int) -> None:
        """Call nothing for the descriptor any more; before it is closed."""
        self.on_readable(file_descriptor, None)
        self.on_writable(file_descriptor, None)

    def run_once(self, timeout_s: float | None = None) -> None:
        """Wait until something is ready, at most so long, and do what is to be done."""
        for key, ready_events in self._selector.select(timeout_s):
            # Looked up again: an earlier callback of this round may have forgotten it.
            for event, callbacks in (
                (selectors.EVENT_READ, self._readers),
                (selectors.EVENT_WRITE, self._writers),
            ):
                callback = callbacks.get(key.fd) if ready_events & event else None
                if callback is not None:
                    callback()

    def close(self) -> None:
        """Forget everything."""
        self._selector.close()

    def _set(
        self, callbacks: dict[int, _Callback], file_descriptor: int, callback: _Callback | None
    ) -> None:
        events_before = self._events(file_descriptor)
        if callback is None:
            callbacks.pop(file_descriptor, None)
        else:
            callbacks[file_descriptor] = callback
        events_now = self._events(file_descriptor)
        if events_before == events_now:
            return
        if not events_now:
            self._selector.unregister(file_descriptor)
        elif events_before:
            self._selector.modify(file_descriptor, events_now)
        else:
            self._selector.register(file_descriptor, events_now)

    def _events(self, file_descriptor: int) -> int:
        return (selectors.EVENT_READ if file_descriptor in self._readers else 0) | (
            selectors.EVENT_WRITE if file_descriptor in self._writers else 0
        )
