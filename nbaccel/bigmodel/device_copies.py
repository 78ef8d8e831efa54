"""Copies weights to an accelerator while it computes: from pinned memory, on a stream beside.

What cannot be copied like that is left to the caller, who copies it when it is needed. It asks no
device for its name: what torch offers for all accelerators is used, or nothing.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from nbaccel.base.log import get_logger
from nbaccel.bigmodel.tensor_placing import is_accelerator
from nbaccel.plan import registry

_copy_log = get_logger(__name__)


@dataclass(frozen=True)
class CopiesUnderWay:
    """Weights that a device is receiving.

    Attributes:
        tensors: Where they will be, by name.
        device: The device.
        end: Reached when all are there.
    """

    tensors: Mapping[str, torch.Tensor]
    device: torch.device
    end: torch.Event

    def finish(self) -> Mapping[str, torch.Tensor]:
        """Let what is computed from now on wait for the copies; the host does not wait."""
        stream = torch.accelerator.current_stream(self.device)
        stream.wait_event(self.end)
        for tensor in self.tensors.values():
            # Their memory belongs to the other stream: without this it could be given to the next
            # copies when the tensors are dropped, which is before the kernels have read them.
            tensor.record_stream(stream)
        return self.tensors


def start_copies(
    weights: Mapping[str, torch.Tensor], device: torch.device
) -> CopiesUnderWay | None:
    """Begin to copy weights to a device, beside what it computes."""
    host_weights = {
        name: weight.detach() for name, weight in weights.items() if weight.device.type == "cpu"
    }
    stream = _side_stream(_with_index(device)) if _can_copy_beside(device) else None
    if stream is None or not host_weights:
        return None
    try:
        return _copy_on(stream, host_weights)
    # No room, in pinned memory or on the device: when the weight is needed there may be.
    except RuntimeError as error:
        _copy_log.debug("Weights are not copied to %s ahead of time: %s", device, error)
        return None


def _copy_on(stream: torch.Stream, host_weights: Mapping[str, torch.Tensor]) -> CopiesUnderWay:
    device = stream.device
    # Outside of the stream, because this is the host's work. Pinned memory that is dropped early
    # is not used again by torch before the copies that read it are through.
    pinned = {
        name: weight if weight.is_pinned() else weight.pin_memory()
        for name, weight in host_weights.items()
    }
    with _current_stream(stream):
        tensors = {name: weight.to(device, non_blocking=True) for name, weight in pinned.items()}
        end = torch.Event(device=device)
        end.record(stream)
    return CopiesUnderWay(tensors, device, end)


def _can_copy_beside(device: torch.device) -> bool:
    if not is_accelerator(device):
        return False
    runtime = registry.device_runtime(device.type)
    return runtime.pins_host_memory and runtime.copies_without_blocking


def _with_index(device: torch.device) -> torch.device:
    index: int | None = device.index
    if index is None:
        return torch.device(device.type, torch.accelerator.current_device_index())
    return device


@functools.lru_cache(maxsize=64)
def _side_stream(device: torch.device) -> torch.Stream | None:
    """The stream of a device that copies run on; None where its backend has no streams."""
    try:
        return torch.Stream(device=device)
    except (RuntimeError, NotImplementedError) as error:
        _copy_log.debug("%s has no streams, so nothing is copied beside: %s", device, error)
        return None


@contextlib.contextmanager
def _current_stream(stream: torch.Stream) -> Iterator[None]:
    """A block whose work goes to a stream; afterwards stream and device are as before."""
    index = torch.accelerator.current_device_index()
    previous_stream = torch.accelerator.current_stream(stream.device)
    torch.accelerator.set_stream(stream)
    try:
        yield
    finally:
        torch.accelerator.set_stream(previous_stream)
        # Setting a stream makes its device the current one.
        torch.accelerator.set_device_index(index)
