"""Random number generators: Python's, numpy's, torch's on the CPU and on CUDA devices.

Asked and set together, so that a run can be repeated and resumed. Nothing here opens a CUDA
context: a generator that was never used needs no saving.
"""

from __future__ import annotations

import contextlib
import operator
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

from nbaccel.abc.place import Place
from nbaccel.config.mistakes import closest, shown
from nbaccel.errors import ConfigError
from nbaccel.train import arrival
from nbaccel.train.collectives import Collectives

__all__ = ["capture", "preserved", "restore", "set_seed", "synchronize_rng_states"]

_SEEDS = 2**32  # numpy takes no larger ones

# The names under which Accelerate keeps them, too.
_PYTHON, _NUMPY, _TORCH, _CUDA = (
    "random_state",
    "numpy_random_seed",
    "torch_manual_seed",
    "torch_cuda_manual_seed",
)


def set_seed(seed: int, device_specific: bool = False, deterministic: bool = False) -> None:
    """Seed Python, numpy and torch (CPU and all CUDA devices).

    Args:
        seed: From 0 to 2**32 - 1.
        device_specific: Add the rank to it, so that every process draws other numbers.
        deterministic: Let torch use deterministic algorithms only; slower, and an operation that
            has none raises.

    Raises:
        ConfigError: The seed is no whole number, or out of range.
    """
    seed = _checked(seed)
    if device_specific:
        seed = (seed + arrival.rank()) % _SEEDS
    random.seed(seed)
    np.random.seed(seed)  # the global generator is the one that users draw from
    torch.manual_seed(seed)  # reaches CUDA when, and only if, CUDA wakes
    if deterministic:
        torch.use_deterministic_algorithms(True)


def _checked(seed: Any) -> int:
    try:
        number = operator.index(seed)
    except TypeError:
        number = -1
    if not 0 <= number < _SEEDS:
        raise ConfigError(
            f"set_seed({shown(seed)}) must get a whole number from 0 to {_SEEDS - 1}. numpy has no "
            "generator for another one, and the others would be seeded without it. Give one."
        )
    return number


# ------------------------------------------------------------------------- keep and give back


def capture(place: Place) -> dict[str, Any]:
    """The states of all global generators that this process uses.

    Args:
        place: This process; CUDA counts only where it computes on it.

    Returns:
        A dict for :func:`restore`, under the names of Accelerate's ``random_states_<rank>.pkl``:
        ``random_state`` (tuple), ``numpy_random_seed`` (tuple), ``torch_manual_seed`` (uint8),
        and on a GPU ``torch_cuda_manual_seed`` (list of uint8, one per visible device).
    """
    return _states(with_cuda=place.device.type == "cuda")


def restore(place: Place, state: Mapping[str, Any]) -> None:
    """Set the global generators to what :func:`capture` gave.

    Args:
        place: This process.
        state: The states; a generator that is missing in it is left as it is, and so are CUDA's
            where the process does not compute on CUDA.
    """
    _set_states(state, with_cuda=place.device.type == "cuda")


@contextlib.contextmanager
def preserved() -> Iterator[None]:
    """Leave all global generators as they were, whatever the block draws or seeds."""
    with_cuda = bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]
    before = _states(with_cuda=with_cuda)
    try:
        yield
    finally:
        _set_states(before, with_cuda=with_cuda)


def _states(*, with_cuda: bool) -> dict[str, Any]:
    states = {
        _PYTHON: random.getstate(),
        _NUMPY: np.random.get_state(),
        _TORCH: torch.get_rng_state(),
    }
    if with_cuda:
        states[_CUDA] = torch.cuda.get_rng_state_all()
    return states


def _set_states(states: Mapping[str, Any], *, with_cuda: bool) -> None:
    if _PYTHON in states:
        version, internal, gauss = states[_PYTHON]
        random.setstate((version, tuple(internal), gauss))
    if _NUMPY in states:
        np.random.set_state(states[_NUMPY])
    if _TORCH in states:
        torch.set_rng_state(states[_TORCH].cpu())
    if with_cuda:
        # A checkpoint may come from a machine with more devices than this one has.
        for number, state in enumerate(states.get(_CUDA, ())[: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(state.cpu(), number)


# ------------------------------------------------------------------------- the same everywhere


def synchronize_rng_states(
    rng_types: Iterable[str],
    generator: torch.Generator | None = None,
    collectives: Collectives | None = None,
) -> None:
    """Let every process draw what process 0 would: a collective.

    Args:
        rng_types: Which generators: of ``python``, ``numpy``, ``torch``, ``cuda`` (each process's
            current device), ``generator`` (the one given).
        generator: A generator of the user's own.
        collectives: The processes; None or a single one changes nothing.

    Raises:
        ConfigError: A type is unknown, or ``generator`` is asked for and none is given.
    """
    # An enum member counts as its value: Accelerate's RNGType is one.
    names = [str(getattr(kind, "value", kind)) for kind in rng_types]
    chosen = {name: _door(name, generator) for name in names}
    if collectives is None or collectives.place.is_alone or not chosen:
        return
    mine = {kind: get() for kind, (get, _) in chosen.items()}
    for kind, state in collectives.broadcast_object(mine).items():
        _, put = chosen[kind]
        put(state)


_KINDS = ("python", "numpy", "torch", "cuda", "generator")
_Door = tuple[Callable[[], Any], Callable[[Any], Any]]


def _door(kind: str, generator: torch.Generator | None) -> _Door:
    """How to ask one generator for its state, and how to set it."""
    if kind == "generator" and generator is None:
        raise ConfigError(
            f"rng_types has {kind!r}, but generator={generator!r}: there is none whose state could "
            "be shared. Give a torch.Generator, or leave it out of rng_types."
        )
    doors: dict[str, _Door] = {
        "python": (random.getstate, random.setstate),
        "numpy": (np.random.get_state, np.random.set_state),
        "torch": (torch.get_rng_state, torch.set_rng_state),
        "cuda": (torch.cuda.get_rng_state, torch.cuda.set_rng_state),
    }
    if generator is not None:
        doors["generator"] = (generator.get_state, generator.set_state)
    if kind not in doors:
        raise ConfigError(
            f"rng_types has {kind!r}, which is no generator that nbaccel knows. The processes "
            f"would draw different numbers.{closest(kind, _KINDS)} Give of {', '.join(_KINDS)}."
        )
    return doors[kind]
