"""Starting workers, and telling each where it works: what launches and pools do alike."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from nbaccel import _catalog, env
from nbaccel.config.variables import run_variables
from nbaccel.errors import StartupFailed
from nbaccel.launch import folder, wire, worker
from nbaccel.launch.ending import kill_all
from nbaccel.launch.fork import ForkStarter
from nbaccel.launch.member import Member, State, connect
from nbaccel.launch.sharing import memory
from nbaccel.launch.starter import Starter
from nbaccel.plan import Plan
from nbaccel.topology import Topology

__all__ = ["Surroundings", "dismiss", "hire", "libraries_memory", "posts", "topologies"]


@dataclass(frozen=True)
class Surroundings:
    """What all workers take over from the notebook as it is now: looked up once."""

    environment: dict[str, str]
    working_directory: str
    import_path: tuple[str, ...]
    random_states: bytes

    @classmethod
    def here(cls, extra: Mapping[str, str]) -> Surroundings:
        """Those of this process, with some more environment variables."""
        return cls(
            env.snapshot() | dict(extra),
            folder.told_here(),
            tuple(folder.import_path()),
            worker.random_states(),
        )


def topologies(plan: Plan, listener: socket.socket | None) -> tuple[Topology, ...]:
    """The places of this node's workers, by rank.

    Args:
        plan: What was planned.
        listener: The rendezvous store's socket, where this node is the one that serves it.
    """
    return Topology.of_node(
        num_processes=plan.num_processes,
        master_port=listener.getsockname()[1] if listener else plan.port or 0,
        master_addr=plan.master_addr,
        node_rank=plan.config.node_rank,
        num_nodes=plan.config.num_nodes,
    )


def hire(starter: Starter, rank: int, members: list[Member]) -> Member:
    """Start one worker and note it at once, so that it is ended whatever comes next."""
    channel, pipes, ends = connect()
    forks_us = isinstance(starter, ForkStarter)
    with memory.closing(*ends.all()):
        if isinstance(starter, ForkStarter):
            starter.ours += [channel.fileno(), *pipes]
        pid = starter.start(ends)
    member = Member(rank=rank, channel=channel, pipes=pipes, pid=pid, tells_its_stack=forks_us)
    members.append(member)
    return member


@contextlib.contextmanager
def libraries_memory(places: Sequence[Topology]) -> Iterator[None]:
    """Remove the shared memory that libraries make in workers: what is there before, and theirs.

    Args:
        places: The workers' places; they live within the block.
    """
    _forget_memory(places)
    try:
        yield
    finally:
        _forget_memory(places)


def _forget_memory(places: Sequence[Topology]) -> None:
    for memory_of in _catalog.shared_memories():
        memory_of.remove(places)
        memory_of.remove_orphans()


def dismiss(starter: Starter, members: Sequence[Member]) -> None:
    """Kill what is left of the workers, and close all connections."""
    try:
        kill_all(starter, [m for m in members if not m.has_ended])
    except StartupFailed:  # the template has ended, and has taken them along
        for member in members:
            member.state = State.GONE
    for member in members:
        for leftover in member.leftovers:
            leftover.remove()
        member.close()


def posts(
    plan: Plan,
    places: Sequence[Topology],
    surroundings: Surroundings,
    listener: socket.socket | None,
) -> list[tuple[wire.Post, list[int]]]:
    """Each worker's post, with the descriptors that belong to it."""
    return [_post(plan, place, surroundings, listener) for place in places]


def _post(
    plan: Plan, place: Topology, surroundings: Surroundings, listener: socket.socket | None
) -> tuple[wire.Post, list[int]]:
    own = place.variables(
        mixed_precision=plan.config.mixed_precision,
        device=plan.device,
        environ=surroundings.environment,
    ) | run_variables(plan.config)
    for memory_of in _catalog.shared_memories():
        own |= memory_of.variables(place, plan.device)
    # Accelerate, and OpenMP libraries loaded later, go by this variable unless the user set it.
    defaults = {"OMP_NUM_THREADS": str(plan.threads_per_process)}
    served = listener if place.rank == 0 else None
    post = wire.Post(
        topology=place.to_json(),
        config=plan.config.to_json(),
        device=plan.device,
        mixed_precision=plan.config.mixed_precision,
        threads=plan.threads_per_process,
        environment=defaults | surroundings.environment | own,
        working_directory=surroundings.working_directory,
        import_path=surroundings.import_path,
        serves_store=served is not None,
        random_states=surroundings.random_states,
    )
    return post, [] if served is None else [served.fileno()]
