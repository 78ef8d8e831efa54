"""Workers forked from the template process: the notebook's side."""

from __future__ import annotations

import contextlib
import select
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence

from nbaccel.base.errors import StartupFailed
from nbaccel.plan import registry
from nbaccel.transfer import memfd
from nbaccel.workers import failure, messaging, template_prestart, time_limits
from nbaccel.workers.start_method import LocalProcesses
from nbaccel.workers.worker import WorkerEnds

_SAY_EVERY_S = 0.1


def dispose(fds: Sequence[int]) -> None:
    """Close descriptors of big files; in the template process if there is one."""
    template_boot = template_prestart.current()
    try:
        # A template that is still importing closes them afterwards.
        if template_boot is not None and fds:
            # OSError: the template ends, or no descriptor is left for the copy. The descriptors are
            # closed below in any case.
            with (
                contextlib.suppress(OSError),
                contextlib.closing(messaging.Channel(template_boot.socket.dup())) as channel,
            ):
                channel.send(messaging.Dispose(), fds)
    finally:
        memfd.close_all(fds)


def go_on() -> None:
    """Let template processes continue if they were stopped (SIGSTOP): they reap the workers."""
    for template_boot in template_prestart.running():
        template_prestart.let_continue(template_boot)


def say_nothing(waited_for: str) -> None:
    """For starters that nobody waits for in front of a screen."""


class TemplateStarter(LocalProcesses):
    """Starts workers by asking a template process to fork. See `start_method.Starter`.

    Args:
        device: The row of what the workers will compute on.
        threads: CPU threads of each worker; 0 where each learns its own.
        say: Takes what is being waited for, again and again while that lasts.
    """

    name = "template"

    def __init__(
        self, device: str, *, threads: int = 0, say: Callable[[str], None] = say_nothing
    ) -> None:
        self._template = device if registry.known_device(device).own_template else ""
        self._threads = threads
        self._say = say
        self.status: int | None = None
        """How the template process ended, if it did so by itself."""
        self._tickets = 0
        self._pids: set[int] = set()
        self._has_forked = False
        self._connect()

    def start(self, ends: WorkerEnds) -> int:
        """Have a worker forked that owns these ends; returns its process id."""
        try:
            process_id = self._fork(ends)
        except StartupFailed:
            # It was killed, or it hangs: nothing is lost as long as it has no workers.
            if self._has_forked:
                raise
            self.close()
            self._connect()
            process_id = self._fork(ends)
        self._has_forked = True
        return process_id

    def _connect(self) -> None:
        """Take the template that there is, or a new one where that does not answer."""
        was_there = template_prestart.base(self._template) is not None
        try:
            self._connect_to(template_prestart.start(self._template))
        except StartupFailed:
            # A new one that cannot start says why, and the next would say the same.
            if not was_there:
                raise
            self._connect_to(template_prestart.start(self._template))

    def _connect_to(self, template_boot: template_prestart.TemplateBoot) -> None:
        self._boot = template_boot
        # A copy of the descriptor: closing this starter must not hang up on the template.
        self._channel = messaging.Channel(template_boot.socket.dup())
        template_boot.use()
        # Someone may have stopped it (SIGSTOP).
        template_prestart.let_continue(template_boot)
        try:
            with template_boot.hearing:
                if not template_boot.ready:
                    self._receive(messaging.Ready, time_limits.TEMPLATE_S)
                    template_boot.ready = True
        except BaseException:  # an interrupt must not leak the descriptor either
            self.close()
            raise

    def _fork(self, ends: WorkerEnds) -> int:
        self._tickets += 1
        # Only one starter reads at a time, and keeps what it reads of the other's workers.
        with self._boot.hearing:
            try:
                self._channel.send(messaging.Fork(self._tickets, self._threads), ends.all())
            except OSError as error:
                raise self._gone() from error
            process_id = int(self._receive(messaging.Forked, time_limits.FORK_S).pid)
            self._pids.add(process_id)
            # An entry marks a worker as waited for; see `_note`.
            self._boot.ended[process_id] = None
        return process_id

    def sentinels(self) -> Sequence[int]:
        """The channel on which the template reports ended workers."""
        return [self._channel.fileno()]

    def collect(self) -> Sequence[messaging.Ended]:
        """Workers of this starter that have ended since the last call."""
        with self._boot.hearing:
            while self._readable(0.0):
                self._note(self._next())
            exit_statuses = [
                self._boot.ended[process_id]
                for process_id in self._pids
                if self._boot.ended[process_id]
            ]
            self._forget(status.pid for status in exit_statuses)
        return exit_statuses

    def close(self) -> None:
        """Close this copy of the channel; the template stays."""
        if self._channel.fileno() >= 0:
            self._forget(tuple(self._pids))
            self._channel.close()
            self._boot.release()

    def _forget(self, process_ids: Iterable[int]) -> None:
        for process_id in process_ids:
            self._pids.discard(process_id)
            self._boot.ended.pop(process_id, None)

    def _note(self, message: object) -> None:
        """Keep a report about a worker that a starter still waits for; drop any other."""
        if isinstance(message, messaging.Ended) and message.pid in self._boot.ended:
            self._boot.ended[message.pid] = message

    def _receive(self, message_type: type, timeout_s: float) -> messaging.Forked:
        """The next message of one kind; reports of ended workers are kept for `collect`."""
        deadline = time.monotonic() + timeout_s
        while (patience_s := deadline - time.monotonic()) > 0:
            if not self._readable(min(patience_s, _SAY_EVERY_S)):
                self._say(self._what_it_does())
                continue
            message = self._next()
            if isinstance(message, message_type):
                return message  # type: ignore[return-value]
            self._note(message)
        self._give_up()
        raise StartupFailed(
            f"The template process did not answer within {timeout_s:.0f} s, so no worker could be "
            "started. The machine may be overloaded or swapping; it has been ended, and the next "
            "launch starts a new one."
        )

    def _readable(self, timeout_s: float) -> bool:
        readable_sockets, _, _ = select.select(
            [self._channel.fileno()], [], [], max(0.0, timeout_s)
        )
        return bool(readable_sockets)

    def _next(self) -> object:
        try:
            message, _ = self._channel.receive()
        except EOFError as error:
            raise self._gone() from error
        return message

    def _what_it_does(self) -> str:
        if self._boot.ready:
            return "a new process"
        return "importing torch in the process that workers are forked from (once)"

    def _give_up(self) -> None:
        """End the template, and let the next one be used."""
        template_prestart.drop_ended(self._boot)
        self._boot.end()

    def _gone(self) -> StartupFailed:
        text = self._boot.error_text().strip()[-2000:]
        # It has closed its end and is about to exit; its status says why.
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._boot.process.wait(timeout=1.0)
        self._give_up()
        self.status = self._boot.status
        reason = "was ended on request (nbaccel.shutdown, or the end of this process)"
        if self.status is not None:
            reason = failure.name_exit(self.status).removesuffix(" before the function returned")
        return StartupFailed(
            f"The process that workers are forked from {reason}, and its workers ended with "
            "it.\n"
            + (f"It said: {text}\n" if text else "")
            + "Run the cell again: the next launch starts a new one."
        )
