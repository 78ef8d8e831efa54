"""Collectives and trees of tensors, on the process group of this process."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from nbaccel.base import trees
from nbaccel.base.errors import CollectiveMismatch
from nbaccel.base.optional_packages import require
from nbaccel.base.public_names import hand_on
from nbaccel.base.trees import (
    find_batch_size as find_batch_size,
    leaves,
    send_to_device as send_to_device,
)
from nbaccel.precision.native import as_float32
from nbaccel.train import distributed
from nbaccel.train.collectives import (
    CannotPadNestedTensorWarning as CannotPadNestedTensorWarning,
    Collectives,
)

DistributedOperationException = CollectiveMismatch
"""Accelerate's name for it: processes met with tensors that do not go together."""


_LATEST: list[tuple[weakref.ref[dist.ProcessGroup], Collectives]] = []
"""The default group, which may be left and joined anew, and what its processes do together: finding
their place takes longer than a broadcast."""


def _together() -> Collectives:
    group: Any = dist.group.WORLD
    # Of a group that is gone the reference gives None, which is no group either.
    if group is not None and _LATEST and _LATEST[0][0]() is group:
        return _LATEST[0][1]
    collectives = Collectives(distributed.init_process())
    group = dist.group.WORLD
    _LATEST[:] = [] if group is None else [(weakref.ref(group), collectives)]
    return collectives


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
    """Copy one process's tensors into those of all processes, in place."""
    return _together().broadcast(tensor, from_process)


def broadcast_object_list(object_list: list[Any], from_process: int = 0) -> list[Any]:
    """Copy one process's list of picklable objects into those of all processes, in place."""
    return _together().broadcast_object_list(object_list, from_process)


def pad_across_processes(
    tensor: Any, dim: int = 0, pad_index: float = 0, pad_first: bool = False
) -> Any:
    """Make every process's tensors equally long in one dimension."""
    return _together().pad_across_processes(tensor, dim, pad_index, pad_first)


def copy_tensor_to_devices(tensor: torch.Tensor | None = None) -> torch.Tensor:
    """Give all processes the tensor of the one that has it, on their devices."""
    place = distributed.init_process()
    collectives = Collectives(place)
    outlines = collectives.all_objects(
        None if tensor is None else (tuple(tensor.shape), tensor.dtype), "copy_tensor_to_devices"
    )
    owners = [rank for rank, outline in enumerate(outlines) if outline is not None]
    if len(owners) != 1:
        raise CollectiveMismatch(
            f"copy_tensor_to_devices got a tensor on processes {owners}: it copies from the one "
            "that has it. Give a tensor on one process and None on the others."
        )
    shape, dtype = outlines[owners[0]]
    # A clone, so that the caller's tensor does not become the returned one.
    shared_tensor = torch.empty(shape, dtype=dtype) if tensor is None else tensor.detach().clone()
    collectives.broadcast(shared_tensor := shared_tensor.to(place.device), owners[0])
    return shared_tensor


def is_torch_tensor(tensor: Any) -> bool:
    """Whether it is a tensor."""
    return isinstance(tensor, torch.Tensor)


def is_namedtuple(data: Any) -> bool:
    """Whether it is a named tuple."""
    return isinstance(data, tuple) and hasattr(data, "_asdict") and hasattr(data, "_fields")


def concatenate(data: Sequence[Any], dim: int = 0) -> Any:
    """Join equal trees of tensors along a dimension; one alone is returned as it is."""
    if len(data) == 1:
        return data[0]
    others = {type(leaf).__name__ for leaf in leaves(data) if not is_torch_tensor(leaf)}
    if others:
        raise TypeError(
            f"concatenate got {', '.join(sorted(others))} among the tensors of {len(data)} "
            "batches: only tensors can be joined. Take the others out, or join them yourself."
        )
    return trees.concatenate(data, dim)


def honor_type(obj: Any, generator: Iterable[Any]) -> Any:
    """Make a sequence of the type of another: a list, a tuple, a named tuple."""
    return trees.sequence_like(obj, list(generator))


def recursively_apply(
    func: Callable[..., Any],
    data: Any,
    *args: Any,
    test_type: Callable[[Any], bool] = is_torch_tensor,
    error_on_other_type: bool = False,
    **kwargs: Any,
) -> Any:
    """Apply a function to everything of a kind in containers; others stay, or are refused."""

    def apply(leaf: Any) -> Any:
        if test_type(leaf):
            return func(leaf, *args, **kwargs)
        if error_on_other_type:
            raise TypeError(
                f"{_name(func)} cannot be applied to a {type(leaf).__name__}, which "
                f"{_name(test_type)} does not accept. Give containers of what it does."
            )
        return leaf

    return trees.map_leaves(apply, data)


def _name(function: Any) -> str:
    return str(getattr(function, "__name__", function))


def listify(data: Any) -> Any:
    """Tensors as numbers and lists of numbers, in the same containers."""
    return trees.map_tensors(lambda tensor: tensor.detach().cpu().tolist(), data)


def slice_tensors(
    data: Any, tensor_slice: Any, process_index: int | None = None, num_processes: int | None = None
) -> Any:
    """Take the same part of every tensor, in the same containers."""
    return trees.map_tensors(lambda tensor: tensor[tensor_slice], data)


def find_device(data: Any) -> torch.device | None:
    """Where the first tensor is; None where there is none."""
    return next((leaf.device for leaf in leaves(data) if isinstance(leaf, torch.Tensor)), None)


def ignorant_find_batch_size(data: Any) -> int | None:
    """Rows of the first tensor with a dimension; None where there is none."""
    return find_batch_size(data)


def get_shape(data: Any) -> Any:
    """The shape of every tensor, as a list, in the same containers."""
    return trees.map_tensors(lambda tensor: list(tensor.shape), data)


@dataclass
class TensorInformation:
    """What a tensor is, without its numbers."""

    shape: torch.Size
    dtype: torch.dtype


def is_tensor_information(tensor_info: Any) -> bool:
    """Whether it is a `TensorInformation`."""
    return isinstance(tensor_info, TensorInformation)


def get_data_structure(data: Any) -> Any:
    """A `TensorInformation` for every tensor, in the same containers."""
    return trees.map_tensors(lambda tensor: TensorInformation(tensor.shape, tensor.dtype), data)


def initialize_tensors(data_structure: Any) -> Any:
    """Tensors of any values for what :func:`get_data_structure` gave."""
    return recursively_apply(
        lambda known: torch.empty(known.shape, dtype=known.dtype),
        data_structure,
        test_type=is_tensor_information,
    )


def pad_input_tensors(tensor: Any, batch_size: int, num_processes: int, dim: int = 0) -> Any:
    """Lengthen tensors by zeros, so that they can be cut into equal parts for the processes."""
    rows = -batch_size % num_processes

    def pad(tensor: torch.Tensor) -> torch.Tensor:
        shape = list(tensor.shape)
        shape[dim] = rows
        return torch.cat([tensor, tensor.new_zeros(shape)], dim) if rows else tensor

    return recursively_apply(pad, tensor, error_on_other_type=True)


def convert_to_fp32(tensor: Any) -> Any:
    """Tensors of fp16 and bf16 as float32, in the same containers; others stay."""
    return as_float32(tensor)


class ConvertOutputsToFp32:
    """A function whose results in fp16 and bf16 are turned into float32."""

    def __init__(self, model_forward: Callable[..., Any]) -> None:
        self.model_forward = model_forward
        functools.update_wrapper(self, model_forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function."""
        return convert_to_fp32(self.model_forward(*args, **kwargs))


def convert_outputs_to_fp32(model_forward: Callable[..., Any]) -> Callable[..., Any]:
    """As `ConvertOutputsToFp32`, as a plain function, which becomes a method in a class."""

    @functools.wraps(model_forward)
    def forward(*args: Any, **kwargs: Any) -> Any:
        return convert_to_fp32(model_forward(*args, **kwargs))

    return forward


def GatheredParameters(  # noqa: N802 - Accelerate's name
    params: Any, modifier_rank: int | None = None, fwd_module: Any = None, enabled: bool = True
) -> AbstractContextManager[Any]:
    """Whole parameters of DeepSpeed's ZeRO-3; what process `modifier_rank` changes counts."""
    # A single parameter is iterable, too, but by rows.
    single = isinstance(params, torch.Tensor) or not isinstance(params, Iterable)
    params = [params] if single else list(params)
    # ZeRO-3 gives `ds_id` to the parameters that it has cut up.
    if not enabled or not any(hasattr(parameter, "ds_id") for parameter in params):
        return nullcontext()
    zero: Any = require("deepspeed", extra="deepspeed", why="Gathering ZeRO-3's parameters").zero
    gathering: AbstractContextManager[Any] = zero.GatheredParameters(
        params, modifier_rank=modifier_rank, fwd_module=fwd_module
    )
    return gathering


hand_on(globals(), "DistributedOperationException")
