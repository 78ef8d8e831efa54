"""Random number generators: Python's, numpy's, torch's on the CPU and on accelerators.

Read and set together, so that a run can be repeated and resumed. Nothing here initialises an
accelerator: a generator that was never used needs no saving.
"""

from __future__ import annotations

import contextlib
import operator
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

from nbaccel.base.errors import ConfigError
from nbaccel.config.given_values import closest, shown
from nbaccel.plan import registry
from nbaccel.plan.contracts.device import DeviceRuntime
from nbaccel.plan.contracts.training import Place
from nbaccel.train import distributed
from nbaccel.train.collectives import Collectives

_NUM_SEEDS = 2**32  # numpy takes no larger ones


def _set_python_state(state: Any) -> None:
    version, internal_state, next_gauss = state
    random.setstate((version, tuple(internal_state), next_gauss))


# By the name in `rng_types`: the name in a checkpoint, as Accelerate has it, and how it is read and
# set. A checkpoint that was read with map_location has its states on the accelerator.
_HOST_GENERATORS: dict[str, tuple[str, Callable[[], Any], Callable[[Any], Any]]] = {
    "python": ("random_state", random.getstate, _set_python_state),
    "numpy": ("numpy_random_seed", np.random.get_state, np.random.set_state),
    "torch": ("torch_manual_seed", torch.get_rng_state, lambda s: torch.set_rng_state(s.cpu())),
}


def _device_state_key(device_runtime: DeviceRuntime) -> str:
    return f"torch_{device_runtime.kind}_manual_seed"


def set_seed(seed: int, device_specific: bool = False, deterministic: bool = False) -> None:
    """Seed Python, numpy and torch (CPU and all accelerators).

    Args:
        seed: From 0 to 2**32 - 1.
        device_specific: Add the rank to it, so that every process draws other numbers.
        deterministic: Let torch use deterministic algorithms only; slower, and an operation that
            has none raises.

    Raises:
        ConfigError: The seed is no whole number, or out of range.
    """
    try:
        # `index` accepts numpy's whole numbers, and refuses floats and text.
        number = operator.index(seed)
    except TypeError:
        number = -1
    if not 0 <= number < _NUM_SEEDS:
        raise ConfigError(
            f"set_seed({shown(seed)}) must get a whole number from 0 to {_NUM_SEEDS - 1}. numpy "
            "takes no other, and would be left unseeded. Give such a number."
        )
    # numpy refuses 2**32 and above, so the largest seeds wrap around.
    seed = (number + distributed.rank()) % _NUM_SEEDS if device_specific else number
    random.seed(seed)
    # The legacy global generator, because `np.random.*` calls in user code draw from it.
    np.random.seed(seed)
    torch.manual_seed(seed)  # seeds an accelerator when, and only if, it is initialised
    if deterministic:
        torch.use_deterministic_algorithms(True)


def capture_rng_states(place: Place) -> dict[str, Any]:
    """The states of all global generators that this process uses."""
    return _generator_states(registry.device(place.device_name))


def restore_rng_states(place: Place, state: Mapping[str, Any]) -> None:
    """Set the global generators to what :func:`capture_rng_states` gave."""
    _set_generator_states(state, registry.device(place.device_name))


@contextlib.contextmanager
def preserve_rng_states() -> Iterator[None]:
    """Restore all global generators after the block."""
    # Chosen once: a device that the block initialises has no earlier state to restore.
    devices = tuple(registry.awake_accelerators())
    previous_states = _generator_states(*devices)
    try:
        yield
    finally:
        _set_generator_states(previous_states, *devices)


def _generator_states(*devices: DeviceRuntime) -> dict[str, Any]:
    states = {key: get_state() for key, get_state, _ in _HOST_GENERATORS.values()}
    for device in devices:
        if device.has_random_state:
            numbers = range(device.count())
            states[_device_state_key(device)] = [device.random_state(i) for i in numbers]
    return states


def _set_generator_states(states: Mapping[str, Any], *devices: DeviceRuntime) -> None:
    for key, _, set_state in _HOST_GENERATORS.values():
        if key in states:
            set_state(states[key])
    for device in devices:
        device_states = states.get(_device_state_key(device), ()) if device.has_random_state else ()
        # A checkpoint may come from a machine with more devices than this one has.
        for index, device_state in enumerate(device_states[: device.count()]):
            device.set_random_state(device_state, index)


def synchronize_rng_states(
    rng_types: Iterable[str],
    generator: torch.Generator | None = None,
    collectives: Collectives | None = None,
) -> None:
    """Let every process draw what process 0 would: a collective."""
    # An enum member counts as its value: Accelerate's RNGType is one.
    type_names = [str(getattr(type_name, "value", type_name)) for type_name in rng_types]
    accessors: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
        name: (get_state, set_state) for name, (_, get_state, set_state) in _HOST_GENERATORS.items()
    }
    devices = (device for device in registry.devices() if device.has_random_state)
    accessors |= {it.kind: (it.random_state, it.set_random_state) for it in devices}
    if generator is not None:
        accessors["generator"] = (generator.get_state, generator.set_state)
    # Before any exchange, so that a wrong name is refused on every process.
    for type_name in type_names:
        if type_name == "generator" and generator is None:
            raise ConfigError(
                f"rng_types has {type_name!r}, but generator={generator!r}: there is none whose "
                "state could be shared. Give a torch.Generator, or leave it out of rng_types."
            )
        if type_name not in accessors:
            types = [*dict.fromkeys((*accessors, "generator"))]
            raise ConfigError(
                f"rng_types has {type_name!r}, which is the name of no generator. The processes "
                f"would draw different numbers.{closest(type_name, types)} Give one of "
                f"{', '.join(types)}."
            )
    if collectives is None or collectives.place.is_alone or not type_names:
        return
    states = {type_name: accessors[type_name][0]() for type_name in type_names}
    for type_name, state in collectives.broadcast_object(states).items():
        _, set_state = accessors[type_name]
        set_state(state)
