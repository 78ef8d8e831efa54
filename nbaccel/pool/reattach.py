"""DDP models of a live worker go on in new process groups after the old ones were left.

    forward of a DDP model whose group was left
      ─► the default group, joined by all ranks     the wrapper gets a new reducer in it
      ─► weights and buffers of rank 0              as DDP's own constructor hands them out
      ─► are the optimizers' states equal?          if not, rank 0's: a rank may be a step ahead

What the constructor would do, without losing what hangs on the wrapper: the optimizer, its state,
and whoever else holds one of them.
"""

from __future__ import annotations

import functools
import gc
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.utils import _sync_module_states
from torch.nn.parallel import DistributedDataParallel

from nbaccel.train.in_sync import fingerprint

__all__ = ["watch"]


def watch(was_left: Callable[[Any], bool]) -> None:
    """Let DDP models find the new group in their forward. Once per worker.

    Args:
        was_left: Whether a process group was a default group that all ranks have left.
    """
    forward = DistributedDataParallel.forward

    @functools.wraps(forward)
    def attached(self: DistributedDataParallel, *args: Any, **kwargs: Any) -> Any:
        # Where nothing is to be sent, one rank may well run it alone.
        if was_left(self.process_group) and (torch.is_grad_enabled() or self.modules_buffers):
            _attach(self)
        return forward(self, *args, **kwargs)  # type: ignore[no-untyped-call]

    DistributedDataParallel.forward = attached  # type: ignore[method-assign]


def _attach(model: DistributedDataParallel) -> None:
    """A collective."""
    hooks = tuple(getattr(model, "_comm_hooks", ()))
    state = {
        k: v for k, v in vars(model).items() if k not in ("process_group", "reducer", "logger")
    }
    dist.distributed_c10d._get_default_group()  # joined, if this rank is in none
    vars(model).pop("reducer", None)  # its hooks on the parameters go with it
    vars(model).pop("logger", None)
    # It makes them anew, in the default group.
    model.__setstate__(state)  # type: ignore[no-untyped-call]
    for hook, of_hook in hooks:
        dist._register_comm_hook(model.reducer, of_hook, hook)  # type: ignore[attr-defined]
    _sync_module_states(
        module=model.module,
        process_group=model.process_group,
        broadcast_bucket_size=model.broadcast_bucket_size,
        src=0,
        params_and_buffers_to_ignore=model.parameters_to_ignore,
        broadcast_buffers=True,
    )
    unfinished = [p for p in model.parameters() if p.grad is not None]
    for parameter in unfinished:  # of a step that some ranks have not come to
        parameter.grad = None
    even = _even_out(model.module)
    if dist.get_rank() == 0:
        sys.stderr.write(_told(even))


def _told(even: bool) -> str:
    states = "their state" if even else "rank 0's state, since ranks were at different steps"
    return (
        "nbaccel: the DDP model goes on in new process groups, with rank 0's weights; optimizers "
        f"keep {states}. The step that was cut short is left out.\n"
    )


def _even_out(module: nn.Module) -> bool:
    """Let all ranks have rank 0's optimizer states, where they differ.

    Returns:
        Whether they were equal.
    """
    mine = [*_optimizers(module)]
    facts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(facts, [_facts(optimizer) for optimizer in mine])
    if all(fact == facts[0] for fact in facts):
        return True
    if len({len(fact) for fact in facts}) > 1:
        raise RuntimeError(
            f"The ranks have {', '.join(str(len(fact)) for fact in facts)} optimizers for this "
            "model, so their states cannot be compared. Run the cell again that makes the "
            "optimizer, on all ranks."
        )
    states: list[Any] = [[optimizer.state_dict() for optimizer in mine]]
    dist.broadcast_object_list(states, src=0)
    for optimizer, state in zip(mine, states[0], strict=True):
        optimizer.load_state_dict(state)
    return False


def _optimizers(module: nn.Module) -> Iterator[torch.optim.Optimizer]:
    """Those that train this module, in an order that is the same on all ranks."""
    places = {id(parameter): i for i, parameter in enumerate(module.parameters())}
    found = []
    for thing in gc.get_objects():
        if issubclass(type(thing), torch.optim.Optimizer) and not _is_in_parts(type(thing)):
            groups = getattr(thing, "param_groups", ())  # one whose constructor has failed has none
            mine = [places.get(id(p), -1) for group in groups for p in group["params"]]
            if any(place >= 0 for place in mine):
                found.append((mine, type(thing).__qualname__, thing))
    yield from (thing for *_, thing in sorted(found, key=lambda entry: entry[:2]))


def _is_in_parts(kind: type) -> bool:
    """Whether each rank has a part of such an optimizer's state; importing it takes long."""
    return any(base.__name__ == "ZeroRedundancyOptimizer" for base in kind.__mro__)


def _facts(optimizer: torch.optim.Optimizer) -> Any:
    """What is equal where two optimizers would step alike."""
    return _told_apart(optimizer.state_dict())


def _told_apart(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return str(value.dtype), tuple(value.shape), fingerprint(value)
    if isinstance(value, dict):
        return {key: _told_apart(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_told_apart(inner) for inner in value]
    return value if isinstance(value, (bool, int, float, str, type(None))) else type(value).__name__
