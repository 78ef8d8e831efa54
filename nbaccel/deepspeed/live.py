"""How many bytes of tensors live, followed operation by operation.

A process's resident memory has libraries, stacks and the allocator's reserve in it, tens of
megabytes that come and go. Here each storage is counted from the operation that made it until it
is freed, so that a small model can be measured, and a fake one that allocates nothing.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

if TYPE_CHECKING:
    _Mode = Any
else:
    _Mode = TorchDispatchMode  # torch has not typed it

__all__ = ["LiveBytes"]


class LiveBytes(_Mode):  # type: ignore[misc]
    """Counts the bytes of storages made inside a ``with`` block of it, each once.

    Args:
        known: Tensors that were there before; neither they nor views of them are counted.
        device: The kind of device that counts: ``cpu``, for example. None: all do.

    Attributes:
        now: Bytes that live.
        peak: The most that lived at once.
    """

    def __init__(self, known: Iterable[torch.Tensor] = (), *, device: str | None = None) -> None:
        super().__init__()
        self._device = device
        self._known: set[int] = set()
        self._living: dict[int, int] = {}
        self.now = 0
        self.peak = 0
        for tensor in known:
            key = storage_key(tensor)
            if key not in self._known:
                self._known.add(key)
                # Once it is freed, another may be made at its address.
                gone = weakref.finalize(tensor.untyped_storage(), self._known.discard, key)
                gone.atexit = False

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run an operation, and count what it made."""
        made = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, torch.Tensor) and tensor.layout is torch.strided:
                self._count(tensor)
        self.peak = max(self.peak, self.now)
        return made

    def adopt(self, tensors: Iterable[torch.Tensor]) -> None:
        """Count tensors that were there before from now on: they have become private.

        Args:
            tensors: Any; those that are counted already change nothing.
        """
        for tensor in tensors:
            self._known.discard(storage_key(tensor))
            self._count(tensor)
        self.peak = max(self.peak, self.now)

    def _count(self, tensor: torch.Tensor) -> None:
        storage, key = tensor.untyped_storage(), storage_key(tensor)
        if key in self._known or self._device not in (None, tensor.device.type):
            return
        num_bytes = storage.nbytes()
        if key not in self._living:
            weakref.finalize(storage, self._freed, key).atexit = False
        self.now += num_bytes - self._living.get(key, 0)  # a storage may have been resized
        self._living[key] = num_bytes

    def _freed(self, key: int) -> None:
        self.now -= self._living.pop(key, 0)


def storage_key(tensor: torch.Tensor) -> int:
    """What tells one storage from another, also among fakes, whose addresses are all the same."""
    return int(tensor.untyped_storage()._cdata)  # noqa: SLF001 - there is no public name for it
