"""Which hosts and slots of a hostfile take part: DeepSpeed's ``--include`` and ``--exclude``.

    worker-1:0,2@worker-2       slots 0 and 2 of one host, and all of another

One reader for `RunConfig`, the engine and the command line. What DeepSpeed takes means the same
here, but for what it would silently read in one of two ways: a host or slot that is named twice.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from nbaccel.base.errors import ConfigError
from nbaccel.config.given_values import closest

_SLOT_HELP = "Name slots by number, as in worker-1:0,1@worker-2"


def slots_by_host(filter_text: str) -> dict[str, tuple[int, ...]]:
    """The hosts that a filter names, each with the numbers of its slots; none stand for all."""
    slots: dict[str, tuple[int, ...]] = {}
    mistakes = []
    for part in filter_text.split("@"):
        host_name, colon, slots_text = (word.strip() for word in part.strip().partition(":"))
        if not host_name:
            mistakes.append(
                f"{filter_text!r} names a host without a name. Nobody could be left out or taken. "
                "Write worker-1@worker-2, without an @ at its ends."
            )
            continue
        words = [word.strip() for word in slots_text.split(",")] if colon else []
        mistakes += _slot_mistakes(host_name, words)
        numbers = tuple(int(word) for word in words if word.isdecimal())
        if host_name in slots and not (numbers and slots[host_name]):
            mistakes.append(
                f"host {host_name!r} is named twice in {filter_text!r}, as a whole and again. One "
                "would silently override the other. Leave one of them out."
            )
        twice = set(numbers) & set(slots.get(host_name, ()))
        mistakes += [_slot_twice(host_name, number) for number in sorted(twice)]
        slots[host_name] = (*slots.get(host_name, ()), *numbers)
    if mistakes:
        raise ConfigError(*dict.fromkeys(mistakes))
    return {host_name: tuple(sorted(numbers)) for host_name, numbers in slots.items()}


def _slot_mistakes(name: str, words: list[str]) -> Iterator[str]:
    for word in words:
        if not (word.isascii() and word.isdecimal()):
            yield (
                f"slot {word!r} of host {name!r} is no number. It would be unclear which "
                f"device is meant. {_SLOT_HELP}."
            )
        elif [int(other) for other in words if other.isdecimal()].count(int(word)) > 1:
            yield _slot_twice(name, int(word))


def _slot_twice(name: str, number: int) -> str:
    return (
        f"slot {number} of host {name!r} is named twice. It takes one worker, so one of them "
        "is a mistake. Name it once."
    )


def read_host_filter(value: Any) -> Any:
    """A filter as it is stored; other values are left to the type's check."""
    if isinstance(value, str) and value:
        slots_by_host(value)
    return value


def kept_slots(
    num_slots: Mapping[str, int], *, include: str | None = None, exclude: str | None = None
) -> dict[str, tuple[int, ...]]:
    """The slots that are left of each host, in the order of the hosts; others are left out."""
    every_slot = {host_name: tuple(range(number)) for host_name, number in num_slots.items()}
    setting_name, text = ("include", include) if include else ("exclude", exclude)
    if not text:
        return every_slot
    # An @ separates hosts here, so a filter cannot write a user.
    full_names = {name.rpartition("@")[2]: name for name in num_slots}
    named: dict[str, tuple[int, ...]] = {}
    mistakes = []
    for host_name, numbers in slots_by_host(text).items():
        full_name = full_names.get(host_name)
        if full_name is None:
            mistakes.append(_unknown_host(setting_name, host_name, tuple(full_names)))
            continue
        mistakes += [
            f"{setting_name} names slot {number} of host {host_name!r}, which has "
            f"slots={num_slots[full_name]}: 0 to {num_slots[full_name] - 1}. No worker could have "
            "it. Name another slot, or write more slots into the hostfile."
            for number in numbers
            if number >= num_slots[full_name]
        ]
        named[full_name] = numbers or every_slot[full_name]
    if mistakes:
        raise ConfigError(*mistakes)
    left = {
        host_name: tuple(
            number
            for number in numbers
            if (number in named.get(host_name, ())) == (setting_name == "include")
        )
        for host_name, numbers in every_slot.items()
    }
    if not any(left.values()):
        raise ConfigError(
            f"{setting_name}={text!r} leaves no slot of {', '.join(num_slots)}. Workers "
            "would have nowhere to run. Leave fewer hosts or slots out."
        )
    return {host_name: numbers for host_name, numbers in left.items() if numbers}


def _unknown_host(setting_name: str, host_name: str, known_names: tuple[str, ...]) -> str:
    remedy = closest(host_name, known_names).lstrip() or f"It has {', '.join(known_names)}."
    return (
        f"{setting_name} names host {host_name!r}, which is not in the hostfile. It would silently "
        f"have no effect. {remedy} Name hosts as the file does, without a user."
    )


# `Any` is a `RunConfig` here, whose module imports this one.
def filter_contradictions(config: Any) -> Iterator[tuple[tuple[str, ...], str]]:
    """What a run's filters contradict, each with the settings that it is about."""
    name = "include" if config.include is not None else "exclude"
    text = getattr(config, name)
    if text is None:
        return
    if config.include is not None and config.exclude is not None:
        yield (
            ("include", "exclude"),
            f"include={config.include!r} contradicts exclude={config.exclude!r}: one says what "
            "is taken, the other what is left out. Leave one of them out.",
        )
    if config.hostfile is None:
        yield (
            ("include", "exclude", "hostfile"),
            f"{name}={text!r} needs hostfile=...: it chooses among the hosts of that "
            "file. Nothing would be chosen. Give the file; devices of this machine alone are "
            'chosen by variables={"CUDA_VISIBLE_DEVICES": "0,1"}, or nbaccel launch --gpu-ids.',
        )
    devices = (config.variables or {}).get("CUDA_VISIBLE_DEVICES")
    if devices is not None:
        yield (
            ("include", "exclude", "variables"),
            f"CUDA_VISIBLE_DEVICES={devices!r} in variables (gpu_ids of a file) contradicts "
            "include and exclude, which choose the devices of each host. One would silently "
            "override the other. Leave one of them out.",
        )
