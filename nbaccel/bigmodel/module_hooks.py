"""Hooks around a module's ``forward``: what they are, and how one gets on a module and off it.

The names of the attributes that a hooked module has are those that transformers and diffusers look
at. What hooks do for big models is in `nbaccel.hooks`, which hands these on.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch import nn

HOOK_ATTRIBUTE = "_hf_hook"
"""Where a module has its hook."""

_FORWARD_ATTRIBUTE = "_old_forward"
# What `dispatch_model` puts on a module to warn of moving it.
_GUARDED_METHODS = ("to", "cuda", "npu", "xpu", "mlu", "sdaa", "musa")
_Method = TypeVar("_Method", bound=Callable[..., Any])


def outside_compiled_code(method: _Method) -> _Method:
    """Let ``torch.compile`` call a function as it is, not trace it.

    ``torch.compiler.disable`` imports the compiler, which takes seconds; here it is asked for
    once a compiler is at work.
    """
    untraced: _Method | None = None

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal untraced
        if not torch.compiler.is_compiling():
            return method(*args, **kwargs)
        if untraced is None:
            # Once: another function each time would be compiled around again each time.
            disable: Callable[[_Method], _Method] = torch.compiler.disable
            untraced = disable(method)
        return untraced(*args, **kwargs)

    return call  # type: ignore[return-value]


class ModelHook:
    """Called before and after a module's ``forward``. Subclasses override what they need.

    Attributes:
        no_grad: Whether ``forward`` runs under ``torch.no_grad()``.
    """

    no_grad = False

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Called when the hook is attached; returns the module, prepared."""
        return module

    def pre_forward(
        self, module: nn.Module, *args: Any, **kwargs: Any
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Called before ``forward`` with its arguments; returns those that it gets."""
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """Called after ``forward`` with what it returned; returns what the caller gets."""
        return output

    def detach_hook(self, module: nn.Module) -> nn.Module:
        """Called when the hook is removed; returns the module, as it was before."""
        return module


class SequentialHook(ModelHook):
    """Several hooks as one, called in their order at every event.

    Args:
        *hooks: The hooks. ``no_grad`` of one holds for all.
    """

    def __init__(self, *hooks: ModelHook) -> None:
        self.hooks = hooks
        self.no_grad = any(hook.no_grad for hook in hooks)

    def init_hook(self, module: nn.Module) -> nn.Module:
        for hook in self.hooks:
            module = hook.init_hook(module)
        return module

    @outside_compiled_code
    def pre_forward(
        self, module: nn.Module, *args: Any, **kwargs: Any
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        for hook in self.hooks:
            args, kwargs = hook.pre_forward(module, *args, **kwargs)
        return args, kwargs

    @outside_compiled_code
    def post_forward(self, module: nn.Module, output: Any) -> Any:
        for hook in self.hooks:
            output = hook.post_forward(module, output)
        return output

    def detach_hook(self, module: nn.Module) -> nn.Module:
        for hook in self.hooks:
            module = hook.detach_hook(module)
        return module


def each_hook(module: nn.Module) -> Iterator[Any]:
    """The hooks of a module, each by itself; also those that another library attached."""
    waiting = [getattr(module, HOOK_ATTRIBUTE, None)]
    while waiting:
        hook = waiting.pop(0)
        nested_hooks = getattr(hook, "hooks", None)
        if nested_hooks is not None:
            waiting[:0] = nested_hooks
        elif hook is not None:
            yield hook


# ------------------------------------------------------------------------- attaching


def add_hook_to_module(module: nn.Module, hook: ModelHook, append: bool = False) -> nn.Module:
    """Call a hook around a module's ``forward``.

    The hook is then ``module._hf_hook``, what ``forward`` was before ``module._old_forward``.

    Args:
        module: The module; it is changed.
        hook: The hook.
        append: Whether it is called after the hook that the module has; else it replaces that.

    Returns:
        The module.
    """
    if append and (first_hook := getattr(module, HOOK_ATTRIBUTE, None)) is not None:
        remove_hook_from_module(module)
        hook = SequentialHook(first_hook, hook)
    is_hooked = hasattr(module, HOOK_ATTRIBUTE) and hasattr(module, _FORWARD_ATTRIBUTE)
    inner_forward = getattr(module, _FORWARD_ATTRIBUTE) if is_hooked else module.forward
    module = hook.init_hook(module)
    setattr(module, _FORWARD_ATTRIBUTE, inner_forward)
    setattr(module, HOOK_ATTRIBUTE, hook)
    # A partial of a function that can be imported: the module can be copied and pickled with it.
    hooked = functools.update_wrapper(functools.partial(_hooked_forward, module), inner_forward)
    if _is_graph_module(module):
        # Its class, which is its own, gets a new `forward` when the graph changes; one of the
        # object would hide that.
        type(module).forward = staticmethod(hooked)
    else:
        module.forward = hooked
    return module


def _hooked_forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    hook = getattr(module, HOOK_ATTRIBUTE)
    args, kwargs = hook.pre_forward(module, *args, **kwargs)
    inner_forward = getattr(module, _FORWARD_ATTRIBUTE)
    if hook.no_grad:
        with torch.no_grad():
            output = inner_forward(*args, **kwargs)
    else:
        output = inner_forward(*args, **kwargs)
    return hook.post_forward(module, output)


def _is_graph_module(module: nn.Module) -> bool:
    # Not imported for this: without it nothing has been traced.
    traced = sys.modules.get("torch.fx.graph_module")
    return traced is not None and isinstance(module, traced.GraphModule)


def remove_hook_from_module(module: nn.Module, recurse: bool = False) -> nn.Module:
    """Take the hook from a module, and give it the ``forward`` back that it had before.

    Args:
        module: The module; one without a hook stays as it is.
        recurse: Whether from its submodules, too.

    Returns:
        The module.
    """
    if hasattr(module, HOOK_ATTRIBUTE):
        getattr(module, HOOK_ATTRIBUTE).detach_hook(module)
        delattr(module, HOOK_ATTRIBUTE)
    if hasattr(module, _FORWARD_ATTRIBUTE):
        inner_forward = getattr(module, _FORWARD_ATTRIBUTE)
        function = getattr(inner_forward, "__func__", None)
        is_its_own = function is not None and getattr(inner_forward, "__self__", None) is module
        if _is_graph_module(module):
            plain = function if is_its_own else staticmethod(inner_forward)
            type(module).forward = plain  # type: ignore[assignment]
        elif is_its_own and function is type(module).forward:
            vars(module).pop("forward", None)
        else:
            module.forward = inner_forward
        delattr(module, _FORWARD_ATTRIBUTE)
    for method_name in _GUARDED_METHODS:
        vars(module).pop(method_name, None)
    if recurse:
        for child in module.children():
            remove_hook_from_module(child, recurse)
    return module


def remove_hook_from_submodules(module: nn.Module) -> None:
    """Take all hooks from a module and its submodules."""
    remove_hook_from_module(module, recurse=True)
