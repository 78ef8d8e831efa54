"""Parameters and buffers of a module by name: which are tied, which are saved, how large one is."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from nbaccel.config.enumerations import CustomDtype

_BYTES = {CustomDtype.INT2: 1 / 4, CustomDtype.INT4: 1 / 2, CustomDtype.FP8: 1}


def dtype_byte_size(dtype: torch.dtype | CustomDtype) -> float:
    """Bytes of one number of a format; those of ``torch.bool`` count as one bit."""
    if isinstance(dtype, CustomDtype):
        return _BYTES[dtype]
    return 1 / 8 if dtype is torch.bool else dtype.itemsize


def id_tensor_storage(tensor: torch.Tensor) -> tuple[torch.device, int, int]:
    """Equal for two tensors if, and only if, they are views of the same memory."""
    storage = tensor.untyped_storage()
    return tensor.device, storage.data_ptr(), storage.nbytes()


def named_module_tensors(
    module: nn.Module,
    include_buffers: bool = True,
    recurse: bool = False,
    remove_non_persistent: bool = False,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and buffers by name.

    Args:
        module: Whose.
        include_buffers: Whether buffers, too.
        recurse: Whether those of submodules, too.
        remove_non_persistent: Whether to leave out buffers that are not in the state dict.

    Yields:
        Names and tensors.
    """
    yield from module.named_parameters(recurse=recurse)
    if include_buffers:
        left_out = (
            get_non_persistent_buffers(module, recurse, fqns=True)
            if remove_non_persistent
            else set()
        )
        for name, buffer in module.named_buffers(recurse=recurse):
            if name not in left_out:
                yield name, buffer


def get_non_persistent_buffers(
    module: nn.Module, recurse: bool = False, fqns: bool = False
) -> set[str]:
    """Names of the buffers that are not in the state dict.

    Args:
        module: Whose.
        recurse: Whether those of submodules, too.
        fqns: Whether names have their submodules' in front (``layer.positions``); without, names
            of different submodules may coincide.
    """
    saved_names = module.state_dict(keep_vars=True).keys()
    names = {
        name
        for name, _ in module.named_buffers(recurse=recurse, remove_duplicate=False)
        if name not in saved_names
    }
    return names if fqns else {name.rpartition(".")[2] for name in names}


def find_tied_parameters(model: nn.Module) -> list[list[str]]:
    """Names of parameters that are one tensor, together; sorted."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return sorted(sorted(group) for group in names.values() if len(group) > 1)
