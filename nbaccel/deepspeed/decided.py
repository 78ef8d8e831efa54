"""What of a DeepSpeed configuration decides about memory, with ``"auto"`` filled in."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nbaccel.config import RunConfig
from nbaccel.config.dotted import drop, put, value_at
from nbaccel.deepspeed.auto import AUTO_KEYS, resolve_auto
from nbaccel.deepspeed.facts import TrainingFacts, hidden_size
from nbaccel.deepspeed.reading import auto_keys
from nbaccel.disk import free_bytes, nearest_folder
from nbaccel.errors import ConfigError

__all__ = ["decided", "free_on_disk", "memory_part", "nearest_folder", "nvme_folders"]

_ZERO = "zero_optimization"
_SECTIONS = (
    *(_ZERO, "fp16", "bf16", "bfloat16", "data_types"),
    "zero_force_ds_cpu_optimizer",
)
_BY_WIDTH = (
    f"{_ZERO}.reduce_bucket_size",
    f"{_ZERO}.stage3_prefetch_bucket_size",
    f"{_ZERO}.stage3_param_persistence_threshold",
)
_PATHS = (f"{_ZERO}.offload_optimizer.nvme_path", f"{_ZERO}.offload_param.nvme_path")


def memory_part(config: Mapping[str, Any] | str | Path | Any = None) -> dict[str, Any]:
    """The settings of a configuration that memory depends on.

    Args:
        config: A mapping, a file, or a `ZeroConfig`; None is plain data-parallel training.

    Returns:
        A copy without the others: what they are, or that they are open, does not matter here.

    Raises:
        ConfigError: It cannot be read.
    """
    found = _mapping(config)
    part = {key: copy.deepcopy(found[key]) for key in _SECTIONS if key in found}
    optimizer = found.get("optimizer")
    if isinstance(optimizer, Mapping) and "type" in optimizer:
        part["optimizer"] = {"type": optimizer["type"]}
        if (optimizer.get("params") or {}).get("torch_adam"):
            part["optimizer"]["params"] = {"torch_adam": True}
    if isinstance(found.get("train_micro_batch_size_per_gpu"), int):
        part["train_micro_batch_size_per_gpu"] = found["train_micro_batch_size_per_gpu"]
    return part


def decided(
    part: dict[str, Any], model: Any, *, world_size: int = 1, run: RunConfig | None = None
) -> dict[str, Any]:
    """Fill in ``"auto"`` by the published rules, where something decides it.

    Args:
        part: What :func:`memory_part` gave.
        model: The module; its hidden size decides buckets. A bare size decides none.
        world_size: Processes in all.
        run: How it will be run: it decides the precision, the stage and the offloading.

    Returns:
        The settings. What nothing decides is still ``"auto"``.

    Raises:
        ConfigError: The file says something else than the run.
    """
    waiting = set(auto_keys(part))
    open_keys = {key for key in waiting if key not in AUTO_KEYS or key in _PATHS}
    if not callable(getattr(model, "modules", None)) or hidden_size(model)[0] is None:
        open_keys |= waiting & set(_BY_WIDTH)
    if not waiting - open_keys and run is None:
        return part
    rest = copy.deepcopy(part)
    for key in open_keys:
        drop(rest, key)
    facts = TrainingFacts(world_size=world_size)
    found = resolve_auto(rest, facts=facts, run=run, model=model).config.to_dict()
    for key in open_keys:
        put(found, key, "auto")
    return found


def free_on_disk(settings: Mapping[str, Any]) -> int | None:
    """What is free where parameters or the optimizer are swapped to.

    Args:
        settings: A DeepSpeed configuration.

    Returns:
        Bytes on the fullest of those disks; None where no folder is named.
    """
    return min(map(free_bytes, nvme_folders(settings)), default=None)


def nvme_folders(settings: Mapping[str, Any] | None) -> list[Path]:
    """The folders that parameters or the optimizer are swapped to.

    Args:
        settings: A DeepSpeed configuration, or None.

    Returns:
        Those that are named, the optimizer's first; ``"auto"`` names none.
    """
    found = (value_at(settings, key) for key in _PATHS)
    return [Path(folder) for folder in found if folder not in (None, "", "auto")]


def _mapping(config: Any) -> Mapping[str, Any]:
    if config is None:
        return {}
    if isinstance(config, Mapping):
        return config
    if callable(getattr(config, "to_dict", None)):
        return dict(config.to_dict())
    try:
        found = json.loads(Path(config).read_text(encoding="utf-8"))
    except (OSError, TypeError, ValueError) as error:
        raise ConfigError(
            f"A DeepSpeed configuration cannot be read from {config!r}: {error}. The estimate "
            "depends on it. Give a dict, the path of a JSON file, or a ZeroConfig."
        ) from error
    return dict(found)
