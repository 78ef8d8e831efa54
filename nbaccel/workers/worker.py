"""The worker process: forked from the template or from the notebook.

    channel ◄──► notebook     assignment, Task, Leave in; Alive, Started, …, Returned | Failed out
    stdout, stderr ──►        pipes from its start, so that C code and subprocesses are shown too
    stack ──►                 faulthandler's dumps: on a crash, and on each STACK_SIGNAL

It never returns into the code it was forked from: it leaves by `os._exit`, because an orderly
interpreter exit with gloo threads alive aborts or hangs now and then (torch 2.13).
"""

from __future__ import annotations

import builtins
import contextlib
import faulthandler
import importlib
import itertools
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.reduction import ForkingPickler
from types import FunctionType, MethodType
from typing import Any, NoReturn

import cloudpickle
import torch

from nbaccel.base import atomic, env, torch_private, training_libraries
from nbaccel.base.errors import InputRefused, InternalError, StoppedAtStep
from nbaccel.base.frames import keep_lines, kind_name
from nbaccel.base.units import shorten_text
from nbaccel.loops import loop_watch, metrics_reporter
from nbaccel.plan import registry
from nbaccel.plan.contracts.device import Device
from nbaccel.plan.topology import Topology
from nbaccel.precision import precision_check
from nbaccel.transfer import arena, memfd, pickling, sharded_tensors
from nbaccel.transfer.library_settings import LibrarySettings, restore_random_states
from nbaccel.transfer.package_changes import AppliedChanges, LateChange, PackageChange
from nbaccel.transfer.received_modules import ReceivedModules
from nbaccel.workers import (
    failure,
    messaging,
    reaping,
    rendezvous,
    step_stop,
    time_limits,
    worker_output,
)


@dataclass(frozen=True, kw_only=True)
class WorkerCall:
    """What a worker runs, and the shared modules among the arguments."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    modules: tuple[arena.SharedModule, ...] = ()
    changes: tuple[PackageChange | LateChange, ...] = ()  # what was changed of packages
    arenas: Mapping[str, memfd.Mapping] = field(default_factory=dict)
    """The notebook's own, in a worker that is forked from it; others map them themselves."""


def run_worker(
    ends: messaging.WorkerEnds,
    parent: int,
    *,
    is_fork: bool = False,
    forked_call: WorkerCall | None = None,
) -> NoReturn:
    """Do what the notebook asks for, and leave; a fork of it may have its call in memory."""
    exit_status = 1
    try:
        _set_up_worker(ends, parent)
        if is_fork:
            # Accelerate's forked state says that this process is the only one.
            training_libraries.forget_accelerate()
        channel = messaging.Channel.from_fd(ends.channel)
        channel.send(messaging.Word.ALIVE)
        if is_fork:
            # Shared after the fork: training would change the notebook's models at once.
            arena.make_arenas_private()
        assignment, descriptors = channel.receive()
        # By name, because this module must not import the pool.
        module, _, function = assignment.handler.partition(":")
        handler = getattr(importlib.import_module(module), function)
        handler(channel, assignment, descriptors, forked_call)
        exit_status = 0
    # The notebook has ended this launch.
    except EOFError:
        exit_status = 0
    except BaseException:  # there is no caller to raise to
        sys.excepthook(*sys.exc_info())
    finally:
        # This process ends whatever is raised here, and `os._exit` below must be reached.
        with contextlib.suppress(Exception):
            sharded_tensors.remove_process_files()
        # Only now: until it was let leave, other ranks may have needed what ends here.
        with contextlib.suppress(BaseException):
            reaping.run_exit_functions(time_limits.EXIT_S, exit_status)
        # What is missed here becomes the template's child, and the template ends it.
        with contextlib.suppress(Exception):
            if left := reaping.end_descendants():
                sys.stderr.write(
                    "nbaccel: ended what this rank had started and left running: "
                    f"{', '.join(left)}. Start what is to outlive the workers from the notebook.\n"
                )
        flush_streams()
        os._exit(exit_status)


def _set_up_worker(ends: messaging.WorkerEnds, parent: int) -> None:
    """Set up session, streams and signals of a new process, before anything can print or hang."""
    # Ctrl-C in a terminal must reach the notebook only, and the group can then be killed as one.
    os.setsid()
    reaping.end_with_parent()
    # The parent may have died before the line above took effect: no signal would ever come.
    if os.getppid() != parent:
        os._exit(1)
    reaping.adopt_orphans()
    reaping.take_name(reaping.WORKER_NAME)
    reaping.forget_inherited()
    # The wakeup descriptor of a forked kernel belongs to the notebook's event loop.
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    # So that reading standard input ends at once instead of taking the notebook's.
    null_device = os.open(os.devnull, os.O_RDONLY)
    for number, descriptor in enumerate((null_device, ends.stdout, ends.stderr)):
        os.dup2(descriptor, number)
        os.close(descriptor)
    # New objects: those of a forked kernel are ipykernel's, which send to the browser.
    sys.stdin = sys.__stdin__ = open(0, closefd=False)  # type: ignore[misc]
    for number, name in ((1, "stdout"), (2, "stderr")):
        # Some libraries print to the "real" streams.
        names = (name, f"__{name}__")
        before = [getattr(sys, each) for each in names]
        # A kernel prints what is no Unicode, as some names of files are, too.
        stream = open(
            number, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False
        )
        for each in names:
            setattr(sys, each, stream)
        worker_output.move_handlers(before, stream)
    sys.excepthook = sys.__excepthook__
    for name in ("ps1", "ps2", "ps3"):
        # Nobody types here, though it looks so in a kernel: Lightning would refuse to run.
        vars(sys).pop(name, None)
    faulthandler.enable(file=ends.stack, all_threads=True)
    faulthandler.register(messaging.STACK_SIGNAL, file=ends.stack, all_threads=True)


@dataclass(frozen=True, kw_only=True)
class WorkerContext:
    """Facts about a worker that is set up: place, device, store."""

    assignment: messaging.WorkerAssignment
    place: Topology
    hardware: Device
    device: str  # what torch calls it: `cpu`, `cuda:1`
    store: Any  # the rendezvous store, in the worker that serves it
    settings: LibrarySettings = field(default_factory=LibrarySettings)
    changes: AppliedChanges = field(default_factory=AppliedChanges)

    def receive_modules(self, staging_files: Mapping[str, int] | None = None) -> ReceivedModules:
        """What will have the notebook's modules in this worker."""
        return ReceivedModules(
            rank=self.assignment.staging_rank,
            num_nodes=self.assignment.num_notebooks,
            share_back=self.assignment.share_back,
            staging_files=staging_files,
        )

    def begin_reports(self, channel: messaging.Channel) -> None:
        """Report to the notebook how far the call that begins is."""
        has_panel = self.assignment.has_cells and env.flag("NBACCEL_DASHBOARD") is not False
        loop_watch.begin(channel, self.hardware, self.device, shows_bars=has_panel)

        def leave(leftover: atomic.LeftoverFolders, is_there: bool) -> None:
            # The notebook is gone, so there is no reader.
            with contextlib.suppress(OSError):
                channel.send(messaging.Leaves(leftover, is_there))

        atomic.listen_for_leftovers(leave)

    def go_to(self, folder: str) -> None:
        """Work in a folder of the notebook; on another host only if it is there, too."""
        try:
            os.chdir(folder)
        except OSError as error:
            if not self.assignment.on_other_host:
                raise
            if self.place.local_rank == 0:
                sys.stderr.write(
                    f"nbaccel: the workers on {socket.gethostname()} work in {os.getcwd()}: "
                    f"{folder} is not there ({error.strerror}).\n"
                )


def set_up_process(assignment: messaging.WorkerAssignment, descriptors: list[int]) -> WorkerContext:
    """Take on an assignment: surroundings, device, process groups. Once per worker."""
    place = assignment.place
    # Before the device: its libraries read variables such as CUDA_VISIBLE_DEVICES when they start.
    if assignment.on_other_host:
        # Laid over those of this host.
        env.update(dict(assignment.environment))
        # Behind the host's own: it may have another Python's packages under the same path.
        sys.path += [
            entry
            for entry in assignment.import_path
            if os.path.exists(entry) and entry not in sys.path
        ]
    else:
        env.replace_all(assignment.environment)
        os.chdir(assignment.working_directory)
        # In place, because other modules hold a reference to this list.
        sys.path[:] = assignment.import_path
    torch.set_num_threads(assignment.threads)
    # A fork of the notebook's process pays for it as said at `_found_libraries`: only where someone
    # computes with such libraries (scikit-learn), who has this loaded.
    if not _found_libraries and "threadpoolctl" in sys.modules:
        find_libraries()
    tell_libraries(assignment.threads)
    hardware = registry.device(assignment.device)
    hardware.enter_worker(place.local_rank)
    for prepare in registry.worker_preparations():
        prepare(assignment.device)
    # Before any user code can create a process group.
    torch_private.keep_process_groups()
    _refuse_questions(place.rank)
    pickling.receive_names()
    # Lets `multiprocessing` send the notebook's classes and functions.
    ForkingPickler.reducer_override = _reduce  # type: ignore[method-assign, assignment]
    training_libraries.enter_worker(place.rank, metrics_reporter.drawing_whole_bar)
    context = WorkerContext(
        assignment=assignment,
        place=place,
        hardware=hardware,
        device=str(hardware.torch_device(place.local_rank)),
        store=rendezvous.serve_store(place, descriptors.pop()) if assignment.serves_store else None,
    )
    if assignment.on_other_host:
        context.go_to(assignment.working_directory)
    return context


def serve_call(
    channel: messaging.Channel,
    assignment: messaging.WorkerAssignment,
    descriptors: list[int],
    forked_call: WorkerCall | None,
) -> None:
    """Make one call as a launch's worker, and stay until the notebook lets it leave."""
    task, job_descriptors = channel.receive()
    try:
        context = set_up_process(assignment, descriptors)
        worker_output.forward_displays(channel.send_in_turn)
        context.begin_reports(channel)
        numbers = itertools.count()
        rendezvous.join_store(context.place, lambda: f"group_{next(numbers)}")
    except BaseException as error:  # the notebook waits for a report, whatever it is
        report(channel, error, assignment.place.rank)
    else:

        def interrupt(_number: int, _frame: Any) -> NoReturn:
            # One packet per message, so this cannot tear a message that the interrupted code sends.
            channel.send(messaging.Word.INTERRUPTING)
            raise KeyboardInterrupt

        # After the set-up: an interrupt during it is a failure, and not the unwinding of user code.
        signal.signal(signal.SIGINT, interrupt)
        stop = step_stop.AgreedStop(channel, listens=True)
        run_job(channel, context, task.body, job_descriptors, stop, forked_call)
    # This worker may serve the store, which others need. A stop may come too late to be read.
    while channel.receive()[0] is not messaging.Word.LEAVE:
        continue


def run_job(
    channel: messaging.Channel,
    context: WorkerContext,
    job: messaging.Job,
    descriptors: Sequence[int],
    stop: step_stop.AgreedStop,
    forked_call: WorkerCall | None = None,
) -> None:
    """Make the call of one job, and hand over what it returns or raises.

    Descriptors: arenas, staging files, the payload's.
    """
    rank = context.place.rank
    by_name = forked_call is not None
    try:
        weight_report = None
        with contextlib.ExitStack() as clean_up:
            keep_lines(job.sources)
            call, received_modules = _open_job(context, job, list(descriptors), forked_call)
            context.changes.follow(call.changes)
            # After unpickling, which may run user code that draws random numbers.
            restore_random_states(job.random_states)
            # After unpickling, which imports libraries that configure their own loggers.
            context.settings.follow(job.settings)
            for shared in call.modules:
                received_modules.add(shared.path, shared)
            clean_up.callback(precision_check.watch(context.assignment.mixed_precision))
            channel.send(messaging.Word.STARTED)
            value = _call(call, stop)
            worker_output.show_figures()
            flush_streams()
            if context.assignment.share_back:
                weight_report = received_modules.write_all()
    except BaseException as error:  # an interrupt too: the notebook waits for a report
        report(channel, error, rank, by_name=by_name)
    else:
        # The work is done: an interrupt must not lose the result.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        packed, fds, unsendable = _pack_result(value, rank, by_name=by_name)
        returned = messaging.Returned(packed, unsendable, weight_report, stop.is_stopped)
        with memfd.closing_files(*fds):
            channel.send(returned, fds)
        # Only now: a rank that fails by it must find that this one has returned.
        rendezvous.say_returned(rank)
    stop.close()


def _open_job(
    context: WorkerContext, job: messaging.Job, files: list[int], forked_call: WorkerCall | None
) -> tuple[WorkerCall, ReceivedModules]:
    payload = job.payload
    payload_fd = files.pop() if payload is not None else -1
    # Not strict: where nothing is brought home, no staging files come.
    staging = dict(zip([key for key, _ in job.arenas], files[len(job.arenas) :], strict=False))
    received_modules = context.receive_modules(staging)
    inherited = forked_call.arenas if forked_call is not None else {}
    for (key, num_bytes), fd in zip(job.arenas, files, strict=False):
        received_modules.open_arena(key, num_bytes, fd, inherited.get(key))
    if forked_call is not None:
        return forked_call, received_modules
    if payload is None:
        raise InternalError(
            f"worker {context.place.rank} got no payload, only {len(job.arenas)} arenas: "
            "there is nothing to run. Please report this."
        )
    mappings = received_modules.mappings
    call = pickling.unpack(payload, payload_fd, mappings, device=context.device)
    return call, received_modules


def _pack_result(
    value: Any, rank: int, *, by_name: bool
) -> tuple[memfd.PackedObject | None, list[int], str | None]:
    """What a function has returned, with its descriptor, or why it cannot be sent."""
    try:
        packed, fd = pickling.pack(value, pickling.Sender(by_name=by_name))
    except BaseException as error:  # the user's own __reduce__ may raise anything
        reason = shorten_text(f"{type(error).__name__}: {error}", 2_000)
        unsendable = (
            f"rank {rank} returned a {kind_name(type(value))}, which cannot be sent to the "
            f"notebook ({reason})"
        )
        return None, [], unsendable
    return packed, [fd], None


def _call(call: WorkerCall, stop: step_stop.AgreedStop) -> Any:
    """Call the function; one that is stopped where a step ends has no value."""
    loop_watch.watch_boundaries(loop_watch.StepBoundaries(stop.at_boundary))
    try:
        return _looked_up(call.function)(*call.args)
    except (StoppedAtStep, SystemExit) as error:
        # sys.exit() is how a script ends well, and Lightning makes SystemExit of an interrupt.
        ends_well = isinstance(error, SystemExit) and error.code in (None, 0)
        if not (ends_well or stop.is_stopped):
            raise
        return None
    finally:
        loop_watch.watch_boundaries(None)


def _looked_up(function: Callable[..., Any]) -> Callable[..., Any]:
    """A method as its class has it now, where that was wrapped after the notebook looked it up."""
    if isinstance(function, MethodType):
        method = getattr(function.__self__, function.__name__, None)
        if callable(method) and getattr(method, "__wrapped__", None) is function.__func__:
            return method  # type: ignore[no-any-return]
    return function


def report(
    channel: messaging.Channel, error: BaseException, rank: int, *, by_name: bool = False
) -> None:
    """Report an exception: its description always, its parts if they can be pickled."""
    # A second interrupt must not lose the report of the first.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Taken first: the earliest failure is the cause, and packing below takes time.
    record = failure.FailureRecord.of_error(rank, error, failure_time=time.monotonic())
    for part in failure.take_error(error).in_reserve():
        try:
            packed, fd = pickling.pack(part, pickling.Sender(by_name=by_name))
        # BaseException: the user's own __reduce__ may raise anything.
        except BaseException:  # noqa: S112
            continue
        with memfd.closing_files(fd):
            channel.send(messaging.Failed(record, packed), [fd])
        break
    else:
        # Without the exception itself: the record describes it.
        channel.send(messaging.Failed(record, None))
    # Not before: flushing may have to wait until the notebook has read what was printed.
    flush_streams()


def _refuse_questions(rank: int) -> None:
    def refuse(prompt: object = "") -> NoReturn:
        raise InputRefused(
            f"input({str(prompt)!r}) in worker {rank} has no answer: workers have no keyboard. "
            "Ask in an ordinary cell before, and hand the answer over."
        )

    def no_debugger(*args: Any, **kwargs: Any) -> NoReturn:
        raise InputRefused(
            f"breakpoint() in worker {rank} has no keyboard to listen to. Debug in the "
            "notebook itself: a launch with num_processes=1, or an ordinary cell."
        )

    # Standard input is the null device, where input() would raise an EOFError without a reason.
    builtins.input = refuse
    sys.breakpointhook = no_debugger


def flush_streams() -> None:
    """Send what has been printed, and reported of the training, so far."""
    metrics_reporter.flush()
    worker_output.flush_streams()


def _reduce(_pickler: ForkingPickler, value: Any) -> Any:
    if not isinstance(value, (type, FunctionType)) or value.__module__ != "__main__":
        return NotImplemented
    is_found = getattr(sys.modules["__main__"], value.__qualname__, None) is value
    # What has arrived here is not in the `__main__` of a process that starts anew.
    if is_found and not pickling.has_received(value):
        return NotImplemented
    # cloudpickle returns the class it has made here or before the fork, so `isinstance` holds.
    return cloudpickle.loads, (pickling.dumps_with_lines(value),)


# Libraries read their variables when they are loaded, which was not in the worker: each is told, in
# the template if it knows the number. A process that tells OpenBLAS, which numpy and scipy bring,
# anew after a fork gets threads back for all cores, which wait in a busy loop for work that may
# never come. The template's next fork ends them again, and its worker inherits the number.

_found_libraries: list[Any] = []


def find_libraries() -> None:
    """Look for loaded libraries that compute with threads, for all workers forked afterwards."""
    from threadpoolctl import ThreadpoolController

    _found_libraries[:] = ThreadpoolController().lib_controllers


def tell_libraries(num_threads: int) -> None:
    """Let the libraries found here compute with so many threads: also what is forked later."""
    for library in _found_libraries:
        if library.num_threads != num_threads:
            library.set_num_threads(num_threads)
