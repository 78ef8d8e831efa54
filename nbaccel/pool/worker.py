"""A live worker: it takes tasks one at a time, and keeps its namespace between them.

    main thread     task ─► cell, call, pull, … ─► Idle        raises KeyboardInterrupt on SIGINT
    second thread   has a channel of its own: answers Look and Break at once

Both wait without polling, so an idle worker costs no CPU.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from nbaccel import env, frames
from nbaccel.errors import UnsafeMoment
from nbaccel.frames import Frame
from nbaccel.launch import precision, reporting, wire
from nbaccel.launch.own_process import own_process
from nbaccel.launch.sharing import arena, memory
from nbaccel.launch.worker import Work, flush, report, restore_random_states, settle
from nbaccel.pool import messages
from nbaccel.pool.groups import Groups
from nbaccel.pool.namespace import Namespace
from nbaccel.pool.shell import CellShell

__all__ = ["serve"]


def serve(
    channel: wire.Channel, enlist: messages.Enlist, fds: list[int], *, forked_here: bool
) -> None:
    """Be a worker of a pool until told to leave, or until the notebook is gone.

    Args:
        channel: To the notebook.
        enlist: The first message.
        fds: What came with it.
        forked_here: Whether this process was forked from the notebook itself.
    """
    if forked_here:
        arena.forget()  # what is shared with the notebook is a private copy now
    worker = _Worker(channel, enlist, fds)
    worker.loop()


class _Worker:
    def __init__(self, channel: wire.Channel, enlist: messages.Enlist, fds: list[int]) -> None:
        signal.signal(signal.SIGINT, self._on_interrupt)
        self._channel = channel
        self._busy = False
        self._main = threading.get_ident()
        self._control = wire.Channel.from_fd(fds.pop())
        self._seat = settle(enlist.post, fds)
        memory.close_all(fds)
        place = self._seat.place
        self._groups = Groups(place, channel.send)
        self._groups.watch()
        self._shell = CellShell.create(channel.send, rank=place.rank)
        self._names = Namespace(
            self._shell.user_ns,
            rank=place.local_rank,
            device=self._seat.device,
            num_nodes=place.num_nodes,
            share_back=enlist.share_back,
        )
        restore_random_states(enlist.post.random_states)
        precision.watch(enlist.post.mixed_precision)
        threading.Thread(target=self._answer, name="nbaccel-control", daemon=True).start()

    # ---- the main thread

    def loop(self) -> None:
        """Take tasks until the channel closes or says so."""
        self._channel.send(messages.Idle())
        while True:
            try:
                task, fds = self._channel.receive()
            except (EOFError, OSError):
                return  # the notebook is gone, or through with this pool
            with memory.closing(*fds):
                shown = self._do(task.body, fds)
            signal.signal(signal.SIGINT, self._on_interrupt)  # handing over had it ignored
            self._channel.send(self._idle(task.number, task.body, shown))

    def _do(self, task: Any, fds: list[int]) -> Any:
        """Carry a task out; what it raises goes to the notebook."""
        shown, error = self._try(task, fds)
        if error is not None and not isinstance(task, _UNHEARD):
            report(self._channel, self._explained(error), self._seat.place.rank)
        flush()
        return shown

    def _try(self, task: Any, fds: list[int]) -> tuple[Any, BaseException | None]:
        try:
            try:
                return _ACTS[type(task)](self, task, fds), None
            finally:
                self._busy = False  # from here on an interrupt comes too late
        except BaseException as error:  # SystemExit and KeyboardInterrupt too: the worker stays
            return None, error

    def _idle(self, number: int, task: Any, shown: Any) -> messages.Idle:
        ran_code = isinstance(task, (messages.RunCell, messages.RunJob))
        return messages.Idle(
            number=number,
            shown=shown,
            bound=self._names.bound() if isinstance(task, messages.RunCell) else (),
            dirty=self._names.dirty() if isinstance(task, messages.RunCell) else (),
            sequence=self._groups.sequence() if ran_code else (),
            in_groups=torch.distributed.is_initialized(),
        )

    def _run_cell(self, task: messages.RunCell, fds: list[int]) -> Any:
        if task.directory is not None:
            os.chdir(task.directory)
        env.update(task.environment)
        if task.logging:
            self._seat.logging.follow(task.logging)
        self._names.begin()
        reporting.begin(self._channel, self._seat.device)
        self._busy = True
        try:
            with own_process():
                return self._shell.run(task.source)
        except SystemExit as error:
            if error.code not in (None, 0):
                raise
            return None  # sys.exit() is how a script ends well

    def _run_job(self, task: messages.RunJob, fds: list[int]) -> None:
        reporting.begin(self._channel, self._seat.device)
        self._busy = True
        Work(self._channel, self._seat, task.job, fds, None).run()

    def _take(self, task: messages.Take, fds: list[int]) -> None:
        self._names.take(task.cargo, fds, task.wanted)

    def _pull(self, task: messages.Pull, fds: list[int]) -> None:
        self._busy = True
        parcel, fd = self._names.pack(task.names)
        self._busy = False
        with memory.closing(fd):
            self._channel.send(wire.Returned(time.monotonic(), parcel, None, None), [fd])

    def _go_home(self, task: messages.GoHome, fds: list[int]) -> None:
        self._busy = True  # gigabytes may be written: an interrupt ends it, and nothing is lost
        report, whole = self._names.write_home(dict(zip(task.arenas, fds, strict=True)))
        self._busy = False
        message = messages.Staged(report=report, whole=tuple(whole))
        self._channel.send(message, list(whole.values()))

    def _settle(self, task: messages.Settle, fds: list[int]) -> None:
        self._busy = True  # it can be given up for an interrupt of the next task
        self._names.settle()

    def _join_all(self, task: messages.JoinAll, fds: list[int]) -> None:
        self._busy = True
        self._groups.join()

    def _join_group(self, task: messages.JoinGroup, fds: list[int]) -> None:
        self._busy = True
        self._groups.join_others(task.wanted)

    def _leave_groups(self, task: messages.LeaveGroups, fds: list[int]) -> None:
        self._groups.leave(task.generation, task.reason)

    def _complete(self, task: messages.Complete, fds: list[int]) -> Any:
        return self._shell.complete(task.code, task.cursor)

    def _inspect(self, task: messages.Inspect, fds: list[int]) -> Any:
        return self._shell.inspect(task.name, task.detail)

    def _explained(self, error: BaseException) -> BaseException:
        """An error that comes of an object which holds a group that was left, in our words."""
        text = str(error)
        if not self._groups.left_for or not isinstance(error, _ABOUT_GROUPS):
            return error
        if not (self._groups.are_behind(error.__traceback__) or any(w in text for w in _FOREIGN)):
            return error
        found = UnsafeMoment(
            "This cell used a process group that all ranks have left, because "
            f"{self._groups.left_for}. DDP models go on by themselves; what else holds a group "
            "(a DeepSpeed engine, FSDP2, dist.new_group) is of no more use: run the cells again "
            "that make them. Models, optimizers and variables are as they were."
        )
        found.__cause__ = error
        return found.with_traceback(error.__traceback__)

    def _on_interrupt(self, signum: int, frame: Any) -> None:
        if self._busy:
            self._channel.send(wire.Interrupting(time.monotonic()))
            raise KeyboardInterrupt

    # ---- the second thread

    def _answer(self) -> None:
        while True:
            try:
                message, _ = self._control.receive()
            except (EOFError, OSError):
                return
            if isinstance(message, messages.Look):
                self._channel.send(self._whereabouts())
            elif isinstance(message, messages.Break):
                self._groups.cut()

    def _whereabouts(self) -> messages.Whereabouts:
        found: list[Frame] = []
        frame = sys._current_frames().get(self._main)
        while frame is not None:
            code = frame.f_code
            found.append(Frame(file=code.co_filename, line=frame.f_lineno, function=code.co_name))
            frame = frame.f_back
        while found and found[-1].is_house:
            found.pop()
        mine = frames.user_frame(found)
        return messages.Whereabouts(
            stack=tuple(found) if mine else (), device_bytes=reporting.reserved(self._seat.device)
        )


_ABOUT_GROUPS = (RuntimeError, ValueError, AssertionError)
_FOREIGN = ("DeepSpeed backend not set", "resolve the process group", "Invalid process group")
"""What libraries say of a group that they look up by name, or hold in their own code."""
_UNHEARD = (messages.JoinGroup, messages.Settle)
"""Tasks that nobody waits for: of a failed join the others tell, and settling can be put off."""

_ACTS: Mapping[type, Callable[[_Worker, Any, list[int]], Any]] = {
    messages.RunCell: _Worker._run_cell,
    messages.RunJob: _Worker._run_job,
    messages.Take: _Worker._take,
    messages.Pull: _Worker._pull,
    messages.GoHome: _Worker._go_home,
    messages.Settle: _Worker._settle,
    messages.JoinAll: _Worker._join_all,
    messages.JoinGroup: _Worker._join_group,
    messages.LeaveGroups: _Worker._leave_groups,
    messages.Complete: _Worker._complete,
    messages.Inspect: _Worker._inspect,
}
