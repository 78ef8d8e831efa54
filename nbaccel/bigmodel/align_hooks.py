"""Hooks that bring a module's weights and arguments to one device for its ``forward``.

Weights that are offloaded come from a map and go when the module has run. Which module computes
where, and what is offloaded, is told by the caller.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch
from torch import nn

from nbaccel.base.errors import ConfigError
from nbaccel.base.torch_private import store_own_tensor
from nbaccel.base.units import first_few
from nbaccel.bigmodel.device_copies import CopiesUnderWay, start_copies
from nbaccel.bigmodel.execution_order import ExecutionOrder
from nbaccel.bigmodel.model_hooks import (
    HOOK_ATTRIBUTE,
    ModelHook,
    add_hook_to_module,
    each_hook,
    outside_compiled_code,
)
from nbaccel.bigmodel.module_tensors import get_non_persistent_buffers, named_module_tensors
from nbaccel.bigmodel.offload_folder import PrefixedDataset
from nbaccel.bigmodel.tensor_placing import (
    PlacedTensors,
    as_device,
    own_module,
    placed_on,
    set_module_tensor_to_device,
)
from nbaccel.bigmodel.weight_source import prefetch_weights, release_weights
from nbaccel.train.trees import leaves, send_to_device

_Device = int | str | torch.device
_TiedMap = dict[int, PlacedTensors]


class AlignDevicesHook(ModelHook):
    """Brings weights and arguments to one device before ``forward``.

    Args:
        execution_device: Where the module computes; None: arguments and weights stay.
        offload: Whether the module's weights are on ``meta`` between calls.
        io_same_device: Whether outputs go to the device of the first tensor among the arguments.
        weights_map: Where offloaded weights come from, by their names in the module; it may be a
            `PrefetchingWeights`. None: they are kept in host memory.
        offload_buffers: Whether buffers are offloaded, too.
        place_submodules: Whether the tensors of submodules count as the module's own.
        skip_keys: Keyword arguments, and keys of mappings in them and in outputs, that are not
            moved.
        tied_params_map: See `set_module_tensor_to_device`.
        execution_order: Shared by the hooks of one model; it asks for weights ahead of time.
    """

    def __init__(
        self,
        execution_device: _Device | None = None,
        offload: bool = False,
        io_same_device: bool = False,
        weights_map: Mapping[str, Any] | None = None,
        offload_buffers: bool = False,
        place_submodules: bool = False,
        skip_keys: str | Sequence[str] | None = None,
        tied_params_map: _TiedMap | None = None,
        *,
        execution_order: ExecutionOrder | None = None,
    ) -> None:
        self.execution_device = execution_device
        self.offload = offload
        self.io_same_device = io_same_device
        self.weights_map = weights_map
        self.offload_buffers = offload_buffers
        self.place_submodules = place_submodules
        self.skip_keys = skip_keys
        self.tied_params_map = tied_params_map
        self.execution_order = execution_order or ExecutionOrder(prefetch=False)
        self.input_device: torch.device | None = None
        self.original_devices: dict[str, torch.device] = {}
        self.tied_params_names: set[str] = set()
        self.weight_bytes = 0
        self._offloaded_names: list[str] = []
        self._tied_groups: dict[str, PlacedTensors] = {}
        self._placed_here: list[tuple[PlacedTensors, torch.device]] = []
        self._placeholders: dict[str, torch.Tensor] = {}
        self._copies: CopiesUnderWay | None = None
        self._num_checked = 0

    def __repr__(self) -> str:
        settings = (
            *("execution_device", "offload", "io_same_device"),
            *("offload_buffers", "place_submodules", "skip_keys"),
        )
        return f"AlignDevicesHook({', '.join(f'{s}={getattr(self, s)!r}' for s in settings)})"

    def __getstate__(self) -> dict[str, Any]:
        # Copies under way belong to this process and to the hook that began them.
        return {**vars(self), "_copies": None}

    # --------------------------------------------------------------- attaching

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Place the module's tensors, or offload them."""
        target = self._target()
        if target is not None and target.type == "meta":
            self.tied_params_map = None
        if self.offload:
            self._offload(module)
            self._place_buffers(module)
            self.execution_order.register(self)
        elif target is not None:
            for name, _ in named_module_tensors(module, recurse=self.place_submodules):
                self._place(module, name)
        return module

    def _offload(self, module: nn.Module) -> None:
        tensors = dict(named_module_tensors(module, recurse=self.place_submodules))
        self.original_devices = {name: tensor.device for name, tensor in tensors.items()}
        offloaded = dict(
            named_module_tensors(
                module, self.offload_buffers, self.place_submodules, remove_non_persistent=True
            )
        )
        if self.weights_map is None:
            kept = named_module_tensors(module, self.offload_buffers, self.place_submodules)
            self.weights_map = {name: tensor.detach().to("cpu") for name, tensor in kept}
        self._offloaded_names = list(offloaded)
        self.weight_bytes = sum(tensor.nbytes for tensor in offloaded.values())
        self._find_tied(offloaded)
        for name in offloaded:
            set_module_tensor_to_device(module, name, "meta")

    def _find_tied(self, offloaded: Mapping[str, torch.Tensor]) -> None:
        """Remember which weights are tied while their addresses are theirs.

        Later ones tell nothing: memory of the first may have been given to something else, and a
        file's weights are at another place each time.
        """
        known = self.tied_params_map or {}
        self._tied_groups = {
            name: known[tensor.data_ptr()]
            for name, tensor in offloaded.items()
            if not tensor.is_meta and tensor.data_ptr() in known
        }
        self.tied_params_names = set(self._tied_groups)

    def _place_buffers(self, module: nn.Module) -> None:
        """Buffers that are not offloaded stay where the module computes."""
        if self.execution_device is None:
            return
        if self.offload_buffers:
            names = get_non_persistent_buffers(module, self.place_submodules, fqns=True)
        else:
            names = {name for name, _ in module.named_buffers(recurse=self.place_submodules)}
        for name in sorted(names):
            self._place(module, name)

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

    @property
    def offloaded_names(self) -> tuple[str, ...]:
        """The weights that are on ``meta`` between calls, by their names in the module."""
        return tuple(self._offloaded_names)

    # --------------------------------------------------------------- running

    @outside_compiled_code
    def pre_forward(
        self, module: nn.Module, *args: Any, **kwargs: Any
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Bring weights and arguments to where the module computes."""
        if self.io_same_device:
            tensors = (leaf for leaf in leaves([args, kwargs]) if isinstance(leaf, torch.Tensor))
            first_tensor = next(tensors, None)
            self.input_device = None if first_tensor is None else first_tensor.device
            if first_tensor is not None and not first_tensor.is_meta:
                self._check_values(module)
        if self.offload:
            self.execution_order.enter(self)
            self.bring_in(module)
        target = self._target()
        if target is None:
            return args, kwargs
        return (
            send_to_device(args, target),
            send_to_device(kwargs, target, skip_keys=self.skip_keys),
        )

    def _check_values(self, model: nn.Module) -> None:
        """Refuse what would compute with tensors that nothing brings in."""
        # Counting is far cheaper than looking, and who adds an adapter adds modules.
        num_modules = sum(1 for _ in model.modules())
        if num_modules == self._num_checked:
            return
        check_values(model)
        self._num_checked = num_modules

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
        """Put the offloaded weights into the module, on the device where it computes.

        Args:
            module: The hook's module.
        """
        # What a call that failed has left.
        self._forget_placed()
        copied = self._take_copies()
        for name in self._offloaded_names:
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
            self._put_weight(owner, last_name, value)
            if group is not None:
                group[self._checked_target()] = getattr(owner, last_name)
                self._placed_here.append((group, self._checked_target()))
            self._watch_gradient(getattr(owner, last_name), name)

    def _put_weight(self, owner: nn.Module, last_name: str, value: torch.Tensor) -> None:
        target = self._target() or value.device
        set_module_tensor_to_device(owner, last_name, target, value=value, clear_cache=False)

    def _weight(self, name: str) -> torch.Tensor:
        try:
            # Not by its truth value, for which a map counts all its weights.
            weights = {} if self.weights_map is None else self.weights_map
            weight: torch.Tensor = weights[name]
        except KeyError:
            raise ConfigError(
                f"{self._full_name(name)!r} is offloaded, and the map of offloaded weights lacks "
                "it, so its module cannot run. Give a state_dict, offload_index or offload_dir "
                "with all weights that the device map offloads."
            ) from None
        return weight

    def send_out(self, module: nn.Module) -> None:
        """Leave the module without its weights, on ``meta``.

        Args:
            module: The hook's module.
        """
        for name in self._offloaded_names:
            placeholder = self._placeholders.pop(name, None)
            if placeholder is None:
                set_module_tensor_to_device(module, name, "meta")
            else:
                store_own_tensor(*own_module(module, name), placeholder)
        self._forget_placed()
        release_weights(self.weights_map, self._offloaded_names)

    def _forget_placed(self) -> None:
        for group, device in self._placed_here:
            group.pop(device, None)
        self._placed_here.clear()

    def _target(self) -> torch.device | None:
        return None if self.execution_device is None else as_device(self.execution_device)

    def _checked_target(self) -> torch.device:
        return self._target() or torch.device("cpu")

    # --------------------------------------------------------------- training

    def _watch_gradient(self, weight: torch.Tensor, name: str) -> None:
        if torch.is_grad_enabled() and weight.requires_grad and weight.is_leaf:
            refuse: Any = functools.partial(_refuse_gradient, self._full_name(name))
            weight.register_hook(refuse)  # type: ignore[no-untyped-call]

    def _full_name(self, name: str) -> str:
        prefix = getattr(self.weights_map, "prefix", "")
        return f"{prefix}{name}"

    # --------------------------------------------------------------- ahead of time

    def ask_for_weights(self) -> None:
        """See `OffloadedBlock`."""
        prefetch_weights(self.weights_map, self._offloaded_names)

    def give_weights_back(self) -> None:
        """See `OffloadedBlock`."""
        release_weights(self.weights_map, self._offloaded_names)

    def copy_ahead(self) -> None:
        """See `OffloadedBlock`."""
        target = self._target()
        if self._copies is None and target is not None and target.type not in ("cpu", "meta"):
            # One that is lacking is reported when its module runs.
            with suppress(ConfigError):
                names = [name for name in self._offloaded_names if name not in self._tied_groups]
                self._copies = start_copies({name: self._weight(name) for name in names}, target)

    def drop_copies(self) -> None:
        """See `OffloadedBlock`."""
        self._copies = None

    def _take_copies(self) -> Mapping[str, torch.Tensor]:
        copies = self._copies
        self._copies = None
        return {} if copies is None else copies.finish()


def check_values(model: nn.Module) -> None:
    """Refuse a model with tensors on ``meta`` that nothing brings in."""
    empty_names = list(_names_without_values(model))
    if empty_names:
        raise ConfigError(
            f"{len(empty_names)} tensors of {type(model).__name__} are on meta and not among "
            f"those that are offloaded: {first_few(empty_names, 3)}. Computing with them gives "
            "no numbers of theirs. Add an adapter before the model is offloaded (disk_offload "
            "or dispatch_model afterwards); or give them memory and values: "
            "submodule.to_empty(device='cpu') and an initialisation, or set buffers, which no "
            "checkpoint has if they are not persistent."
        )


def _names_without_values(model: nn.Module) -> Iterator[str]:
    """Tensors on ``meta`` that no hook brings in."""
    offloaded: set[str] = set()
    for module_name, module in model.named_modules():
        prefix = f"{module_name}." if module_name else ""
        for hook in each_hook(module):
            if isinstance(hook, AlignDevicesHook):
                offloaded.update(prefix + name for name in hook.offloaded_names)
        for name, tensor in named_module_tensors(module):
            if tensor.is_meta and prefix + name not in offloaded:
                yield prefix + name


def _refuse_gradient(name: str, gradient: torch.Tensor) -> NoReturn:
    raise ConfigError(
        f"The gradient of {name!r} (shape {tuple(gradient.shape)}) would be lost: the "
        "weight is offloaded, and what computed with it was a copy that is not kept. Give "
        "max_memory with more room, so that weights to be trained stay in memory; or train with "
        "FSDP or ZeRO-3 and their offloading; or freeze it with requires_grad_(False)."
    )


# ------------------------------------------------------------------------- attaching


@dataclass(frozen=True)
class _Attaching:
    """What all hooks of one call have in common; see `attach_align_device_hook`."""

    weights_map: Mapping[str, Any] | None
    offload_buffers: bool
    skip_keys: str | Sequence[str] | None
    preload_module_classes: Sequence[str]
    tied_params_map: _TiedMap | None
    order: ExecutionOrder

    def offloading(
        self, module: nn.Module, device: _Device | None, offload: bool, name: str
    ) -> None:
        """Hook every submodule that has tensors of its own, or loads all of them at once."""
        is_whole = offload and type(module).__name__ in self.preload_module_classes
        if is_whole or next(named_module_tensors(module), None) is not None:
            hook = AlignDevicesHook(
                execution_device=device,
                offload=offload,
                weights_map=self._part_of_map(name),
                offload_buffers=self.offload_buffers,
                place_submodules=is_whole,
                skip_keys=self.skip_keys,
                tied_params_map=self.tied_params_map,
                execution_order=self.order,
            )
            add_hook_to_module(module, hook, append=True)
        if not is_whole:
            for child_name, child in _named_children(module, name):
                self.offloading(child, device, offload, child_name)

    def _part_of_map(self, name: str) -> PrefixedDataset | None:
        if self.weights_map is None:
            return None
        return PrefixedDataset(self.weights_map, f"{name}." if name else "")

    def aligning(
        self,
        module: nn.Module,
        device: _Device | None,
        *,
        io_same_device: bool,
        place_submodules: bool = False,
    ) -> None:
        """Hook one module whose weights stay where they are put now."""
        hook = AlignDevicesHook(
            execution_device=device,
            io_same_device=io_same_device,
            offload_buffers=place_submodules and self.offload_buffers,
            place_submodules=place_submodules,
            skip_keys=self.skip_keys,
            tied_params_map=self.tied_params_map,
            execution_order=self.order,
        )
        add_hook_to_module(module, hook)

    def executing(self, module: nn.Module, device: _Device | None) -> None:
        """Hook the submodules that have no hook yet, so that their arguments are moved."""
        if not hasattr(module, HOOK_ATTRIBUTE) and len(module.state_dict()) > 0:
            self.aligning(module, device, io_same_device=False)
        if type(module).__name__ not in self.preload_module_classes:
            for child in module.children():
                self.executing(child, device)

    def on_blocks(
        self,
        module: nn.Module,
        devices: Mapping[str, _Device | None],
        offloads: Mapping[str, bool],
        name: str,
    ) -> None:
        """Hook a module as its entries say, then its submodules."""
        is_root = name == ""
        if name not in devices or name not in offloads:
            if is_root:
                self.aligning(module, devices.get(""), io_same_device=True)
        elif offloads[name]:
            self.offloading(module, devices[name], True, name)
            if not hasattr(module, HOOK_ATTRIBUTE):
                self.aligning(module, devices[name], io_same_device=is_root)
            self.executing(module, devices[name])
        else:
            self.aligning(module, devices[name], io_same_device=is_root, place_submodules=True)
            replace(self, preload_module_classes=()).executing(module, devices[name])
        for child_name, child in _named_children(module, name):
            self.on_blocks(child, devices, offloads, child_name)


def _named_children(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
    for child_name, child in module.named_children():
        yield (f"{name}.{child_name}" if name else child_name), child


def attach_execution_device_hook(
    module: nn.Module,
    execution_device: _Device,
    skip_keys: str | Sequence[str] | None = None,
    preload_module_classes: Sequence[str] | None = None,
    tied_params_map: _TiedMap | None = None,
    *,
    order: ExecutionOrder | None = None,
) -> None:
    """Hook all submodules with weights and without a hook: arguments go to where they compute.

    Args:
        module: The module.
        execution_device: Where it computes.
        skip_keys: See `AlignDevicesHook`.
        preload_module_classes: Names of classes in whose instances nothing is hooked.
        tied_params_map: See `set_module_tensor_to_device`.
        order: Shared by the hooks of one model.
    """
    attaching = _Attaching(
        weights_map=None,
        offload_buffers=False,
        skip_keys=skip_keys,
        preload_module_classes=tuple(preload_module_classes or ()),
        tied_params_map=tied_params_map,
        order=order or ExecutionOrder(),
    )
    attaching.executing(module, execution_device)


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
    attaching = _Attaching(
        weights_map=weights_map,
        offload_buffers=offload_buffers,
        skip_keys=skip_keys,
        preload_module_classes=tuple(preload_module_classes or ()),
        tied_params_map=tied_params_map,
        order=order or ExecutionOrder(prefetch=prefetch),
    )
    attaching.offloading(module, execution_device, offload, module_name)


def attach_align_device_hook_on_blocks(
    module: nn.Module,
    execution_device: _Device | Mapping[str, _Device] | None = None,
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

    Args:
        module: The model.
        execution_device: Where it computes: one device, or one for each of the parts by name.
        offload: Whether weights are on ``meta`` between calls: for all, or for each part.
        weights_map: See `attach_align_device_hook`, also for the others.
        offload_buffers: Whether buffers are offloaded, too.
        module_name: What the module is called in the mappings.
        skip_keys: Arguments that are not moved.
        preload_module_classes: Classes whose instances get all their weights at once.
        tied_params_map: Where tied weights have been placed.
        order: Shared by the hooks of one model; None: a new one.
        prefetch: Whether a new one asks for weights ahead of time.
    """
    attaching = _Attaching(
        weights_map=weights_map,
        offload_buffers=offload_buffers,
        skip_keys=skip_keys,
        preload_module_classes=tuple(preload_module_classes or ()),
        tied_params_map=tied_params_map,
        order=order or ExecutionOrder(prefetch=prefetch),
    )
    if isinstance(execution_device, Mapping):
        offloads = (
            offload if isinstance(offload, Mapping) else dict.fromkeys(execution_device, offload)
        )
        attaching.on_blocks(module, execution_device, offloads, module_name)
    elif isinstance(offload, Mapping):
        devices: dict[str, _Device | None] = dict.fromkeys(offload, execution_device)
        attaching.on_blocks(module, devices, offload, module_name)
    elif offload:
        attaching.offloading(module, execution_device, True, module_name)
    else:
        attaching.aligning(module, execution_device, io_same_device=True, place_submodules=True)
