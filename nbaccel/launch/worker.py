"""The worker process: born by fork, from the template or from the notebook.

    channel ◄──► notebook     Job, Leave in; Alive, Started, Display, …, Returned | Failed out
    stdout, stderr ──►        pipes from birth, so that C code and subprocesses are heard too
    stack ──►                 faulthandler's dumps: on a crash, and whenever the notebook asks

It never returns into the code it was forked from: it leaves by `os._exit`, because an orderly
interpreter exit with gloo threads alive aborts or hangs now and then (torch 2.13).
"""

from __future__ import annotations

import builtins
import ctypes
import faulthandler
import itertools
import linecache
import os
import pickle
import random
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn

from nbaccel import _catalog, env
from nbaccel.errors import InputRefused, InternalError
from nbaccel.launch import display, failure, precision, remains, wire
from nbaccel.launch.sharing import arena, memory, parcel
from nbaccel.launch.sharing.home import Homebound, Manifest
from nbaccel.topology import Topology

STACK_SIGNAL = signal.SIGRTMAX - 2
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

    call: Call
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
        channel = wire.Channel.from_fd(ends.channel)
        channel.send(wire.Alive(time.monotonic()))
        message, fds = channel.receive()
        work = _Work(channel, message, fds, inheritance)
        work.run()
        channel.receive()  # Leave
        status = 0
        del work  # until here: it serves the store, which slower ranks still need
    except EOFError:
        status = 0  # the notebook is through with this launch
    except BaseException:  # nobody is left to raise to: say it and leave
        sys.excepthook(*sys.exc_info())
    finally:
        _flush()
        os._exit(status)


def _settle_in(ends: Ends, parent: int) -> None:
    """Become a process of its own: session, streams, signals. Before anything can print or hang."""
    os.setsid()  # the notebook decides what an interrupt does; and the group can be killed as one
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)  # the parent died before the line above took effect
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


class _Work:
    """One job in one worker."""

    def __init__(
        self,
        channel: wire.Channel,
        job: wire.Job,
        fds: Sequence[int],
        inheritance: Inheritance | None,
    ) -> None:
        self._channel = channel
        self._job = job
        self._topology = Topology.from_json(job.topology)
        self._forked_here = inheritance is not None
        keys = [key for key, _ in job.arenas]
        rest = list(fds)
        self._parcel_fd = rest.pop() if job.parcel is not None else None
        self._listener = rest.pop() if job.serves_store else None
        self._arena_fds, self._staging = (
            rest[: len(keys)],
            dict(zip(keys, rest[len(keys) :], strict=False)),
        )
        self._store: Any = None
        self._inheritance = inheritance

    def run(self) -> None:
        try:
            call, homebound = self._prepare()
            self._channel.send(wire.Started(time.monotonic()))
            value = _call(call)
            _flush()
            report = homebound.write() if self._job.share_back else None
        except BaseException as error:  # KeyboardInterrupt too: the notebook is told of every end
            self._report(error)
        else:
            self._hand_over(value, report)

    def _prepare(self) -> tuple[Call, Homebound]:
        job, topology = self._job, self._topology
        env.replace_all(job.environment)
        os.chdir(job.working_directory)
        sys.path[:] = job.import_path
        for name, lines in job.sources.items():
            linecache.cache[name] = (sum(map(len, lines)), None, lines, name)
        torch.set_num_threads(job.threads)
        device = _catalog.device(job.device)
        device.enter_worker(topology.local_rank)
        display.forward(self._channel.send)
        signal.signal(signal.SIGINT, self._on_interrupt)
        _keep_groups()
        _separate_groups()
        _refuse_questions(topology.rank)
        self._serve_store()
        call, mappings = self._open(str(device.torch_device(topology.local_rank)))
        restore_random_states(job.random_states)
        homebound = Homebound(
            rank=topology.local_rank,
            modules=call.modules,
            mappings=mappings,
            staging=self._staging,
            num_nodes=topology.num_nodes,
        )
        if job.share_back:
            homebound.watch_first_step()
        precision.watch(job.mixed_precision)
        return call, homebound

    def _serve_store(self) -> None:
        """Serve the rendezvous store on the socket that the notebook bound.

        So it listens on loopback only, and no port is ever chosen first and bound later. All ranks,
        this one too, join it as clients (TORCHELASTIC_USE_AGENT_STORE).
        """
        if self._listener is not None:
            self._store = dist.TCPStore(  # type: ignore[attr-defined]
                self._topology.master_addr,
                self._topology.master_port,
                is_master=True,
                wait_for_workers=False,
                master_listen_fd=self._listener,
            )

    def _open(self, device: str) -> tuple[Call, Mapping[str, memory.Mapping]]:
        if self._inheritance is not None:
            # What this worker answers must carry its own values, not point at the notebook's.
            arena.forget()
            for key, mapping in self._inheritance.arenas.items():
                mapping.replace(self._inheritance.arena_fds[key], private=True)
            return self._inheritance.call, self._inheritance.arenas
        if self._job.parcel is None or self._parcel_fd is None:
            raise InternalError(
                f"worker {self._topology.rank} got no parcel, only {len(self._arena_fds)} arenas: "
                "there is nothing to run. Please report this."
            )
        mappings = {
            key: memory.Mapping(fd, nbytes, private=True)
            for (key, nbytes), fd in zip(self._job.arenas, self._arena_fds, strict=True)
        }
        call = parcel.unpack(self._job.parcel, self._parcel_fd, mappings, device=device)
        return call, mappings

    def _on_interrupt(self, signum: int, frame: Any) -> NoReturn:
        self._channel.send(wire.Interrupting(time.monotonic()))
        raise KeyboardInterrupt

    def _hand_over(self, value: Any, report: Any) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the work is done: do not lose it now
        try:
            packed, fd = self._pack(value)
        except BaseException as error:  # the user's own __reduce__ may raise anything
            kind = type(value)
            reason = (
                f"rank {self._topology.rank} returned a {failure.kind_name(kind)}, which cannot be "
                f"sent to the notebook ({type(error).__name__}: {error})"
            )
            self._channel.send(wire.Returned(time.monotonic(), None, reason, report))
            return
        with memory.closing(fd):
            self._channel.send(wire.Returned(time.monotonic(), packed, None, report), [fd])

    def _report(self, error: BaseException) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        now = time.monotonic()
        record = failure.Record(rank=self._topology.rank, time=now, raised=failure.describe(error))
        _flush()
        whole = remains.take(error)
        for part in (whole, whole.bare()):
            try:
                packed, fd = self._pack(part)
            except BaseException:  # noqa: S112  (the user's own __reduce__ may raise anything)
                continue
            with memory.closing(fd):
                self._channel.send(wire.Failed(now, record, packed), [fd])
            return
        self._channel.send(wire.Failed(now, record, None))  # its description says what it was

    def _pack(self, value: Any) -> tuple[parcel.Parcel, int]:
        """Pack for the notebook; what came by fork goes back by name where it can."""
        if self._forked_here:
            try:
                return parcel.pack_plain(value, parcel.Sender.create())
            except (pickle.PicklingError, AttributeError, TypeError):
                return parcel.pack(value, parcel.Sender.create())
        return parcel.pack(value, parcel.Sender.create())


def _call(call: Call) -> Any:
    try:
        return call.function(*call.args)
    except SystemExit as error:
        if error.code not in (None, 0):
            raise
        return None  # sys.exit() is how a script ends well


def _keep_groups() -> None:
    """Let no process group be destructed before this process leaves.

    ~ProcessGroupGloo joins a thread that may be waiting for the GIL to drop a finished work, while
    the destructor holds it: a deadlock, met in every fifth to thirtieth DDP run that ends by
    `destroy_process_group()` (torch 2.13; the stack is in docs/upstream.md). Shutting a group down
    works as before; only its C++ object outlives it, and this process is about to end anyway.
    """
    c10d = dist.distributed_c10d
    kept: list[Any] = []

    class Keeping(dict[Any, Any]):
        def __setitem__(self, group: Any, value: Any) -> None:
            kept.append(group)
            super().__setitem__(group, value)

    c10d._pg_map = Keeping(c10d._pg_map)


def _separate_groups() -> None:
    """Let each default process group of this worker meet under a prefix of its own.

    The store is the launch's and outlives a group. Torch uses the same keys in it for the next one,
    whose ranks then wait for addresses of the first for ever (torch 2.13, `torchrun` too).
    """
    rendezvous = sys.modules["torch.distributed.rendezvous"]
    create, count = rendezvous._create_c10d_store, itertools.count()

    def separate(*args: Any, **kwargs: Any) -> Any:
        store = create(*args, **kwargs)
        return dist.PrefixStore(f"group_{next(count)}", store)  # type: ignore[attr-defined]

    rendezvous._create_c10d_store = separate  # type: ignore[attr-defined]


def _refuse_questions(rank: int) -> None:
    def refuse(prompt: object = "") -> NoReturn:
        raise InputRefused(
            f"input({str(prompt)!r}) in worker {rank} cannot be answered: workers have no keyboard"
            ", and waiting would hang the launch. Ask in a cell before and pass the answer in "
            "args."
        )

    def no_debugger(*args: Any, **kwargs: Any) -> NoReturn:
        raise InputRefused(
            f"breakpoint() in worker {rank} has no keyboard to listen to. Debug with "
            "num_processes=1: the function then runs in the notebook itself."
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


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            continue  # the reader is gone, or user code closed the stream: nothing left to save
