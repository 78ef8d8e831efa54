"""A live worker: it takes tasks one at a time, and keeps its namespace between them.

    main thread     task ─► cell, call, pull, … ─► Idle        raises KeyboardInterrupt on SIGINT
    second thread   has a separate channel: answers AskWhereabouts and Break at once
    third thread    interrupts again, a moment later, where the first came at the end of a block

All wait without polling, so an idle worker costs no CPU.
"""

from __future__ import annotations

import contextlib
import itertools
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any

import torch

from nbaccel.base import env, frames
from nbaccel.base.errors import UnsafeMoment
from nbaccel.base.frames import Frame
from nbaccel.base.units import count_noun
from nbaccel.calls import pool_messages
from nbaccel.calls.cell_running import make_shell
from nbaccel.calls.process_groups import ProcessGroups
from nbaccel.transfer import memfd
from nbaccel.transfer.worker_namespace import Namespace
from nbaccel.workers import messaging, metrics_reporter, precision_check
from nbaccel.workers.library_texts import can_come_of_a_left_group, tells_of_a_left_group
from nbaccel.workers.worker import (
    Work,
    WorkerCall,
    flush_streams,
    own_process,
    report,
    restore_random_states,
    set_up_process,
)

__all__ = ["serve_cells"]


def serve_cells(
    notebook_channel: messaging.Channel,
    assignment: messaging.WorkerAssignment,
    file_descriptors: list[int],
    _forked_call: WorkerCall | None = None,
) -> None:
    """Be a worker of a pool until the notebook ends it, or is gone."""
    _CellWorker(notebook_channel, assignment, file_descriptors).loop()


_MAX_NAMES = 100
# Together less than the notebook waits for an answer before it interrupts again.
_PUT_OFF_S = 0.01
_MOST_TIMES_PUT_OFF = 10


class _CellWorker:
    def __init__(
        self,
        notebook_channel: messaging.Channel,
        assignment: messaging.WorkerAssignment,
        file_descriptors: list[int],
    ) -> None:
        signal.signal(signal.SIGINT, self._on_interrupt)
        self._channel = notebook_channel
        self._busy = False
        self._times_put_off = 0
        # Its `put` may come in the middle of any other code, as a signal does; a lock's may not.
        self._put_off: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._main = threading.get_ident()
        # The second channel's descriptor is the last; those before it belong to the assignment.
        self._control = messaging.Channel.from_fd(file_descriptors.pop())
        self._worker_context = set_up_process(assignment, file_descriptors)
        memfd.close_all(file_descriptors)
        own_place = self._worker_context.place
        self._groups = ProcessGroups(own_place, notebook_channel.send)
        self._groups.watch()
        self._shell = make_shell(notebook_channel.send, rank=own_place.rank)
        self._names_at_start = frozenset(self._shell.user_ns)
        self._names = Namespace(
            self._shell.user_ns,
            rank=assignment.staging_rank,
            device=self._worker_context.device,
            num_nodes=assignment.num_notebooks,
            share_back=assignment.share_back,
        )
        restore_random_states(assignment.random_states)
        precision_check.watch(assignment.mixed_precision)
        threading.Thread(target=self._answer, name="nbaccel-control", daemon=True).start()
        threading.Thread(
            target=self._interrupt_again, name="nbaccel-interrupts", daemon=True
        ).start()

    # ---- the main thread

    def loop(self) -> None:
        """Take tasks until the channel closes or says so."""
        self._channel.send(pool_messages.Idle())
        while True:
            try:
                task, file_descriptors = self._channel.receive()
            # The notebook is gone, or has ended this pool.
            except (EOFError, OSError):
                return
            if isinstance(task, messaging.Leave):
                return
            with memfd.closing_files(*file_descriptors):
                bundle = self._do(task.body, file_descriptors)
            # `report` and `Work` ignore interrupts while they hand over.
            signal.signal(signal.SIGINT, self._on_interrupt)
            self._channel.send(self._idle(task.number, task.body, bundle))

    def _do(self, task: Any, file_descriptors: list[int]) -> Any:
        """Carry a task out; what it raises goes to the notebook."""
        bundle, error = self._try(task, file_descriptors)
        if error is not None and not isinstance(task, _UNINTERRUPTED_MESSAGES):
            report(self._channel, self._explained(error), self._worker_context.place.rank)
        flush_streams()
        return bundle

    def _try(self, task: Any, file_descriptors: list[int]) -> tuple[Any, BaseException | None]:
        try:
            try:
                return _TASK_METHODS[type(task)](self, task, file_descriptors), None
            finally:
                # In the inner block: an interrupt that comes here is still caught below.
                self._busy = False
                self._times_put_off = 0
        except BaseException as raised_error:  # neither exit nor interrupt may end the worker
            return None, raised_error

    def _idle(self, task_number: int, task: Any, shown_bundle: Any) -> pool_messages.Idle:
        ran_code = isinstance(task, (pool_messages.RunCell, messaging.Job))
        return pool_messages.Idle(
            number=task_number,
            shown=shown_bundle,
            bound=self._names.bound() if isinstance(task, pool_messages.RunCell) else (),
            dirty=self._names.modules.dirty() if isinstance(task, pool_messages.RunCell) else (),
            sequence=self._groups.sequence() if ran_code else (),
            in_groups=torch.distributed.is_initialized(),
        )

    def _run_cell(self, task: pool_messages.RunCell, file_descriptors: list[int]) -> Any:
        if task.directory is not None:
            self._worker_context.go_to(task.directory)
        env.update(task.environment)
        if task.logging:
            self._worker_context.logging.follow(task.logging)
        self._worker_context.settings.follow(task.settings)
        self._names.begin()
        metrics_reporter.begin(
            self._channel, self._worker_context.hardware, self._worker_context.device
        )
        self._busy = True
        try:
            with own_process():
                return self._shell.run(task.source)
        except SystemExit as raised_error:
            if raised_error.code not in (None, 0):
                raise
            # sys.exit() is how a script ends well.
            return None

    def _run_job(self, task: messaging.Job, file_descriptors: list[int]) -> None:
        metrics_reporter.begin(
            self._channel, self._worker_context.hardware, self._worker_context.device
        )
        self._busy = True
        Work(self._channel, self._worker_context, task, file_descriptors).run()

    def _bind_names(self, task: pool_messages.BindNames, file_descriptors: list[int]) -> None:
        self._names.take(task.update, file_descriptors)
        if pool_messages.PACKAGE_CHANGES in self._shell.user_ns:
            _, changes = self._shell.user_ns.pop(pool_messages.PACKAGE_CHANGES)
            self._worker_context.changes.follow(changes)

    def _pull(self, task: pool_messages.Pull, file_descriptors: list[int]) -> None:
        self._busy = True
        values, fd = self._names.pack(task.names)
        self._busy = False
        with memfd.closing_files(fd):
            self._channel.send(messaging.Returned(values), [fd])

    def _write_weights(self, task: pool_messages.WriteWeights, file_descriptors: list[int]) -> None:
        # Gigabytes may be written. After an interrupt the weights are still here for the next time.
        self._busy = True
        weight_report, whole_files = self._names.modules.write_changed(
            dict(zip(task.arenas, file_descriptors, strict=True))
        )
        self._busy = False
        answer_message = pool_messages.Staged(report=weight_report, whole=tuple(whole_files))
        self._channel.send(answer_message, list(whole_files.values()))

    def _weights_received(
        self, task: pool_messages.WeightsReceived, file_descriptors: list[int]
    ) -> None:
        # May be interrupted, because it can be put off: it only gives memory back.
        self._busy = True
        self._names.modules.share_equal_pages()

    def _join_all(self, task: pool_messages.JoinAll, file_descriptors: list[int]) -> None:
        self._busy = True
        self._groups.join()

    def _join_group(self, task: pool_messages.JoinGroup, file_descriptors: list[int]) -> None:
        self._busy = True
        self._groups.join_others(task.wanted)

    def _close_groups(self, task: pool_messages.CloseGroups, file_descriptors: list[int]) -> None:
        self._groups.close(task.generation, task.reason)

    def _complete(self, task: pool_messages.Complete, file_descriptors: list[int]) -> Any:
        return self._shell.completions_at(task.code, task.cursor)

    def _inspect(self, task: pool_messages.Inspect, file_descriptors: list[int]) -> Any:
        return self._shell.describe(task.name, task.detail)

    def _explained(self, error: BaseException) -> BaseException:
        """The error, explained if it comes from an object that holds a group that was left."""
        if not self._groups.left_for or not can_come_of_a_left_group(error):
            return error
        if not (self._groups.are_behind(error.__traceback__) or tells_of_a_left_group(error)):
            return error
        explained_error = UnsafeMoment(
            "This cell used a process group that all ranks have left, because "
            f"{self._groups.left_for}. DDP models go on by themselves; what else holds a group "
            "(a DeepSpeed engine, FSDP2, dist.new_group) is of no more use: run the cells again "
            "that make them. Models, optimizers and variables are as they were."
        )
        explained_error.__cause__ = error
        return explained_error.with_traceback(error.__traceback__)

    def _on_interrupt(self, number: int, frame: Any) -> None:
        # While the worker waits for a task, or sends an answer, an interrupt has nothing to stop.
        if not self._busy:
            return
        if self._times_put_off < _MOST_TIMES_PUT_OFF and _leaves_block(frame):
            self._times_put_off += 1
            self._put_off.put(None)
            return
        self._channel.send(messaging.Interrupting())
        raise KeyboardInterrupt

    # ---- the third thread

    def _interrupt_again(self) -> None:
        while True:
            self._put_off.get()
            time.sleep(_PUT_OFF_S)
            # 0: the task has ended meanwhile, and the next one is not to be interrupted.
            if self._times_put_off:
                signal.pthread_kill(self._main, signal.SIGINT)

    # ---- the second thread

    def _answer(self) -> None:
        while True:
            try:
                message, _ = self._control.receive()
            except (EOFError, OSError):
                return
            if isinstance(message, messaging.AskWhereabouts):
                self._channel.send(self._whereabouts())
            elif isinstance(message, messaging.Break):
                self._groups.cut()

    def _whereabouts(self) -> messaging.Whereabouts:
        stack_frames: list[Frame] = []
        frame = sys._current_frames().get(self._main)
        while frame is not None:
            frame_code = frame.f_code
            stack_frames.append(
                Frame(
                    file=frame_code.co_filename,
                    line=frame.f_lineno,
                    function=frame_code.co_name,
                )
            )
            frame = frame.f_back
        own_frames = frames.within_worker(stack_frames)
        return messaging.Whereabouts(
            stack=own_frames if frames.user_frame(own_frames) else (),
            device_bytes=metrics_reporter.reserved(
                self._worker_context.hardware, self._worker_context.device
            ),
            names=self._held_names(),
            group=_group_words(),
        )

    def _held_names(self) -> tuple[str, ...]:
        # A copy of the keys in one step: the main thread may define a name meanwhile.
        names = (
            name
            for name in tuple(self._shell.user_ns)
            if not name.startswith("_") and name not in self._names_at_start
        )
        return tuple(itertools.islice(names, _MAX_NAMES))


def _leaves_block(frame: FrameType | None) -> bool:
    """Whether `with` blocks may be about to be left, or an error is being handled.

    A collective that was cut raises out of C code, and Python handles the signal that came with the
    cut right after: at the first line of `__exit__`, or before that is called (Python 3.10).
    Interrupted there, `torch.no_grad()` leaves gradients off for all later cells.
    """
    while frame is not None:
        if frame.f_code.co_name == "__exit__":
            return True
        frame = frame.f_back
    return sys.exc_info()[1] is not None


def _group_words() -> str:
    """The process group of this process, in words; empty for none."""
    # The main thread may leave the group meanwhile.
    with contextlib.suppress(RuntimeError, ValueError):
        if torch.distributed.is_initialized():
            num_ranks = count_noun(torch.distributed.get_world_size(), "rank")
            return f"{torch.distributed.get_backend()}, {num_ranks}"
    return ""


_UNINTERRUPTED_MESSAGES = (pool_messages.JoinGroup, pool_messages.WeightsReceived)
"""Tasks without an answer: a failed join shows in the other ranks, and memory may stay longer."""

_TASK_METHODS: Mapping[type, Callable[[_CellWorker, Any, list[int]], Any]] = {
    pool_messages.RunCell: _CellWorker._run_cell,
    messaging.Job: _CellWorker._run_job,
    pool_messages.BindNames: _CellWorker._bind_names,
    pool_messages.Pull: _CellWorker._pull,
    pool_messages.WriteWeights: _CellWorker._write_weights,
    pool_messages.WeightsReceived: _CellWorker._weights_received,
    pool_messages.JoinAll: _CellWorker._join_all,
    pool_messages.JoinGroup: _CellWorker._join_group,
    pool_messages.CloseGroups: _CellWorker._close_groups,
    pool_messages.Complete: _CellWorker._complete,
    pool_messages.Inspect: _CellWorker._inspect,
}
