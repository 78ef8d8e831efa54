"""The whole weights of a model that an engine has in parts, and back.

Parameters are gathered a few at a time, and only process 0 keeps them: no process holds more than
its part, process 0 the model besides, and all of them a little for a moment.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from nbaccel.deepspeed.strategy import on_disk, pieces
from nbaccel.errors import ConfigError

__all__ = ["gather", "scatter"]

_AT_A_TIME_BYTES = 256 << 20


def gather(module: nn.Module, *, keep: bool) -> dict[str, Any]:
    """The state dict, whole; a collective where weights are in shards.

    Args:
        module: The user's own module inside the engine.
        keep: Whether this process wants it.

    Returns:
        Tensors on the CPU by name, tied ones as one, in the module's format; empty if not wanted.
    """
    from deepspeed.runtime.zero.partition_parameters import GatheredParameters

    state = module.state_dict(keep_vars=True)
    tensors = {id(t): t for t in state.values() if isinstance(t, torch.Tensor)}
    whole: dict[int, torch.Tensor] = {}
    on_disk.free_buffers(module)
    for some in _by_size(tensors.values()):
        cut = [tensor for tensor in some if pieces.is_partitioned(tensor)]
        with GatheredParameters(cut, enabled=bool(cut)):
            if keep:
                # Of flattened groups: a view would drag all of the group into a file.
                whole |= {id(t): t.detach().to("cpu", copy=True) for t in some}
    return {name: whole.get(id(value), value) for name, value in state.items()} if keep else {}


def scatter(module: nn.Module, state: Mapping[str, Any], *, strict: bool = True) -> None:
    """Load a whole state dict; a collective.

    Args:
        module: The user's own module inside the engine.
        state: Tensors by name; those of process 0 count.
        strict: Whether every name must be there, and no other.

    Raises:
        ConfigError: Names or shapes do not fit, on every process; nothing was loaded then.
    """
    own = {
        name: value
        for name, value in module.state_dict(keep_vars=True).items()
        if isinstance(value, torch.Tensor)
    }
    problem = [_misfit(module, own, state, strict=strict) if dist.get_rank() == 0 else ""]
    named = [[name for name in own if name in state]]
    dist.broadcast_object_list(problem, 0)
    dist.broadcast_object_list(named, 0)
    if problem[0]:
        raise ConfigError(str(problem[0]))
    done: set[int] = set()
    with torch.no_grad():
        for name in named[0]:
            tensor = own[name]
            if id(tensor) in done:
                continue
            done.add(id(tensor))
            whole = _from_first(state.get(name), tensor)
            if pieces.is_cut(tensor):
                pieces.assign(tensor, whole)
            else:
                tensor.detach().copy_(whole)


def _from_first(value: torch.Tensor | None, tensor: torch.Tensor) -> torch.Tensor:
    """Process 0's tensor on every process, in float32 where it is a floating-point one."""
    dtype = torch.float32 if tensor.is_floating_point() else tensor.dtype
    device = tensor.device
    shape = pieces.shape_of(tensor)
    if dist.get_rank() == 0 and value is not None:
        whole = value.detach().to(device, dtype).contiguous()
    else:
        whole = torch.empty(shape, dtype=dtype, device=device)
    dist.broadcast(whole, 0)
    return whole


def _misfit(
    module: nn.Module, own: Mapping[str, torch.Tensor], state: Mapping[str, Any], *, strict: bool
) -> str:
    shapes = {name: pieces.shape_of(t) for name, t in own.items()}
    wrong = [
        f"{name} has shape {tuple(state[name].shape)} instead of {shape}"
        for name, shape in shapes.items()
        if name in state and tuple(state[name].shape) != shape
    ]
    if strict:
        wrong += [f"{name} is missing" for name in own if name not in state]
        wrong += [f"{name} is unknown" for name in state if name not in own]
    if not wrong:
        return ""
    more = f" and {len(wrong) - 5} more" if len(wrong) > 5 else ""
    return (
        f"The state does not fit {type(module).__name__}: {'; '.join(wrong[:5])}{more}. Weights "
        "would go to the wrong places. Load the state of the same model, or give strict=False for "
        "names alone."
    )


def _by_size(tensors: Iterable[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """The tensors in lists that are not too big together, gathered."""
    some: list[torch.Tensor] = []
    nbytes = 0
    for tensor in tensors:
        count = int(getattr(tensor, "ds_numel", tensor.numel()))
        # Each that is on disk takes one of the few buffers.
        alone = on_disk.is_on_disk(tensor) or any(map(on_disk.is_on_disk, some))
        if some and (alone or nbytes + count * tensor.element_size() > _AT_A_TIME_BYTES):
            yield some
            some, nbytes = [], 0
        some.append(tensor)
        nbytes += count * tensor.element_size()
    if some:
        yield some
