"""What each worker is told first: its place among the others, and the notebook's surroundings."""

from __future__ import annotations

import dataclasses
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from nbaccel.base import env
from nbaccel.config.variables import run_variables
from nbaccel.plan import Plan, registry, shared_memory_files
from nbaccel.plan.topology import Topology
from nbaccel.transfer.library_settings import seeded_states
from nbaccel.workers import notebook_imports
from nbaccel.workers.messaging import WorkerAssignment
from nbaccel.workers.starters import HostShare

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
    host_plans = [_plan_of_host(plan, share) for share in shares] or [plan]
    # Found once: the workers of a launch have to agree on their addresses.
    device_variables = [one for host_plan in host_plans for one in _device_variables(host_plan)]
    surroundings = (env.changes() if shares else env.snapshot()) | dict(variables)
    surroundings["GROUP_WORLD_SIZE"] = str(meeting_place.num_nodes)
    working_directory = notebook_imports.explain_here()
    import_path = tuple(notebook_imports.import_path())
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
