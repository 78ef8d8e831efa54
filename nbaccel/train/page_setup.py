"""Finds out which processes of a group share memory, and maps a page of it into each.

    all          exchange: how this process wants to compare calls; what suggests its host
    of each host, the first process     makes a memory file, tells where it can be opened
    the others                          open it by /proc, write a random token into their block
    all of the host                     read all blocks: is every token there?

Names of hosts decide nothing: containers may share a name and no memory, and network namespaces of
one machine have several names and one memory. The suggestion only says who tries; the tokens are
the proof. If one process of a host cannot take part, none of the host does. The file never has a
name: it is gone with the processes, however they end.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

from nbaccel.base import env, torch_private
from nbaccel.base.errors import ConfigError
from nbaccel.train.shared_page import TOKEN_BYTES, SharedPage, page_bytes
from nbaccel.transfer import memfd

__all__ = ["ROUTE_VARIABLE", "Meeting", "set_up_page", "wanted_route"]

ROUTE_VARIABLE = "NBACCEL_COLLECTIVE_CHECK"
_ROUTES = ("memory", "store", "off")
_BOOT_NUMBER = Path("/proc/sys/kernel/random/boot_id")  # drawn anew by each start of a system
_OWN_NAMESPACE = Path("/proc/self/ns/pid")


class Meeting(NamedTuple):
    """What the processes of a group have found out about each other."""

    store: Any
    """The group's store, with a prefix of its own."""
    hosts: tuple[tuple[int, ...], ...]
    """The ranks that share memory, in order, host by host."""
    page: SharedPage | None
    """The memory of this process's host; None if it is alone there."""
    route: str
    """``memory``, ``store`` or ``off``."""


def wanted_route() -> str:
    """How this process is to compare its calls with the others'.

    Returns:
        ``memory`` (where there is memory that processes share, else the store), ``store``, or
        ``off``.

    Raises:
        ConfigError: The environment says something else.
    """
    route = (env.read(ROUTE_VARIABLE, "") or "").strip().lower() or _ROUTES[0]
    if route not in _ROUTES:
        raise ConfigError(
            f"Environment variable {ROUTE_VARIABLE} must be one of {', '.join(_ROUTES)}: got "
            f"{route!r}. It says how processes compare their calls before a collective. Correct "
            "it, or unset it for shared memory."
        )
    return route


def set_up_page(rank: int, world_size: int) -> Meeting:
    """Find out together with all other processes of the default group; a collective.

    Args:
        rank: This process's number.
        world_size: How many there are.

    Raises:
        ConfigError: The processes' environments say different things.
    """
    own_facts = [wanted_route(), _suggest_host()]
    # A store outlives a process group; a second group on it must not find the first one's keys.
    shared_token = [secrets.token_hex(4)]
    dist.broadcast_object_list(shared_token, src=0)
    default_store = torch_private.default_store()  # the store the group itself uses
    store = dist.PrefixStore(  # type: ignore[attr-defined]
        f"nbaccel/{shared_token[0]}", default_store
    )
    store.set(f"facts/{rank}", json.dumps(own_facts))
    facts = [json.loads(fact) for fact in _read_all(store, "facts", range(world_size))]
    routes = [route for route, _ in facts]
    if len(set(routes)) > 1:
        raise ConfigError(
            f"Environment variable {ROUTE_VARIABLE} differs between processes: by rank, "
            f"{', '.join(routes)}. They could not compare their calls, and would wait for each "
            "other for ever. Set it to the same everywhere."
        )
    hosts = _suggested_hosts([suggestion for _, suggestion in facts])
    if routes[0] == "store":
        hosts = [(member,) for member in range(world_size)]
    return _try_hosts(rank, hosts, store, routes[0])


def _read_all(store: Any, name: str, ranks: Iterable[int]) -> list[bytes]:
    """What each of these processes has set under a name; waits for it."""
    values: list[bytes] = store.multi_get([f"{name}/{rank}" for rank in ranks])
    return values


def _suggest_host() -> str:
    """What is equal where processes can see each other in /proc; empty where that is unknown."""
    with contextlib.suppress(OSError, AttributeError):
        number = _BOOT_NUMBER.read_text(encoding="ascii").strip()
        return f"{number} {_OWN_NAMESPACE.readlink()} {os.getuid()}"
    return ""


def _suggested_hosts(suggestions: Sequence[str]) -> list[tuple[int, ...]]:
    members: dict[str, list[int]] = {}
    for rank, suggestion in enumerate(suggestions):
        members.setdefault(suggestion or f"process {rank}", []).append(rank)
    return [tuple(ranks) for ranks in members.values()]


def _try_hosts(rank: int, suggested: list[tuple[int, ...]], store: Any, route: str) -> Meeting:
    own_host = next(host for host in suggested if rank in host)
    shared_hosts = [host for host in suggested if len(host) > 1]
    page = None
    with contextlib.ExitStack() as files:
        if len(own_host) > 1:
            page = _try_page(rank, own_host, store, files)
            store.set(f"agrees/{rank}", "no" if page is None else "yes")
        # Nobody closes the file before all have said that they have mapped it.
        answers = {host: _read_all(store, "agrees", host) for host in shared_hosts}
    proven = [host for host in shared_hosts if all(answer == b"yes" for answer in answers[host])]
    hosts = proven + [(member,) for host in suggested if host not in proven for member in host]
    if own_host not in proven:
        page = None
    return Meeting(store, tuple(sorted(hosts)), page, route)


def _try_page(
    rank: int, host: tuple[int, ...], store: Any, files: contextlib.ExitStack
) -> SharedPage | None:
    """The page of a host's processes; None if this process does not see all of them in it."""
    own_token = secrets.token_bytes(TOKEN_BYTES)
    page = None
    # Without memory files, without /proc, or where a sandbox permits neither.
    with contextlib.suppress(OSError, AttributeError):
        page = _map_page(rank, host, store, files)
    if page is not None:
        page.sign(host.index(rank), own_token)
    store.set(f"token/{rank}", own_token.hex() if page is not None else "")
    tokens = [bytes.fromhex(token.decode()) for token in _read_all(store, "token", host)]
    if page is None:
        return None
    is_whole = all(page.token(position) == token for position, token in enumerate(tokens))
    return page if is_whole else None


def _map_page(
    rank: int, host: tuple[int, ...], store: Any, open_files: contextlib.ExitStack
) -> SharedPage | None:
    file_key = f"file/{host[0]}"
    if rank == host[0]:
        path = ""
        try:
            descriptor = memfd.create_file("collectives", page_bytes(len(host)))
            open_files.enter_context(memfd.closing_files(descriptor))
            path = f"/proc/{os.getpid()}/fd/{descriptor}"
        finally:
            # In any case, because the others wait for it.
            store.set(file_key, json.dumps(path))
        return SharedPage(descriptor, len(host))
    path = json.loads(store.get(file_key))
    # Where this process sees other processes under these numbers, the file is another one.
    if not path or not str(Path(path).readlink()).startswith("/memfd:nbaccel-"):
        return None
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    with memfd.closing_files(descriptor):
        if os.fstat(descriptor).st_size != page_bytes(len(host)):
            return None
        return SharedPage(descriptor, len(host))
