"""The worker process: born by fork, from the template or from the notebook.

    channel ◄──► notebook     Job, Leave in; Alive, Started, Display, …, Returned | Failed out
    stdout, stderr ──►        pipes from birth, so that C code and subprocesses are heard too
    stack ──►                 faulthandler's dumps: on a crash, and whenever the notebook asks

It never returns into the code it was forked from: it leaves by `os._exit`, because an orderly
interpreter exit with gloo threads alive aborts or hangs now and then (torch 2.13).
"""

from __future__ import annotations

import builtins
import contextlib
import ctypes
import faulthandler
import linecache
import os
import pickle
import random
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MethodType
from typing import Any, NoReturn

import torch
from torch import nn

from nbaccel import _accelerate, _catalog, _transformers, env
from nbaccel.errors import InputRefused, InternalError
from nbaccel.launch import (
    by_value,
    display,
    failure,
    loggers,
    precision,
    process_groups,
    remains,
    rendezvous,
    reporting,
    wire,
)
from nbaccel.launch.own_process import own_process
from nbaccel.launch.reaping import adopt_orphans, end_descendants
from nbaccel.launch.sharing import arena, memory, parcel, shards
from nbaccel.launch.sharing.home import Homebound, Manifest
from nbaccel.topology import Topology
from nbaccel.units import shortened

STACK_SIGNAL = getattr(signal, "SIGRTMAX", 0) - 2  # macOS has none, and no workers either
"""Asks a worker where it is; user code is unlikely to want this one."""

_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, kw_only=True)
class Ends:
    """The worker's ends of its connections: descriptors."""

    channel: int
    stdout: int
    stderr: int
    stack: int

    def all(self) -> tuple[int, int, int, int]:
        """All four, in the order in which they travel."""
        return (self.channel, self.stdout, self.stderr, self.stack)


@dataclass(frozen=True, kw_only=True)
class Call:
    """What a worker runs, and the shared modules among the arguments."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    modules: tuple[tuple[Manifest, nn.Module], ...] = ()


@dataclass(frozen=True, kw_only=True)
class Inheritance:
    """What a worker forked from the notebook already has in memory."""

    call: Call | None = None
    """What to call; None in a pool's worker, which is told later."""
    arenas: Mapping[str, memory.Mapping] = field(default_factory=dict)
    arena_fds: Mapping[str, int] = field(default_factory=dict)


def main(ends: Ends, parent: int, inheritance: Inheritance | None = None) -> NoReturn:
    """Run one job and leave.

    Args:
        ends: This worker's ends of its connections.
        parent: Process id of whoever forked it; the worker dies with it.
        inheritance: What came with the fork, if it was from the notebook.
    """
    status = 1
    try:
        _settle_in(ends, parent)
        if inheritance is not None:
            _accelerate.forget()  # it says that the notebook is alone, and is believed here, too
        channel = wire.Channel.from_fd(ends.channel)
        channel.send(wire.Alive(time.monotonic()))
        message, fds = channel.receive()
        message.serve(channel, fds, inheritance)
        status = 0
    except EOFError:
        status = 0  # the notebook is through with this launch
    except BaseException:  # nobody is left to raise to: say it and leave
        sys.excepthook(*sys.exc_info())
    finally:
        with contextlib.suppress(Exception):  # whatever it is, this process ends
            shards.leave()
        with contextlib.suppress(Exception):  # the template ends what is left
            _end_what_it_started()
        flush()
        os._exit(status)


def _end_what_it_started() -> None:
    left = end_descendants()
    if left:
        sys.stderr.write(
            f"nbaccel: ended what this rank had started and left running: {', '.join(left)}. Start "
            "what is to outlive the workers from the notebook itself.\n"
        )


def _settle_in(ends: Ends, parent: int) -> None:
    """Become a process of its own: session, streams, signals. Before anything can print or hang."""
    os.setsid()  # the notebook decides what an interrupt does; and the group can be killed as one
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)  # the parent died before the line above took effect
    adopt_orphans()
    signal.set_wakeup_fd(-1)  # a kernel's event loop must not hear of this process's signals
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.dup2(ends.stdout, 1)
    os.dup2(ends.stderr, 2)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    for fd in (ends.stdout, ends.stderr, null):
        os.close(fd)
    sys.stdin = open(0, closefd=False)
    sys.stdout = open(1, "w", buffering=1, encoding="utf-8", closefd=False)
    sys.stderr = open(2, "w", buffering=1, encoding="utf-8", closefd=False)
    for name in ("stdin", "stdout", "stderr"):  # some libraries print to the "real" ones
        setattr(sys, f"__{name}__", getattr(sys, name))
    sys.excepthook = sys.__excepthook__
    faulthandler.enable(file=ends.stack, all_threads=True)
    faulthandler.register(STACK_SIGNAL, file=ends.stack, all_threads=True)


@dataclass(frozen=True, kw_only=True)
class Seat:
    """A worker at its post."""

    place: Topology
    device: str
    """What torch calls it: `cpu`, `cuda:1`."""
    store: Any
    """The rendezvous store, in the worker that serves it."""
    logging: loggers.Logging = field(default_factory=loggers.Logging)


def settle(post: wire.Post, fds: list[int]) -> Seat:
    """Take up a post: surroundings, device, streams, process groups. Once per worker.

    Args:
        post: The post.
        fds: Descriptors that came with it; those of the post are taken from the end.
    """
    place = Topology.from_json(post.topology)
    env.replace_all(post.environment)
    os.chdir(post.working_directory)
    sys.path[:] = post.import_path
    torch.set_num_threads(post.threads)
    device = _catalog.device(post.device)
    device.enter_worker(place.local_rank)
    _catalog.enter_worker(post.device)
    process_groups.keep()
    _refuse_questions(place.rank)
    by_value.send_notebook_classes()
    _transformers.adopt_trainers()
    store = process_groups.serve_store(place, fds.pop()) if post.serves_store else None
    return Seat(place=place, device=str(device.torch_device(place.local_rank)), store=store)


def serve_job(
    channel: wire.Channel, job: wire.Job, fds: list[int], inheritance: Inheritance | None
) -> None:
    """Run one job in a worker of its own, and stay until the notebook says so."""
    if job.post is None:
        raise InternalError(f"a job with {len(fds)} descriptors came without a post: report this")
    try:
        seat = settle(job.post, fds)
        display.forward(channel.send)
        reporting.begin(channel, seat.device)
        rendezvous.meet_here(seat.place, process_groups.counted())
    except BaseException as error:  # a device that cannot be had: the notebook is told
        report(channel, error, Topology.from_json(job.post.topology).rank)
    else:
        signal.signal(signal.SIGINT, _interrupt(channel))
        Work(channel, seat, job, fds, inheritance).run()
    channel.receive()  # Leave; until then this worker may serve the store, which slower ranks need


def _interrupt(channel: wire.Channel) -> Callable[[int, Any], NoReturn]:
    def on_interrupt(signum: int, frame: Any) -> NoReturn:
        channel.send(wire.Interrupting(time.monotonic()))
        raise KeyboardInterrupt

    return on_interrupt


class Work:
    """One job in one worker.

    Args:
        channel: To the notebook.
        seat: Where this worker works.
        job: What to call.
        fds: The job's descriptors, which are closed when it is through.
        inheritance: What came with the fork, if it was from the notebook.
    """

    def __init__(
        self,
        channel: wire.Channel,
        seat: Seat,
        job: wire.Job,
        fds: Sequence[int],
        inheritance: Inheritance | None,
    ) -> None:
        self._channel = channel
        self._job = job
        self._seat = seat
        self._rank = seat.place.rank
        self._forked_here = inheritance is not None
        keys = [key for key, _ in job.arenas]
        rest = list(fds)
        self._parcel_fd = rest.pop() if job.parcel is not None else None
        self._arena_fds, self._staging = (
            rest[: len(keys)],
            dict(zip(keys, rest[len(keys) :], strict=False)),
        )
        self._inheritance = inheritance

    def run(self) -> None:
        """Make the call and hand over what it returns or raises."""
        try:
            with contextlib.ExitStack() as stack:
                call, homebound = self._prepare(stack)
                self._channel.send(wire.Started(time.monotonic()))
                value = _call(call)
                display.show_figures()
                flush()
                home = homebound.write() if self._job.share_back else None
        except BaseException as error:  # KeyboardInterrupt too: the notebook is told of every end
            report(self._channel, error, self._rank, self._pack)
        else:
            self._hand_over(value, home)

    def _prepare(self, stack: contextlib.ExitStack) -> tuple[Call, Homebound]:
        job, place = self._job, self._seat.place
        for name, lines in job.sources.items():
            linecache.cache[name] = (sum(map(len, lines)), None, lines, name)
        call, mappings = self._open(self._seat.device)
        restore_random_states(job.random_states)
        self._seat.logging.follow(job.logging)  # after the libraries that the call has imported
        homebound = Homebound(
            rank=place.local_rank,
            modules=call.modules,
            mappings=mappings,
            staging=self._staging,
            num_nodes=place.num_nodes,
        )
        if job.share_back:
            stack.callback(homebound.watch_first_step())
        stack.callback(precision.watch(job.mixed_precision))
        return call, homebound

    def _open(self, device: str) -> tuple[Call, Mapping[str, memory.Mapping]]:
        if self._inheritance is not None and self._inheritance.call is not None:
            # What this worker answers must carry its own values, not point at the notebook's.
            arena.forget()
            for key, mapping in self._inheritance.arenas.items():
                mapping.replace(self._inheritance.arena_fds[key], private=True)
            call = self._inheritance.call
            return replace(call, function=_looked_up(call.function)), self._inheritance.arenas
        if self._job.parcel is None or self._parcel_fd is None:
            raise InternalError(
                f"worker {self._rank} got no parcel, only {len(self._arena_fds)} arenas: "
                "there is nothing to run. Please report this."
            )
        mappings = {
            key: memory.Mapping(fd, nbytes, private=True)
            for (key, nbytes), fd in zip(self._job.arenas, self._arena_fds, strict=True)
        }
        call = parcel.unpack(self._job.parcel, self._parcel_fd, mappings, device=device)
        return call, mappings

    def _hand_over(self, value: Any, home: Any) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the work is done: do not lose it now
        try:
            packed, fd = self._pack(value)
        except BaseException as error:  # the user's own __reduce__ may raise anything
            kind = type(value)
            reason = (
                f"rank {self._rank} returned a {failure.kind_name(kind)}, which cannot be "
                f"sent to the notebook ({shortened(f'{type(error).__name__}: {error}', 2_000)})"
            )
            self._channel.send(wire.Returned(time.monotonic(), None, reason, home))
            return
        with memory.closing(fd):
            self._channel.send(wire.Returned(time.monotonic(), packed, None, home), [fd])

    def _pack(self, value: Any) -> tuple[parcel.Parcel, int]:
        """Pack for the notebook; what came by fork goes back by name where it can."""
        if self._forked_here:
            try:
                return parcel.pack_plain(value, parcel.Sender.create())
            except (pickle.PicklingError, AttributeError, TypeError):
                return parcel.pack(value, parcel.Sender.create())
        return parcel.pack(value, parcel.Sender.create())


def _looked_up(function: Callable[..., Any]) -> Callable[..., Any]:
    """A method as its class has it now, where that was wrapped after the notebook looked it up."""
    if isinstance(function, MethodType):
        found = getattr(function.__self__, function.__name__, None)
        if callable(found) and getattr(found, "__wrapped__", None) is function.__func__:
            return found  # type: ignore[no-any-return]
    return function


def _pack_for_notebook(value: Any) -> tuple[parcel.Parcel, int]:
    return parcel.pack(value, parcel.Sender.create())


def report(
    channel: wire.Channel,
    error: BaseException,
    rank: int,
    pack: Callable[[Any], tuple[parcel.Parcel, int]] = _pack_for_notebook,
) -> None:
    """Tell the notebook of an exception: its description for sure, its parts if they can travel."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    now = time.monotonic()
    record = failure.Record(rank=rank, time=now, raised=failure.describe(error))
    for part in remains.take(error).in_reserve():
        try:
            packed, fd = pack(part)
        except BaseException:  # noqa: S112  (the user's own __reduce__ may raise anything)
            continue
        with memory.closing(fd):
            channel.send(wire.Failed(now, record, packed), [fd])
        break
    else:
        channel.send(wire.Failed(now, record, None))  # its description says what it was
    flush()  # not before: it may have to wait until the notebook has read what was printed


def _call(call: Call) -> Any:
    try:
        with own_process():
            return call.function(*call.args)
    except SystemExit as error:
        if error.code not in (None, 0):
            raise
        return None  # sys.exit() is how a script ends well


def _refuse_questions(rank: int) -> None:
    def refuse(prompt: object = "") -> NoReturn:
        raise InputRefused(
            f"input({str(prompt)!r}) in worker {rank} cannot be answered: workers have no keyboard"
            ", and waiting would hang for ever. Ask in an ordinary cell before, and hand the "
            "answer over."
        )

    def no_debugger(*args: Any, **kwargs: Any) -> NoReturn:
        raise InputRefused(
            f"breakpoint() in worker {rank} has no keyboard to listen to. Debug in the notebook "
            "itself: a launch with num_processes=1, or an ordinary cell."
        )

    builtins.input = refuse
    sys.breakpointhook = no_debugger


def random_states() -> bytes:
    """State of the random generators of Python, torch and (if loaded) numpy."""
    numpy = sys.modules.get("numpy")
    return pickle.dumps(
        (
            random.getstate(),
            torch.get_rng_state().numpy().tobytes(),
            numpy.random.get_state() if numpy is not None else None,
            torch.get_default_dtype(),
        )
    )


def restore_random_states(states: bytes) -> None:
    """Let this worker draw the numbers that a fork of the notebook would draw."""
    own, of_torch, of_numpy, dtype = pickle.loads(states)
    random.setstate(own)
    torch.set_rng_state(torch.frombuffer(bytearray(of_torch), dtype=torch.uint8))
    torch.set_default_dtype(dtype)
    if of_numpy is not None:
        import numpy as np

        np.random.set_state(of_numpy)


def flush() -> None:
    """Push out what has been printed, and told of the training, so far."""
    reporting.flush()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            continue  # the reader is gone, or user code closed the stream: nothing left to save
