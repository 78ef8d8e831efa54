"""Which devices, and of which hosts: ``--gpu-ids``, ``--include`` and ``--exclude``.

DeepSpeed writes ``host1:0,1@host2``; Accelerate has the same under longer names. With a hostfile a
filter is a setting, which chooses among its hosts; without, what names this machine alone becomes
``CUDA_VISIBLE_DEVICES``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from nbaccel.base.errors import ConfigError
from nbaccel.config.host_filter import kept_slots, slots_by_host
from nbaccel.plan import inspect_machine

_THIS_MACHINE = frozenset({"localhost", "127.0.0.1"})
_FILTER_NAMES = {
    "include": ("include", "deepspeed_inclusion_filter"),
    "exclude": ("exclude", "deepspeed_exclusion_filter"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceChoice:
    """The devices that were asked for.

    Attributes:
        visible: Value of ``CUDA_VISIBLE_DEVICES``; None leaves it.
        count: How many devices were named; 0 where that is not known.
        host_filters: ``include`` or ``exclude`` → its text, where it is about hosts.
        flag: The option that says so.
        mistakes: What is wrong.
    """

    visible: str | None = None
    count: int = 0
    host_filters: Mapping[str, str] = field(default_factory=dict)
    flag: str = ""
    mistakes: tuple[str, ...] = ()


def choose_devices(given: Mapping[str, Any], *, has_hosts: bool = False) -> DeviceChoice:
    """Read the options that choose devices."""
    filters = [
        (kind, str(given[name]), f"--{name.replace('_', '-')}")
        for kind, names in _FILTER_NAMES.items()
        for name in names
        if given.get(name)
    ]
    gpu_ids = str(given.get("gpu_ids") or "all").replace(" ", "")
    given_flags = [flag for _, _, flag in filters] + ["--gpu-ids"] * (gpu_ids != "all")
    if len(given_flags) > 1:
        return DeviceChoice(
            mistakes=(
                f"{' and '.join(given_flags)} choose devices twice: one would silently override "
                "the other. Leave one of them out.",
            )
        )
    if gpu_ids != "all":
        return _of_numbers(gpu_ids.split(","), "--gpu-ids")
    if not filters:
        return DeviceChoice()
    kind, text, flag = filters[0]
    try:
        host_names = slots_by_host(text).keys()
        if has_hosts or not host_names <= _THIS_MACHINE:
            return DeviceChoice(host_filters={kind: text}, flag=flag)
        return _of_this_machine(kind, text, flag)
    except ConfigError as error:
        return DeviceChoice(mistakes=tuple(f"{flag}: {mistake}" for mistake in error.mistakes))


def _of_this_machine(kind: str, filter_text: str, flag: str) -> DeviceChoice:
    """Devices of this machine, by whatever name."""
    numbers = [str(number) for slots in slots_by_host(filter_text).values() for number in slots]
    if kind == "include":
        return _of_numbers(numbers, flag) if numbers else DeviceChoice()
    num_gpus = len(inspect_machine().gpus)
    # Without GPUs there is nothing to leave out but the machine.
    if numbers and not num_gpus:
        return DeviceChoice()
    own_filter = f"localhost:{','.join(numbers)}" if numbers else "localhost"
    [kept_numbers] = kept_slots({"localhost": max(1, num_gpus)}, exclude=own_filter).values()
    return _of_numbers([str(number) for number in kept_numbers], flag)


def _of_numbers(numbers: list[str], flag: str) -> DeviceChoice:
    if not all(number.isdecimal() for number in numbers):
        return DeviceChoice(
            mistakes=(
                f"{flag} must name devices by number: got {','.join(numbers)!r}. Only these are "
                "used. Give for example 0,1.",
            )
        )
    return DeviceChoice(visible=",".join(numbers), count=len(numbers), flag=flag)
