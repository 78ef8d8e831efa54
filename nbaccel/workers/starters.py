"""What workers need of the system, who starts them, and what each is told first.

A worker is forked from the template, or from the notebook: then it has everything that is there,
and nothing is pickled. What makes such a fork unsafe is found in `fork_safety`; what can be cured
is, just before forking.
"""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import errno
import faulthandler
import gc
import importlib
import os
import socket
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from nbaccel.base import ports
from nbaccel.base.errors import PlatformUnsupported, StartupFailed, UnsafeMoment
from nbaccel.base.processes import ProcessUse, process_use
from nbaccel.plan import Plan, registry
from nbaccel.plan.inventory import Inventory
from nbaccel.transfer import memfd
from nbaccel.workers import fork_safety, messaging, template, time_limits
from nbaccel.workers.messaging import Ended, WorkerEnds
from nbaccel.workers.reaping import end_group, reap

if TYPE_CHECKING:
    from nbaccel.workers.worker import WorkerCall


from collections.abc import Mapping

from nbaccel.base import env
from nbaccel.config.variables import run_variables
from nbaccel.plan import shared_memory_files
from nbaccel.plan.topology import Topology
from nbaccel.workers.messaging import WorkerAssignment


@dataclass(frozen=True, kw_only=True)
class HostShare:
    """The workers of a launch that run on one host."""

    name: str
    num_workers: int
    """How many; their ranks follow those of the host before."""
    inventory: Inventory
    devices: tuple[int, ...] = ()
    """Numbers of the devices that its workers see; empty: all."""


class Starter(abc.ABC):
    """Starts workers and learns of their end. What is not abstract is that of this machine."""

    shares: Sequence[HostShare] = ()
    """The hosts that the workers run on, in the order of ranks; empty for this machine."""
    status: int | None = None
    """How the process that starts them has ended, if it is another one and did so by itself."""

    @abc.abstractmethod
    def start(self, ends: WorkerEnds) -> int:
        """Start a worker that owns these ends, in the order of ranks; returns its process id."""

    @abc.abstractmethod
    def collect(self) -> Sequence[Ended]:
        """Workers that have ended since the last call, reaped."""

    def sentinel(self, pid: int) -> int:
        """A new descriptor, readable once this worker may have ended; the caller closes it."""
        try:
            return os.pidfd_open(pid)
        except ProcessLookupError:
            # A pipe without a writer reads as ended, like the pidfd of a process that has ended.
            read_end, write_end = os.pipe()
            os.close(write_end)
            return read_end

    def channel_to(
        self, pid: int, channel: messaging.Channel, *, is_second: bool = False
    ) -> messaging.Channel:
        """What the notebook sends a worker by, given its end of a channel."""
        del pid, is_second
        return channel

    def signal(self, pid: int, number: int) -> None:
        """Send a worker a signal, unless it has ended."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)

    def kill(self, pid: int) -> None:
        """End a worker, with everything it has started that has not left its process group."""
        end_group(pid)

    def use_of(self, pid: int) -> ProcessUse | None:
        """What a worker uses; of one on another host its last answer, for this never waits."""
        return process_use(pid)

    def close(self) -> None:  # noqa: B027 - most have nothing to close
        """No more workers will be started and all have ended."""


class ForkStarter(Starter):
    """Starts workers by forking this process."""

    def __init__(self, call: WorkerCall | None = None, *, is_asked: bool = True) -> None:
        self._call = call
        self._children: set[int] = set()
        self.ours: list[int] = []
        """The notebook's own ends of all connections: a child closes them."""
        if is_asked:
            # The first optimizer of a process imports it (a second): once here, not in each worker.
            importlib.import_module("torch._dynamo")
        fork_safety.pause_pools()
        fork_safety.end_bar_monitors()

    def start(self, ends: WorkerEnds) -> int:
        """Fork a worker that owns these ends; returns its process id."""
        # Here, because it imports torch: a node's actor only asks a template.
        from nbaccel.workers import worker

        parent = os.getpid()
        for stream in (sys.stdout, sys.stderr):
            # What is still buffered would be printed by the child as well.
            stream.flush()
        # Registered before the fork, so that a child which hangs at once can still be asked where.
        faulthandler.register(messaging.STACK_SIGNAL, file=ends.stack, all_threads=True)
        # A collection in the child would write to every page it shares with this process.
        gc.freeze()
        try:
            with warnings.catch_warnings():
                # Python 3.12 warns of every fork with threads; `fork_safety` has judged these.
                warnings.simplefilter("ignore", DeprecationWarning)
                pid = os.fork()
        finally:
            # The child runs the `finally` too, and must keep both.
            if os.getpid() == parent:
                gc.unfreeze()
                faulthandler.unregister(messaging.STACK_SIGNAL)
        if pid == 0:
            for descriptor in self.ours:
                os.close(descriptor)
            worker.run_worker(ends, parent, is_fork=True, forked_call=self._call)
        self._children.add(pid)
        return pid

    def collect(self) -> Sequence[Ended]:
        """Children that have ended since the last call, reaped."""
        ended = [one for one in map(reap, self._children) if one is not None]
        self._children.difference_update(one.pid for one in ended)
        return ended


def dispose(fds: Sequence[int]) -> None:
    """Close descriptors of big files; in the template process if there is one."""
    ready = [process for process in template.running() if process.ready]
    try:
        if ready and fds:
            # OSError: the template ends, or no descriptor is left for the copy. The descriptors are
            # closed below in any case.
            with (
                contextlib.suppress(OSError),
                contextlib.closing(messaging.Channel(ready[0].socket.dup())) as channel,
            ):
                channel.send(messaging.Word.DISPOSE, fds)
    finally:
        memfd.close_all(fds)


def go_on() -> None:
    """Let template processes continue if they were stopped (SIGSTOP): they reap the workers."""
    for process in template.running():
        process.let_continue()


class TemplateStarter(Starter):
    """Starts workers by asking a template process to fork."""

    def __init__(
        self, device: str, *, threads: int = 0, say: Callable[[str], None] = lambda _: None
    ) -> None:
        self._template = template.template_for(device)
        self._threads = threads
        self._say = say
        self._pids: set[int] = set()
        self._connect()

    def start(self, ends: WorkerEnds) -> int:
        """Have a worker forked that owns these ends; returns its process id."""
        try:
            return self._fork(ends)
        except StartupFailed:
            # It was killed a moment ago: nothing is lost as long as it has no workers.
            if self._pids:
                raise
            self.close()
            self._connect()
            return self._fork(ends)

    def _connect(self) -> None:
        self._process = self._template.wait(self._say)
        # A copy of the descriptor: closing this starter must not hang up on the template.
        self._channel = messaging.Channel(self._process.socket.dup())
        self._process.use()
        # Someone may have stopped it (SIGSTOP).
        self._process.let_continue()

    def _fork(self, ends: WorkerEnds) -> int:
        # Only one starter reads at a time, and keeps what it reads of the other's workers.
        with self._process.hearing:
            try:
                self._channel.send(messaging.Fork(self._threads), ends.all())
            except OSError as error:
                raise self._gone() from error
            pid = self._forked()
            self._pids.add(pid)
            # An entry marks a worker as waited for; see `_note`.
            self._process.ended[pid] = None
        return pid

    def collect(self) -> Sequence[Ended]:
        """Workers of this starter that have ended since the last call."""
        with self._process.hearing:
            while messaging.wait([self._channel.fileno()]):
                self._note(self._next())
            reports = self._process.ended
            ended = [reports[pid] for pid in self._pids if reports[pid] is not None]
            self._forget(one.pid for one in ended)
        return ended

    def sentinel(self, pid: int) -> int:
        """A pidfd; where a sandbox forbids them, the channel by which the template reports ends."""
        try:
            return super().sentinel(pid)
        except (AttributeError, OSError):
            return os.dup(self._channel.fileno())

    def close(self) -> None:
        """Close this copy of the channel; the template stays."""
        if self._channel.fileno() >= 0:
            self._forget(tuple(self._pids))
            self._channel.close()
            self._process.release()

    def _forked(self) -> int:
        """The process id of the worker; reports of ended ones are kept for `collect`."""
        deadline = time.monotonic() + time_limits.FORK_S
        while (left_s := deadline - time.monotonic()) > 0:
            wait_s = min(left_s, template.SAY_EVERY_S)
            if not messaging.wait([self._channel.fileno()], wait_s):
                self._say("a new process")
                self._process.let_continue()  # it may have been stopped meanwhile
                continue
            message = self._next()
            if isinstance(message, messaging.Forked):
                return message.pid
            self._note(message)
        self._template.drop(self._process)
        raise template.no_answer(time_limits.FORK_S)

    def _forget(self, pids: Iterable[int]) -> None:
        for pid in pids:
            self._pids.discard(pid)
            self._process.ended.pop(pid, None)

    def _note(self, message: object) -> None:
        """Keep a report about a worker that a starter still waits for; drop any other."""
        if isinstance(message, Ended) and message.pid in self._process.ended:
            self._process.ended[message.pid] = message

    def _next(self) -> object:
        try:
            message, _ = self._channel.receive()
        except EOFError as error:
            raise self._gone() from error
        return message

    def _gone(self) -> StartupFailed:
        error = self._process.explain_end()
        self._template.drop(self._process)
        self.status = self._process.status
        return error


# ------------------------------------------------------------------------- what they need

_CONNECT_S = 2.0
_NO_DESCRIPTORS = (errno.EMFILE, errno.ENFILE)
_DESCRIPTORS_OF_NOTEBOOK = 8
"""For memory files, the rendezvous store and the template process."""
_DESCRIPTORS_OF_A_WORKER = 5
"""Its channel, three pipes, and its process."""


def check_requirements(plan: Plan, *, is_live: bool = False) -> Plan:
    """The plan as it can be carried out here."""
    missing = _missing_requirements(is_live=is_live) or _too_few_descriptors(plan.num_processes)
    if missing:
        raise PlatformUnsupported(
            f"Several workers need {missing}. Use num_processes=1, which runs in the notebook "
            "itself."
        )
    if busy_reason := registry.device(plan.device).busy_reason(plan):
        raise UnsafeMoment(busy_reason)
    if plan.config.num_nodes > 1:
        return plan
    address = ports.loopback(plan.master_addr)
    if address in ports.LOOPBACK_ADDRESSES:
        _try_to_connect(address)
    return dataclasses.replace(plan, master_addr=address)


def _missing_requirements(*, is_live: bool) -> str:
    """What is missing, as the end of a sentence; empty if nothing is."""
    if not sys.platform.startswith("linux"):
        return f"Linux (memfd_create, pidfd_open): this is {sys.platform}"
    if not hasattr(os, "memfd_create"):
        return "memory files (os.memfd_create), which this Python does not have"
    try:
        # Tried and not only looked up: a sandbox may refuse the call that the library has.
        os.close(os.memfd_create("nbaccel-trial", os.MFD_CLOEXEC))
    except OSError as error:
        if error.errno in _NO_DESCRIPTORS:
            return f"free file descriptors: {error.strerror}. Close files, or raise `ulimit -n`"
        return (
            f"memory files (memfd_create), which this system refuses: {error.strerror}. A "
            "sandbox may forbid them"
        )
    if not Path("/proc/self").exists():
        return "/proc, which is not mounted here (mount -t proc proc /proc)"
    return _no_pidfd() if is_live else ""


def _too_few_descriptors(num_workers: int) -> str:
    """The same for descriptors, of which each worker costs some."""
    descriptors = _DESCRIPTORS_OF_NOTEBOOK + num_workers * _DESCRIPTORS_OF_A_WORKER
    try:
        with contextlib.ExitStack() as clean_up:
            for _ in range(descriptors):
                # Opened for real: `ulimit -n` says nothing about how many are in use.
                clean_up.callback(os.close, os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
    except OSError as error:
        if error.errno not in _NO_DESCRIPTORS:
            raise
        return (
            f"{descriptors} free file descriptors: {error.strerror}. Raise `ulimit -n`, "
            "or close files"
        )
    return ""


def _no_pidfd() -> str:
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError) as error:
        return f"pidfd_open (Linux 5.3 and later; some sandboxes forbid it): {error}"
    return ""


def _try_to_connect(address: str) -> None:
    """See whether a process can reach another one on this machine."""
    try:
        with ports.listen(address, None) as probe_socket:
            # A real connection: a firewall may let a port be bound and drop what is sent to it.
            socket.create_connection(probe_socket.getsockname()[:2], timeout=_CONNECT_S).close()
    except OSError as error:
        raise PlatformUnsupported(
            f"Several workers meet at {address}, and nothing can be reached there: "
            f"{error.strerror or error}. The loopback interface is down, or a firewall closes "
            "it: ip link set lo up. Or use num_processes=1, which needs no network."
        ) from error


# ------------------------------------------------------------------------- what each worker is told

# Named, because the latter is above this module.
_SERVES_CALL = "nbaccel.workers.worker:serve_call"
_SERVES_CELLS = "nbaccel.calls.pool_worker:serve_cells"


@dataclass(frozen=True, kw_only=True)
class MeetingPlace:
    """The rendezvous store that the workers of all nodes meet in, and which node this is."""

    address: str
    port: int
    store_socket: socket.socket | None
    """What rank 0 is given to serve it: the listening socket, or one that stands for a socket of
    its own host; None where another node serves it."""
    node_rank: int = 0
    num_nodes: int = 1
    """Nodes with a notebook of their own."""


def places(
    plan: Plan, shares: Sequence[HostShare], meeting_place: MeetingPlace
) -> tuple[Topology, ...]:
    """The place of each worker, by rank."""
    if shares:
        return Topology.of_hosts(
            [share.num_workers for share in shares],
            master_addr=meeting_place.address,
            master_port=meeting_place.port,
        )
    return Topology.of_node(
        num_processes=plan.num_processes,
        master_port=meeting_place.port,
        master_addr=meeting_place.address,
        node_rank=meeting_place.node_rank,
        num_nodes=meeting_place.num_nodes,
    )


def assignments(
    plan: Plan,
    shares: Sequence[HostShare],
    meeting_place: MeetingPlace,
    variables: Mapping[str, str],
    *,
    stays: bool,
    has_cells: bool,
) -> list[WorkerAssignment]:
    """What each worker is told, by rank: those of a pool if it stays, else of a launch."""
    # Here, because it imports torch: a node's actor only asks a template.
    from nbaccel.transfer.library_settings import seeded_states

    host_plans = [_plan_of_host(plan, share) for share in shares] or [plan]
    # Found once: the workers of a launch have to agree on their addresses.
    device_variables = [one for host_plan in host_plans for one in _device_variables(host_plan)]
    surroundings = (env.changes() if shares else env.snapshot()) | dict(variables)
    surroundings["GROUP_WORLD_SIZE"] = str(meeting_place.num_nodes)
    working_directory = template.explain_here()
    import_path = tuple(template.import_path())
    random_states = seeded_states()
    serves_store = meeting_place.store_socket is not None
    told = []
    for place, own_variables in zip(
        places(plan, shares, meeting_place), device_variables, strict=True
    ):
        host_plan = host_plans[place.node_rank] if shares else plan
        environment = _environment(place, host_plan, surroundings)
        if shares:
            environment |= _device_choice(shares[place.node_rank])
        environment |= shared_memory_files.variables(place, plan.device) | own_variables
        assignment = WorkerAssignment(
            handler=_SERVES_CELLS if stays else _SERVES_CALL,
            topology=place.to_json(),
            device=plan.device,
            mixed_precision=plan.config.mixed_precision,
            share_back=plan.config.share_back,
            threads=host_plan.threads_per_process,
            environment={name: value for name, value in environment.items() if value is not None},
            working_directory=working_directory,
            import_path=import_path,
            serves_store=serves_store and place.rank == 0,
            random_states=random_states,
            # Every node has its own notebook, unless hosts were given to this one.
            staging_rank=place.rank if shares else place.local_rank,
            num_notebooks=1 if shares else place.num_nodes,
            has_cells=has_cells,
            on_other_host=bool(shares),
        )
        told.append(assignment)
    return told


def _plan_of_host(plan: Plan, share: HostShare) -> Plan:
    threads = plan.config.threads_per_process
    return dataclasses.replace(
        plan,
        num_processes=share.num_workers,
        inventory=share.inventory,
        threads_per_process=threads or max(1, share.inventory.cpu_cores // share.num_workers),
    )


def _device_variables(plan: Plan) -> list[dict[str, str | None]]:
    """What the workers of a host get for their device, by local rank, and for all others."""
    idle: dict[str, str | None] = {}
    for device in registry.possible_devices():
        if device.name != plan.device:
            idle |= device.idle_variables()
    of_workers = registry.device(plan.device).launch_variables(plan) or ({},) * plan.num_processes
    return [{**idle, **variables} for variables in of_workers]


def _environment(
    place: Topology, plan: Plan, surroundings: dict[str, str]
) -> dict[str, str | None]:
    own_variables = place.variables(
        mixed_precision=plan.config.mixed_precision, device=plan.device, environ=surroundings
    )
    # Accelerate, and OpenMP libraries loaded later, read it. First, so that the user's wins.
    defaults = {"OMP_NUM_THREADS": str(plan.threads_per_process)}
    return {**defaults, **surroundings, **own_variables, **run_variables(plan.config)}


def _device_choice(share: HostShare) -> dict[str, str]:
    """What a worker on a host gets where only some of the devices there were named."""
    devices = ",".join(map(str, share.devices))
    return {"CUDA_VISIBLE_DEVICES": devices} if devices else {}
