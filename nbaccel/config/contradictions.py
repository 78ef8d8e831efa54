"""Settings of a ``RunConfig`` that contradict each other: one rule each, with what to do."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Collection
from typing import Any, TypeAlias

from nbaccel.config.capabilities import STRATEGIES
from nbaccel.config.engine_choice import ENGINE_CONTRADICTIONS
from nbaccel.config.host_filter import HOST_FILTER_CONTRADICTIONS

__all__ = ["contradictions"]

# A `RunConfig`, whose module imports this one.
_Settings: TypeAlias = Any


def contradictions(config: _Settings, *, ignoring: Collection[str] = ()) -> tuple[str, ...]:
    """Every contradiction between settings."""
    texts = (
        contradiction_check(config)
        for involved_names, contradiction_check in _CONTRADICTION_CHECKS
        if not any(setting_name in ignoring for setting_name in involved_names)
    )
    return tuple(contradiction for contradiction in texts if contradiction)


def _node_in_range(run_config: _Settings) -> str:
    if run_config.node_rank < run_config.num_nodes:
        return ""
    return (
        f"node_rank must be below num_nodes: got node_rank={run_config.node_rank} with "
        f"num_nodes={run_config.num_nodes}. The other nodes would wait for a node that never "
        "comes. Number the nodes from 0, or raise num_nodes."
    )


def _nodes_need_a_count(run_config: _Settings) -> str:
    if run_config.num_nodes == 1 or run_config.num_processes is not None:
        return ""
    return (
        f"num_processes cannot be left out with num_nodes={run_config.num_nodes}. "
        "Every node must know how many workers the others have. "
        "Give the same num_processes on every node."
    )


def _nodes_need_a_real_address(run_config: _Settings) -> str:
    setting_name = "master_addr"
    host_name = run_config.master_addr
    if run_config.rdzv_endpoint:
        setting_name = "rdzv_endpoint"
        host_name = _host_of(run_config.rdzv_endpoint)
    if run_config.num_nodes == 1 or not _is_loopback(host_name):
        return ""
    return (
        f"{setting_name} cannot be {host_name!r} with num_nodes={run_config.num_nodes}. "
        "On each node that address is the node itself, so they would never meet. "
        "Give the address of the first node as the others reach it."
    )


def _endpoint_has_a_port(run_config: _Settings) -> str:
    text = run_config.rdzv_endpoint.rpartition(":")[2]
    # Only static rendezvous needs the port; other backends have a default port.
    if not run_config.rdzv_endpoint or run_config.rdzv_backend != "static":
        return ""
    if text.isdecimal() and 1 <= int(text) <= 65535:
        return ""
    return (
        f'rdzv_endpoint must be "host:port": got {run_config.rdzv_endpoint!r}. '
        "Static rendezvous connects to exactly that port. Add a port from 1 to 65535."
    )


def _etcd_needs_an_endpoint(run_config: _Settings) -> str:
    if not run_config.rdzv_backend.startswith("etcd") or run_config.rdzv_endpoint:
        return ""
    return (
        f"rdzv_endpoint cannot be empty with rdzv_backend={run_config.rdzv_backend!r}. "
        'The etcd server must be found. Give its "host:port".'
    )


def _fsdp_by_its_strategy(run_config: _Settings) -> str:
    names = [row.name for row in STRATEGIES if "fsdp_plugin" in row.arguments]
    if run_config.fsdp is None or run_config.strategy in names:
        return ""
    return (
        f"fsdp cannot go with strategy={run_config.strategy!r}: its settings would have no effect. "
        'Give strategy="fsdp", or leave fsdp out.'
    )


def _inline_is_one(run_config: _Settings) -> str:
    if run_config.start_method != "inline" or run_config.num_processes in (None, 1):
        return ""
    return (
        f'start_method="inline" cannot run num_processes={run_config.num_processes}. '
        "Inline means in this very process, which is one. "
        'Give num_processes=1, or start_method="auto".'
    )


def _inline_is_alone(run_config: _Settings) -> str:
    upper_limits = (
        ("num_nodes", run_config.num_nodes, 1),
        ("max_restarts", run_config.max_restarts, 0),
    )
    settings = [
        f"{name}={setting_value}"
        for name, setting_value, largest_value in upper_limits
        if setting_value > largest_value
    ]
    if run_config.start_method != "inline" or not settings:
        return ""
    return (
        f'start_method="inline" cannot go with {" and ".join(settings)}. '
        "Inline is this very process: it meets no other node and cannot be started again. "
        f'Give start_method="auto", or leave out {settings[0].partition("=")[0]}.'
    )


def _host_of(text: str) -> str:
    name, separator, _ = text.rpartition(":")
    return (name if separator else text).strip("[]")


def _is_loopback(host_name: str) -> bool:
    stripped_name = host_name.strip().strip("[]").lower()
    try:
        return ipaddress.ip_address(stripped_name).is_loopback
    except ValueError:  # a name
        return stripped_name == "localhost" or stripped_name.startswith("localhost.")


_CONTRADICTION_CHECKS: tuple[tuple[tuple[str, ...], Callable[[_Settings], str]], ...] = (
    (("node_rank", "num_nodes"), _node_in_range),
    (("num_processes", "num_nodes"), _nodes_need_a_count),
    (("master_addr", "rdzv_endpoint", "num_nodes"), _nodes_need_a_real_address),
    (("rdzv_endpoint", "rdzv_backend"), _endpoint_has_a_port),
    (("rdzv_endpoint", "rdzv_backend"), _etcd_needs_an_endpoint),
    (("fsdp", "strategy"), _fsdp_by_its_strategy),
    (("start_method", "num_processes"), _inline_is_one),
    (("start_method", "num_nodes", "max_restarts"), _inline_is_alone),
    *ENGINE_CONTRADICTIONS,
    *HOST_FILTER_CONTRADICTIONS,
)
