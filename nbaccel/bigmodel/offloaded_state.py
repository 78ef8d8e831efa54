"""State of modules whose weights are offloaded: brought in for a moment, or read as a whole.

It works with any hook that has weights to bring in, also with those that another library attached.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from nbaccel.base.log import get_logger
from nbaccel.base.units import first_few
from nbaccel.bigmodel.model_hooks import each_hook
from nbaccel.bigmodel.tensor_placing import set_module_tensor_to_device

_MOST_NAMES_TOLD = 5

_state_log = get_logger(__name__)


def has_offloaded_params(module: nn.Module) -> bool:
    """Whether a module has a hook that brings its weights in when it runs.

    Args:
        module: The module; submodules are not asked.
    """
    return _offloading_hook(module) is not None


def _offloading_hook(module: nn.Module) -> Any:
    return next(
        (hook for hook in each_hook(module) if getattr(hook, "offload", False) is True), None
    )


@contextlib.contextmanager
def align_module_device(
    module: nn.Module, execution_device: torch.device | str | int | None = None
) -> Iterator[None]:
    """A block in which a module has its weights, on one device.

    Args:
        module: The module. What is in its submodules moves only where its hook includes them.
        execution_device: Where to; None: where its hook computes, or nothing happens where it has
            none that offloads.

    Yields:
        Nothing. Afterwards everything is where it was.
    """
    hook = _offloading_hook(module)
    if hook is not None:
        with _brought_in(module, hook, execution_device):
            yield
    elif execution_device is None:
        yield
    else:
        devices = {name: tensor.device for name, tensor in module.named_parameters(recurse=False)}
        try:
            for name in devices:
                set_module_tensor_to_device(module, name, execution_device)
            yield
        finally:
            for name, device in devices.items():
                set_module_tensor_to_device(module, name, device)


@contextlib.contextmanager
def _brought_in(module: nn.Module, hook: Any, execution_device: Any) -> Iterator[None]:
    usual_device = hook.execution_device
    if execution_device is not None:
        hook.execution_device = execution_device
    # Those of other libraries bring weights in as part of a call.
    bring_in = getattr(hook, "bring_in", None) or hook.pre_forward
    send_out = getattr(hook, "send_out", None) or (lambda owner: hook.post_forward(owner, None))
    try:
        bring_in(module)
        yield
    finally:
        send_out(module)
        hook.execution_device = usual_device


def get_state_dict_offloaded_model(model: nn.Module) -> dict[str, Any]:
    """The state dict of a model with offloaded weights, all of it in host memory.

    Args:
        model: The model.

    Returns:
        Its tensors by name. Weights that nothing has values of are left out, with a warning.
    """
    state: dict[str, Any] = {
        name: value.to("cpu") if _has_values(value) else value
        for name, value in model.state_dict().items()
    }
    for module_name, module in model.named_modules():
        if has_offloaded_params(module):
            prefix = f"{module_name}." if module_name else ""
            with align_module_device(module, "cpu"):
                own_state = module.state_dict(prefix=prefix)
            state |= {name: value for name, value in own_state.items() if _has_values(value)}
    lacking = [name for name, value in state.items() if getattr(value, "is_meta", False)]
    if lacking:
        _state_log.warning(
            "%d tensors are on meta and nothing has their values, so they are not in the state "
            "dict: %s",
            len(lacking),
            first_few(lacking, _MOST_NAMES_TOLD),
        )
    return {name: value for name, value in state.items() if name not in lacking}


def _has_values(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not value.is_meta


def get_state_dict_from_offload(
    module: nn.Module,
    module_name: str,
    state_dict: dict[str, Any],
    device_to_put_offload: int | str | torch.device = "cpu",
) -> dict[str, Any]:
    """Put a module's tensors into a state dict that has their names already.

    Args:
        module: The module.
        module_name: The whole name of one of its tensors.
        state_dict: It is changed.
        device_to_put_offload: Where offloaded weights go; others stay where they are.

    Returns:
        `state_dict`.
    """
    owner_name = module_name.rpartition(".")[0]
    target = device_to_put_offload if has_offloaded_params(module) else None
    with align_module_device(module, target):
        for name, value in module.state_dict(prefix=f"{owner_name}.").items():
            if name in state_dict:
                state_dict[name] = value
    return state_dict
