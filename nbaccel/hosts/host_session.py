"""The hosts of one launch or pool, from the start of their actors to the end.

engine: which hosts? ─► engine: an actor on each ─► all have joined, or who is missing
                                                    ─► which rank is where
"""

from __future__ import annotations

import contextlib
import dataclasses
import socket
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from nbaccel.base.errors import ConfigError, PortTaken, StartupFailed
from nbaccel.base.processes import uninterrupted
from nbaccel.base.units import count_noun, first_few
from nbaccel.config import RunConfig
from nbaccel.config.field_rules import refuse_mistakes
from nbaccel.hosts.node_actor import own_versions
from nbaccel.hosts.ray_host import error_line
from nbaccel.plan import Plan, registry, resolve
from nbaccel.plan.contracts.host_engine import Host
from nbaccel.plan.inventory import Inventory
from nbaccel.plan.resolving import named_setting, with_named_gpus
from nbaccel.workers.worker_processes import HostShare, MeetingPlace, Starter

_JOIN_S = 180.0
"""For all hosts and their actors to be there, and again for templates: minutes on busy machines."""
_LOOK_S = 0.1
_BIND_S = 10.0


class HostSession:
    """Hosts whose actors have joined, with a plan that knows what they have."""

    def __init__(self, plan: Plan, lost: Sequence[str] = ()) -> None:
        """Start the actors of a plan's engine, on other hosts than those that were lost."""
        from nbaccel.hosts.node_links import RemoteStarter  # it imports Ray

        engine = registry.engine(plan.engine)
        hosts = engine.replacements(plan.config, lost) if lost else engine.hosts(plan.config)
        if not hosts:
            raise ConfigError(
                f"engine={plan.engine!r} has no host left for this launch. Workers would have no "
                "place to run. Look at its list of hosts."
            )
        self._hosts = hosts
        self._on_end = contextlib.ExitStack()
        try:
            self._crew = engine.start_nodes(hosts)
            self._on_end.callback(self._crew.end)
            self._starter = RemoteStarter(self._crew.problems)
            # Before Ray ends, for whose answers its threads wait.
            self._on_end.callback(self._starter.end)
            self._on_end.callback(self._kill_actors)
            self._on_end.callback(self._starter.leave)
            actors = self._crew.actors
            joining = {
                name: actor.join.remote(plan.device, runs_cells="IPython" in sys.modules)
                for name, actor in actors.items()
            }
            facts = self._await_answers(joining)
            self._check_versions(facts)
            self._addresses = {name: str(known["address"]) for name, known in facts.items()}
            inventories = {name: known["inventory"] for name, known in facts.items()}
            inventories = _named_devices(hosts, inventories, plan.config)
            device = _same_device(inventories, plan.config)
            self.shares = _share_out(hosts, inventories, device, plan.config.num_processes)
            self.plan = _plan_on(self.shares, plan.config)
            self._await_answers({name: actor.get_ready.remote() for name, actor in actors.items()})
            for name, actor in actors.items():
                self._starter.add(name, actor)
        except BaseException:  # an interrupt must leave nothing behind either
            self.close()
            raise

    @property
    def lost_hosts(self) -> tuple[str, ...]:
        """Names of hosts that have joined and were lost since."""
        return self._starter.lost()

    def starter(self) -> Starter:
        """What starts the workers of the next attempt on these hosts."""
        self._starter.begin(self.shares)
        return self._starter

    def bind_store(self, port: int | None) -> MeetingPlace:
        """Let the host of rank 0 listen for the rendezvous store."""
        import ray

        first_host = self.shares[0].name
        address = self._addresses[first_host]
        actor = self._crew.actors[first_host]
        try:
            bound_port, problem = ray.get(actor.bind_store.remote(address, port), timeout=_BIND_S)
        except ray.exceptions.RayError as error:
            raise StartupFailed(
                f"Host {first_host} did not answer ({error_line(error)}), so workers would have no "
                "place to meet. It may be overloaded; run the cell again."
            ) from error
        if problem:
            raise PortTaken(f"on host {first_host}: {problem}", port=port)
        # In messages it stands for the socket on that host.
        stand_in = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        return MeetingPlace(address=address, port=bound_port, store_socket=stand_in)

    def close(self) -> None:
        """End all that runs on the hosts, and wait for it."""
        with uninterrupted():
            self._on_end.close()

    def _kill_actors(self) -> None:
        import ray

        if ray.is_initialized():  # or the user has left the cluster, which ended all
            for actor in self._crew.actors.values():
                ray.kill(actor)

    def _await_answers(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        """What all hosts answer, by name."""
        import ray

        deadline = time.monotonic() + _JOIN_S
        answers: dict[str, Any] = {}
        problems: dict[str, str] = {}
        while len(answers) < len(asked):
            waited_for = [asked[name] for name in asked if name not in answers]
            answered, _ = ray.wait(waited_for, num_returns=len(waited_for), timeout=_LOOK_S)
            for name in [name for name, reference in asked.items() if reference in answered]:
                try:
                    answers[name] = ray.get(asked[name])
                except ray.exceptions.RayTaskError as error:
                    problems[name] = str(error.cause)
                except ray.exceptions.RayError as error:
                    problems[name] = f"Ray says: {error_line(error)}"
            problems = {**problems, **self._crew.problems()}
            is_late = time.monotonic() >= deadline
            if (problems or is_late) and len(answers) < len(asked):
                raise self._missing(answers, problems)
        return answers

    def _check_versions(self, facts: Mapping[str, Mapping[str, Any]]) -> None:
        mismatches = {}
        for name, known in facts.items():
            differences = [
                f"{package} {known['versions'].get(package, 'missing')} there and {version} here"
                for package, version in own_versions().items()
                if known["versions"].get(package) != version
            ]
            if differences:
                mismatches[name] = (
                    f"it has {', '.join(differences)}: what workers are sent could not be read. "
                    "Install the same versions on all hosts"
                )
        if mismatches:
            raise self._missing(facts.keys() - mismatches.keys(), mismatches)

    def _missing(self, joined: Collection[str], problems: Mapping[str, str]) -> StartupFailed:
        missing = [host.name for host in self._hosts if host.name not in joined]
        lines = [
            f"{count_noun(len(missing), 'host')} of {len(self._hosts)} did not join the launch: "
            f"{first_few(missing, 5)}. No worker was started."
        ]
        lines += [f"  {name}: {problem}" for name, problem in problems.items()]
        if not problems:
            lines.append(
                f"  Nothing was heard for {_JOIN_S:.0f} s: a firewall closes the way to this "
                "machine, Ray has no room for an actor there, or torch is slow to import."
            )
        return StartupFailed("\n".join(lines))


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
    refuse_mistakes(mistakes)
    return seen_inventories


def _same_device(inventories: Mapping[str, Inventory], config: RunConfig) -> str:
    """The device that all hosts compute on."""
    devices = {name: resolve(config, inventory).device for name, inventory in inventories.items()}
    first_name, first_device = next(iter(devices.items()))
    refuse_mistakes(
        f"host {name} computes on {device}, and host {first_name} on {first_device}: ranks of one "
        "launch need the same kind of device. Give device=..., or leave one host out."
        for name, device in devices.items()
        if device != first_device
    )
    return first_device


def _plan_on(shares: Sequence[HostShare], config: RunConfig) -> Plan:
    """The plan with what the hosts have; what is warned of says of which host."""
    whole = config.changed(num_processes=sum(share.num_workers for share in shares))
    plans = [resolve(whole, share.inventory, num_local=share.num_workers) for share in shares]
    warnings = [
        f"host {share.name}: {warning}"
        for share, host_plan in zip(shares, plans, strict=True)
        for warning in host_plan.warnings
    ]
    return dataclasses.replace(plans[0], config=config, warnings=tuple(warnings))


def _share_out(
    hosts: Sequence[Host], inventories: Mapping[str, Inventory], device: str, num_wanted: int | None
) -> tuple[HostShare, ...]:
    """How many workers each host gets: the first ones are filled first."""
    num_units = {name: len(registry.device(device).units(one)) for name, one in inventories.items()}
    places = {host.name: host.slots or num_units[host.name] or 1 for host in hosts}
    if num_wanted is not None:
        # A host without slots and accelerators takes any number: they are shared out evenly.
        places |= {
            host.name: -(-num_wanted // len(hosts))
            for host in hosts
            if host.slots is None and not num_units[host.name]
        }
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
    refuse_mistakes(mistakes)
    shares = []
    workers_left = num_places if num_wanted is None else num_wanted
    for host in hosts:
        num_workers = min(places[host.name], workers_left)
        workers_left -= num_workers
        if num_workers:
            shares.append(HostShare(host.name, num_workers, inventories[host.name], host.devices))
    return tuple(shares)
