"""The worker process: born by fork, from the template or from the notebook.

    channel ◄──► notebook     Job, Leave in; Alive, Started, Display, …, Returned | Failed out
    stdout, stderr ──►        pipes from birth, so that C code and subprocesses are heard too
    stack ──►                 faulthandler's dumps: on a crash, and whenever the notebook asks

It never returns into the code it was forked from: it leaves by `os._exit`, because an orderly
interpreter exit with gloo threads alive aborts or hangs now and then (torch 2.13).

`multiprocessing` pickles a class by its name, and looks for the notebook's in `__main__`, which in
a worker is not the notebook. What it does not find there is pickled as launches pickle it. Without
this a batch of such a class, or an exception, is lost in the child, and the rank waits for ever.

It would hand over a result, write weights and read the worker's messages: the launch would hang.
"""

from __future__ import annotations

import builtins
import contextlib
import ctypes
import faulthandler
import importlib
import linecache
import os
import pickle
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.reduction import ForkingPickler
from types import FunctionType, MethodType
from typing import Any, NoReturn

import cloudpickle
import torch
from torch import nn

from nbaccel import _accelerate, _catalog, _transformers, env
from nbaccel.abc.device import Device
from nbaccel.errors import InputRefused, InternalError
from nbaccel.failures import failure, portable_exception
from nbaccel.topology import Topology
from nbaccel.transfer import arena, pickling, sharded_tensors, shared_memory
from nbaccel.transfer.weight_sync import Manifest, WeightWriter
from nbaccel.units import shorten_text
from nbaccel.workers import messaging, metrics_reporter, precision_check, rendezvous, worker_output
from nbaccel.workers.reaping import adopt_orphans, end_descendants

__all__ = ["own_process", "send_notebook_classes"]


STACK_SIGNAL = getattr(signal, "SIGRTMAX", 0) - 2  # macOS has none, and no workers either
"""Asks a worker where it is; user code is unlikely to want this one."""

_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, kw_only=True)
class WorkerEnds:
    """The worker's ends of its connections: descriptors."""

    channel: int
    stdout: int
    stderr: int
    stack: int

    def all(self) -> tuple[int, int, int, int]:
        """All four, in the order in which they travel."""
        return (self.channel, self.stdout, self.stderr, self.stack)


@dataclass(frozen=True, kw_only=True)
class WorkerCall:
    """What a worker runs, and the shared modules among the arguments."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    modules: tuple[tuple[Manifest, nn.Module], ...] = ()


@dataclass(frozen=True, kw_only=True)
class Inheritance:
    """What a worker forked from the notebook already has in memory."""

    call: WorkerCall | None = None
    """What to call; None in a pool's worker, which is told later."""
    arenas: Mapping[str, shared_memory.Mapping] = field(default_factory=dict)
    arena_fds: Mapping[str, int] = field(default_factory=dict)


def run_worker(
    worker_ends: WorkerEnds, parent_id: int, inheritance: Inheritance | None = None
) -> NoReturn:
    """Run one job and leave.

    Args:
        worker_ends: This worker's ends of its connections.
        parent_id: Process id of whoever forked it; the worker dies with it.
        inheritance: What came with the fork, if it was from the notebook.
    """
    exit_status = 1
    try:
        _settle_in(worker_ends, parent_id)
        if inheritance is not None:
            _accelerate.forget()  # it says that the notebook is alone, and is believed here, too
        notebook_channel = messaging.Channel.from_fd(worker_ends.channel)
        notebook_channel.send(messaging.Alive(time.monotonic()))
        message, file_descriptors = notebook_channel.receive()
        # By name: a launch knows nothing of pools, whose first message is another.
        named_module, _, function = message.handler.partition(":")
        getattr(importlib.import_module(named_module), function)(
            notebook_channel, message, file_descriptors, inheritance
        )
        exit_status = 0
    except EOFError:
        exit_status = 0  # the notebook is through with this launch
    except BaseException:  # nobody is left to raise to: say it and leave
        sys.excepthook(*sys.exc_info())
    finally:
        with contextlib.suppress(Exception):  # whatever it is, this process ends
            sharded_tensors.remove_process_files()
        with contextlib.suppress(Exception):  # the template ends what is left
            _end_what_it_started()
        flush_streams()
        os._exit(exit_status)


def _end_what_it_started() -> None:
    processes_left = end_descendants()
    if processes_left:
        sys.stderr.write(
            f"nbaccel: ended what this rank had started and left running: "
            f"{', '.join(processes_left)}. Start what is to outlive the workers from the "
            f"notebook itself.\n"
        )


def _settle_in(worker_ends: WorkerEnds, parent_id: int) -> None:
    """Become a process of its own: session, streams, signals. Before anything can print or hang."""
    os.setsid()  # the notebook decides what an interrupt does; and the group can be killed as one
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_id:
        os._exit(1)  # the parent died before the line above took effect
    adopt_orphans()
    signal.set_wakeup_fd(-1)  # a kernel's event loop must not hear of this process's signals
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.dup2(worker_ends.stdout, 1)
    os.dup2(worker_ends.stderr, 2)
    null_device = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null_device, 0)
    for file_descriptor in (worker_ends.stdout, worker_ends.stderr, null_device):
        os.close(file_descriptor)
    sys.stdin = open(0, closefd=False)
    sys.stdout = open(1, "w", buffering=1, encoding="utf-8", closefd=False)
    sys.stderr = open(2, "w", buffering=1, encoding="utf-8", closefd=False)
    for variable_name in ("stdin", "stdout", "stderr"):  # some libraries print to the "real" ones
        setattr(sys, f"__{variable_name}__", getattr(sys, variable_name))
    sys.excepthook = sys.__excepthook__
    faulthandler.enable(file=worker_ends.stack, all_threads=True)
    faulthandler.register(STACK_SIGNAL, file=worker_ends.stack, all_threads=True)


@dataclass(frozen=True, kw_only=True)
class WorkerContext:
    """A worker at its post."""

    place: Topology
    hardware: Device
    device: str
    """What torch calls it: `cpu`, `cuda:1`."""
    store: Any
    """The rendezvous store, in the worker that serves it."""
    logging: worker_output.LoggingSettings = field(default_factory=worker_output.LoggingSettings)


def settle_in_process(
    worker_post: messaging.WorkerAssignment, file_descriptors: list[int]
) -> WorkerContext:
    """Take up a post: surroundings, device, streams, process groups. Once per worker.

    Args:
        worker_post: The post.
        file_descriptors: Descriptors that came with it; those of the post are taken from the end.
    """
    place = Topology.from_json(worker_post.topology)
    env.replace_all(worker_post.environment)
    os.chdir(worker_post.working_directory)
    sys.path[:] = worker_post.import_path
    torch.set_num_threads(worker_post.threads)
    device_kind = _catalog.device(worker_post.device)
    device_kind.enter_worker(place.local_rank)
    _catalog.enter_worker(worker_post.device)
    rendezvous.keep_groups_alive()
    _refuse_questions(place.rank)
    send_notebook_classes()
    _transformers.adopt_trainers()
    rendezvous_store = (
        rendezvous.serve_store(place, file_descriptors.pop()) if worker_post.serves_store else None
    )
    return WorkerContext(
        place=place,
        hardware=device_kind,
        device=str(device_kind.torch_device(place.local_rank)),
        store=rendezvous_store,
    )


def serve_job(
    notebook_channel: messaging.Channel,
    job: messaging.Job,
    file_descriptors: list[int],
    inheritance: Inheritance | None,
) -> None:
    """Run one job in a worker of its own, and stay until the notebook says so."""
    if job.post is None:
        raise InternalError(
            f"a job with {len(file_descriptors)} descriptors came without a post: report this"
        )
    try:
        worker_seat = settle_in_process(job.post, file_descriptors)
        worker_output.forward_displays(notebook_channel.send)
        metrics_reporter.begin(notebook_channel, worker_seat.hardware, worker_seat.device)
        rendezvous.meet_here(worker_seat.place, rendezvous.group_names())
    except BaseException as raised_error:  # a device that cannot be had: the notebook is told
        report(notebook_channel, raised_error, Topology.from_json(job.post.topology).rank)
    else:
        signal.signal(signal.SIGINT, _interrupt(notebook_channel))
        Work(notebook_channel, worker_seat, job, file_descriptors, inheritance).run()
    # Leave; until then this worker may serve the store, which slower ranks need.
    notebook_channel.receive()


def _interrupt(notebook_channel: messaging.Channel) -> Callable[[int, Any], NoReturn]:
    def on_interrupt(signal_number: int, current_frame: Any) -> NoReturn:
        notebook_channel.send(messaging.Interrupting(time.monotonic()))
        raise KeyboardInterrupt

    return on_interrupt


class Work:
    """One job in one worker.

    Args:
        notebook_channel: To the notebook.
        worker_seat: Where this worker works.
        job: What to call.
        file_descriptors: The job's descriptors, which are closed when it is through.
        inheritance: What came with the fork, if it was from the notebook.
    """

    def __init__(
        self,
        notebook_channel: messaging.Channel,
        worker_seat: WorkerContext,
        job: messaging.Job,
        file_descriptors: Sequence[int],
        inheritance: Inheritance | None,
    ) -> None:
        self._channel = notebook_channel
        self._job = job
        self._seat = worker_seat
        self._rank = worker_seat.place.rank
        self._forked_here = inheritance is not None
        arena_keys = [arena_key for arena_key, _ in job.arenas]
        other_fds = list(file_descriptors)
        self._parcel_fd = other_fds.pop() if job.parcel is not None else None
        self._arena_fds, self._staging = (
            other_fds[: len(arena_keys)],
            dict(zip(arena_keys, other_fds[len(arena_keys) :], strict=False)),
        )
        self._inheritance = inheritance

    def run(self) -> None:
        """Make the call and hand over what it returns or raises."""
        try:
            with contextlib.ExitStack() as clean_up:
                call, weight_writer = self._prepare(clean_up)
                self._channel.send(messaging.Started(time.monotonic()))
                returned_value = _call(call)
                worker_output.show_figures()
                flush_streams()
                weight_report = weight_writer.write() if self._job.share_back else None
        except BaseException as raised_error:  # KeyboardInterrupt too: every end is reported
            report(self._channel, raised_error, self._rank, self._pack)
        else:
            self._hand_over(returned_value, weight_report)

    def _prepare(self, clean_up: contextlib.ExitStack) -> tuple[WorkerCall, WeightWriter]:
        job, place = self._job, self._seat.place
        for variable_name, source_lines in job.sources.items():
            linecache.cache[variable_name] = (
                sum(map(len, source_lines)),
                None,
                source_lines,
                variable_name,
            )
        call, arena_mappings = self._open(self._seat.device)
        restore_random_states(job.random_states)
        self._seat.logging.follow(job.logging)  # after the libraries that the call has imported
        weight_writer = WeightWriter(
            own_rank=place.local_rank,
            shared_modules=call.modules,
            arena_mappings=arena_mappings,
            staging_files=self._staging,
            num_nodes=place.num_nodes,
        )
        if job.share_back:
            clean_up.callback(weight_writer.watch_first_step())
        clean_up.callback(precision_check.watch(job.mixed_precision))
        return call, weight_writer

    def _open(self, device_kind: str) -> tuple[WorkerCall, Mapping[str, shared_memory.Mapping]]:
        if self._inheritance is not None and self._inheritance.call is not None:
            # What this worker answers must carry its own values, not point at the notebook's.
            arena.forget_arenas()
            for arena_key, arena_mapping in self._inheritance.arenas.items():
                arena_mapping.replace(self._inheritance.arena_fds[arena_key], is_private=True)
            call = self._inheritance.call
            return replace(call, function=_looked_up(call.function)), self._inheritance.arenas
        if self._job.parcel is None or self._parcel_fd is None:
            raise InternalError(
                f"worker {self._rank} got no parcel, only {len(self._arena_fds)} arenas: there "
                f"is nothing to run. Please report this."
            )
        arena_mappings = {
            arena_key: shared_memory.Mapping(file_descriptor, num_bytes, is_private=True)
            for (arena_key, num_bytes), file_descriptor in zip(
                self._job.arenas, self._arena_fds, strict=True
            )
        }
        call = pickling.unpack(
            self._job.parcel, self._parcel_fd, arena_mappings, target_device=device_kind
        )
        return call, arena_mappings

    def _hand_over(self, returned_value: Any, weight_report: Any) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the work is done: do not lose it now
        try:
            packed_value, file_descriptor = self._pack(returned_value)
        except BaseException as raised_error:  # the user's own __reduce__ may raise anything
            value_type = type(returned_value)
            unsendable_reason = (
                f"rank {self._rank} returned a {failure.kind_name(value_type)}, which cannot be "
                f"sent to the notebook "
                f"({shorten_text(f'{type(raised_error).__name__}: {raised_error}', 2_000)})"
            )
            self._channel.send(
                messaging.Returned(time.monotonic(), None, unsendable_reason, weight_report)
            )
            return
        with shared_memory.closing_files(file_descriptor):
            self._channel.send(
                messaging.Returned(time.monotonic(), packed_value, None, weight_report),
                [file_descriptor],
            )

    def _pack(self, returned_value: Any) -> tuple[pickling.PackedObject, int]:
        """Pack for the notebook; what came by fork goes back by name where it can."""
        if self._forked_here:
            try:
                return pickling.pack_plain(returned_value, pickling.Sender.create())
            except (pickle.PicklingError, AttributeError, TypeError):
                return pickling.pack(returned_value, pickling.Sender.create())
        return pickling.pack(returned_value, pickling.Sender.create())


def _looked_up(function: Callable[..., Any]) -> Callable[..., Any]:
    """A method as its class has it now, where that was wrapped after the notebook looked it up."""
    if isinstance(function, MethodType):
        found_object = getattr(function.__self__, function.__name__, None)
        if (
            callable(found_object)
            and getattr(found_object, "__wrapped__", None) is function.__func__
        ):
            return found_object  # type: ignore[no-any-return]
    return function


def _pack_for_notebook(returned_value: Any) -> tuple[pickling.PackedObject, int]:
    return pickling.pack(returned_value, pickling.Sender.create())


def report(
    notebook_channel: messaging.Channel,
    raised_error: BaseException,
    own_rank: int,
    pack_value: Callable[[Any], tuple[pickling.PackedObject, int]] = _pack_for_notebook,
) -> None:
    """Tell the notebook of an exception: its description for sure, its parts if they can travel."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    failed_at = time.monotonic()
    failure_record = failure.FailureRecord.of_error(own_rank, raised_error, failure_time=failed_at)
    for value_part in portable_exception.take_error(raised_error).in_reserve():
        try:
            packed_value, file_descriptor = pack_value(value_part)
        except BaseException:  # noqa: S112  (the user's own __reduce__ may raise anything)
            continue
        with shared_memory.closing_files(file_descriptor):
            notebook_channel.send(
                messaging.Failed(failed_at, failure_record, packed_value), [file_descriptor]
            )
        break
    else:
        notebook_channel.send(
            messaging.Failed(failed_at, failure_record, None)
        )  # its description says what it was
    flush_streams()  # not before: it may have to wait until the notebook has read what was printed


def _call(call: WorkerCall) -> Any:
    try:
        with own_process():
            return call.function(*call.args)
    except SystemExit as raised_error:
        if raised_error.code not in (None, 0):
            raise
        return None  # sys.exit() is how a script ends well


def _refuse_questions(own_rank: int) -> None:
    def refuse(prompt: object = "") -> NoReturn:
        raise InputRefused(
            f"input({str(prompt)!r}) in worker {own_rank} cannot be answered: workers have no "
            f"keyboard, and waiting would hang for ever. Ask in an ordinary cell before, and "
            f"hand the answer over."
        )

    def no_debugger(*args: Any, **kwargs: Any) -> NoReturn:
        raise InputRefused(
            f"breakpoint() in worker {own_rank} has no keyboard to listen to. Debug in the "
            f"notebook itself: a launch with num_processes=1, or an ordinary cell."
        )

    builtins.input = refuse
    sys.breakpointhook = no_debugger


def seeded_states() -> bytes:
    """State of the random generators of Python, torch and (if loaded) numpy."""
    numpy_random = sys.modules.get("numpy")
    return pickle.dumps(
        (
            random.getstate(),
            torch.get_rng_state().numpy().tobytes(),
            numpy_random.random.get_state() if numpy_random is not None else None,
            torch.get_default_dtype(),
        )
    )


def restore_random_states(saved_states: bytes) -> None:
    """Let this worker draw the numbers that a fork of the notebook would draw."""
    own_states, of_torch, of_numpy, state_dtype = pickle.loads(saved_states)
    random.setstate(own_states)
    torch.set_rng_state(torch.frombuffer(bytearray(of_torch), dtype=torch.uint8))
    torch.set_default_dtype(state_dtype)
    if of_numpy is not None:
        import numpy as np

        np.random.set_state(of_numpy)


def flush_streams() -> None:
    """Push out what has been printed, and told of the training, so far."""
    metrics_reporter.flush()
    for output_stream in (sys.stdout, sys.stderr):
        try:
            output_stream.flush()
        except (OSError, ValueError):
            continue  # the reader is gone, or user code closed the stream: nothing left to save


def send_notebook_classes() -> None:
    """Let `multiprocessing` send the notebook's classes and functions from now on."""
    ForkingPickler.reducer_override = _reduce  # type: ignore[method-assign, assignment]


def _reduce(pickler: ForkingPickler, found_object: Any) -> Any:
    if not isinstance(found_object, (type, FunctionType)) or found_object.__module__ != "__main__":
        return NotImplemented
    if getattr(sys.modules["__main__"], found_object.__qualname__, None) is found_object:
        return NotImplemented
    # cloudpickle knows a class again that it has made in this process or one this was forked from.
    return cloudpickle.loads, (cloudpickle.dumps(found_object),)


@contextlib.contextmanager
def own_process() -> Iterator[None]:
    """Run a block of user code. Only the process that has begun it comes out of it.

    A child that returns from it, or raises, ends as a script would: what it raised is printed.
    """
    own_variables = os.getpid()
    try:
        yield
    except BaseException as raised_error:  # whatever a child raises, it ends here
        if os.getpid() == own_variables:
            raise
        _leave(raised_error)
    if os.getpid() != own_variables:
        _leave(None)


def _leave(raised_error: BaseException | None) -> None:
    exit_status = 0
    if isinstance(raised_error, SystemExit):
        exit_status = (
            raised_error.code
            if isinstance(raised_error.code, int)
            else int(raised_error.code is not None)
        )
    elif raised_error is not None:
        exit_status = 1
        sys.excepthook(type(raised_error), raised_error, raised_error.__traceback__)
    for output_stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # closed by the user, or nobody reads
            output_stream.flush()
    os._exit(exit_status)
