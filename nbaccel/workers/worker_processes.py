"""Worker processes: who starts them, what is known of each, what they need and are told first.

A worker is forked from the template, or from the notebook: then it has everything that is there,
and nothing is pickled. What makes such a fork unsafe is found in `fork_safety`; what can be cured
is, just before forking.
"""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import enum
import errno
import faulthandler
import gc
import importlib
import os
import signal
import socket
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nbaccel.base import env, processes
from nbaccel.base.atomic import LeftoverFolders
from nbaccel.base.errors import PlatformUnsupported, StartupFailed, UnsafeMoment
from nbaccel.base.frames import Frame
from nbaccel.base.processes import ProcessUse, explain_kill, process_use
from nbaccel.plan import Plan, registry
from nbaccel.plan.inventory import Inventory
from nbaccel.plan.topology import Topology, run_variables, shared_memory_variables
from nbaccel.transfer import memfd
from nbaccel.workers import failure, fork_safety, messaging, template, time_limits
from nbaccel.workers.failure import FailureRecord
from nbaccel.workers.messaging import STACK_SIGNAL, Channel, Ended, WorkerAssignment, WorkerEnds

if TYPE_CHECKING:
    from nbaccel.workers.worker import WorkerCall


@dataclass(frozen=True)
class HostShare:
    """The workers of a launch that run on one host."""

    name: str
    num_workers: int  # how many; their ranks follow those of the host before
    inventory: Inventory
    devices: tuple[int, ...] = ()  # numbers of the devices that its workers see; empty: all


class Starter(abc.ABC):
    """Starts workers and learns of their end. What is not abstract is that of this machine."""

    shares: Sequence[HostShare] = ()  # the hosts, in the order of ranks; empty for this machine

    @abc.abstractmethod
    def start(self, ends: WorkerEnds) -> int:
        """Start a worker that owns these ends, in the order of ranks; returns its process id."""

    @abc.abstractmethod
    def end_of(self, pid: int) -> Ended | None:
        """How this worker has ended, reaped and told once; None if it still runs."""

    @abc.abstractmethod
    def sentinel(self, pid: int) -> int:
        """A new descriptor, readable once this worker may have ended; the caller closes it."""

    def channel_to(self, pid: int, channel: Channel) -> Channel:
        """What the notebook sends a worker by, given its end of the channel."""
        del pid
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
        self.ours: list[int] = []  # the notebook's own ends of all connections: a child closes them
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
        faulthandler.register(STACK_SIGNAL, file=ends.stack, all_threads=True)
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
                faulthandler.unregister(STACK_SIGNAL)
        if pid == 0:
            for descriptor in self.ours:
                os.close(descriptor)
            worker.run_worker(ends, parent, is_fork=True, forked_call=self._call)
        return pid

    def end_of(self, pid: int) -> Ended | None:
        """How this child has ended; None if it still runs."""
        return reap(pid)

    def sentinel(self, pid: int) -> int:
        """A pidfd, which stands for the process also when it has ended."""
        return os.pidfd_open(pid)


def reap(pid: int) -> Ended | None:
    """Collect a child that has ended, with everything it started; None if it still runs."""
    try:
        result = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        # Other code of this process has waited for it: its status is lost.
        return Ended(pid, -signal.SIGKILL, 0)
    if result is None:
        return None
    # First, while the dead leader holds the group's number: its children would live on otherwise.
    end_group(pid)
    _, status, usage = os.wait4(pid, 0)
    return Ended(pid, os.waitstatus_to_exitcode(status), usage.ru_maxrss * 1024)


def end_group(pid: int) -> None:
    """Kill a worker and everything it started that has not left its process group."""
    # The process too: one that was just forked may not have made its group yet.
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(pid, signal.SIGKILL)


def dispose(fds: Sequence[int]) -> None:
    """Close descriptors of big files; in the template process if there is one."""
    ready = [process for process in template.running() if process.ready]
    try:
        # The template ends, or no descriptor is left for the copy: they are closed below.
        with contextlib.suppress(OSError):
            if ready and fds:
                Channel(ready[0].socket).send(messaging.Word.DISPOSE, fds)
    finally:
        memfd.close_all(fds)


class TemplateStarter(Starter):
    """Starts workers by asking a template process to fork."""

    def __init__(
        self, device: str, *, threads: int = 0, say: Callable[[str], None] = lambda _: None
    ) -> None:
        self._template = template.template_for(device)
        self._threads = threads
        self._say = say
        self._reports: dict[int, Channel] = {}  # worker → what the template reports its end by
        self._connect()

    def start(self, ends: WorkerEnds) -> int:
        """Have a worker forked that owns these ends; returns its process id."""
        try:
            return self._fork(ends)
        except StartupFailed:
            # It was killed a moment ago: nothing is lost as long as it has no workers.
            if self._reports:
                raise
            self.close()
            self._connect()
            return self._fork(ends)

    def _connect(self) -> None:
        self._process = self._template.wait(self._say)
        self._process.users += 1
        # Someone may have stopped it (SIGSTOP).
        self._process.let_continue()

    def _fork(self, ends: WorkerEnds) -> int:
        report, its_end = Channel.pair()
        with contextlib.ExitStack() as undo:
            undo.callback(report.close)
            try:
                with contextlib.closing(its_end):
                    fds = [*ends, its_end.fileno()]
                    Channel(self._process.socket).send(messaging.Fork(self._threads), fds)
                if not messaging.wait([report.fileno()], time_limits.FORK_S):
                    self._template.drop(self._process)
                    raise template.no_answer(time_limits.FORK_S)
                pid, _ = report.receive()
            except (OSError, EOFError) as error:
                lines = self._process.explain_end()
                self._template.drop(self._process)
                raise StartupFailed("\n".join(lines)) from error
            self._reports[pid] = report
            undo.pop_all()
        return int(pid)

    def end_of(self, pid: int) -> Ended | None:
        """How this worker has ended, perhaps with the template; None if it still runs."""
        report = self._reports[pid]
        if not messaging.wait([report.fileno()]):
            return None
        self._reports.pop(pid)
        with contextlib.closing(report):
            try:
                ended, _ = report.receive()
            except EOFError:
                because, *_, remedy = self._process.explain_end()
                self._template.drop(self._process)
                ended = Ended(pid, self._process.status or 0, 0, because, remedy)
        return ended  # type: ignore[no-any-return]

    def sentinel(self, pid: int) -> int:
        """A descriptor that can be read once the template has reported the worker's end."""
        return os.dup(self._reports[pid].fileno())

    def close(self) -> None:
        """No more is asked of the template, which stays."""
        for report in self._reports.values():
            report.close()
        self._reports.clear()
        self._process.users -= 1
        self._process.end_unless_used()


_CRASH_HEADING = "Fatal Python error"  # how faulthandler begins a report of a crash


class HandleState(enum.Enum):
    """How far a worker has come. In a pool it goes back to RUNNING with each call."""

    FORKED = "forked; has sent no message yet"
    ALIVE = "runs Python and listens to signals; unpacks its job"
    RUNNING = "has called the user's function"
    RETURNED = "has handed over its result; its weights are in the staging files, or in its memory"
    FAILED = "has handed over its exception"
    GONE = "has ended and been reaped"


@dataclass(kw_only=True, eq=False)
class WorkerHandle:
    """A worker's connections, and everything known of it and of its current call."""

    rank: int
    channel: Channel
    pipes: dict[int, str]  # the notebook's reading ends → `stdout`, `stderr` or `stack`
    pid: int
    sentinel: int  # descriptor that can be read once the process may have ended
    starter: Starter
    stays: bool  # it is a pool's, whose second thread listens while a cell runs
    state: HandleState = HandleState.FORKED
    forked_at: float = field(default_factory=time.monotonic)
    since: float = field(default_factory=time.monotonic)
    returned: messaging.Returned | None = None
    failed: messaging.Failed | None = None
    handed_fds: list[int] = field(default_factory=list)  # what came along with its answer
    record: FailureRecord | None = None
    whereabouts: messaging.Whereabouts | None = None  # a pool's worker's latest answer
    stack_text: str = ""  # what faulthandler has written since it was last read
    hung_up: bool = False  # its end of the channel is closed, or it is gone: no further messages
    leftovers: set[LeftoverFolders] = field(default_factory=set)
    is_stopped: bool = False  # by the notebook: how it ends says nothing about user code

    @property
    def has_ended(self) -> bool:
        """Whether it is gone and reaped."""
        return self.state is HandleState.GONE

    @property
    def is_busy(self) -> bool:
        """Whether its function may still be running."""
        return self.state in (HandleState.FORKED, HandleState.ALIVE, HandleState.RUNNING)

    @property
    def stack(self) -> tuple[Frame, ...]:
        """Its main thread's stack by its latest answer, innermost call first."""
        if self.whereabouts is not None:
            return self.whereabouts.stack
        return failure.parse_stack(self.stack_text)

    @property
    def has_crashed(self) -> bool:
        """Whether faulthandler has written why it dies."""
        return _CRASH_HEADING in self.stack_text

    def begin_call(self, *, takes_part: bool) -> None:
        """A call begins, and what is known of the last one is dropped."""
        self.take([])
        self.returned = self.failed = self.record = None
        if self.whereabouts is not None:
            # A late answer to the last call would be taken for the place in this one.
            self.whereabouts = dataclasses.replace(self.whereabouts, stack=())
        self.is_stopped = False
        if takes_part:
            self.since = time.monotonic()
            # One that has not reported stays FORKED, so the limit for its first message holds.
            if self.state is not HandleState.FORKED and not self.has_ended:
                self.state = HandleState.RUNNING

    def take(self, descriptors: list[int]) -> None:
        """It has handed something over."""
        memfd.close_all(self.handed_fds)
        self.handed_fds = descriptors

    def finish_call(self) -> None:
        """Its call has ended; one that has handed over nothing has no value."""
        self.state = HandleState.RETURNED if self.failed is None else HandleState.FAILED
        if self.failed is None and self.returned is None:
            self.returned = messaging.Returned()
        self.since = time.monotonic()

    def end(self, record: FailureRecord | None = None) -> None:
        """It is gone and reaped."""
        self.state = HandleState.GONE
        self.record = record or self.record

    def record_of_death(self, ended: messaging.Ended, oom_kills: int) -> FailureRecord:
        """The record of it if it has just ended by itself."""
        _, heading, dump = self.stack_text.rpartition(_CRASH_HEADING)
        return FailureRecord(
            rank=self.rank,
            time=time.monotonic(),
            exit_status=ended.status,
            stack=failure.parse_stack(dump) if heading else (),
            max_rss_bytes=ended.max_rss_bytes,
            evidence=explain_kill(ended.status, oom_kills),
            doing=f"ended: {failure.as_clause(ended.because)}" if ended.because else "",
            remedy=ended.remedy,
        )

    def record_of_stop(self) -> FailureRecord:
        """The record of it if it did nothing wrong, and was stopped for something else."""
        had_started = self.stays or bool(self.stack_text)
        doing = f"was {failure.RankActivity.of_stack(self.stack)} when nbaccel stopped it"
        return FailureRecord(
            rank=self.rank,
            # Never the first failure: it was stopped because of another one.
            time=float("inf"),
            doing=doing if had_started else "had not started",
            stack=self.stack,
        )

    def tell(self, message: Any) -> None:
        """Send it a message; it may have ended, which its sentinel says."""
        with contextlib.suppress(OSError):
            self.channel.send(message)

    def ask_where(self) -> bool:
        """Ask where it is, or let faulthandler write it; returns whether it can answer."""
        if self.stays and self.state is not HandleState.FORKED:
            self.tell(messaging.Word.ASK_WHEREABOUTS)
            return True
        # One that does not handle the signal would be killed by it. A fork does from its start.
        can_answer = isinstance(self.starter, ForkStarter) or self.state is not HandleState.FORKED
        if can_answer:
            self.starter.signal(self.pid, STACK_SIGNAL)
        return can_answer

    def interrupt(self) -> None:
        """Let it raise KeyboardInterrupt; one that was stopped (SIGSTOP) continues."""
        self.is_stopped = True
        # In this order: a stopped process handles the pending signal once it continues.
        self.starter.signal(self.pid, signal.SIGINT)
        self.starter.signal(self.pid, signal.SIGCONT)

    def terminate(self) -> None:
        """Ask it to end, and do not wait for `finally` blocks."""
        self.is_stopped = True
        self.starter.signal(self.pid, signal.SIGTERM)

    def kill(self) -> None:
        """End it, with everything it has started that has not left its process group."""
        self.is_stopped = True
        self.starter.kill(self.pid)

    def let_exit(self) -> None:
        """Let it exit: its work is over."""
        self.tell(messaging.Word.LEAVE)
        # A stopped process (SIGSTOP) would not read the message.
        self.starter.signal(self.pid, signal.SIGCONT)

    def close(self) -> None:
        """Close every descriptor that is left."""
        self.channel.close()
        memfd.close_all([self.sentinel, *self.pipes])
        self.pipes.clear()
        self.take([])


def connect() -> tuple[Channel, dict[int, str], WorkerEnds]:
    """A worker's connections: the notebook's ends, and the worker's, which the caller closes."""
    import fcntl  # Windows has none, where nbaccel can be imported, too

    channel, worker_end = Channel.pair()
    pipes: dict[int, str] = {}
    worker_ends = {}
    for name in ("stdout", "stderr", "stack"):
        read_end, worker_ends[name] = os.pipe()
        # The notebook reads until a pipe is empty; a blocking read would stop all other work.
        os.set_blocking(read_end, False)
        # So that one that prints a lot seldom waits. Where the user's quota is used up: 64 KiB.
        with contextlib.suppress(OSError):
            fcntl.fcntl(read_end, fcntl.F_SETPIPE_SZ, 1 << 20)
        pipes[read_end] = name
    return channel, pipes, WorkerEnds(channel=worker_end.detach(), **worker_ends)


# ------------------------------------------------------------------------- what they need

_CONNECT_S = 2.0
_DESCRIPTORS_OF_NOTEBOOK = 8  # for memory files, the rendezvous store and the template process
_DESCRIPTORS_OF_A_WORKER = 6  # its channel, three pipes, and twice what tells of its end


def check_requirements(plan: Plan) -> Plan:
    """The plan as it can be carried out here."""
    if missing := _missing_requirements(plan.num_processes):
        raise PlatformUnsupported(
            f"Several workers need {missing}. Use num_processes=1, which runs in the notebook."
        )
    if busy_reason := registry.device(plan.device).busy_reason(plan):
        raise UnsafeMoment(busy_reason)
    if plan.config.num_nodes > 1:
        return plan
    address = processes.loopback(plan.master_addr)
    if address in processes.LOOPBACK_ADDRESSES:
        _try_to_connect(address)
    return dataclasses.replace(plan, master_addr=address)


def _missing_requirements(num_workers: int) -> str:
    """What is missing, as the end of a sentence; empty if nothing is."""
    if not sys.platform.startswith("linux"):
        return f"Linux (memfd_create, pidfd_open): this is {sys.platform}"
    descriptors = _DESCRIPTORS_OF_NOTEBOOK + num_workers * _DESCRIPTORS_OF_A_WORKER
    try:
        with contextlib.ExitStack() as clean_up:
            for _ in range(descriptors):
                # Opened for real: `ulimit -n` says nothing about how many are in use.
                clean_up.callback(os.close, os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
    except OSError as error:
        if error.errno not in (errno.EMFILE, errno.ENFILE):
            raise
        return f"{descriptors} free file descriptors: {error.strerror}. Raise `ulimit -n`"
    try:
        # Tried and not only looked up: a sandbox may refuse the call that the library has.
        os.close(os.memfd_create("nbaccel-trial", os.MFD_CLOEXEC))
    except (OSError, AttributeError) as error:
        return f"memory files (memfd_create), which this system, or its sandbox, refuses: {error}"
    if not Path("/proc/self").exists():
        return "/proc, which is not mounted here (mount -t proc proc /proc)"
    return ""


def _try_to_connect(address: str) -> None:
    """See whether a process can reach another one on this machine."""
    try:
        with processes.listen(address, None) as probe_socket:
            # A real connection: a firewall may let a port be bound and drop what is sent to it.
            socket.create_connection(probe_socket.getsockname()[:2], timeout=_CONNECT_S).close()
    except OSError as error:
        raise PlatformUnsupported(
            f"Several workers meet at {address}, and nothing can be reached there: "
            f"{error.strerror or error}. Is the loopback interface down (ip link set lo up), or "
            "closed by a firewall? Or use num_processes=1, which needs no network."
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
    num_nodes: int = 1  # nodes with a notebook of their own


def places(
    plan: Plan, shares: Sequence[HostShare], meeting_place: MeetingPlace
) -> tuple[Topology, ...]:
    """The place of each worker that is started here, by rank."""
    everyone = Topology.of_hosts(
        [share.num_workers for share in shares] or [plan.num_processes] * meeting_place.num_nodes,
        master_addr=meeting_place.address,
        master_port=meeting_place.port,
    )
    first_rank = plan.num_processes * meeting_place.node_rank
    return everyone[first_rank : first_rank + plan.num_processes]


def assignments(
    plan: Plan,
    shares: Sequence[HostShare],
    worker_places: Sequence[Topology],
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
    working_directory = template.current_folder(tells=True)
    import_path = tuple(template.import_path())
    random_states = seeded_states()
    told = []
    for place, own_variables in zip(worker_places, device_variables, strict=True):
        host_plan = host_plans[place.node_rank] if shares else plan
        devices = shares[place.node_rank].devices if shares else ()
        environment: dict[str, str | None] = {
            # Accelerate and OpenMP libraries read it. First, so that the user's wins.
            "OMP_NUM_THREADS": str(host_plan.threads_per_process),
            **surroundings,
            **place.variables(
                mixed_precision=plan.config.mixed_precision,
                device=plan.device,
                environ=surroundings,
            ),
            **run_variables(plan.config),
            **({"CUDA_VISIBLE_DEVICES": ",".join(map(str, devices))} if devices else {}),
            **shared_memory_variables(place, plan.device),
            **own_variables,
        }
        assignment = WorkerAssignment(
            handler=_SERVES_CELLS if stays else _SERVES_CALL,
            place=place,
            device=plan.device,
            mixed_precision=plan.config.mixed_precision,
            share_back=plan.config.share_back,
            threads=host_plan.threads_per_process,
            environment={name: value for name, value in environment.items() if value is not None},
            working_directory=working_directory,
            import_path=import_path,
            serves_store=meeting_place.store_socket is not None and place.rank == 0,
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
