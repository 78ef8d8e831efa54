"""Hooks around a module's ``forward``, which see keyword arguments and may replace what it returns.

They know nothing of where weights are; hooks that move weights are in `align_hooks`. The names of
the attributes that a hooked module has are those that transformers and diffusers look at.
"""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch import nn

from nbaccel.base.errors import ConfigError
from nbaccel.base.log import get_logger
from nbaccel.bigmodel.tensor_placing import as_device, check_device_same, is_accelerator
from nbaccel.plan import registry
from nbaccel.train.distributed import find_device
from nbaccel.train.trees import send_to_device

HOOK_ATTRIBUTE = "_hf_hook"
"""Where a module has its hook."""

_FORWARD_ATTRIBUTE = "_old_forward"
# What `dispatch_model` puts on a module to warn of moving it.
_GUARDED_METHODS = ("to", "cuda", "npu", "xpu", "mlu", "sdaa", "musa")
_CAST_LAYERS = (
    *(nn.Conv1d, nn.Conv2d, nn.Conv3d),
    *(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
    nn.Linear,
)
_Method = TypeVar("_Method", bound=Callable[..., Any])

_hook_log = get_logger(__name__)


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
        """Called when the hook is attached.

        Args:
            module: The module.

        Returns:
            The module, prepared.
        """
        return module

    def pre_forward(
        self, module: nn.Module, *args: Any, **kwargs: Any
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Called before ``forward``.

        Args:
            module: The module.
            *args: What it is called with.
            **kwargs: The same by keyword.

        Returns:
            The arguments that ``forward`` gets.
        """
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """Called after ``forward``.

        Args:
            module: The module.
            output: What ``forward`` returned.

        Returns:
            What the caller gets.
        """
        return output

    def detach_hook(self, module: nn.Module) -> nn.Module:
        """Called when the hook is removed.

        Args:
            module: The module.

        Returns:
            The module, as it was before.
        """
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
        """See :meth:`ModelHook.init_hook`."""
        for hook in self.hooks:
            module = hook.init_hook(module)
        return module

    @outside_compiled_code
    def pre_forward(
        self, module: nn.Module, *args: Any, **kwargs: Any
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """See :meth:`ModelHook.pre_forward`."""
        for hook in self.hooks:
            args, kwargs = hook.pre_forward(module, *args, **kwargs)
        return args, kwargs

    @outside_compiled_code
    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """See :meth:`ModelHook.post_forward`."""
        for hook in self.hooks:
            output = hook.post_forward(module, output)
        return output

    def detach_hook(self, module: nn.Module) -> nn.Module:
        """See :meth:`ModelHook.detach_hook`."""
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
    _put_forward(module, inner_forward)
    return module


def _put_forward(module: nn.Module, inner_forward: Callable[..., Any]) -> None:
    # A partial of a function that can be imported: the module can be copied and pickled with it.
    hooked = functools.update_wrapper(functools.partial(_hooked_forward, module), inner_forward)
    if _is_graph_module(module):
        # Its class, which is its own, gets a new `forward` when the graph changes; one of the
        # object would hide that.
        type(module).forward = staticmethod(hooked)
    else:
        module.forward = hooked


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
        _give_forward_back(module, getattr(module, _FORWARD_ATTRIBUTE))
        delattr(module, _FORWARD_ATTRIBUTE)
    for method_name in _GUARDED_METHODS:
        vars(module).pop(method_name, None)
    if recurse:
        for child in module.children():
            remove_hook_from_module(child, recurse)
    return module


def _give_forward_back(module: nn.Module, inner_forward: Callable[..., Any]) -> None:
    function = getattr(inner_forward, "__func__", None)
    is_its_own = function is not None and getattr(inner_forward, "__self__", None) is module
    if _is_graph_module(module):
        plain = function if is_its_own else staticmethod(inner_forward)
        type(module).forward = plain  # type: ignore[assignment]
    elif is_its_own and function is type(module).forward:
        vars(module).pop("forward", None)
    else:
        module.forward = inner_forward


def remove_hook_from_submodules(module: nn.Module) -> None:
    """Take all hooks from a module and its submodules.

    Args:
        module: The module.
    """
    remove_hook_from_module(module, recurse=True)


# ------------------------------------------------------------------------- whole modules


class CpuOffload(ModelHook):
    """Keeps a model in host memory until it is called; after that it stays where it computed.

    Args:
        execution_device: Where it computes; None: this machine's accelerator, else the CPU.
        prev_module_hook: Of the model that comes before it in a pipeline: that one goes back to
            host memory first.
    """

    def __init__(
        self,
        execution_device: str | int | torch.device | None = None,
        prev_module_hook: UserCpuOffloadHook | None = None,
    ) -> None:
        self.prev_module_hook = prev_module_hook
        self.execution_device = find_device() if execution_device is None else execution_device

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Move the model to host memory."""
        return module.to("cpu")

    @outside_compiled_code
    def pre_forward(
        self, module: nn.Module, *args: Any, **kwargs: Any
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Make room, and move the model and its arguments to where it computes."""
        target = as_device(self.execution_device)
        if isinstance(self.prev_module_hook, UserCpuOffloadHook):
            self.prev_module_hook.make_room()
        if not check_device_same(_parameter_device(module) or target, target):
            module.to(target)
        return send_to_device(args, target), send_to_device(kwargs, target)


class UserCpuOffloadHook:
    """What a user needs of a `CpuOffload`: send the model back, or remove the hook.

    Args:
        model: The model.
        hook: Its hook.
    """

    def __init__(self, model: nn.Module, hook: ModelHook) -> None:
        self.model = model
        self.hook = hook

    def offload(self) -> None:
        """Move the model to host memory."""
        self.hook.init_hook(self.model)

    def make_room(self) -> None:
        """Move the model to host memory if it is elsewhere, and give the device's cache back."""
        device = _parameter_device(self.model)
        if device is not None and device.type != "cpu":
            self.offload()
            if is_accelerator(device):
                registry.device_runtime(device.type).empty_cache()

    def remove(self) -> None:
        """Take the hook from the model, which stays where it is."""
        remove_hook_from_module(self.model)


def _parameter_device(module: nn.Module) -> torch.device | None:
    first_parameter = next(module.parameters(), None)
    return None if first_parameter is None else first_parameter.device


class LayerwiseCastingHook(ModelHook):
    """Keeps a module's weights in one format, and converts them to another for ``forward``.

    Args:
        storage_dtype: What they are kept in, such as ``torch.float8_e4m3fn``.
        compute_dtype: What they are while the module computes.
        non_blocking: Whether the conversion may be under way when the next step begins.
    """

    def __init__(
        self, storage_dtype: torch.dtype, compute_dtype: torch.dtype, non_blocking: bool
    ) -> None:
        _check_float_dtypes(storage_dtype=storage_dtype, compute_dtype=compute_dtype)
        self.storage_dtype = storage_dtype
        self.compute_dtype = compute_dtype
        self.non_blocking = non_blocking

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Convert the weights to what they are kept in."""
        module.to(dtype=self.storage_dtype, non_blocking=self.non_blocking)
        return module

    @outside_compiled_code
    def pre_forward(
        self, module: nn.Module, *args: Any, **kwargs: Any
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Convert the weights to what the module computes in."""
        module.to(dtype=self.compute_dtype, non_blocking=self.non_blocking)
        return args, kwargs

    @outside_compiled_code
    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """Convert the weights to what they are kept in."""
        module.to(dtype=self.storage_dtype, non_blocking=self.non_blocking)
        return output


def _check_float_dtypes(**dtypes: Any) -> None:
    mistakes = [
        f"{setting} must be a floating-point format of torch, because weights are converted to "
        f"it: got {dtype!r}. Give one such as torch.bfloat16 or torch.float8_e4m3fn."
        for setting, dtype in dtypes.items()
        if not (isinstance(dtype, torch.dtype) and dtype.is_floating_point)
    ]
    if mistakes:
        raise ConfigError(*mistakes)


def attach_layerwise_casting_hooks(
    module: nn.Module,
    storage_dtype: torch.dtype,
    compute_dtype: torch.dtype,
    skip_modules_pattern: str | tuple[str, ...] | None = None,
    skip_modules_classes: tuple[type[nn.Module], ...] | None = None,
    non_blocking: bool = False,
) -> None:
    """Keep the weights of linear layers and convolutions in one format, and compute in another.

    Args:
        module: The model.
        storage_dtype: What the weights are kept in, such as ``torch.float8_e4m3fn``.
        compute_dtype: What they are while their layer computes.
        skip_modules_pattern: Regular expressions: submodules in whose names one is found are left
            alone, with all that is in them.
        skip_modules_classes: Classes whose instances are left alone, with all that is in them.
        non_blocking: Whether conversions may be under way when the next step begins.

    Raises:
        ConfigError: A format is none of floating-point numbers, or a pattern cannot be read.
    """
    _check_float_dtypes(storage_dtype=storage_dtype, compute_dtype=compute_dtype)
    is_one = isinstance(skip_modules_pattern, str)
    texts = (skip_modules_pattern,) if is_one else tuple(skip_modules_pattern or ())
    patterns = [_read_pattern(text) for text in texts]
    for name, layer in _layers_to_cast(module, "", patterns, tuple(skip_modules_classes or ())):
        _hook_log.debug("Weights of %r are kept in %s", name, storage_dtype)
        hook = LayerwiseCastingHook(storage_dtype, compute_dtype, non_blocking)
        add_hook_to_module(layer, hook, append=True)


def _read_pattern(text: Any) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except (re.error, TypeError) as error:
        raise ConfigError(
            f"skip_modules_pattern has {text!r}, which is no regular expression ({error}), so the "
            "layers to skip are not known. Put a backslash before special characters."
        ) from None


def _layers_to_cast(
    module: nn.Module,
    name: str,
    patterns: list[re.Pattern[str]],
    skipped_classes: tuple[type[nn.Module], ...],
) -> Iterator[tuple[str, nn.Module]]:
    if isinstance(module, skipped_classes) or any(pattern.search(name) for pattern in patterns):
        return
    if isinstance(module, _CAST_LAYERS):
        yield name, module
        return
    for child_name, child in module.named_children():
        full_name = f"{name}.{child_name}" if name else child_name
        yield from _layers_to_cast(child, full_name, patterns, skipped_classes)
