"""From an agent to the notebook's machine: the address, the handshake, the network interface."""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence

import psutil

from nbaccel.base.errors import ConfigError
from nbaccel.base.ports import LOOPBACK_ADDRESSES
from nbaccel.hosts.secure_link import NONCE_BYTES, HandshakeFailed, SecureLink, Side
from nbaccel.plan.contracts.host_engine import AgentHello, Host

__all__ = [
    "INTERFACE_VARIABLES",
    "address_towards",
    "addresses_towards",
    "connect_to_relay",
    "interface_of",
]

INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
"""Variables by which torch's process groups are told over which network to meet."""
_REACH_S = 10.0
_PROOF_BYTES = 32
_ANY_PORT = 9  # nothing is sent there


def connect_to_relay(hello: AgentHello) -> SecureLink:
    """Connect to the relay."""
    connection = _first_connection(hello)
    side = Side(hello.token)
    try:
        relay_nonce = _receive_exactly(connection, NONCE_BYTES)
        connection.sendall(side.agent_answer(relay_nonce))
        key = side.agent_key(relay_nonce, _receive_exactly(connection, _PROOF_BYTES))
    except (OSError, HandshakeFailed) as error:
        connection.close()
        raise ConnectionError(
            f"what answers at {hello.addresses[0]}:{hello.port} is not the notebook that started "
            "this agent, or has ended. Start the launch again."
        ) from error
    return SecureLink(connection, key, is_relay=False)


def _first_connection(hello: AgentHello) -> socket.socket:
    deadline = time.monotonic() + _REACH_S
    problems = []
    for address in hello.addresses:
        try:
            return socket.create_connection(
                (address, hello.port), timeout=max(1.0, deadline - time.monotonic())
            )
        except OSError as error:
            problems.append(f"{address}:{hello.port} ({error.strerror or error})")
    raise ConnectionError(
        f"host {socket.gethostname()} cannot reach the notebook's machine at "
        f"{', '.join(problems)}. A firewall may close its ports, or the machines are in "
        "different networks."
    )


def _receive_exactly(connection: socket.socket, num_bytes: int) -> bytes:
    connection.settimeout(_REACH_S)
    received = b""
    while len(received) < num_bytes:
        part = connection.recv(num_bytes - len(received))
        if not part:
            raise ConnectionError("the other side hung up during the handshake")
        received += part
    return received


def addresses_towards(hosts: Sequence[Host]) -> tuple[str, ...]:
    """This machine's addresses on the way to these hosts: where their agents can reach it."""
    problems = []
    addresses = []
    for host in hosts:
        try:
            if not host.is_here:
                addresses.append(address_towards(host.address))
        except OSError as error:
            problems.append(
                f"host {host.name}: {host.address!r} cannot be reached "
                f"({error.strerror or error}). Its workers would have no way to the notebook. "
                "Write its address instead of its name, or look at /etc/hosts."
            )
    if problems:
        raise ConfigError(*problems)
    return tuple(dict.fromkeys(addresses)) or LOOPBACK_ADDRESSES[:1]


def address_towards(host_address: str) -> str:
    """This machine's address on the way to another one."""
    family, kind, protocol, _, target = socket.getaddrinfo(
        host_address, _ANY_PORT, type=socket.SOCK_DGRAM
    )[0]
    with socket.socket(family, kind, protocol) as probe_socket:
        # Connecting a datagram socket sends nothing: the system only looks up the way.
        probe_socket.connect(target)
        address: str = probe_socket.getsockname()[0]
    return address


def interface_of(own_address: str) -> str:
    """The network interface with an address of this machine; empty if none has it."""
    for interface, interface_addresses in psutil.net_if_addrs().items():
        if any(entry.address.partition("%")[0] == own_address for entry in interface_addresses):
            return interface
    return ""
