"""A live worker: it takes tasks one at a time, and keeps its namespace between them.

second thread   channel ─► tasks, for the main thread; answers ASK_WHEREABOUTS and BREAK at once
main thread     task ─► cell, call, pull, … ─► Idle        raises KeyboardInterrupt on SIGINT
a third one     interrupts again, a moment later, where an interrupt came at a block's end
"""

from __future__ import annotations

import _thread
import contextlib
import queue
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch

from nbaccel.base import env, frames
from nbaccel.base.errors import UnsafeMoment
from nbaccel.base.frames import Frame
from nbaccel.base.optional_packages import require
from nbaccel.base.units import count_noun
from nbaccel.calls.process_groups import ProcessGroups
from nbaccel.precision import precision_check
from nbaccel.transfer import memfd
from nbaccel.transfer.library_settings import restore_random_states
from nbaccel.transfer.package_changes import PACKAGE_CHANGES
from nbaccel.transfer.worker_namespace import Namespace
from nbaccel.workers import messaging, rendezvous, step_stop, worker

if TYPE_CHECKING:
    from nbaccel.calls.pool_planning import CellSource
    from nbaccel.calls.worker_shell import WorkerShell
    from nbaccel.transfer.worker_namespace import NamespaceUpdate


def serve_cells(
    channel: messaging.Channel,
    assignment: messaging.WorkerAssignment,
    fds: list[int],
    _forked_call: worker.WorkerCall | None = None,
) -> None:
    """Be a worker of a pool until the notebook ends it, or is gone."""
    CellWorker(channel, assignment, fds).loop()


def make_shell(send: Callable[[Any], None], *, rank: int) -> WorkerShell:
    """Make the shell of this process; IPython is imported then, and not with this module."""
    require("IPython", extra="notebook", why="Running cells in workers")
    from nbaccel.calls import worker_shell

    return worker_shell.make_shell(send, rank=rank)


_MAX_NAMES = 100
# Together less than the notebook waits for an answer before it interrupts again.
_PUT_OFF_S = 0.01
_MOST_TIMES_PUT_OFF = 10


class CellWorker:
    """One worker; its public methods are what a `PoolTask` names."""

    def __init__(
        self, channel: messaging.Channel, assignment: messaging.WorkerAssignment, fds: list[int]
    ) -> None:
        signal.signal(signal.SIGINT, self._on_interrupt)
        self._channel = channel
        self._busy = False
        self._times_put_off = 0
        self._main = threading.get_ident()
        self._tasks: queue.SimpleQueue[tuple[messaging.Task, list[int]] | None] = (
            queue.SimpleQueue()
        )
        self._stop = step_stop.AgreedStop(channel, listens=False)  # of the latest call
        self._context = worker.set_up_process(assignment, fds)
        memfd.close_all(fds)
        self._rank = self._context.place.rank
        self._groups = ProcessGroups(self._context.place, channel.send)
        self._groups.watch()
        self._shell = make_shell(channel.send_in_turn, rank=self._rank)
        self._names_at_start = frozenset(self._shell.user_ns)
        modules = self._context.receive_modules()
        self._names = Namespace(self._shell.user_ns, modules, self._rank, self._context.device)
        restore_random_states(assignment.random_states)
        precision_check.watch(assignment.mixed_precision)
        threading.Thread(target=self._listen, name="nbaccel-control", daemon=True).start()

    # ---- the main thread

    def loop(self) -> None:
        """Take tasks until the notebook is gone, or has ended this pool."""
        self._channel.send(messaging.Idle(whereabouts=self._whereabouts()))
        while (received := self._tasks.get()) is not None:
            task, fds = received
            if task.number:  # not for what a rank does while others are still at the last one
                rendezvous.begin_task(task.number, task.resting)
            with memfd.closing_files(*fds):
                shown = self._do(task.body, fds)
            # `report` and `run_job` ignore interrupts while they hand over.
            signal.signal(signal.SIGINT, self._on_interrupt)
            is_cell = getattr(task.body, "method", "") == "run_cell"
            ran_code = is_cell or isinstance(task.body, messaging.Job)
            idle = messaging.Idle(
                number=task.number,
                shown=shown,
                bound=self._names.bound() if is_cell else (),
                dirty=self._names.modules.dirty() if is_cell else (),
                sequence=self._groups.sequence() if ran_code else (),
                whereabouts=self._whereabouts(),
            )
            self._channel.send(idle)

    def _do(self, task: Any, fds: list[int]) -> Any:
        """Carry a task out; what it raises goes to the notebook."""
        shown = None
        try:
            try:
                if isinstance(task, messaging.PoolTask):
                    shown = getattr(self, task.method)(fds, **task.arguments)
                else:
                    self._call(task, fds)
            finally:
                # In the inner block: an interrupt that comes here is still caught below.
                self._busy = False
                self._times_put_off = 0
        except BaseException as error:  # neither exit nor interrupt may end the worker
            # Those two are not told: a failed join shows in the other ranks, and memory may stay.
            if getattr(task, "method", "") not in ("join_group", "share_equal_pages"):
                worker.report(self._channel, self._explained(error), self._rank)
        worker.flush_streams()
        return shown

    # ---- tasks, each with its descriptors; what it returns is shown. Interrupted where it is busy.

    def _call(self, job: messaging.Job, fds: list[int]) -> None:
        self._context.begin_reports(self._channel)
        self._busy = True
        self._stop = step_stop.AgreedStop(self._channel, listens=False)
        worker.run_job(self._channel, self._context, job, fds, self._stop)

    def run_cell(
        self,
        _fds: list[int],
        source: CellSource,
        directory: str | None,
        environment: dict[str, str | None],
        settings: bytes,
    ) -> Any:
        """Run the code of a cell, in the notebook's folder, with its variables and settings."""
        if directory is not None:
            self._context.go_to(directory)
        env.update(environment)
        if settings:
            self._context.settings.follow(settings)
        self._names.begin()
        self._context.begin_reports(self._channel)
        self._busy = True
        try:
            shown = self._shell.run(source)
        except SystemExit as error:
            if error.code not in (None, 0):
                raise
            shown = None  # sys.exit() is how a script ends well
        rendezvous.say_returned(self._rank)
        return shown

    def bind_names(self, fds: list[int], update: NamespaceUpdate) -> None:
        """Bind names that the notebook has. Descriptors: those of the update."""
        self._names.take(update, fds)
        if PACKAGE_CHANGES in self._shell.user_ns:
            _, changes = self._shell.user_ns.pop(PACKAGE_CHANGES)
            self._context.changes.follow(changes)

    def pull(self, _fds: list[int], names: tuple[str, ...]) -> None:
        """Send the values of names, as what is returned."""
        self._busy = True
        values, fd = self._names.pack(names)
        self._busy = False
        with memfd.closing_files(fd):
            self._channel.send(messaging.Returned(values), [fd])

    def write_weights(self, fds: list[int], arenas: tuple[str, ...]) -> None:
        """Write changed weights into the staging files of these arenas: the descriptors."""
        # Gigabytes may be written. After an interrupt the weights are still here for the next time.
        self._busy = True
        staging = dict(zip(arenas, fds, strict=True))
        weight_report, files = self._names.modules.write_changed(staging)
        self._busy = False
        answer = messaging.Returned(weight_report=weight_report, whole=tuple(files))
        self._channel.send(answer, list(files.values()))

    def share_equal_pages(self, _fds: list[int]) -> None:
        """The notebook has the weights: share again what is equal to them. Can be put off."""
        self._busy = True
        self._names.modules.share_equal_pages()

    def join_group(self, _fds: list[int], wanted: messaging.GroupWanted) -> None:
        """Join the group that another rank is about to be in, unless this one has been in it."""
        self._busy = True
        self._groups.join_others(wanted)
        rendezvous.say_returned(self._rank)  # its own task has ended

    def close_groups(self, _fds: list[int], generation: int) -> None:
        """Drop all process groups: they are out of step. New ones get other names in the store."""
        self._groups.close(generation)

    def ask_shell(self, _fds: list[int], question: str, **arguments: Any) -> Any:
        """Find completions, or describe an object: a method of the shell."""
        return getattr(self._shell, question)(**arguments)

    # ---- errors and interrupts

    def _explained(self, error: BaseException) -> BaseException:
        """The error, explained if it comes from an object that holds a group that was left."""
        if not self._groups.are_behind(error):
            return error
        explained = UnsafeMoment(
            "This cell used a process group that all ranks have left, because a cell was ended "
            "while ranks were waiting for each other. DDP models go on by themselves; what else "
            "holds a group (a DeepSpeed engine, FSDP2, dist.new_group) does not: run the cells "
            "again that make them. Models, optimizers and variables are as they were."
        )
        explained.__cause__ = error
        return explained.with_traceback(error.__traceback__)

    def _on_interrupt(self, number: int, frame: Any) -> None:
        # While the worker waits for a task, or sends an answer, an interrupt has nothing to stop.
        if not self._busy:
            return
        if self._times_put_off < _MOST_TIMES_PUT_OFF and _leaves_block(frame):
            self._times_put_off += 1
            # Not by `threading`, whose locks the interrupted code may hold.
            _thread.start_new_thread(self._interrupt_again, ())
            return
        self._channel.send(messaging.Word.INTERRUPTING)
        raise KeyboardInterrupt

    def _interrupt_again(self) -> None:
        time.sleep(_PUT_OFF_S)
        # 0: the task has ended meanwhile, and the next one is not to be interrupted.
        if self._times_put_off:
            signal.pthread_kill(self._main, signal.SIGINT)

    # ---- the second thread

    def _listen(self) -> None:
        while True:
            try:
                message, fds = self._channel.receive()
            except (EOFError, OSError):
                message, fds = messaging.Word.LEAVE, []
            if message is messaging.Word.LEAVE:
                self._tasks.put(None)
                return
            if message is messaging.Word.ASK_WHEREABOUTS:
                self._channel.send(self._whereabouts(sys._current_frames().get(self._main)))
            elif message is messaging.Word.BREAK:
                self._groups.cut()
            elif isinstance(message, messaging.Task):
                self._tasks.put((message, fds))
            else:
                # One that comes too late is about a call that has ended.
                self._stop.hear(message)

    def _whereabouts(self, frame: FrameType | None = None) -> messaging.Whereabouts:
        """What this worker has in memory, and where a frame is; None while it waits for a task."""
        stack = []
        while frame is not None:
            code = frame.f_code
            stack.append(Frame(file=code.co_filename, line=frame.f_lineno, function=code.co_name))
            frame = frame.f_back
        own_frames = frames.within_worker(stack)
        names = [
            name
            # A copy of the keys in one step: the main thread may define a name meanwhile.
            for name in tuple(self._shell.user_ns)
            if not name.startswith("_") and name not in self._names_at_start
        ]
        group = ""
        # The main thread may leave the group meanwhile.
        with contextlib.suppress(RuntimeError, ValueError):
            if torch.distributed.is_initialized():
                num_ranks = count_noun(torch.distributed.get_world_size(), "rank")
                group = f"{torch.distributed.get_backend()}, {num_ranks}"
        return messaging.Whereabouts(
            stack=own_frames if frames.user_frame(own_frames) else (),
            device_bytes=self._context.hardware.reserved_bytes(torch.device(self._context.device)),
            names=tuple(names[:_MAX_NAMES]),
            group=group,
        )


def _leaves_block(frame: FrameType | None) -> bool:
    """Whether `with` blocks may be about to be left, or an error is being handled.

    A collective that was cut raises out of C code, and Python handles the signal that came with the
    cut right after: at the first line of `__exit__`, or before that is called (Python 3.10).
    Interrupted there, `torch.no_grad()` leaves gradients off for all later cells.
    """
    callers = (caller.f_code.co_name for caller, _ in traceback.walk_stack(frame))
    return "__exit__" in callers or sys.exc_info()[1] is not None
