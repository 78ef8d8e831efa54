"""The :class:`~nbaccel.abc.ShardReader` of weights at MS-AMP's level O3.

Every process has such a weight in E4M3, and one of them its FP16 master, which is what was trained:
it is what is copied back to the notebook.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import nn

from nbaccel.plan.contracts import shards
from nbaccel.plan.contracts.shards import Piece, Remembered
from nbaccel.precision.fp8.conversion import restore_layers
from nbaccel.precision.fp8.scaled_tensor import ScaledTensor

remember = shards.remember


def building_whole() -> contextlib.AbstractContextManager[None]:
    """See :meth:`ShardReader.building_whole`; weights become short when they are prepared."""
    return contextlib.nullcontext()


def is_cut(tensor: torch.Tensor) -> bool:
    """See :meth:`ShardReader.is_cut`."""
    return isinstance(tensor, ScaledTensor) and tensor.owner is not None


def whole_shape(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """See :meth:`ShardReader.whole_shape`: every process has it whole."""
    return None


def local_pieces(tensor: Any, held: object = None) -> list[Piece]:
    """See :meth:`ShardReader.local_pieces`: the master, where it is."""
    return [] if tensor.master is None else [(0, tensor.master.dequantize().reshape(-1))]


def hold(tensor: torch.Tensor) -> object:
    """See :meth:`ShardReader.hold`: the weight itself keeps its master."""
    return None


def assign(tensor: Any, whole: torch.Tensor) -> None:
    """See :meth:`ShardReader.assign`."""
    tensor.store(whole)
    if tensor.master is not None:
        tensor.master.store(whole)


def inner_module(module: nn.Module) -> nn.Module | None:
    """See :meth:`ShardReader.inner_module`: there are no engines."""
    return None


def plain_state(module: nn.Module) -> dict[str, Any] | None:
    """See :meth:`ShardReader.plain_state`: a layer and its weight can be pickled."""
    return None


def check_whole(module_or_state: Any, what: str) -> None:
    """See :meth:`ShardReader.check_whole`: there are no placeholders."""


def take_back(module: nn.Module, remembered: Remembered) -> bool:
    """See :meth:`ShardReader.take_back`."""
    return bool(restore_layers(module))


def leave() -> None:
    """See :meth:`ShardReader.leave`: nothing is on disk."""


def forget_groups() -> None:
    """See :meth:`ShardReader.forget_groups`: the default group is asked for when it is needed."""


def tear_down(before: Any) -> None:
    """See :meth:`ShardReader.tear_down`: nothing is kept outside of models."""
