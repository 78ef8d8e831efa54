"""``ScaledAdam``: Adam and AdamW whose state takes three bytes per parameter instead of eight.

FP8-LM (arXiv 2310.18313), section 2.2: the first moment is stored in E4M3, the second in FP16, each
tensor under a scale of its own; the weight itself is a `ScaledTensor` of FP16. All arithmetic is
float32, and a step uses the moments before they are rounded:

    w ← w · (1 - lr · decay)                      AdamW; Adam adds decay · w to the gradient instead
    m ← β₁ m + (1 - β₁) g,    v ← β₂ v + (1 - β₂) g²
    w ← w - lr / (1 - β₁ᵗ) · m / (√v / √(1 - β₂ᵗ) + ε)

The second moment needs FP16: with β₂ = 0.999 an update is smaller than half a unit in the last
place of BF16 or E4M3, and would be lost.

[Note: divided states] With several processes, level O3 divides the state as ZeRO-1 does: each
tensor has one owner, which keeps its moments and an FP16 master of its weight; the weight itself is
E4M3 everywhere. Whole tensors are assigned, largest first, to the process that holds least, because
a tensor has one scale. After a step the owners send their new weights.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Adam, AdamW, Optimizer

from nbaccel.base import torch_private
from nbaccel.base.errors import ConfigError
from nbaccel.precision.fp8.scaled_tensor import E4M3, FP16, ScaledTensor

_STORED_AS = {"exp_avg": E4M3, "exp_avg_sq": FP16, "master": FP16}


class ScaledAdam(Optimizer):
    """Takes the place of an Adam or AdamW of torch's, with its groups, settings and state."""

    def __init__(
        self,
        given: Optimizer,
        owners: Mapping[int, int] | None = None,
        first_values: Mapping[int, torch.Tensor] | None = None,
    ) -> None:
        name = type(given).__name__
        if not isinstance(given, (Adam, AdamW)):
            raise ConfigError(
                "MS-AMP's levels O2 and O3 keep Adam's moments in 8 and 16 bits, and this "
                f"optimizer is {name}: what it keeps is unknown. Give torch.optim.AdamW or Adam, "
                'or opt_level="O1", which keeps any optimizer.'
            )
        if any(group.get("amsgrad") for group in given.param_groups):
            raise ConfigError(
                f"{name}(amsgrad=True) keeps a third moment, which MS-AMP's levels O2 and O3 do "
                'not have. Leave amsgrad out, or give opt_level="O1".'
            )
        super().__init__(given.param_groups, dict(given.defaults))
        # The very same list, so that a scheduler of the given optimizer sets these learning rates.
        self.param_groups = given.param_groups
        self.given = given
        self._owners = dict(owners or {})
        self._consolidated: dict[str, Any] | None = None
        decoupled = given.defaults.get("decoupled_weight_decay", isinstance(given, AdamW))
        for group in self.param_groups:
            group.setdefault("decoupled_weight_decay", decoupled)
        for parameter, state in given.state.items():
            self.state[parameter] = self._stored_state(parameter, state)
        given.state.clear()
        for parameter in self._parameters() if self._owners else ():
            if not isinstance(parameter, ScaledTensor):
                continue
            parameter.owner = self._owners[id(parameter)]
            if self._is_own(parameter):
                state = self.state[parameter]
                if "step" not in state:
                    state.update(self._first_state(parameter))
                values = (first_values or {}).get(id(parameter), parameter)
                state["master"] = parameter.master = ScaledTensor.of(_plain(values), FP16)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and self._is_own(parameter):
                    self._step_one(parameter, group)
        for parameter in self._parameters() if self._owners else ():
            owner = self._owners[id(parameter)]
            if isinstance(parameter, ScaledTensor):
                # gloo has no 8-bit floats.
                dist.broadcast(parameter.payload.view(torch.uint8), owner)
                dist.broadcast(parameter.inverse_scale, owner)
            else:
                dist.broadcast(parameter.detach(), owner)
        torch_private.mark_as_stepped(self.given)
        return loss

    def _is_own(self, parameter: torch.Tensor) -> bool:
        return not self._owners or self._owners[id(parameter)] == dist.get_rank()

    def _step_one(self, parameter: torch.Tensor, group: Mapping[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state.update(self._first_state(parameter))
        state["step"] += 1
        step_number = state["step"].item()
        (beta1, beta2) = group["betas"]
        weight = _plain(state.get("master", parameter))
        gradient = _plain(parameter.grad)
        if group["maximize"]:
            gradient = -gradient
        if group["decoupled_weight_decay"]:
            weight.mul_(1 - group["lr"] * group["weight_decay"])
        elif group["weight_decay"]:
            gradient = gradient.add(weight, alpha=group["weight_decay"])
        first = _plain(state["exp_avg"]).lerp_(gradient, 1 - beta1)
        second = _plain(state["exp_avg_sq"]).mul_(beta2)
        second.addcmul_(gradient, gradient, value=1 - beta2)
        divisor = second.sqrt().div_(math.sqrt(1 - beta2**step_number)).add_(group["eps"])
        weight.addcdiv_(first, divisor, value=-float(group["lr"]) / (1 - beta1**step_number))
        state["exp_avg"].copy_(first)
        state["exp_avg_sq"].copy_(second)
        if "master" in state:
            state["master"].copy_(weight)
            # The rounded one, so that a run that was resumed has the same weights.
            weight = state["master"].dequantize()
        parameter.copy_(weight)

    def _first_state(self, parameter: torch.Tensor) -> dict[str, Any]:
        shape = parameter.shape
        device = parameter.device
        state: dict[str, Any] = {"step": torch.tensor(0.0)}
        for name in ("exp_avg", "exp_avg_sq"):
            payload = torch.zeros(shape, dtype=_STORED_AS[name].dtype, device=device)
            state[name] = ScaledTensor(payload, torch.ones((), device=device))
        return state

    def _stored_state(self, parameter: torch.Tensor, state: Mapping[str, Any]) -> dict[str, Any]:
        """State of torch's, or of a checkpoint, in the formats of this one."""
        stored: dict[str, Any] = {}
        device = parameter.device
        for name, value in state.items():
            if name not in _STORED_AS:
                stored[name] = value
            elif isinstance(value, Mapping):
                payload, inverse_scale = value["payload"], value["inverse_scale"]
                stored[name] = ScaledTensor(payload.to(device), inverse_scale.to(device))
            else:
                stored[name] = ScaledTensor.of(value.to(device), _STORED_AS[name])
        return stored

    def state_dict(self) -> dict[str, Any]:
        """Groups and state as torch has them; of stored tensors payload and inverse scale."""
        if self._owners and self._consolidated is None:
            raise ConfigError(
                f"state_dict() of an optimizer of level O3: process {dist.get_rank()} has the "
                "state of its own tensors alone, and a part cannot be loaded. Use "
                "accelerator.save_state(), or call consolidate_state_dict() on all processes first."
            )
        whole_state = super().state_dict()
        if self._consolidated is not None:
            whole_state["state"] = self._consolidated
            self._consolidated = None
        else:
            whole_state["state"] = _packed(whole_state["state"])
        return whole_state

    def consolidate_state_dict(self, to: int = 0) -> None:
        """Bring divided state together for the next :meth:`state_dict`; a collective."""
        if not self._owners:
            return
        own_state = io.BytesIO()
        # Python's pickle, by which processes send objects, has no 8-bit floats.
        torch.save(_packed(super().state_dict()["state"]), own_state)
        parts: list[Any] = [None] * dist.get_world_size()
        dist.gather_object(own_state.getvalue(), parts if dist.get_rank() == to else None, dst=to)
        self._consolidated = {}
        for part in filter(None, parts):
            self._consolidated |= torch.load(io.BytesIO(part), map_location="cpu")

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what :meth:`state_dict` gave, or the state of an Adam of torch's."""
        saved_state = state_dict["state"]
        # torch would cast stored tensors to the dtype that parameters seem to have.
        super().load_state_dict({**state_dict, "state": {}})
        self.state.clear()
        for number, parameter in enumerate(self._parameters()):
            if number in saved_state and self._is_own(parameter):
                state = self._stored_state(parameter, saved_state[number])
                self.state[parameter] = state
                if isinstance(parameter, ScaledTensor) and self._owners:
                    # A state saved at another level has no master: the weight has been loaded.
                    state.setdefault("master", ScaledTensor.of(parameter.dequantize(), FP16))
                    parameter.master = state["master"]

    def _parameters(self) -> Iterator[torch.Tensor]:
        for group in self.param_groups:
            yield from group["params"]

    @torch.no_grad()
    def masters(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Parameters with the float32 values of their FP16 masters; a collective where divided."""
        for parameter in self._parameters():
            if isinstance(parameter, ScaledTensor) and parameter.owner is not None:
                yield parameter, master_values(parameter)


def master_values(weight: ScaledTensor) -> torch.Tensor:
    """A weight's values with all digits that are kept; a collective where states are divided."""
    values = (weight if weight.master is None else weight.master).dequantize()
    if weight.owner is not None and dist.is_available() and dist.is_initialized():
        dist.broadcast(values, weight.owner)
    return values


def owners_of(parameters: Sequence[torch.Tensor], world_size: int) -> dict[int, int]:
    """Assign whole tensors, largest first to the process that holds least (FP8-LM, algorithm 1)."""
    held = [0] * world_size
    owners: dict[int, int] = {}
    # `sorted` is stable, so processes agree on tensors of equal size.
    for parameter in sorted(parameters, key=lambda parameter: -parameter.numel()):
        owner = held.index(min(held))
        held[owner] += parameter.numel()
        owners[id(parameter)] = owner
    return owners


def _plain(values: Any) -> torch.Tensor:
    """A float32 copy of a stored tensor; a plain one as it is, which may then be changed."""
    if isinstance(values, ScaledTensor):
        return values.dequantize()
    plain_values: torch.Tensor = values.detach().float()
    return plain_values


def _packed(state: Mapping[Any, Mapping[str, Any]]) -> dict[Any, Any]:
    """State with stored tensors as payload and inverse scale, which any torch can read."""
    return {
        number: {
            name: {"payload": value.payload, "inverse_scale": value.inverse_scale}
            if isinstance(value, ScaledTensor)
            else value
            for name, value in entry.items()
        }
        for number, entry in state.items()
    }
