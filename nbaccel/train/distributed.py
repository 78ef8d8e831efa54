"""Finds this process's place in the run, and joins the others if there are any.

The numbers come from the process group where one exists, else from the standard variables that
every launcher sets (`torchrun`, `notebook_launcher`, SLURM scripts). Only the stores where groups
met are kept here: asking again gives the same answer, and a process that is alone leaves no trace.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from nbaccel.base import env
from nbaccel.base.errors import ConfigError
from nbaccel.config.capabilities import DEVICES
from nbaccel.config.handlers import InitProcessGroupKwargs
from nbaccel.plan import registry
from nbaccel.plan.contracts.training import Place
from nbaccel.plan.topology import DEVICE_VARIABLE
from nbaccel.train import call_check
from nbaccel.train.call_check import DEFAULT_TIMEOUT_S
from nbaccel.train.collectives import Collectives

_TORCH_DEVICE_VARIABLE = "ACCELERATE_TORCH_DEVICE"
_RENDEZVOUS_STORES: list[Any] = []


def init_process(
    *, cpu: bool = False, device: str = "", settings: InitProcessGroupKwargs | None = None
) -> Place:
    """Find this process's place, and initialise the process group if there are other processes."""
    settings = settings or InitProcessGroupKwargs()
    environment = _process_numbers()
    device_backend = registry.device(device or name_device(cpu=cpu))
    # Before the process group: NCCL's exchange of objects goes through the current device.
    device_backend.enter_worker(environment["local_rank"])
    torch_device = device_backend.torch_device(environment["local_rank"])
    asked_device = _asked_device()
    if asked_device is not None and asked_device.type == torch_device.type:
        torch_device = asked_device
        device_backend.make_current(torch_device)
    if environment["world_size"] > 1 and not dist.is_initialized():
        backend = settings.backend or device_backend.process_group_backend(
            environment["local_world_size"]
        )
        _join_process_group(environment, backend, settings)
    if not dist.is_initialized():
        return Place(device=torch_device, device_row=device_backend.name)
    # The backend for tensors on this device: the matching part of ``cpu:gloo,cuda:nccl``.
    config = str(dist.get_backend_config())
    backend_parts = [part.partition(":") for part in config.split(",")]
    return Place(
        rank=dist.get_rank(),
        local_rank=environment["local_rank"],
        world_size=dist.get_world_size(),
        local_world_size=environment["local_world_size"],
        device=torch_device,
        device_row=device_backend.name,
        backend=(
            {device_type: name for device_type, _, name in backend_parts}.get(torch_device.type)
            or config
        ),
    )


def _join_process_group(
    environment: Mapping[str, int], backend: str, settings: InitProcessGroupKwargs
) -> None:
    timeout = timedelta(seconds=timeout_s(settings))
    numbers = {name: environment[name] for name in ("rank", "world_size")}
    meeting: dict[str, Any] = {}  # a launch keeps its workers' groups apart
    if settings.init_method:
        meeting = {"init_method": settings.init_method, **numbers}
    elif not env.flag("FORK_LAUNCHED"):
        # The store outlives a group, and torch uses the same keys in it for the next one, whose
        # ranks would wait for addresses of the first for ever (torch 2.13). So each group gets a
        # prefix; and the store is kept, because another process may read it while this one creates
        # its next group.
        store = next(iter(rendezvous("env://", **numbers, timeout=timeout)))[0]
        store.set_timeout(timeout)
        _RENDEZVOUS_STORES.append(store)
        group_store = dist.PrefixStore(f"nbaccel_{len(_RENDEZVOUS_STORES)}", store)  # type: ignore[attr-defined]
        meeting = {"store": group_store, **numbers}
    dist.init_process_group(backend, timeout=timeout, **meeting)


def rank() -> int:
    """Number of this process, found without a device and without joining the others."""
    return dist.get_rank() if dist.is_initialized() else _environment_number("RANK", 0)


def world_size() -> int:
    """Number of processes, found in the same way."""
    return dist.get_world_size() if dist.is_initialized() else _environment_number("WORLD_SIZE", 1)


def local_rank() -> int:
    """Number of this process on its node, found in the same way."""
    return _environment_number("LOCAL_RANK", rank())


def can_join() -> bool:
    """Whether there is a process group, or a launcher has said how to make one."""
    return dist.is_initialized() or bool((env.read("RANK", "") or "").strip())


def timeout_s(settings: InitProcessGroupKwargs | None) -> float:
    """Seconds that a process waits for the others in a collective."""
    timeout = settings.timeout if settings else None
    return timeout.total_seconds() if isinstance(timeout, timedelta) else DEFAULT_TIMEOUT_S


def wants_cpu(cpu: bool = False) -> bool:
    """Whether the CPU was asked for, by argument or by ``ACCELERATE_USE_CPU``."""
    return cpu or bool(env.flag("ACCELERATE_USE_CPU"))


def name_device(*, cpu: bool = False) -> str:
    """The row of the device that this process computes on."""
    row = DEVICES[0]
    if wants_cpu(cpu):
        return row.name
    if variable := (env.read(DEVICE_VARIABLE, "") or "").strip():
        return variable
    if (asked_device := _asked_device()) is not None:
        names = [device.name for device in registry.devices() if device.kind == asked_device.type]
        if not names:
            raise ConfigError(
                f"Environment variable {_TORCH_DEVICE_VARIABLE}={str(asked_device)!r} names a "
                "device that nbaccel does not know: it could not be set up. Unset it, or install "
                "the package that brings the device."
            )
        return names[0]
    # The first device is the host, which is what remains if none of the others is ready. A backend
    # that has never run must not be chosen by default, only by name.
    others = [device for device in registry.devices()[1:] if not device.row.never_run]
    return next((device.name for device in others if device.is_available()), row.name)


def _asked_device() -> torch.device | None:
    """What ``ACCELERATE_TORCH_DEVICE`` names, with its number, if it has one."""
    text = (env.read(_TORCH_DEVICE_VARIABLE, "") or "").strip()
    if not text:
        return None
    try:
        return torch.device(text)
    except RuntimeError as error:
        raise ConfigError(
            f"Environment variable {_TORCH_DEVICE_VARIABLE}={text!r} names no device of torch: "
            "nothing could be computed on it. Give one such as 'cuda:1' or 'cpu', or unset it."
        ) from error


def find_device(local_rank: int = 0, *, cpu: bool = False) -> torch.device:
    """The device that this process computes on: its GPU where there is one, else the CPU."""
    return registry.device(name_device(cpu=cpu)).torch_device(local_rank)


def _process_numbers() -> dict[str, int]:
    group_numbers = {"rank": rank(), "world_size": world_size()}
    if not dist.is_initialized():
        # Checked before torch: a rendezvous with wrong numbers would wait until its timeout.
        if not 0 <= group_numbers["rank"] < group_numbers["world_size"]:
            raise ConfigError(
                f"RANK={group_numbers['rank']} does not fit "
                f"WORLD_SIZE={group_numbers['world_size']}. The processes could not connect to "
                "each other. Set both, or none to train in this process alone."
            )
        variables = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not env.read(name)]
        if group_numbers["world_size"] > 1 and variables:
            raise ConfigError(
                f"WORLD_SIZE={group_numbers['world_size']} means several processes, but "
                f"{' and '.join(variables)} {'is' if len(variables) == 1 else 'are'} not set. They "
                "could not connect. Use notebook_launcher or torchrun, or unset WORLD_SIZE."
            )
    local_number = _environment_number("LOCAL_RANK", group_numbers["rank"])
    return group_numbers | {
        "local_rank": local_number,
        "local_world_size": _environment_number(
            "LOCAL_WORLD_SIZE", max(group_numbers["world_size"], local_number + 1)
        ),
    }


def _environment_number(name: str, default: int) -> int:
    text = env.read(name, "") or ""
    if not text.strip():
        return default
    try:
        return int(text)
    except ValueError:
        raise ConfigError(
            f"Environment variable {name} must be a whole number: got {text!r}. "
            "It tells a process its place among the others. Unset it, or use a launcher."
        ) from None


def leave_process_group(collectives: Collectives) -> None:
    """Leave the default process group, if there is one, together with the other processes."""
    if collectives.place.is_alone or not dist.is_initialized():
        return
    # A process that leaves early would make a collective of another one fail.
    collectives.barrier()
    # A notebook's worker keeps it: later lines of the cell may use it, and it ends with the worker.
    if not env.flag("FORK_LAUNCHED"):
        dist.destroy_process_group()
        call_check.forget_left_group()
