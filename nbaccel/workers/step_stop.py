"""Stopping a training function at the end of a step, the same one on all ranks.

    notebook ─ STOP_AT_STEP ─► each rank
             ◄── AtStep ────── at its next boundary it says which one that is, and goes on
    notebook ── GoOnTo ──────► a boundary ahead of all ranks
             ◄── AtStep ────── a thread says at once whether it is still ahead; if it is not, again
    notebook ── GoOnTo ──────► the same, agreed: there each rank is stopped

Ranks that run the same code have the same boundaries. One that has reached what may become the goal
waits there: it has done its part in all collectives before it, so those that are behind can follow;
one that is further might wait for it, and makes the notebook choose another goal.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
from collections.abc import Iterator
from typing import Any

from nbaccel.base import env
from nbaccel.loops import loop_watch
from nbaccel.plan.topology import MOST_STEPS_VARIABLE
from nbaccel.workers import messaging, time_limits


class AgreedStop:
    """A worker's side of a stop at a step that all ranks agree on."""

    def __init__(self, channel: messaging.Channel, *, listens: bool) -> None:
        """A pool's worker listens itself, and hands on what it hears."""
        self._channel = channel
        self._poll = select.poll()
        if listens:
            self._poll.register(channel, select.POLLIN)
        self._process_id = os.getpid()
        self._number = 0
        self._most = int(env.read(MOST_STEPS_VARIABLE) or 0)
        self._goal = messaging.GoOnTo(float("inf"))
        self._listener: threading.Thread | None = None
        self._news = threading.Condition()
        self.is_stopped = False

    def at_boundary(self) -> bool:
        """Another boundary; returns whether the function is stopped at it."""
        # A process that was forked from this one has its descriptors, too.
        if self._listener is None and self._poll.poll(0) and os.getpid() == self._process_id:
            self._listener = threading.Thread(target=self._listen, daemon=True)
            self._listener.start()
        if self._number + 1 == self._most:
            self.is_stopped = True
            return True
        with self._news:
            self._number += 1
            self._news.wait_for(lambda: self._goal.number > self._number or self._goal.is_agreed)
            self.is_stopped = self._number >= self._goal.number
        if self.is_stopped:
            self._channel.send(messaging.Word.INTERRUPTING)
        return self.is_stopped

    def _listen(self) -> None:
        # The notebook is gone: this process ends soon.
        with contextlib.suppress(EOFError, OSError):
            while not self._goal.is_agreed:
                self.hear(self._channel.receive()[0])

    def hear(self, message: Any) -> None:
        """Take what the notebook says, and tell it how far this is until all have agreed."""
        with self._news:
            number = self._number
            if isinstance(message, messaging.GoOnTo) and (
                message.is_agreed or number < message.number
            ):
                self._goal = message
                self._news.notify()
        if not self._goal.is_agreed:
            self._channel.send(messaging.AtStep(number))

    def close(self) -> None:
        """Wait until the notebook has said its last word, which no one else may read."""
        if self._listener is not None:
            self._listener.join()


@contextlib.contextmanager
def interrupted_at_step() -> Iterator[None]:
    """A block of the notebook's own process whose first interrupt waits, not long, for the step."""
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        # Somebody else decides what an interrupt does.
        yield
        return
    asked = threading.Event()
    main = threading.get_ident()
    # Looked up when it is due: Windows has no such function.
    alarm = threading.Timer(time_limits.STEP_S, lambda: signal.pthread_kill(main, signal.SIGINT))
    alarm.daemon = True

    def is_asked() -> bool:
        if asked.is_set():  # the step has ended in time; to keep its state may take longer
            alarm.cancel()
        return asked.is_set()

    boundaries = loop_watch.StepBoundaries(is_asked)

    def interrupt(number: int, frame: Any) -> None:
        if asked.is_set() or not boundaries.has_stepped:
            signal.default_int_handler(number, frame)
        asked.set()
        alarm.start()

    signal.signal(signal.SIGINT, interrupt)
    loop_watch.watch_boundaries(boundaries)
    try:
        yield
    finally:
        loop_watch.watch_boundaries(None)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        alarm.cancel()
