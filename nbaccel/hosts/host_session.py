"""The hosts of one launch or pool, from the start of their agents to the end.

engine: which hosts? ─► relay ─► engine: start agents ─► all have joined, or who is missing
                                                         ─► which rank is where
"""

from __future__ import annotations

import contextlib
import dataclasses
import secrets
import socket
import sys
import time
from collections.abc import Collection, Mapping, Sequence

from nbaccel.base.errors import ConfigError, PortTaken, StartupFailed
from nbaccel.base.ports import listen
from nbaccel.base.process_death import uninterrupted
from nbaccel.base.units import count_noun, first_few
from nbaccel.config import RunConfig
from nbaccel.hosts import relay_messages, wire_frames
from nbaccel.hosts.connecting import addresses_towards
from nbaccel.hosts.helper_process import HelperProcess
from nbaccel.hosts.remote_starter import RelayConnection, RemoteStarter
from nbaccel.plan import Plan, registry, resolve
from nbaccel.plan.contracts.host_engine import AgentCrew, AgentHello, Engine, Host
from nbaccel.plan.inventory import Inventory
from nbaccel.plan.named_gpus import named_setting, with_named_gpus
from nbaccel.workers.start_method import HostShare
from nbaccel.workers.worker_group import MeetingPlace

__all__ = ["HostSession"]

_JOIN_S = 120.0
"""For all agents to be there: they import torch, perhaps from a slow network disk."""
_LOOK_S = 0.1
_LEAVE_S = 3.0
"""For agents to end their workers and themselves once the notebook has hung up."""
_BIND_S = 10.0


class HostSession:
    """Hosts whose agents are connected.

    Attributes:
        plan: What was planned with what the hosts have.
        shares: The hosts, and how many workers each gets.
    """

    def __init__(self, engine: Engine, hosts: Sequence[Host], plan: Plan) -> None:
        self._hosts = hosts
        self._on_end = contextlib.ExitStack()
        self._crew: AgentCrew | None = None
        try:
            self._connection = self._start_relay_and_agents(engine, plan)
            inventories = _named_devices(hosts, self._await_hosts(), plan.config)
            device = _same_device(inventories, plan.config)
            self.shares = _share_out(hosts, inventories, device, plan.config.num_processes)
            self.plan = _plan_on(self.shares, plan.config)
        except BaseException:  # an interrupt must leave no agent behind either
            self.close()
            raise

    @classmethod
    def open(cls, plan: Plan, lost: Sequence[str] = ()) -> HostSession:
        """Start the agents of a plan's engine."""
        engine = registry.engine(plan.engine)
        hosts = engine.replacements(plan.config, lost) if lost else engine.hosts(plan.config)
        if not hosts:
            raise ConfigError(
                f"engine={plan.engine!r} has no host left for this launch. Workers would have no "
                "place to run. Look at its list of hosts."
            )
        return cls(engine, hosts, plan)

    @property
    def lost_hosts(self) -> tuple[str, ...]:
        """Names of hosts that have joined and were lost since."""
        return tuple(self._connection.lost_hosts)

    def starter(self) -> RemoteStarter:
        """What starts workers on these hosts: a new one for each attempt."""
        crew = self._crew
        return RemoteStarter(
            self._connection, self.shares, crew.carry if crew is not None else lambda _: ""
        )

    def bind_store(self, port: int | None) -> MeetingPlace:
        """Let the host of rank 0 listen for the rendezvous store."""
        first_host = self.shares[0].name
        self._connection.send(relay_messages.BindHostStore(first_host, port))
        answer = self._connection.next((wire_frames.StoreBound,), _BIND_S)
        if not isinstance(answer, wire_frames.StoreBound):
            raise StartupFailed(
                f"Host {first_host} did not answer within {_BIND_S:.0f} s, so workers would have "
                "no place to meet. It may be overloaded; run the cell again."
            )
        if answer.problem:
            raise PortTaken(f"on host {first_host}: {answer.problem}", port=port)
        # In messages it stands for the socket on that host.
        stand_in = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self._on_end.callback(stand_in.close)
        return MeetingPlace(address=answer.address, port=answer.port, store_socket=stand_in)

    def close(self) -> None:
        """Hang up; agents and relay end, and are waited for."""
        with uninterrupted():
            self._on_end.close()

    # ---- starting

    def _start_relay_and_agents(self, engine: Engine, plan: Plan) -> RelayConnection:
        addresses = addresses_towards(self._hosts)
        address = addresses[0]
        if len(addresses) > 1:
            # Hosts in several networks: each reaches this machine by another address.
            address = "::" if any(":" in one for one in addresses) else "0.0.0.0"  # noqa: S104
        token = secrets.token_hex(32)
        with listen(address, None) as listener:
            connection = self._start_relay(listener, token, plan)
            self._crew = engine.start_agents(
                self._hosts,
                AgentHello(addresses=addresses, port=listener.getsockname()[1], token=token),
            )
            self._on_end.callback(self._crew.end, _LEAVE_S)
            # Last on the stack, so that it runs first: agents leave once it has hung up.
            self._on_end.callback(connection.close)
        return connection

    def _start_relay(self, listener: socket.socket, token: str, plan: Plan) -> RelayConnection:
        relay = HelperProcess(
            relay_messages.ServeHosts(
                token=token,
                names=tuple(host.name for host in self._hosts),
                device=plan.device if registry.known_device(plan.device).own_template else "",
                in_notebook="IPython" in sys.modules,
            ),
            [listener.fileno()],
        )
        self._on_end.callback(relay.close)
        return RelayConnection(relay, lambda: {} if self._crew is None else self._crew.problems())

    def _await_hosts(self) -> dict[str, Inventory]:
        """Wait until all agents have joined."""
        deadline = time.monotonic() + _JOIN_S
        joined: dict[str, Inventory] = {}
        refused: dict[str, str] = {}
        while len(joined) < len(self._hosts):
            answer = self._connection.next(
                (relay_messages.HostJoined, relay_messages.HostRefused), _LOOK_S
            )
            if isinstance(answer, relay_messages.HostJoined):
                joined[answer.name] = Inventory.from_json(answer.inventory)
                continue
            if isinstance(answer, relay_messages.HostRefused):
                refused[answer.name] = answer.reason
            problems = {**(self._crew.problems() if self._crew else {}), **refused}
            if problems or time.monotonic() >= deadline:
                raise StartupFailed(self._who_is_missing(joined, problems))
        return joined

    def _who_is_missing(self, joined: Collection[str], problems: Mapping[str, str]) -> str:
        missing = [host.name for host in self._hosts if host.name not in joined]
        lines = [
            f"{count_noun(len(missing), 'host')} of {len(self._hosts)} did not join the launch: "
            f"{first_few(missing, 5)}. No worker was started."
        ]
        lines += [f"  {name}: {problem}" for name, problem in problems.items()]
        if not problems:
            lines.append(
                f"  Nothing was heard of {'it' if len(missing) == 1 else 'them'} for "
                f"{_JOIN_S:.0f} s. A firewall may close the way to this machine, or Python "
                "is missing there."
            )
        return "\n".join(lines)


def _named_devices(
    hosts: Sequence[Host], inventories: Mapping[str, Inventory], config: RunConfig
) -> dict[str, Inventory]:
    """What each host has, with the GPUs alone that its workers will see."""
    seen_inventories = {}
    mistakes = []
    for host in hosts:
        setting = named_setting(config, host.devices)
        seen_inventories[host.name], mistake = with_named_gpus(inventories[host.name], setting)
        if mistake:
            mistakes.append(f"host {host.name}: {mistake}")
    if mistakes:
        raise ConfigError(*mistakes)
    return seen_inventories


def _same_device(inventories: Mapping[str, Inventory], config: RunConfig) -> str:
    """The device that all hosts compute on."""
    devices = {name: resolve(config, inventory).device for name, inventory in inventories.items()}
    first_name, first_device = next(iter(devices.items()))
    mistakes = [
        f"host {name} computes on {device}, and host {first_name} on {first_device}: ranks of one "
        "launch need the same kind of device. Give device=..., or leave one host out."
        for name, device in devices.items()
        if device != first_device
    ]
    if mistakes:
        raise ConfigError(*mistakes)
    return first_device


def _plan_on(shares: Sequence[HostShare], config: RunConfig) -> Plan:
    """The plan with what the hosts have; what is warned of says of which host."""
    num_workers = sum(share.num_workers for share in shares)
    whole_config = config.changed(num_processes=num_workers)
    plans = [
        resolve(whole_config, share.inventory, num_local=share.num_workers) for share in shares
    ]
    warnings = [
        f"host {share.name}: {warning}"
        for share, host_plan in zip(shares, plans, strict=True)
        for warning in host_plan.warnings
    ]
    return dataclasses.replace(plans[0], config=config, warnings=tuple(warnings))


def _share_out(
    hosts: Sequence[Host],
    inventories: Mapping[str, Inventory],
    device: str,
    num_wanted: int | None,
) -> tuple[HostShare, ...]:
    """How many workers each host gets: the first ones are filled first."""
    num_units = {
        name: len(registry.known_device(device).units(inventory))
        for name, inventory in inventories.items()
    }
    places = {host.name: host.slots or num_units[host.name] or 1 for host in hosts}
    if num_wanted is not None:
        # A host without slots and accelerators takes any number: they are shared out evenly.
        places |= {
            host.name: -(-num_wanted // len(hosts))
            for host in hosts
            if host.slots is None and not num_units[host.name]
        }
    _check_places(hosts, places, num_units, num_wanted)
    shares = []
    workers_left = sum(places.values()) if num_wanted is None else num_wanted
    for host in hosts:
        num_workers = min(places[host.name], workers_left)
        workers_left -= num_workers
        if num_workers:
            shares.append(
                HostShare(
                    name=host.name,
                    num_workers=num_workers,
                    inventory=inventories[host.name],
                    devices=host.devices,
                )
            )
    return tuple(shares)


def _check_places(
    hosts: Sequence[Host],
    places: Mapping[str, int],
    num_units: Mapping[str, int],
    num_wanted: int | None,
) -> None:
    mistakes = [
        f"host {host.name} has slots={host.slots} and {count_noun(num_units[host.name], 'device')}"
        ": workers would share them. Write as many slots as it has devices."
        for host in hosts
        if host.slots and 0 < num_units[host.name] < host.slots
    ]
    num_places = sum(places.values())
    if num_wanted is not None and num_wanted > num_places:
        text = first_few([f"{name}: {number}" for name, number in places.items()], 4)
        mistakes.append(
            f"num_processes={num_wanted} on hosts with {count_noun(num_places, 'place')} "
            f"({text}): some workers would have nowhere to run. Ask for fewer, or add hosts."
        )
    if mistakes:
        raise ConfigError(*mistakes)
