"""Which devices, and of which hosts: ``--gpu-ids``, ``--include`` and ``--exclude``.

DeepSpeed writes ``host1:0,1@host2``; Accelerate has the same under longer names. What names this
machine alone becomes ``CUDA_VISIBLE_DEVICES``; what names others is left to the engine of hosts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from nbaccel.plan import inspect_machine

__all__ = ["DeviceChoice", "choose_devices"]

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
        host_filters: ``include`` or ``exclude`` → its text, where it names other hosts.
        flag: The option that says so.
        mistakes: What is wrong.
    """

    visible: str | None = None
    count: int = 0
    host_filters: Mapping[str, str] = field(default_factory=dict)
    flag: str = ""
    mistakes: tuple[str, ...] = ()


def choose_devices(given: Mapping[str, Any]) -> DeviceChoice:
    """Read the options that choose devices.

    Args:
        given: Options by name; others are left alone.
    """
    found_filters = [
        (kind, str(given[name]), f"--{name.replace('_', '-')}")
        for kind, names in _FILTER_NAMES.items()
        for name in names
        if given.get(name)
    ]
    gpu_ids = str(given.get("gpu_ids") or "all").replace(" ", "")
    given_flags = [flag for _, _, flag in found_filters] + ["--gpu-ids"] * (gpu_ids != "all")
    if len(given_flags) > 1:
        return DeviceChoice(
            mistakes=(
                f"{' and '.join(given_flags)} choose devices twice: one would silently override "
                "the other. Leave one of them out.",
            )
        )
    if gpu_ids != "all":
        return _of_numbers(gpu_ids.split(","), "--gpu-ids")
    return _of_filter(*found_filters[0]) if found_filters else DeviceChoice()


def _of_filter(kind: str, filter_text: str, flag: str) -> DeviceChoice:
    hosts = dict(part.strip().partition(":")[::2] for part in filter_text.split("@"))
    if not hosts.keys() <= _THIS_MACHINE:
        return DeviceChoice(host_filters={kind: filter_text}, flag=flag)
    slots_text = next(iter(hosts.values()))
    if not slots_text:
        return DeviceChoice()
    numbers = slots_text.replace(" ", "").split(",")
    if kind == "include" or not all(number.isdecimal() for number in numbers):
        return _of_numbers(numbers, flag)
    kept_numbers = [
        str(gpu.index) for gpu in inspect_machine().gpus if str(gpu.index) not in numbers
    ]
    return _of_numbers(kept_numbers, flag) if kept_numbers else DeviceChoice()


def _of_numbers(numbers: list[str], flag: str) -> DeviceChoice:
    if not all(number.isdecimal() for number in numbers):
        return DeviceChoice(
            mistakes=(
                f"{flag} must name devices by number: got {','.join(numbers)!r}. Only these are "
                "used. Give for example 0,1.",
            )
        )
    return DeviceChoice(visible=",".join(numbers), count=len(numbers), flag=flag)
