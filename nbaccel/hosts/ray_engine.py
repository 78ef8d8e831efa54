"""Hosts of a Ray cluster that the notebook is connected to.

    a placement group      one bundle per node, which reserves its devices
    a NodeActor in each    see `hosts.node_actor`

Seen in Ray 2.60: two raylets of one machine have the same address, so that nodes are told apart by
their ids.
"""

from __future__ import annotations

import logging
import socket
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from nbaccel.base import env
from nbaccel.base.errors import ConfigError, StartupFailed
from nbaccel.base.log import write_notice
from nbaccel.base.optional_packages import is_installed
from nbaccel.base.units import format_seconds
from nbaccel.config import RunConfig
from nbaccel.hosts.node_actor import start_actor
from nbaccel.hosts.own_cluster import is_connected
from nbaccel.hosts.ray_host import error_line
from nbaccel.plan.contracts.host_engine import Engine, Host, NodeCrew

_Nodes: TypeAlias = Mapping[str, Mapping[str, Any]]  # by id, as Ray tells of them
_RESOURCES = {"cpu": "CPU", "cuda": "GPU", "xpu": "GPU", "tpu": "TPU"}  # Device → what Ray calls it
_ANSWER_S = 10.0  # for the head of a cluster
_RESERVE_S = 30.0  # for other work on the cluster to end
_PLACEMENT_NOTICE_S = 3.0  # of waiting, before it is told


class RayEngine(Engine):
    """See :class:`~nbaccel.abc.Engine`. A notebook calls `ray.init` itself."""

    name = "ray"

    def __init__(self) -> None:
        self._resource = "CPU"

    def unavailable_reason(self, config: RunConfig) -> str:
        if not is_installed("ray"):
            return (
                'engine="ray" needs Ray, which is not installed. Install it with pip install '
                '"nbaccel[ray]", in the version that the cluster has.'
            )
        if not is_connected():
            return (
                'engine="ray" was asked for, and this notebook is not connected to a Ray cluster, '
                'which nbaccel does not do itself. First: import ray; ray.init(address="auto").'
            )
        return ""

    def connect(self) -> None:
        if not is_installed("ray"):  # `unavailable_reason` tells
            return
        _check_answers(env.read("RAY_ADDRESS", "") or "")
        import ray

        if ray.is_initialized():
            return
        try:
            # What workers print comes home by itself.
            ray.init(address="auto", log_to_driver=False, logging_level=logging.WARNING)
        except ConnectionError as error:
            raise ConfigError(
                f"engine='ray' found no Ray cluster from here ({error_line(error)}). Run this on a "
                "node of it, set RAY_ADDRESS to HOST:PORT of its head, or use `ray job submit`."
            ) from error

    def hosts(self, config: RunConfig) -> Sequence[Host]:
        """See :meth:`Engine.hosts`: where Ray would place so many workers now, densely packed."""
        import ray

        nodes = _living_nodes()
        self._resource = resource = _resource_of(config, nodes)
        counts = (1 if resource == "CPU" else _has(node, resource) for node in nodes.values())
        placed = _try_placement(config.num_processes or sum(counts), resource, nodes)
        own_id = str(ray.get_runtime_context().get_node_id())
        # The notebook's own node first: its ranks reach the notebook without a network.
        node_ids = sorted(placed, key=lambda node_id: (node_id != own_id, -placed[node_id]))
        names = _node_names(nodes)
        return [
            Host(name=names[one], address=str(nodes[one]["NodeManagerAddress"]), slots=placed[one])
            for one in node_ids
        ]

    def start_nodes(self, hosts: Sequence[Host]) -> NodeCrew:
        from ray.util.placement_group import placement_group, remove_placement_group

        node_ids = {name: node_id for node_id, name in _node_names(_living_nodes()).items()}
        missing = [host.name for host in hosts if host.name not in node_ids]
        if missing:
            raise StartupFailed(
                f"{', '.join(missing)} left the Ray cluster before the workers were started. Run "
                "the cell again."
            )
        bundles = [{self._resource: host.slots or 1, "CPU": host.slots or 1} for host in hosts]
        selectors = [{"ray.io/node-id": node_ids[host.name]} for host in hosts]
        group = placement_group(bundles, strategy="PACK", bundle_label_selector=selectors)
        try:
            _await_placement(group, str(bundles), _living_nodes())
        except BaseException:  # an interrupt, too, must not leave it waiting
            remove_placement_group(group)
            raise
        return RayCrew(group, hosts, bundles)


def _check_answers(address: str) -> None:
    """Refuse an address at which nothing listens: Ray tries it for minutes."""
    name, _, text = address.rpartition(":")
    if not name or not text.isdecimal():  # none, or one of another form, which Ray reads
        return
    try:
        socket.create_connection((name, int(text)), timeout=_ANSWER_S).close()
    except OSError as error:
        raise ConfigError(
            f"engine='ray' needs a Ray cluster, and nothing answers at RAY_ADDRESS={address!r} "
            f"({error}). Nothing was started. Correct the address, or start the cluster."
        ) from error


def _living_nodes() -> dict[str, dict[str, Any]]:
    import ray

    all_nodes: Any = ray.nodes  # it has no annotations
    return {node["NodeID"]: node for node in all_nodes() if node["Alive"]}


def _node_names(nodes: _Nodes) -> dict[str, str]:
    """Node's id → a name: its address, with a part of the id where two have the same."""
    addresses = {node_id: str(node["NodeManagerAddress"]) for node_id, node in nodes.items()}
    times = Counter(addresses.values())
    return {
        node_id: address if times[address] == 1 else f"{address}-{node_id[:6]}"
        for node_id, address in addresses.items()
    }


def _resource_of(config: RunConfig, nodes: _Nodes) -> str:
    if config.device == "auto":
        there = {name for node in nodes.values() for name in node["Resources"] if _has(node, name)}
        return next((name for name in ("GPU", "TPU") if name in there), "CPU")
    if config.device not in _RESOURCES:
        raise ConfigError(
            f'device={config.device!r} cannot go with engine="ray", which counts '
            f"{', '.join(sorted(set(_RESOURCES.values())))} alone. Give one of "
            f"{', '.join(_RESOURCES)}, or another engine."
        )
    return _RESOURCES[config.device]


def _has(node: Mapping[str, Any], resource: str) -> int:
    return int(node["Resources"].get(resource, 0))


def _try_placement(num_workers: int, resource: str, nodes: _Nodes) -> dict[str, int]:
    """Node → workers, as Ray's scheduler places them now. Nothing stays reserved."""
    from ray.util.placement_group import (
        placement_group,
        placement_group_table,
        remove_placement_group,
    )

    bundle = {"CPU": 1} if resource == "CPU" else {resource: 1, "CPU": 1}
    num_places = sum(
        min(_has(node, name) // amount for name, amount in bundle.items())
        for node in nodes.values()
    )
    wanted = f"{num_workers} x {bundle}"
    if num_workers > num_places:
        # Ray calls it infeasible only if a single bundle fits no node.
        raise ConfigError(_unplaced(wanted, "is more than the cluster has", nodes))
    group = placement_group([bundle] * num_workers, strategy="PACK")
    try:
        _await_placement(group, wanted, nodes)
        return Counter(placement_group_table(group)["bundles_to_node_id"].values())
    finally:
        remove_placement_group(group)


def _await_placement(group: Any, wanted: str, nodes: _Nodes) -> None:
    from ray.util.placement_group import placement_group_table

    deadline = time.monotonic() + _RESERVE_S
    was_told = False
    while not group.wait(1):
        state = placement_group_table(group)["stats"]["scheduling_state"]
        is_late = time.monotonic() > deadline
        # Ray itself would wait in silence for a node that never comes.
        if state == "INFEASIBLE" or is_late:
            late = f"was not free within {format_seconds(_RESERVE_S)}"
            problem = late if is_late else "is more than the cluster has"
            raise ConfigError(_unplaced(wanted, problem, nodes))
        if not was_told and time.monotonic() > deadline - _RESERVE_S + _PLACEMENT_NOTICE_S:
            write_notice(f"nbaccel: waiting for Ray to free {wanted}.\n")
            was_told = True


def _unplaced(wanted: str, problem: str, nodes: _Nodes) -> str:
    import ray

    available: Any = ray.available_resources  # it has no annotations
    free = available()
    counted = sorted(set(_RESOURCES.values()))
    lines = [
        f"  {name}: " + ", ".join(f"{_has(nodes[node_id], kind)} {kind}" for kind in counted)
        for node_id, name in _node_names(nodes).items()
    ]
    now = ", ".join(f"{int(free.get(kind, 0))} {kind}" for kind in counted)
    table = "\n".join([*lines, f"  free of all: {now}"])
    return (
        f"Ray cannot place the workers: {wanted} {problem}.\n{table}\nGive a smaller "
        "num_processes, add nodes, or end what else runs there."
    )


class RayCrew(NodeCrew):
    """Actors of one placement group; see :class:`NodeCrew`."""

    def __init__(self, group: Any, hosts: Sequence[Host], bundles: list[dict[str, int]]) -> None:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        self._group = group
        self.actors = {
            host.name: start_actor(
                num_cpus=bundle["CPU"],
                num_gpus=bundle.get("GPU", 0),
                resources={kind: bundle[kind] for kind in bundle if kind == "TPU"} or None,
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    placement_group=group, placement_group_bundle_index=number
                ),
            )
            for number, (host, bundle) in enumerate(zip(hosts, bundles, strict=True))
        }

    def end(self) -> None:
        import ray
        from ray.util.placement_group import remove_placement_group

        if ray.is_initialized():  # or the user has left the cluster, which ended all
            remove_placement_group(self._group)
