"""``ScaledAdam``: Adam and AdamW whose state takes three bytes per parameter instead of eight.

FP8-LM (arXiv 2310.18313), section 2.2: the first moment is stored in E4M3, the second in FP16, each
tensor under a scale of its own; the weight itself is a `ScaledTensor` of FP16. All arithmetic is
float32, and a step uses the moments before they are rounded:

    w ← w · (1 - lr · decay)                      AdamW; Adam adds decay · w to the gradient instead
    m ← β₁ m + (1 - β₁) g,    v ← β₂ v + (1 - β₂) g²
    w ← w - lr / (1 - β₁ᵗ) · m / (√v / √(1 - β₂ᵗ) + ε)

The second moment needs FP16: with β₂ = 0.999 an update is smaller than half a unit in the last
place of BF16 or E4M3, and would be lost.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.optim import Adam, AdamW, Optimizer

from nbaccel.base import torch_private
from nbaccel.base.errors import ConfigError
from nbaccel.precision.fp8.scaled_tensor import E4M3, FP16, ScaledTensor

_STORED_AS = {"exp_avg": E4M3, "exp_avg_sq": FP16}


class ScaledAdam(Optimizer):
    """Takes the place of an Adam or AdamW of torch's, with its groups, settings and state."""

    def __init__(self, given: Optimizer) -> None:
        name = type(given).__name__
        if not isinstance(given, (Adam, AdamW)):
            raise ConfigError(
                "MS-AMP's level O2 keeps Adam's moments in 8 and 16 bits, and this optimizer is "
                f"{name}: what it keeps is unknown. Give torch.optim.AdamW or Adam, "
                'or opt_level="O1", which keeps any optimizer.'
            )
        if any(group.get("amsgrad") for group in given.param_groups):
            raise ConfigError(
                f"{name}(amsgrad=True) keeps a third moment, which MS-AMP's level O2 does not "
                'have. Leave amsgrad out, or give opt_level="O1".'
            )
        super().__init__(given.param_groups, dict(given.defaults))
        # The very same list, so that a scheduler of the given optimizer sets these learning rates.
        self.param_groups = given.param_groups
        self.given = given
        decoupled = given.defaults.get("decoupled_weight_decay", isinstance(given, AdamW))
        for group in self.param_groups:
            group.setdefault("decoupled_weight_decay", decoupled)
        for parameter, state in given.state.items():
            self.state[parameter] = self._stored_state(parameter, state)
        given.state.clear()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step_one(parameter, group)
        torch_private.mark_as_stepped(self.given)
        return loss

    def _step_one(self, parameter: torch.Tensor, group: Mapping[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state.update(self._first_state(parameter))
        state["step"] += 1
        step_number = state["step"].item()
        (beta1, beta2) = group["betas"]
        weight = _plain(parameter)
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
        whole_state = super().state_dict()
        whole_state["state"] = _packed(whole_state["state"])
        return whole_state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what :meth:`state_dict` gave, or the state of an Adam of torch's."""
        saved_state = state_dict["state"]
        # torch would cast stored tensors to the dtype that parameters seem to have.
        super().load_state_dict({**state_dict, "state": {}})
        self.state.clear()
        parameters = (item for group in self.param_groups for item in group["params"])
        for number, parameter in enumerate(parameters):
            if number in saved_state:
                self.state[parameter] = self._stored_state(parameter, saved_state[number])


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
