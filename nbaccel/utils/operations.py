"""Collectives and trees of tensors, on the process group of this process."""

from __future__ import annotations

from typing import Any

from nbaccel.train import arrival
from nbaccel.train.collectives import Collectives
from nbaccel.train.trees import concatenate, find_batch_size, send_to_device

__all__ = [
    "broadcast",
    "broadcast_object_list",
    "concatenate",
    "find_batch_size",
    "gather",
    "gather_object",
    "pad_across_processes",
    "reduce",
    "send_to_device",
    "wait_for_everyone",
]


def _together() -> Collectives:
    place = arrival.arrive()
    return Collectives(place)


def wait_for_everyone() -> None:
    """Wait until every process is here."""
    _together().barrier()


def gather(tensor: Any) -> Any:
    """Join every process's tensors along their first dimension; see `Accelerator.gather`."""
    return _together().gather(tensor)


def gather_object(object: Any) -> list[Any]:  # noqa: A002  (Accelerate's name)
    """Join every process's list of picklable objects."""
    return _together().gather_object(object)


def reduce(tensor: Any, reduction: str = "mean", scale: float = 1.0) -> Any:
    """Combine every process's tensors element by element: ``sum``, ``mean`` or ``max``."""
    return _together().reduce(tensor, reduction, scale)


def broadcast(tensor: Any, from_process: int = 0) -> Any:
    """Copy one process's tensors into everybody's, in place."""
    return _together().broadcast(tensor, from_process)


def broadcast_object_list(object_list: list[Any], from_process: int = 0) -> list[Any]:
    """Copy one process's list of picklable objects into everybody's, in place."""
    return _together().broadcast_object_list(object_list, from_process)


def pad_across_processes(
    tensor: Any, dim: int = 0, pad_index: float = 0, pad_first: bool = False
) -> Any:
    """Make every process's tensors equally long in one dimension."""
    return _together().pad_across_processes(tensor, dim, pad_index, pad_first)
