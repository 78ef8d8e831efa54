"""Hooks around a module's ``forward``: they see its arguments and may replace what it returns.

`AlignDevicesHook` brings weights and arguments to one device for it; weights that are offloaded
come from a map and go when the module has run. Which module computes where, and what is offloaded,
is told by the caller. Attributes of a hooked module are those that transformers and diffusers read.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NoReturn, TypeVar

import torch
from torch import nn

from nbaccel.base.errors import ConfigError
from nbaccel.base.torch_private import store_own_tensor
from nbaccel.base.trees import leaves, send_to_device
from nbaccel.base.units import first_few
from nbaccel.bigmodel.module_sizes import get_non_persistent_buffers, named_module_tensors
from nbaccel.bigmodel.offload_folder import PrefixedDataset
from nbaccel.bigmodel.prefetching import CopiesUnderWay, ExecutionOrder, start_copies, tell_weights
from nbaccel.bigmodel.tensor_placing import (
    PlacedTensors,
    as_device,
    check_device_same,
    is_accelerator,
    own_module,
    placed_on,
    set_module_tensor_to_device,
)
from nbaccel.plan import registry
from nbaccel.train import distributed

__all__ = [
    "AlignDevicesHook",
    "CpuOffload",
    "LayerwiseCastingHook",
    "ModelHook",
    "SequentialHook",
    "UserCpuOffloadHook",
    "add_hook_to_module",
    "attach_align_device_hook",
    "attach_align_device_hook_on_blocks",
    "attach_execution_device_hook",
    "remove_hook_from_module",
    "remove_hook_from_submodules",
]

_Device = int | str | torch.device
_TiedMap = dict[int, PlacedTensors]
_Arguments = tuple[tuple[Any, ...], dict[str, Any]]
_Method = TypeVar("_Method", bound=Callable[..., Any])

HOOK_ATTRIBUTE = "_hf_hook"  # where a module has its hook
_FORWARD_ATTRIBUTE = "_old_forward"
# What `dispatch_model` puts on a module to warn of moving it.
_GUARDED_METHODS = ("to", "cuda", "npu", "xpu", "mlu", "sdaa", "musa")


def outside_compiled_code(method: _Method) -> _Method:
    """Let ``torch.compile`` call a function as it is, not trace it."""
    # Not before a compiler is at work: `torch.compiler.disable` imports it, which takes seconds.
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

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> _Arguments:
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
    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> _Arguments:
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
        # Its own class gets a new `forward` when the graph changes: the object's would hide that.
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


class CpuOffload(ModelHook):
    """Keeps a model in host memory until it is called; after that it stays where it computed.

    Args:
        execution_device: Where it computes; None: this machine's accelerator, else the CPU.
        prev_module_hook: Of the model before it in a pipeline, which goes to host memory first.
    """

    def __init__(
        self,
        execution_device: str | int | torch.device | None = None,
        prev_module_hook: UserCpuOffloadHook | None = None,
    ) -> None:
        self.prev_module_hook = prev_module_hook
        self.execution_device = (
            distributed.find_device() if execution_device is None else execution_device
        )

    def init_hook(self, module: nn.Module) -> nn.Module:
        return module.to("cpu")

    @outside_compiled_code
    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> _Arguments:
        target = as_device(self.execution_device)
        if isinstance(self.prev_module_hook, UserCpuOffloadHook):
            self.prev_module_hook.make_room()
        present_device = next((parameter.device for parameter in module.parameters()), target)
        if not check_device_same(present_device, target):
            module.to(target)
        return send_to_device(args, target), send_to_device(kwargs, target)


@dataclass(eq=False, repr=False)
class UserCpuOffloadHook:
    """What a user needs of a `CpuOffload`: send the model back, or remove the hook.

    Args:
        model: The model.
        hook: Its hook.
    """

    model: nn.Module
    hook: ModelHook

    def offload(self) -> None:
        """Move the model to host memory."""
        self.hook.init_hook(self.model)

    def make_room(self) -> None:
        """Move the model to host memory if it is elsewhere, and give the device's cache back."""
        own_devices = (parameter.device for parameter in self.model.parameters())
        device = next(own_devices, torch.device("cpu"))
        if device.type != "cpu":
            self.offload()
            if is_accelerator(device):
                registry.device_runtime(device.type).empty_cache()

    def remove(self) -> None:
        """Take the hook from the model, which stays where it is."""
        remove_hook_from_module(self.model)


@dataclass(eq=False, repr=False)
class LayerwiseCastingHook(ModelHook):
    """Keeps a module's weights in one format, and converts them to another for ``forward``.

    Args:
        storage_dtype: What they are kept in, such as ``torch.float8_e4m3fn``.
        compute_dtype: What they are while the module computes.
        non_blocking: Whether the conversion may be under way when the next step begins.
    """

    storage_dtype: torch.dtype  # such as ``torch.float8_e4m3fn``
    compute_dtype: torch.dtype
    non_blocking: bool  # whether the conversion may be under way when the next step begins

    def __post_init__(self) -> None:
        check_float_dtypes(storage_dtype=self.storage_dtype, compute_dtype=self.compute_dtype)

    def init_hook(self, module: nn.Module) -> nn.Module:
        module.to(dtype=self.storage_dtype, non_blocking=self.non_blocking)
        return module

    @outside_compiled_code
    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> _Arguments:
        module.to(dtype=self.compute_dtype, non_blocking=self.non_blocking)
        return args, kwargs

    @outside_compiled_code
    def post_forward(self, module: nn.Module, output: Any) -> Any:
        module.to(dtype=self.storage_dtype, non_blocking=self.non_blocking)
        return output


def check_float_dtypes(**dtypes: Any) -> None:
    """Refuse formats that weights cannot be converted to."""
    mistakes = [
        f"{setting} must be a floating-point format of torch, because weights are converted to "
        f"it: got {dtype!r}. Give one such as torch.bfloat16 or torch.float8_e4m3fn."
        for setting, dtype in dtypes.items()
        if not (isinstance(dtype, torch.dtype) and dtype.is_floating_point)
    ]
    if mistakes:
        raise ConfigError(*mistakes)


@dataclass(eq=False)
class AlignDevicesHook(ModelHook):
    """Brings weights and arguments to one device before ``forward``.

    Attributes:
        execution_device: Where the module computes; None: arguments and weights stay.
        offload: Whether the module's weights are on ``meta`` between calls.
        io_same_device: Whether outputs go to the device of the first tensor among the arguments.
        weights_map: Where offloaded weights come from, by their names in the module; it may read
            ahead (`tell_weights`). None: they are kept in host memory.
        offload_buffers: Whether buffers are offloaded, too.
        place_submodules: Whether the tensors of submodules count as the module's own.
        skip_keys: Keyword arguments, and keys of mappings in them and in outputs, to be left alone.
        tied_params_map: See `set_module_tensor_to_device`.
        execution_order: Shared by the hooks of one model; it asks for weights ahead of time.
    """

    execution_device: _Device | None = None
    offload: bool = False
    io_same_device: bool = False
    weights_map: Mapping[str, Any] | None = field(default=None, repr=False)
    offload_buffers: bool = False
    place_submodules: bool = False
    skip_keys: str | Sequence[str] | None = None
    tied_params_map: _TiedMap | None = field(default=None, repr=False)
    execution_order: ExecutionOrder = field(
        default_factory=lambda: ExecutionOrder(prefetch=False), kw_only=True, repr=False
    )

    def __post_init__(self) -> None:
        self.input_device: torch.device | None = None
        self.original_devices: dict[str, torch.device] = {}
        self.tied_params_names: set[str] = set()
        self.weight_bytes = 0
        self.offloaded_names: Sequence[str] = ()
        self._tied_groups: dict[str, PlacedTensors] = {}
        self._placed_here: list[tuple[PlacedTensors, torch.device]] = []
        self._placeholders: dict[str, torch.Tensor] = {}
        self._copies: CopiesUnderWay | None = None
        self._num_checked = 0

    def __getstate__(self) -> dict[str, Any]:
        # Copies under way belong to this process and to the hook that began them.
        return {**vars(self), "_copies": None}

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Place the module's tensors, or offload them."""
        target = self._target()
        if target is not None and target.type == "meta":
            self.tied_params_map = None
        if self.offload:
            self._offload(module)
            if self.execution_device is not None:
                # Buffers that are not offloaded stay where the module computes.
                staying = (
                    get_non_persistent_buffers(module, self.place_submodules, fqns=True)
                    if self.offload_buffers
                    else {name for name, _ in module.named_buffers(recurse=self.place_submodules)}
                )
                for name in sorted(staying):
                    self._place(module, name)
            self.execution_order.register(self)
        elif target is not None:
            for name, _ in named_module_tensors(module, recurse=self.place_submodules):
                self._place(module, name)
        return module

    def _offload(self, module: nn.Module) -> None:
        tensors = dict(named_module_tensors(module, recurse=self.place_submodules))
        self.original_devices = {name: tensor.device for name, tensor in tensors.items()}
        which = (self.offload_buffers, self.place_submodules)
        offloaded = dict(named_module_tensors(module, *which, remove_non_persistent=True))
        if self.weights_map is None:
            kept = named_module_tensors(module, *which)
            self.weights_map = {name: tensor.detach().to("cpu") for name, tensor in kept}
        self.offloaded_names = tuple(offloaded)
        self.weight_bytes = sum(tensor.nbytes for tensor in offloaded.values())
        # Which weights are tied is told by their addresses, now: later memory of the first may have
        # been given to something else, and a file's weights are at another place each time.
        known = self.tied_params_map or {}
        addresses = {n: it.data_ptr() for n, it in offloaded.items() if not it.is_meta}
        self._tied_groups = {name: known[it] for name, it in addresses.items() if it in known}
        self.tied_params_names = set(self._tied_groups)
        for name in offloaded:
            set_module_tensor_to_device(module, name, "meta")

    def _place(self, module: nn.Module, name: str) -> None:
        set_module_tensor_to_device(
            module, name, self._checked_target(), tied_params_map=self.tied_params_map
        )

    def detach_hook(self, module: nn.Module) -> nn.Module:
        """Give the module its weights back, on the devices where they were."""
        if self.offload:
            for name, device in self.original_devices.items():
                if device.type != "meta":
                    value = None if self.weights_map is None else self.weights_map.get(name)
                    set_module_tensor_to_device(module, name, device, value=value)
            self.drop_copies()
            self.execution_order.forget(self)
        return module

    @outside_compiled_code
    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> _Arguments:
        """Bring weights and arguments to where the module computes."""
        if self.io_same_device:
            tensors = (leaf for leaf in leaves([args, kwargs]) if isinstance(leaf, torch.Tensor))
            first_tensor = next(tensors, None)
            self.input_device = None if first_tensor is None else first_tensor.device
            if first_tensor is not None and not first_tensor.is_meta:
                # Counting is far cheaper than looking, and who adds an adapter adds modules.
                num_modules = sum(1 for _ in module.modules())
                if num_modules != self._num_checked:
                    check_values(module)
                    self._num_checked = num_modules
        if self.offload:
            self.execution_order.enter(self)
            self.bring_in(module)
        target = self._target()
        if target is None:
            return args, kwargs
        moved_kwargs = send_to_device(kwargs, target, skip_keys=self.skip_keys)
        return send_to_device(args, target), moved_kwargs

    @outside_compiled_code
    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """Let the weights go, and move outputs."""
        if self.offload:
            self.send_out(module)
            self.execution_order.end_block()
        if self.io_same_device and self.input_device is not None:
            output = send_to_device(output, self.input_device, skip_keys=self.skip_keys)
        return output

    def bring_in(self, module: nn.Module) -> None:
        """Put the offloaded weights into the module, on the device where it computes."""
        # What a call that failed has left.
        self._forget_placed()
        copied = {} if self._copies is None else self._copies.finish()
        self._copies = None
        for name in self.offloaded_names:
            owner, last_name = own_module(module, name)
            current = getattr(owner, last_name)
            if current.is_meta:
                self._placeholders[name] = current
            group = self._tied_groups.get(name)
            placed = None if group is None else placed_on(group, self._checked_target())
            if placed is not None:
                store_own_tensor(owner, last_name, placed)
                continue
            value = copied[name] if name in copied else self._weight(name)
            target = self._target() or value.device
            set_module_tensor_to_device(owner, last_name, target, value=value, clear_cache=False)
            if group is not None:
                group[self._checked_target()] = getattr(owner, last_name)
                self._placed_here.append((group, self._checked_target()))
            weight = getattr(owner, last_name)
            if torch.is_grad_enabled() and weight.requires_grad and weight.is_leaf:
                refuse: Any = functools.partial(_refuse_gradient, self._full_name(name))
                weight.register_hook(refuse)

    def _weight(self, name: str) -> torch.Tensor:
        try:
            # Not by its truth value, for which a map counts all its weights.
            return ({} if self.weights_map is None else self.weights_map)[name]  # type: ignore[no-any-return]
        except KeyError:
            raise ConfigError(
                f"{self._full_name(name)!r} is offloaded, and the map of offloaded weights lacks "
                "it, so its module cannot run. Give a state_dict, offload_index or offload_dir "
                "with all weights that the device map offloads."
            ) from None

    def send_out(self, module: nn.Module) -> None:
        """Leave the module without its weights, on ``meta``."""
        for name in self.offloaded_names:
            placeholder = self._placeholders.pop(name, None)
            if placeholder is None:
                set_module_tensor_to_device(module, name, "meta")
            else:
                store_own_tensor(*own_module(module, name), placeholder)
        self._forget_placed()
        tell_weights(self.weights_map, "release", self.offloaded_names)

    def _forget_placed(self) -> None:
        for group, device in self._placed_here:
            group.pop(device, None)
        self._placed_here.clear()

    def _target(self) -> torch.device | None:
        return None if self.execution_device is None else as_device(self.execution_device)

    def _checked_target(self) -> torch.device:
        return self._target() or torch.device("cpu")

    def _full_name(self, name: str) -> str:
        return f"{getattr(self.weights_map, 'prefix', '')}{name}"

    def copy_ahead(self) -> None:
        """Begin to copy the weights to where the module computes, if that can be done beside."""
        target = self._target()
        if self._copies is None and target is not None and target.type not in ("cpu", "meta"):
            # One that is lacking is reported when its module runs.
            with suppress(ConfigError):
                names = [name for name in self.offloaded_names if name not in self._tied_groups]
                self._copies = start_copies({name: self._weight(name) for name in names}, target)

    def drop_copies(self) -> None:
        """Forget copies that were begun."""
        self._copies = None


def check_values(model: nn.Module) -> None:
    """Refuse a model with tensors on ``meta`` that no hook brings in."""
    empty_names: list[str] = []
    offloaded: set[str] = set()
    for module_name, module in model.named_modules():
        prefix = f"{module_name}." if module_name else ""
        for hook in each_hook(module):
            if isinstance(hook, AlignDevicesHook):
                offloaded.update(prefix + name for name in hook.offloaded_names)
        tensors = named_module_tensors(module)
        empty_names += [prefix + name for name, tensor in tensors if tensor.is_meta]
    empty_names = [name for name in empty_names if name not in offloaded]
    if empty_names:
        raise ConfigError(
            f"{len(empty_names)} tensors of {type(model).__name__} are on meta and not among "
            f"those that are offloaded: {first_few(empty_names, 3)}. Computing with them gives "
            "no numbers of theirs. Add an adapter before the model is offloaded (disk_offload "
            "or dispatch_model afterwards); or give them memory and values: "
            "submodule.to_empty(device='cpu') and an initialisation, or set buffers, which no "
            "checkpoint has if they are not persistent."
        )


def _refuse_gradient(name: str, gradient: torch.Tensor) -> NoReturn:
    raise ConfigError(
        f"The gradient of {name!r} (shape {tuple(gradient.shape)}) would be lost: the "
        "weight is offloaded, and what computed with it was a copy that is not kept. Give "
        "max_memory with more room, so that weights to be trained stay in memory; or train with "
        "FSDP or ZeRO-3 and their offloading; or freeze it with requires_grad_(False)."
    )


def attach_execution_device_hook(
    module: nn.Module,
    execution_device: _Device | None,
    skip_keys: str | Sequence[str] | None = None,
    preload_module_classes: Sequence[str] | None = None,
    tied_params_map: _TiedMap | None = None,
    *,
    order: ExecutionOrder | None = None,
) -> None:
    """Hook all submodules with weights and without a hook: arguments go to where they compute.

    Inside of `preload_module_classes` nothing is hooked; see also `attach_align_device_hook`.
    """
    for _, part in _outside_of(module, preload_module_classes or ()):
        if not hasattr(part, HOOK_ATTRIBUTE) and len(part.state_dict()) > 0:
            hook = AlignDevicesHook(
                execution_device,
                skip_keys=skip_keys,
                tied_params_map=tied_params_map,
                execution_order=order or ExecutionOrder(prefetch=False),
            )
            add_hook_to_module(part, hook)


def _outside_of(
    module: nn.Module, classes: Sequence[str], name: str = ""
) -> Iterator[tuple[str, nn.Module]]:
    """A module and its submodules with their names, but for those inside of some classes'."""
    yield name, module
    if type(module).__name__ not in classes:
        for child_name, child in module.named_children():
            yield from _outside_of(child, classes, f"{name}.{child_name}" if name else child_name)


def attach_align_device_hook(
    module: nn.Module,
    execution_device: _Device | None = None,
    offload: bool = False,
    weights_map: Mapping[str, Any] | None = None,
    offload_buffers: bool = False,
    module_name: str = "",
    skip_keys: str | Sequence[str] | None = None,
    preload_module_classes: Sequence[str] | None = None,
    tied_params_map: _TiedMap | None = None,
    *,
    order: ExecutionOrder | None = None,
    prefetch: bool = True,
) -> None:
    """Hook every submodule that has parameters or buffers of its own.

    Args:
        module: The module.
        execution_device: Where it computes.
        offload: Whether weights are on ``meta`` between calls.
        weights_map: Where offloaded weights come from, by their whole names.
        offload_buffers: Whether buffers are offloaded, too.
        module_name: What the module is called in `weights_map`.
        skip_keys: See `AlignDevicesHook`.
        preload_module_classes: Names of classes whose instances get all their weights, those of
            submodules included, before they run: for those that use weights of submodules
            without calling them.
        tied_params_map: See `set_module_tensor_to_device`.
        order: Shared by the hooks of one model; None: a new one.
        prefetch: Whether a new one asks for weights ahead of time.
    """
    order = order or ExecutionOrder(prefetch=prefetch)
    whole_classes = preload_module_classes if offload and preload_module_classes else ()
    for name, part in _outside_of(module, whole_classes, module_name):
        is_whole = type(part).__name__ in whole_classes
        if is_whole or next(named_module_tensors(part), None) is not None:
            prefix = f"{name}." if name else ""
            hook = AlignDevicesHook(
                execution_device,
                offload=offload,
                weights_map=None if weights_map is None else PrefixedDataset(weights_map, prefix),
                offload_buffers=offload_buffers,
                place_submodules=is_whole,
                skip_keys=skip_keys,
                tied_params_map=tied_params_map,
                execution_order=order,
            )
            add_hook_to_module(part, hook, append=True)


def attach_align_device_hook_on_blocks(
    module: nn.Module,
    execution_device: _Device | Mapping[str, _Device | None] | None = None,
    offload: bool | Mapping[str, bool] = False,
    weights_map: Mapping[str, Any] | None = None,
    offload_buffers: bool = False,
    module_name: str = "",
    skip_keys: str | Sequence[str] | None = None,
    preload_module_classes: Sequence[str] | None = None,
    tied_params_map: _TiedMap | None = None,
    *,
    order: ExecutionOrder | None = None,
    prefetch: bool = True,
) -> None:
    """Hook the parts of a model, each with a device of its own.

    `execution_device` and `offload` are one for all, or one for each of the parts by name; other
    arguments are as in `attach_align_device_hook`.
    """
    order = order or ExecutionOrder(prefetch=prefetch)
    common: dict[str, Any] = {"skip_keys": skip_keys, "tied_params_map": tied_params_map}
    inner: dict[str, Any] = {
        **common,
        "weights_map": weights_map,
        "offload_buffers": offload_buffers,
        "preload_module_classes": preload_module_classes,
        "order": order,
    }
    align: Callable[..., AlignDevicesHook] = functools.partial(
        AlignDevicesHook, offload_buffers=offload_buffers, execution_order=order, **common
    )
    if isinstance(execution_device, Mapping):
        devices: Mapping[str, _Device | None] = execution_device
        offloads = offload if isinstance(offload, Mapping) else dict.fromkeys(devices, offload)
    elif isinstance(offload, Mapping):
        devices, offloads = dict.fromkeys(offload, execution_device), offload
    elif offload:
        attach_align_device_hook(module, execution_device, True, module_name=module_name, **inner)
        return
    else:
        whole = align(execution_device, io_same_device=True, place_submodules=True)
        add_hook_to_module(module, whole)
        return
    for name, part in _outside_of(module, (), module_name):
        is_root = name == ""
        if name not in devices or name not in offloads:
            if is_root:
                add_hook_to_module(part, align(devices.get(""), io_same_device=True))
            continue
        device = devices[name]
        left_alone = None
        if offloads[name]:
            attach_align_device_hook(part, device, True, module_name=name, **inner)
            if not hasattr(part, HOOK_ATTRIBUTE):
                add_hook_to_module(part, align(device, io_same_device=is_root))
            left_alone = preload_module_classes
        else:
            add_hook_to_module(part, align(device, io_same_device=is_root, place_submodules=True))
        attach_execution_device_hook(
            part, device, preload_module_classes=left_alone, order=order, **common
        )
