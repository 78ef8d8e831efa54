"""Where am I? Finds this process's place in the run, and joins the others if there are any.

The facts come from the process group where one exists, else from the standard variables that every
launcher sets (`torchrun`, `notebook_launcher`, SLURM scripts). Nothing is kept here but the stores
where groups met: asking again gives the same answer, and a process that is alone leaves no trace.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from nbaccel import _catalog, env
from nbaccel.abc.place import Place
from nbaccel.config.handlers import InitProcessGroupKwargs
from nbaccel.errors import ConfigError
from nbaccel.train.rollcall import DEFAULT_TIMEOUT_S

__all__ = ["arrive", "can_meet", "find_device", "local_rank", "rank", "timeout_s", "wants_cpu"]


_STORES: list[Any] = []


def arrive(*, cpu: bool = False, settings: InitProcessGroupKwargs | None = None) -> Place:
    """Find this process's place, and initialise the process group if there are other processes.

    Args:
        cpu: Compute on the CPU even if there is a GPU.
        settings: Arguments of the process group.

    Returns:
        The place.

    Raises:
        ConfigError: The environment contradicts itself.
    """
    settings = settings or InitProcessGroupKwargs()
    found = _numbers()
    device = find_device(found["local_rank"], cpu=cpu)
    if device.type != "cpu":
        _catalog.device(device.type).enter_worker(found["local_rank"])
    if found["world_size"] > 1 and not dist.is_initialized():
        _join(found, settings.backend or _backend(device, found["local_world_size"]), settings)
    if not dist.is_initialized():
        return Place(device=device)
    return Place(
        rank=dist.get_rank(),
        local_rank=found["local_rank"],
        world_size=dist.get_world_size(),
        local_world_size=found["local_world_size"],
        device=device,
        backend=_backend_in_use(device),
    )


def _join(found: Mapping[str, int], backend: str, settings: InitProcessGroupKwargs) -> None:
    timeout = timedelta(seconds=timeout_s(settings))
    rank, world_size = found["rank"], found["world_size"]
    if settings.init_method:
        dist.init_process_group(
            backend,
            init_method=settings.init_method,
            timeout=timeout,
            rank=rank,
            world_size=world_size,
        )
        return
    if env.flag("FORK_LAUNCHED"):  # a launch keeps its workers' groups apart
        dist.init_process_group(backend, timeout=timeout)
        return
    # The store outlives a group, and torch uses the same keys in it for the next one, whose ranks
    # would wait for addresses of the first for ever (torch 2.13). So each has keys of its own; and
    # the store stays, because another process may look into it while this one makes it anew.
    met = rendezvous("env://", rank, world_size, timeout=timeout)
    store = next(iter(met))[0]
    store.set_timeout(timeout)
    _STORES.append(store)
    own = dist.PrefixStore(f"nbaccel_{len(_STORES)}", store)  # type: ignore[attr-defined]
    dist.init_process_group(backend, store=own, timeout=timeout, rank=rank, world_size=world_size)


def rank() -> int:
    """Number of this process, found out without a device and without joining the others."""
    return dist.get_rank() if dist.is_initialized() else _number("RANK", 0)


def local_rank() -> int:
    """Number of this process on its node, found out in the same way."""
    return _number("LOCAL_RANK", rank())


def can_meet() -> bool:
    """Whether there is a process group, or a launcher has said how to make one."""
    return dist.is_initialized() or bool((env.read("RANK", "") or "").strip())


def timeout_s(settings: InitProcessGroupKwargs | None) -> float:
    """Seconds that a process waits for the others in a collective."""
    asked = settings.timeout if settings else None
    return asked.total_seconds() if isinstance(asked, timedelta) else DEFAULT_TIMEOUT_S


def wants_cpu(cpu: bool = False) -> bool:
    """Whether the CPU was asked for, by argument or by ``ACCELERATE_USE_CPU``."""
    return cpu or bool(env.flag("ACCELERATE_USE_CPU"))


def find_device(local_rank: int = 0, *, cpu: bool = False) -> torch.device:
    """What this process computes on: its GPU where there is one, else the CPU."""
    if not wants_cpu(cpu) and torch.cuda.is_available():
        return _catalog.device("cuda").torch_device(local_rank)
    return torch.device("cpu")


def _numbers() -> dict[str, int]:
    if dist.is_initialized():
        world = {"rank": dist.get_rank(), "world_size": dist.get_world_size()}
    else:
        world = {"rank": _number("RANK", 0), "world_size": _number("WORLD_SIZE", 1)}
        _check(world)
    local = _number("LOCAL_RANK", world["rank"])
    return world | {
        "local_rank": local,
        "local_world_size": _number("LOCAL_WORLD_SIZE", max(world["world_size"], local + 1)),
    }


def _number(name: str, default: int) -> int:
    text = env.read(name, "") or ""
    if not text.strip():
        return default
    try:
        return int(text)
    except ValueError:
        raise ConfigError(
            f"Environment variable {name} must be a whole number: got {text!r}. Processes find "
            "each other by it. Unset it, or start the processes with a launcher, which sets it."
        ) from None


def _check(world: dict[str, int]) -> None:
    if not 0 <= world["rank"] < world["world_size"]:
        raise ConfigError(
            f"RANK={world['rank']} does not fit WORLD_SIZE={world['world_size']}. The processes "
            "would never find each other. Set both, or none to train in this process alone."
        )
    missing = [n for n in ("MASTER_ADDR", "MASTER_PORT") if not env.read(n)]
    if world["world_size"] > 1 and missing:
        raise ConfigError(
            f"WORLD_SIZE={world['world_size']} asks for several processes, but "
            f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not set. They would "
            "not find each other. Start them with notebook_launcher or torchrun, or unset "
            "WORLD_SIZE to train in this process alone."
        )


def _backend_in_use(device: torch.device) -> str:
    """By which tensors on this device travel: of ``cpu:gloo,cuda:nccl`` the part that matters."""
    config = str(dist.get_backend_config())
    parts = [part.partition(":") for part in config.split(",")]
    return {kind: name for kind, _, name in parts}.get(device.type) or config


def _backend(device: torch.device, num_local: int) -> str:
    """What fits the device; beside nccl also gloo, by which objects and CPU tensors travel."""
    if (
        device.type != "cuda"
        or num_local > torch.cuda.device_count()
        or not dist.is_nccl_available()
    ):
        return "gloo"
    return "cpu:gloo,cuda:nccl"
