"""Settings that are right alone and wrong together, each with its remedy.

Only what holds on every machine: what depends on this one is judged by the plan.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nbaccel.config.run import RunConfig

__all__ = ["contradictions", "elastic_reason"]


def contradictions(config: RunConfig, *, ignoring: Collection[str] = ()) -> tuple[str, ...]:
    """Every contradiction between settings.

    Args:
        config: The settings.
        ignoring: Settings already found wrong: nothing is said of what involves them.

    Returns:
        One message each.
    """
    messages = (
        check(config) for names, check in _CHECKS if not any(name in ignoring for name in names)
    )
    return tuple(message for message in messages if message)


def _node_in_range(config: RunConfig) -> str:
    if config.node_rank < config.num_nodes:
        return ""
    return (
        f"node_rank must be below num_nodes: got node_rank={config.node_rank} with "
        f"num_nodes={config.num_nodes}. The other nodes would wait for a node that never comes. "
        "Number the nodes from 0, or raise num_nodes."
    )


def _nodes_need_a_count(config: RunConfig) -> str:
    if config.num_nodes == 1 or config.num_processes is not None:
        return ""
    return (
        f"num_processes cannot be left out with num_nodes={config.num_nodes}. "
        "Every node must know how many workers the others have. "
        "Give the same num_processes on every node."
    )


def _nodes_need_a_real_address(config: RunConfig) -> str:
    name, host = "master_addr", config.master_addr
    if config.rdzv_endpoint:
        name, host = "rdzv_endpoint", _host(config.rdzv_endpoint)
    if config.num_nodes == 1 or not _is_loopback(host):
        return ""
    return (
        f"{name} cannot be {host!r} with num_nodes={config.num_nodes}. "
        "On each node that address is the node itself, so they would never meet. "
        "Give the address of the first node as the others reach it."
    )


def _endpoint_has_a_port(config: RunConfig) -> str:
    port = config.rdzv_endpoint.rpartition(":")[2]
    # Only static rendezvous must know the port; other backends have one of their own.
    if not config.rdzv_endpoint or config.rdzv_backend != "static":
        return ""
    if port.isdecimal() and 1 <= int(port) <= 65535:
        return ""
    return (
        f'rdzv_endpoint must be "host:port": got {config.rdzv_endpoint!r}. '
        "Static rendezvous connects to exactly that port. Add a port from 1 to 65535."
    )


def _etcd_needs_an_endpoint(config: RunConfig) -> str:
    if not config.rdzv_backend.startswith("etcd") or config.rdzv_endpoint:
        return ""
    return (
        f"rdzv_endpoint cannot be empty with rdzv_backend={config.rdzv_backend!r}. "
        'The etcd server must be found. Give its "host:port".'
    )


def _inline_is_one(config: RunConfig) -> str:
    if config.start_method != "inline" or config.num_processes in (None, 1):
        return ""
    return (
        f'start_method="inline" cannot run num_processes={config.num_processes}. '
        "Inline means in this very process, which is one. "
        'Give num_processes=1, or start_method="auto".'
    )


def _inline_is_alone(config: RunConfig) -> str:
    limits = (("num_nodes", config.num_nodes, 1), ("max_restarts", config.max_restarts, 0))
    more = [f"{name}={value}" for name, value, most in limits if value > most]
    if config.start_method != "inline" or not more:
        return ""
    return (
        f'start_method="inline" cannot go with {" and ".join(more)}. '
        "Inline is this very process: it meets no other node and cannot be started again. "
        f'Give start_method="auto", or leave out {more[0].partition("=")[0]}.'
    )


def elastic_reason(config: RunConfig) -> str:
    """The settings that need a rendezvous in which nodes agree anew who takes part.

    A fixed set of nodes, and restarts on one node, need none: the launcher does those itself.

    Args:
        config: The settings.

    Returns:
        ``rdzv_backend='c10d'``, for example, or nothing.
    """
    if config.rdzv_backend != "static":
        return f"rdzv_backend={config.rdzv_backend!r}"
    if config.num_nodes > 1 and config.max_restarts > 0:
        return f"max_restarts={config.max_restarts} with num_nodes={config.num_nodes}"
    return ""


def _host(endpoint: str) -> str:
    host, colon, _ = endpoint.rpartition(":")
    return (host if colon else endpoint).strip("[]")


def _is_loopback(host: str) -> bool:
    name = host.strip().strip("[]").lower()
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:  # a name
        return name == "localhost" or name.startswith("localhost.")


_CHECKS: tuple[tuple[tuple[str, ...], Callable[[RunConfig], str]], ...] = (
    (("node_rank", "num_nodes"), _node_in_range),
    (("num_processes", "num_nodes"), _nodes_need_a_count),
    (("master_addr", "rdzv_endpoint", "num_nodes"), _nodes_need_a_real_address),
    (("rdzv_endpoint", "rdzv_backend"), _endpoint_has_a_port),
    (("rdzv_endpoint", "rdzv_backend"), _etcd_needs_an_endpoint),
    (("start_method", "num_processes"), _inline_is_one),
    (("start_method", "num_nodes", "max_restarts"), _inline_is_alone),
)
