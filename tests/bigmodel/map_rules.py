"""What holds for any device map, checked tensor by tensor without the code that makes maps."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn


class Block(nn.Module):
    """A module of parts, a class that maps may be told not to split."""

    def __init__(self, parts: Mapping[str, nn.Module]) -> None:
        super().__init__()
        for name, part in parts.items():
            self.add_module(name, part)


class Stack(Block):
    """The same, that may always be split."""


def all_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Under all of their names."""
    return {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }


def device_of(name: str, device_map: Mapping[str, Any]) -> Any:
    while name and name not in device_map:
        name = name.rpartition(".")[0]
    return device_map.get(name)


def held(model: nn.Module, device_map: Mapping[str, Any]) -> Counter:
    """Bytes by device; a tensor with several names counts at the first."""
    first_names: dict[int, str] = {}
    for name, tensor in all_tensors(model).items():
        first_names.setdefault(id(tensor), name)
    bytes_on = Counter()
    for name, tensor in all_tensors(model).items():
        if first_names[id(tensor)] == name:
            bytes_on[device_of(name, device_map)] += tensor.numel() * tensor.itemsize
    return bytes_on


def slow_bytes(model: nn.Module, device_map: Mapping[str, Any]) -> tuple[int, int]:
    """Bytes on no accelerator, and of these on the disk."""
    bytes_on = held(model, device_map)
    return bytes_on["cpu"] + bytes_on["disk"], bytes_on["disk"]


def layers(model: nn.Module, whole: frozenset[str], prefix: str = "") -> Iterator[str]:
    """Names of what is brought to a device at once."""
    for name, child in model._modules.items():
        if child is None:
            continue
        if not any(True for _ in child.children()) or type(child).__name__ in whole:
            yield prefix + name
        else:
            yield from layers(child, whole, f"{prefix}{name}.")


def rules_broken(
    model: nn.Module,
    device_map: Mapping[str, Any],
    budgets: Mapping[Any, int],
    whole: frozenset[str] = frozenset(),
) -> list[str]:
    """All that is wrong with a map; empty where it can be followed.

    Room for what is brought back is another matter: `lack_of_room`.
    """
    tensors = all_tensors(model)
    wrong = [f"no device: {name}" for name in tensors if device_of(name, device_map) is None]
    bytes_on = held(model, device_map)
    wrong += [
        f"over budget: {device} holds {bytes_on[device]} of {budget}"
        for device, budget in budgets.items()
        if bytes_on[device] > budget
    ]
    wrong += [f"unknown device {device}" for device in bytes_on.keys() - {*budgets, "disk", None}]
    places: dict[int, set] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        places.setdefault(id(parameter), set()).add(device_of(name, device_map))
    wrong += [f"ties apart: {devices}" for devices in places.values() if len(devices) > 1]
    for name, module in model.named_modules(remove_duplicate=False):
        if type(module).__name__ in whole:
            inside = [key for key in device_map if key.startswith(f"{name}.") or (not name and key)]
            wrong += [f"split: {name} into {inside}"] if inside else []
    return wrong


def lack_of_room(
    model: nn.Module,
    device_map: Mapping[str, Any],
    budgets: Mapping[Any, int],
    whole: frozenset[str],
) -> Iterator[str]:
    """Layers of slow devices that the first accelerator in use could not be given."""
    used = [d for d in budgets if d != "disk" and d in device_map.values()]
    sizes, bytes_on = layer_sizes(model, whole), held(model, device_map)
    for keeper in {*used[:1], *(["cpu"] if "cpu" in used else [])}:
        slower = ("disk",) if keeper == "cpu" else ("cpu", "disk")
        away = [(s, n) for n, s in sizes.items() if device_of(n, device_map) in slower]
        largest, name = max(away, default=(0, ""))
        if bytes_on[keeper] + largest > budgets[keeper]:
            yield f"no room: {name} ({largest}) beside {bytes_on[keeper]} on {keeper}"


def layer_sizes(model: nn.Module, whole: frozenset[str]) -> dict[str, int]:
    names = list(layers(model, whole))
    sizes: Counter = Counter()
    seen: set[int] = set()
    for name, tensor in all_tensors(model).items():
        layer = next((n for n in names if name == n or name.startswith(f"{n}.")), name)
        # A buffer beside submodules is in no layer.
        if id(tensor) not in seen and (layer != name or isinstance(tensor, nn.Parameter)):
            sizes[layer] += tensor.numel() * tensor.itemsize
        seen.add(id(tensor))
    return dict(sizes)


def random_model(chance: random.Random, *, odd: bool = True) -> nn.Module:
    """A tree of modules on ``meta``, some weights tied.

    What is odd Accelerate has no answer to: buffers and parameters beside submodules, modules that
    stand in two places.
    """
    with torch.device("meta"):
        model = random_stack(chance, depth=chance.randint(1, 3), odd=odd, kind=Stack)
    tie_some(model, chance)
    return model


def random_stack(
    chance: random.Random, depth: int, odd: bool, kind: type[Block] | None = None
) -> nn.Module:
    kind = kind or (Block if chance.random() < 0.3 else Stack)
    parts = {}
    for _ in range(chance.randint(1, 4)):
        deep = depth > 0 and chance.random() < 0.6
        # Accelerate takes a name inside of another for one around it: no two are alike.
        parts[f"part{chance.getrandbits(40):010x}"] = (
            random_stack(chance, depth - 1, odd) if deep else random_leaf(chance)
        )
    stack = kind(parts)
    if odd and chance.random() < 0.2:
        stack.register_buffer("own_buffer", torch.zeros(chance.randint(1, 9)))
    if odd and chance.random() < 0.2:
        stack.own_parameter = nn.Parameter(torch.zeros(chance.randint(1, 9)))
    if odd and chance.random() < 0.1:
        stack.again = next(stack.children())
    return stack


def random_leaf(chance: random.Random) -> nn.Module:
    kinds = [
        lambda: nn.Linear(chance.randint(1, 6), chance.choice([4, 4, 8])),
        lambda: nn.Linear(4, 4, bias=False),
        lambda: nn.BatchNorm1d(chance.randint(1, 6)),
        nn.Dropout,
    ]
    return chance.choice(kinds)()


def tie_some(model: nn.Module, chance: random.Random) -> None:
    linears = [m for m in model.modules() if isinstance(m, nn.Linear)]
    for _ in range(chance.choice([0, 0, 1, 1, 2])):
        if len(linears) > 1:
            first, second = chance.sample(linears, 2)
            second.weight = first.weight


def random_budgets(model: nn.Module, chance: random.Random) -> dict[Any, int]:
    total = sum(held(model, {"": 0}).values())
    budgets: dict[Any, int] = {
        number: chance.randint(0, int(total * chance.choice([0.3, 0.7, 1.2])) + 8)
        for number in range(chance.choice([0, 1, 1, 2, 3]))
    }
    if not budgets or chance.random() < 0.7:
        budgets["cpu"] = chance.randint(0, int(total * 1.5) + 8)
    return budgets
