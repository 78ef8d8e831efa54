"""The GPUs that ``CUDA_VISIBLE_DEVICES`` of the workers leaves: ``gpu_ids`` of Accelerate's files.

The inventory is of this process, which sees more than its workers will: a plan that counted all
GPUs would start workers without one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from nbaccel.base.units import count_noun
from nbaccel.config import RunConfig
from nbaccel.config.capabilities import device_row
from nbaccel.plan.inventory import Gpu, Inventory

_NONE_AT_ALL = ("", "-1", "NoDevFiles")


def named_setting(config: RunConfig, host_devices: Sequence[int] = ()) -> str | None:
    """``CUDA_VISIBLE_DEVICES`` of the workers; None where nothing was said, or no GPU is used."""
    if config.device != "auto" and device_row(config.device).in_host_memory:
        return None
    if host_devices:
        return ",".join(map(str, host_devices))
    return (config.variables or {}).get("CUDA_VISIBLE_DEVICES")


def with_named_gpus(found: Inventory, setting: str | None) -> tuple[Inventory, str]:
    """The machine as workers with that setting will see it."""
    if setting is None or setting == found.gpu_setting or not found.gpus:
        return found, ""
    names = [] if setting.strip() in _NONE_AT_ALL else [name.strip() for name in setting.split(",")]
    named_gpus = []
    for name in names:
        gpu = _gpu_of(found, name)
        if gpu is None or gpu in named_gpus:
            problem = "twice" if gpu in named_gpus else f"and here are {_names_of(found)}"
            return found, (
                f"CUDA_VISIBLE_DEVICES={setting!r} of the workers (gpu_ids, or slots of a filter) "
                f"names GPU {name!r}, {problem}. CUDA would hide it and all that follow, and "
                "workers would have none. Name others, or leave it out to take all."
            )
        named_gpus.append(gpu)
    return (
        dataclasses.replace(
            found,
            gpus=tuple(
                dataclasses.replace(gpu, index=index) for index, gpu in enumerate(named_gpus)
            ),
            gpu_setting=setting,
            gpu_note=found.gpu_note if names else f"CUDA_VISIBLE_DEVICES={setting!r} hides all",
        ),
        "",
    )


def _gpu_of(found: Inventory, name: str) -> Gpu | None:
    """The GPU that is called so: by number, or by the beginning of its UUID."""
    if name.startswith(("GPU-", "MIG-")):
        meant_gpus = [gpu for gpu in found.gpus if gpu.uuid.startswith(name)]
        return meant_gpus[0] if len(meant_gpus) == 1 else None
    return dict(zip(_numbers_of(found), found.gpus, strict=False)).get(name)


def _numbers_of(found: Inventory) -> list[str]:
    # Numbers are those of the machine, also for a process that sees a part of it.
    if found.gpu_setting is not None:
        return [name.strip() for name in found.gpu_setting.split(",")]
    return [str(gpu.index) for gpu in found.gpus]


def _names_of(found: Inventory) -> str:
    numbers = _numbers_of(found)[: len(found.gpus)]
    return f"{count_noun(len(numbers), 'GPU')} ({', '.join(numbers)})"
