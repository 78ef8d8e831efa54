"""Workers that are started together and ended together: those of one launch, or of one pool."""

from __future__ import annotations

import contextlib
import dataclasses
import select
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from nbaccel.base import env, process_death
from nbaccel.base.errors import StartupFailed
from nbaccel.config.variables import run_variables
from nbaccel.plan import Plan, registry, shared_memory_files
from nbaccel.plan.topology import Topology
from nbaccel.transfer import memfd
from nbaccel.workers import messaging, time_limits, worker, working_folder
from nbaccel.workers.fork import ForkStarter
from nbaccel.workers.start_method import HostShare, Starter
from nbaccel.workers.worker_handle import WorkerHandle, connect

__all__ = ["MeetingPlace", "WorkerGroup"]


# Named, because the latter is above this module.
_SERVES_CALL = "nbaccel.workers.worker:serve_call"
_SERVES_CELLS = "nbaccel.calls.pool_worker:serve_cells"


@dataclass(frozen=True, kw_only=True)
class MeetingPlace:
    """Where the workers of all nodes meet, and which node this is.

    Attributes:
        address: Host name or address of the rendezvous store.
        port: Its TCP port.
        store_socket: What rank 0 is given to serve it: the listening socket, or one that stands for
            a socket of its own host; None where another node serves it.
        node_rank: Number of this node.
        num_nodes: Nodes with a notebook of their own.
    """

    address: str
    port: int
    store_socket: socket.socket | None
    node_rank: int = 0
    num_nodes: int = 1


class WorkerGroup:
    """The workers of one launch or one pool on this machine.

    Attributes:
        plan: What was planned.
        members: The workers that have been started, by rank.
        stays: Whether they take one task after the other, as a pool's do, or make a single call.
        oom_kills: How often the system had run out of memory before.
    """

    def __init__(
        self,
        plan: Plan,
        worker_starter: Starter,
        *,
        stays: bool = False,
        after_end: Callable[[], object] = lambda: None,
    ) -> None:
        self.plan = plan
        self.stays = stays
        self.members: list[WorkerHandle] = []
        self.oom_kills = process_death.oom_kills()
        self._starter = worker_starter
        self._on_end = contextlib.ExitStack()
        self._on_end.callback(after_end)
        # Before all others, so that it runs after them: workers are reaped through the starter.
        self._on_end.callback(worker_starter.close)

    def start(
        self,
        meeting_place: MeetingPlace,
        environment_variables: Mapping[str, str] | None = None,
    ) -> None:
        """Start all workers and tell each its place; they then wait for a task."""
        worker_places = self._places(meeting_place)
        self._on_end.enter_context(_libraries_memory(worker_places))
        # Before the first start: a failed start of one worker must end those started before it.
        self._on_end.callback(self._end_workers)
        for worker_place in worker_places:
            self._start_worker(worker_place.rank)
        worker_surroundings = _WorkerSurroundings.here(
            environment_variables or {}, is_for_other_hosts=bool(self._starter.shares)
        )
        for worker_place, handle, device_variables in zip(
            worker_places, self.members, self._device_variables(), strict=True
        ):
            fds = []
            if worker_place.rank == 0 and meeting_place.store_socket is not None:
                fds.append(meeting_place.store_socket.fileno())
            assignment = self._assignment(
                worker_place, worker_surroundings, device_variables, serves_store=bool(fds)
            )
            with contextlib.ExitStack() as sent:
                if self.stays:
                    control_end = sent.enter_context(contextlib.closing(handle.open_control()))
                    fds.append(control_end.fileno())
                # If it has died already, its sentinel says so.
                with messaging.unless_gone():
                    handle.channel.send(assignment, fds)

    def sentinels(self) -> Sequence[int]:
        """Descriptors that become readable when a worker may have ended."""
        return self._starter.sentinels()

    def collect(self) -> Sequence[messaging.Ended]:
        """Workers that have ended since the last call, reaped."""
        return self._starter.collect()

    def end(self) -> None:
        """End what is left of the workers, wait until they are reaped, close all connections."""
        self._on_end.close()

    # ---- starting

    def _places(self, meeting_place: MeetingPlace) -> tuple[Topology, ...]:
        if self._starter.shares:
            return Topology.of_hosts(
                [host_share.num_workers for host_share in self._starter.shares],
                master_addr=meeting_place.address,
                master_port=meeting_place.port,
            )
        return Topology.of_node(
            num_processes=self.plan.num_processes,
            master_port=meeting_place.port,
            master_addr=meeting_place.address,
            node_rank=meeting_place.node_rank,
            num_nodes=meeting_place.num_nodes,
        )

    def _device_variables(self) -> list[Mapping[str, str | None]]:
        """What each worker gets for its device, by rank.

        Found once: the workers of a launch have to agree on their addresses.
        """
        return [
            device_variables
            for plan in self._host_plans()
            for device_variables in _device_variables(plan)
        ]

    def _host_plans(self) -> list[Plan]:
        """The plan of each host alone."""
        return [
            dataclasses.replace(
                self.plan,
                num_processes=host_share.num_workers,
                inventory=host_share.inventory,
                threads_per_process=self._threads_on(host_share),
            )
            for host_share in self._starter.shares
        ] or [self.plan]

    def _threads_on(self, host_share: HostShare) -> int:
        threads = self.plan.config.threads_per_process
        return threads or max(1, host_share.inventory.cpu_cores // host_share.num_workers)

    def _start_worker(self, rank: int) -> WorkerHandle:
        channel, worker_pipes, worker_ends = connect()
        is_fork = isinstance(self._starter, ForkStarter)
        with memfd.closing_files(*worker_ends.all()):
            self._keep_from_children(channel.fileno(), *worker_pipes)
            process_id = self._starter.start(worker_ends)
        handle = WorkerHandle(
            rank=rank,
            channel=channel,
            pipes=worker_pipes,
            pid=process_id,
            starter=self._starter,
            # A fork has registered the signal from its start; workers of the template do so later.
            tells_its_stack=is_fork,
        )
        # At once, so that it is ended whatever happens next.
        self.members.append(handle)
        return handle

    def _keep_from_children(self, *file_descriptors: int) -> None:
        """Have a worker that is forked from the notebook close these."""
        if isinstance(self._starter, ForkStarter):
            self._starter.ours += file_descriptors

    def _assignment(
        self,
        worker_place: Topology,
        worker_surroundings: _WorkerSurroundings,
        device_variables: Mapping[str, str | None],
        *,
        serves_store: bool,
    ) -> messaging.WorkerAssignment:
        plan = self._host_plans()[worker_place.node_rank if self._starter.shares else 0]
        is_on_other_host = bool(self._starter.shares)
        own_environment = worker_place.variables(
            mixed_precision=plan.config.mixed_precision,
            device=plan.device,
            environ=worker_surroundings.environment,
        ) | run_variables(plan.config)
        if is_on_other_host:
            own_environment |= _device_choice(self._starter.shares[worker_place.node_rank])
        own_environment |= shared_memory_files.variables(worker_place, plan.device)
        # Accelerate, and OpenMP libraries loaded later, read it. First, so that the user's wins.
        default_variables = {"OMP_NUM_THREADS": str(plan.threads_per_process)}
        environment = {
            name: value
            for name, value in {
                **default_variables,
                **worker_surroundings.environment,
                **own_environment,
                **device_variables,
            }.items()
            if value is not None
        }
        return messaging.WorkerAssignment(
            handler=_SERVES_CELLS if self.stays else _SERVES_CALL,
            topology=worker_place.to_json(),
            device=plan.device,
            mixed_precision=plan.config.mixed_precision,
            share_back=plan.config.share_back,
            threads=plan.threads_per_process,
            environment=environment,
            working_directory=worker_surroundings.working_directory,
            import_path=worker_surroundings.import_path,
            serves_store=serves_store,
            random_states=worker_surroundings.random_states,
            # Every node has its own notebook, unless hosts were given to this one.
            staging_rank=worker_place.rank if is_on_other_host else worker_place.local_rank,
            num_notebooks=1 if is_on_other_host else worker_place.num_nodes,
            on_other_host=is_on_other_host,
        )

    # ---- ending

    def _end_workers(self) -> None:
        try:
            self._kill_all()
        # The template has ended and has taken its workers along; the channel cannot say more.
        except StartupFailed:
            for handle in self.members:
                handle.end()
        for handle in self.members:
            for folders in handle.leftovers:
                folders.remove()
            handle.close()

    def _kill_all(self) -> None:
        members = self._living()
        for handle in members.values():
            handle.kill()
        # With a limit: a process that hangs in a driver cannot be killed.
        self._wait_for_ends(members, time_limits.KILL_S)

    def _let_all_exit(self, limit_s: float) -> None:
        """Let workers that wait for work end by themselves, as far as they do so in time."""
        members = self._living()
        for handle in members.values():
            handle.let_exit()
        self._wait_for_ends(members, limit_s)

    def _living(self) -> dict[int, WorkerHandle]:
        return {handle.pid: handle for handle in self.members if not handle.has_ended}

    def _wait_for_ends(self, members: dict[int, WorkerHandle], limit_s: float) -> None:
        deadline = time.monotonic() + limit_s
        while members and time.monotonic() < deadline:
            select.select(list(self._starter.sentinels()), [], [], deadline - time.monotonic())
            for ended_worker in self._starter.collect():
                if ended_worker.pid in members:
                    members.pop(ended_worker.pid).end()


@dataclass(frozen=True)
class _WorkerSurroundings:
    """What all workers take over from the notebook as it is now: looked up once."""

    environment: dict[str, str]
    working_directory: str
    import_path: tuple[str, ...]
    random_states: bytes

    @classmethod
    def here(
        cls, extra_variables: Mapping[str, str], *, is_for_other_hosts: bool
    ) -> _WorkerSurroundings:
        """Those of this process, with some more environment variables."""
        environment = env.changes() if is_for_other_hosts else env.snapshot()
        return cls(
            environment | dict(extra_variables),
            working_folder.explain_here(),
            tuple(working_folder.import_path()),
            worker.seeded_states(),
        )


def _device_choice(host_share: HostShare) -> dict[str, str]:
    """What a worker on a host gets where only some of the devices there were named."""
    devices = ",".join(map(str, host_share.devices))
    return {"CUDA_VISIBLE_DEVICES": devices} if devices else {}


def _device_variables(plan: Plan) -> list[Mapping[str, str | None]]:
    """What the workers of a launch get for their device, by local rank, and for all others."""
    idle_variables: dict[str, str | None] = {}
    for device in registry.possible_devices():
        if device.name != plan.device:
            idle_variables |= device.idle_variables()
    of_workers = registry.device(plan.device).launch_variables(plan) or ({},) * plan.num_processes
    return [{**idle_variables, **variables} for variables in of_workers]


@contextlib.contextmanager
def _libraries_memory(worker_places: Sequence[Topology]) -> Iterator[None]:
    """Remove the shared memory that libraries make in workers: what is there before, and theirs."""
    _forget_memory(worker_places)
    try:
        yield
    finally:
        _forget_memory(worker_places)


def _forget_memory(worker_places: Sequence[Topology]) -> None:
    shared_memory_files.remove(worker_places)
    shared_memory_files.remove_orphans()
