"""Models bigger than memory: built empty, loaded where they fit, and run from there.

Modules on accelerators stay there; weights in host memory or on disk are brought in before a
module's forward and let go after it. Where the host itself computes, those in its memory stay.
"""

from __future__ import annotations

import contextlib
import functools
import re
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from nbaccel import hooks
from nbaccel.base import env
from nbaccel.base.errors import ConfigError, UnsafeMoment
from nbaccel.base.log import get_logger
from nbaccel.base.training_libraries import is_sharding_new_models
from nbaccel.base.units import first_few
from nbaccel.bigmodel.checkpoint_loading import (
    fill_model,
    load_checkpoint_in_model,
    write_offload_index,
)
from nbaccel.bigmodel.device_map import (
    DISK,
    HOST,
    check_device_map,
    get_balanced_memory,
    infer_auto_device_map,
)
from nbaccel.bigmodel.module_sizes import find_tied_parameters
from nbaccel.bigmodel.offload_folder import (
    OffloadedWeightsLoader,
    extract_submodules_state_dict,
    offload_state_dict,
)
from nbaccel.bigmodel.tensor_placing import (
    PlacedTensors,
    as_dtype,
    check_device_same,
    parameter_like,
    retie_parameters,
    usable_device,
)
from nbaccel.strategies.model_blocks import own_block_classes
from nbaccel.transfer.sharded_tensors import shard_readers

__all__ = [
    "attach_layerwise_casting_hooks",
    "check_device_map",
    "cpu_offload",
    "cpu_offload_with_hook",
    "disk_offload",
    "dispatch_model",
    "infer_auto_device_map",
    "init_empty_weights",
    "init_on_device",
    "load_checkpoint_and_dispatch",
    "load_checkpoint_in_model",
]

_MAP_WORDS = ("auto", "balanced", "balanced_low_0", "sequential")
_AWAY = (HOST, DISK)
_INCLUDE_BUFFERS_VARIABLE = "ACCELERATE_INIT_INCLUDE_BUFFERS"
_CAST_LAYERS = (
    *(nn.Conv1d, nn.Conv2d, nn.Conv3d),
    *(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
    nn.Linear,
)

_hook_log = get_logger(__name__)


@contextlib.contextmanager
def init_empty_weights(include_buffers: bool | None = None) -> Iterator[None]:
    """Build models whose parameters have shapes and no memory: they are on ``meta``.

    One parameter at a time is allocated before it moves there, but with `include_buffers` none.

    Args:
        include_buffers: Whether buffers, too, and everything else that the block makes with
            functions such as ``torch.zeros``. None: what the environment variable
            ``ACCELERATE_INIT_INCLUDE_BUFFERS`` says, else no.

    Yields:
        Nothing. Blocks can be nested (the innermost counts), and leave torch as it was found.

    Example:
        >>> with init_empty_weights():
        ...     model = nn.Linear(100_000, 100_000)
    """
    with init_on_device("meta", include_buffers):
        yield


@contextlib.contextmanager
def init_on_device(
    device: torch.device | str | int, include_buffers: bool | None = None
) -> Iterator[None]:
    """Build models whose parameters are made on a device.

    Class, attributes and `requires_grad` of parameters are kept, and what is tied stays tied. A
    parameter that is on the device already stays the same object.

    Args:
        device: Where to.
        include_buffers: As in :func:`init_empty_weights`.

    Yields:
        Nothing.

    Raises:
        ConfigError: Tensors cannot be made on the device.
    """
    target = usable_device(device)
    if include_buffers is None:
        include_buffers = bool(env.flag(_INCLUDE_BUFFERS_VARIABLE))
    with contextlib.ExitStack() as stack:
        if include_buffers:
            stack.enter_context(target)
        if target.type == "meta" and is_sharding_new_models():
            # There are no values yet that could be cut into shards.
            for shard_reader in shard_readers(loaded_only=False):
                stack.enter_context(shard_reader.building_whole())
        _watch_registrations()
        stack.callback(setattr, _this_thread, "block", _this_thread.block)
        _this_thread.block = _Block(target, include_buffers)
        yield


@dataclass
class _Block:
    """One ``with`` block of one thread."""

    device: torch.device  # where tensors are made
    include_buffers: bool  # whether buffers, too
    # What became of parameters made elsewhere: one that is registered twice must become one.
    moved: WeakTensorKeyDictionary = field(default_factory=WeakTensorKeyDictionary)


class _ThisThread(threading.local):
    block: _Block | None = None  # the innermost that this thread is in


_this_thread = _ThisThread()


@functools.cache
def _watch_registrations() -> None:
    """Let torch show what modules register; for good, since another thread may be in a block."""
    nn.modules.module.register_module_parameter_registration_hook(_moved_parameter)
    nn.modules.module.register_module_buffer_registration_hook(_moved_buffer)


def _moved_parameter(module: nn.Module, name: str, parameter: Any) -> Any:
    block = _this_thread.block
    if block is None or parameter is None or check_device_same(parameter.device, block.device):
        return parameter
    if parameter not in block.moved:
        _check_can_move(module, name, parameter, block)
        block.moved[parameter] = parameter_like(parameter, parameter.data.to(block.device))
    return block.moved[parameter]


def _moved_buffer(module: nn.Module, name: str, buffer: Any) -> Any:
    block = _this_thread.block
    if block is None or buffer is None or not block.include_buffers:
        return buffer
    _check_can_move(module, name, buffer, block)
    return buffer.to(block.device)


def _check_can_move(module: nn.Module, name: str, tensor: torch.Tensor, block: _Block) -> None:
    if tensor.is_meta and block.device.type != "meta":
        raise ConfigError(
            f"{name!r} of {type(module).__name__} was made on meta, inside of init_on_device("
            f"{str(block.device)!r}): it has no values to move there. Give the inner block "
            "include_buffers=True, or make it outside of the outer one."
        )


def load_checkpoint_and_dispatch(
    model: nn.Module,
    checkpoint: str | Path,
    device_map: str | Mapping[str, Any] | None = None,
    max_memory: Mapping[int | str, int | str] | None = None,
    no_split_module_classes: Sequence[str] | None = None,
    offload_folder: str | Path | None = None,
    offload_buffers: bool = False,
    dtype: str | torch.dtype | None = None,
    offload_state_dict: bool | None = None,
    skip_keys: str | Sequence[str] | None = None,
    preload_module_classes: Sequence[str] | None = None,
    force_hooks: bool = False,
    strict: bool = False,
    full_state_dict: bool = True,
    broadcast_from_rank0: bool = False,
    *,
    prefetch: bool = True,
) -> nn.Module:
    """Load a checkpoint, each weight on the tier where it fits, and make the model run there.

    Weights on disk are read from the checkpoint's own files, while the module before computes.

    Args:
        model: The model; best built under :func:`init_empty_weights`.
        checkpoint: A file of weights, an ``*.index.json``, or a folder with one of them.
        device_map: ``"auto"`` and ``"balanced"`` (spread evenly over accelerators),
            ``"balanced_low_0"`` (the first one kept freer), ``"sequential"`` (one filled after the
            other), or module's name → accelerator, ``"cpu"`` or ``"disk"``. None: weights stay
            where the model is; see :func:`load_checkpoint_in_model`.
        max_memory: Bytes, or texts such as ``"10GiB"``, by tier; None: what is free.
        no_split_module_classes: Classes whose modules stay whole; None: what the model names.
        offload_folder: Not needed. Where it is given, an index of the weights on disk is written
            there, which :func:`dispatch_model` can read later.
        offload_buffers: Whether buffers are moved as parameters are.
        dtype: Format of floating-point weights; None: that of the model.
        offload_state_dict: Not needed: no file is ever held beside the model.
        skip_keys: Arguments of `forward` that are not moved between devices.
        preload_module_classes: Classes whose submodules' weights are brought in together.
        force_hooks: Whether a model on a single device gets hooks, too.
        strict: Whether missing and left-over weights are errors.
        full_state_dict: See :func:`load_checkpoint_in_model`.
        broadcast_from_rank0: The same.
        prefetch: Whether the next weights are fetched while a module computes.

    Returns:
        The model.

    Raises:
        CheckpointDamaged: Files are missing, truncated, damaged or hold code.
        ConfigError: The checkpoint does not fit the model, it does not fit into `max_memory`, or
            there is no such device. Nothing has been changed in either case.
    """
    if device_map is None:
        load_checkpoint_in_model(
            model,
            checkpoint,
            dtype=dtype,
            strict=strict,
            full_state_dict=full_state_dict,
            broadcast_from_rank0=broadcast_from_rank0,
        )
        return model
    tiers = _map_of(model, device_map, max_memory, no_split_module_classes, dtype, offload_buffers)
    weights = fill_model(
        model,
        checkpoint,
        device_map=tiers,
        dtype=None if dtype is None else as_dtype(dtype),
        offload_buffers=offload_buffers,
        strict=strict,
    )
    if offload_folder is not None and weights.stored:
        write_offload_index(offload_folder, weights)
    return _dispatch(
        model,
        tiers,
        weights.holding,
        skip_keys=skip_keys,
        preload_module_classes=preload_module_classes,
        offload_buffers=offload_buffers,
        force_hooks=force_hooks,
        prefetch=prefetch,
    )


def _map_of(
    model: nn.Module,
    device_map: str | Mapping[str, Any],
    max_memory: Mapping[int | str, int | str] | None,
    no_split_module_classes: Sequence[str] | None,
    dtype: str | torch.dtype | None,
    offload_buffers: bool,
) -> Mapping[str, Any]:
    if not isinstance(device_map, str):
        check_device_map(model, dict(device_map))
        return device_map
    if device_map not in _MAP_WORDS:
        raise ConfigError(
            f"device_map={device_map!r} is no way to place a model: nothing would be loaded. Give "
            f"one of {', '.join(map(repr, _MAP_WORDS))}, or a mapping such as {{'': 'cpu'}}."
        )
    is_unsaid = no_split_module_classes is None
    whole_classes = own_block_classes(model) if is_unsaid else no_split_module_classes
    if device_map != "sequential":
        low_zero = device_map == "balanced_low_0"
        max_memory = get_balanced_memory(model, max_memory, whole_classes, dtype, low_zero=low_zero)
    return infer_auto_device_map(
        model, max_memory, whole_classes, dtype, offload_buffers=offload_buffers
    )


def dispatch_model(
    model: nn.Module,
    device_map: Mapping[str, Any],
    main_device: torch.device | str | int | None = None,
    state_dict: Mapping[str, torch.Tensor] | None = None,
    offload_dir: str | Path | None = None,
    offload_index: Mapping[str, Any] | None = None,
    offload_buffers: bool = False,
    skip_keys: str | Sequence[str] | None = None,
    preload_module_classes: Sequence[str] | None = None,
    force_hooks: bool = False,
    *,
    prefetch: bool = True,
) -> nn.Module:
    """Put a model's modules where a map says, and make it run there.

    Args:
        model: The model.
        device_map: Module's name → accelerator, ``"cpu"`` or ``"disk"``.
        main_device: Where weights in host memory or on disk compute; None: the first accelerator
            of the map, or the host.
        state_dict: Weights of the modules in host memory; None: the model's own.
        offload_dir: Folder of the weights on disk, written there unless it has an ``index.json``.
        offload_index: What such an index says, instead of one in the folder.
        offload_buffers: Whether buffers are moved as parameters are.
        skip_keys: Arguments of `forward` that are not moved between devices.
        preload_module_classes: Classes whose submodules' weights are brought in together.
        force_hooks: Whether a model on a single device gets hooks, too.
        prefetch: Whether the next weights are fetched while a module computes.

    Returns:
        The model, with the map as ``hf_device_map``.

    Raises:
        ConfigError: The map leaves parameters out, or weights belong on disk and it is not said
            where.
    """
    check_device_map(model, dict(device_map))
    disk_modules = [name for name, tier in device_map.items() if tier == DISK]
    if disk_modules:
        if offload_dir is None and offload_index is None:
            raise ConfigError(
                f"device_map keeps {first_few(disk_modules, 3)} on disk, and no offload_dir was "
                "given: there is nowhere to read them from. Give a folder, or load the model with "
                "load_checkpoint_and_dispatch, which reads the checkpoint's own files."
            )
        if offload_dir is not None and offload_index is None and not _has_index(offload_dir):
            weights = extract_submodules_state_dict(model.state_dict(), disk_modules)
            offload_state_dict(offload_dir, weights)

    def weights_with(held: dict[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        held = {**held, **(state_dict or {})}
        if not disk_modules:
            return held
        return OffloadedWeightsLoader(
            state_dict=held or None, save_folder=offload_dir, index=offload_index
        )

    return _dispatch(
        model,
        device_map,
        weights_with,
        main_device=main_device,
        skip_keys=skip_keys,
        preload_module_classes=preload_module_classes,
        offload_buffers=offload_buffers,
        force_hooks=force_hooks,
        prefetch=prefetch,
    )


def _has_index(folder: str | Path) -> bool:
    return (Path(folder) / "index.json").is_file()


def _dispatch(
    model: nn.Module,
    device_map: Mapping[str, Any],
    weights_with: Callable[[dict[str, torch.Tensor]], Mapping[str, torch.Tensor]],
    *,
    main_device: Any = None,
    force_hooks: bool,
    **hook_settings: Any,
) -> nn.Module:
    tiers = set(device_map.values())
    # A quantized model's layers move in their own way, which `Module.to` does not know.
    force_hooks = force_hooks or bool(getattr(model, "is_quantized", False))
    if len(tiers) <= 1 and DISK not in tiers and not force_hooks:
        (only_tier,) = tiers
        if torch.device(only_tier).type != "meta":
            hooks.check_values(model)
        model.to(only_tier)
        model.hf_device_map = dict(device_map)  # type: ignore[assignment]
        return model
    if main_device is None:
        main_device = next((tier for tier in device_map.values() if tier not in _AWAY), HOST)
    computes_on_host = torch.device(main_device).type == "cpu"
    held: dict[str, torch.Tensor] = {}
    if not computes_on_host:
        host_modules = [name for name, tier in device_map.items() if tier == HOST]
        held = extract_submodules_state_dict(model.state_dict(), host_modules)
    moved_tiers = (DISK,) if computes_on_host else _AWAY
    devices = {name: main_device if tier in _AWAY else tier for name, tier in device_map.items()}
    tied_parameters = find_tied_parameters(model)
    tied = [model.get_parameter(names[0]) for names in tied_parameters]
    # Where copies of each on a device are noted, by its address. On `meta` all addresses are 0:
    # such a tie is found again by `retie_parameters` alone.
    storages: dict[int, PlacedTensors] = {it.data_ptr(): {} for it in tied if not it.is_meta}
    hooks.attach_align_device_hook_on_blocks(
        model,
        execution_device={**devices, "": main_device},
        offload={name: tier in moved_tiers for name, tier in device_map.items()},
        weights_map=weights_with(held),
        tied_params_map=storages,
        **hook_settings,
    )
    # A hook replaces the parameters of its module, and with them one end of a tie.
    retie_parameters(model, tied_parameters)
    for method_name in ("to", "cuda"):
        setattr(model, method_name, _guarded(model, method_name))
    model.hf_device_map = dict(device_map)  # type: ignore[assignment]
    return model


def _guarded(model: nn.Module, method_name: str) -> Callable[..., nn.Module]:
    """A method that moves the model, with a warning; refused while weights are elsewhere."""
    move: Callable[..., nn.Module] = getattr(model, method_name)

    @functools.wraps(move)
    def guarded(*args: Any, **kwargs: Any) -> nn.Module:
        moved_out = [name for name, tensor in model.named_parameters() if tensor.is_meta]
        if moved_out:
            raise UnsafeMoment(
                f"{type(model).__name__}.{method_name}{args} cannot move the model: "
                f"{len(moved_out)} of its weights ({first_few(moved_out, 2)}) are in host memory "
                "or on disk, and only brought in when they are used. Load it with another "
                "device_map, or call remove_hook_from_submodules(model) first."
            )
        warnings.warn(
            f"{type(model).__name__} was placed by a device_map: after .{method_name}{args} its "
            "hooks still send inputs to its devices. Load it with another device_map instead.",
            stacklevel=2,
        )
        return move(*args, **kwargs)

    return guarded


def cpu_offload(
    model: nn.Module,
    execution_device: torch.device | None = None,
    offload_buffers: bool = False,
    state_dict: Mapping[str, torch.Tensor] | None = None,
    preload_module_classes: Sequence[str] | None = None,
    *,
    prefetch: bool = True,
) -> nn.Module:
    """Keep a model's weights in host memory, and bring each module's in for its forward.

    Args:
        model: The model.
        execution_device: Where it computes; None: where its first parameter is.
        offload_buffers: Whether buffers are moved, too.
        state_dict: The weights; None: the model's own.
        preload_module_classes: As in :func:`dispatch_model`.
        prefetch: The same.

    Returns:
        The model, with its parameters on ``meta``.
    """
    if state_dict is None:
        state_dict = {name: tensor.to(HOST) for name, tensor in model.state_dict().items()}
    return _offload_all(
        model, execution_device, state_dict, offload_buffers, preload_module_classes, prefetch
    )


def disk_offload(
    model: nn.Module,
    offload_dir: str | Path,
    execution_device: torch.device | None = None,
    offload_buffers: bool = False,
    preload_module_classes: Sequence[str] | None = None,
    *,
    prefetch: bool = True,
) -> nn.Module:
    """Write a model's weights to a folder, and bring each module's in for its forward.

    Args:
        model: The model.
        offload_dir: The folder; weights are not written where it has an ``index.json`` already.
        execution_device: Where the model computes; None: where its first parameter is.
        offload_buffers: Whether buffers are moved, too.
        preload_module_classes: As in :func:`dispatch_model`.
        prefetch: The same.

    Returns:
        The model, with its parameters on ``meta``.
    """
    if not _has_index(offload_dir):
        offload_state_dict(offload_dir, model.state_dict())
    weights = OffloadedWeightsLoader(save_folder=offload_dir)
    return _offload_all(
        model, execution_device, weights, offload_buffers, preload_module_classes, prefetch
    )


def cpu_offload_with_hook(
    model: nn.Module,
    execution_device: int | str | torch.device | None = None,
    prev_module_hook: hooks.UserCpuOffloadHook | None = None,
) -> tuple[nn.Module, hooks.UserCpuOffloadHook]:
    """Keep a whole model in host memory until it is called; then it stays on the device.

    For pipelines of several models, of which one at a time is on the device.

    Args:
        model: The model.
        execution_device: Where it computes; None: the first accelerator, or the host.
        prev_module_hook: Of the model that is called before this one, which then moves it out.

    Returns:
        The model, and a hook whose ``offload()`` moves it out and whose ``remove()`` ends all this.
    """
    hook = hooks.CpuOffload(execution_device=execution_device, prev_module_hook=prev_module_hook)
    hooks.add_hook_to_module(model, hook, append=True)
    return model, hooks.UserCpuOffloadHook(model, hook)


def _offload_all(
    model: nn.Module,
    execution_device: torch.device | None,
    weights: Mapping[str, torch.Tensor],
    offload_buffers: bool,
    whole_classes: Sequence[str] | None,
    prefetch: bool,
) -> nn.Module:
    own_devices = (parameter.device for parameter in model.parameters())
    device = execution_device or next(own_devices, torch.device(HOST))
    if device.type == "meta":
        raise ConfigError(
            f"{type(model).__name__} is on meta, so it is not known where it computes. Give "
            "execution_device, for example torch.device('cpu')."
        )
    # Outermost, so that outputs return to where the inputs were.
    hooks.add_hook_to_module(model, hooks.AlignDevicesHook(io_same_device=True), append=True)
    whole: dict[str, Any] = {"preload_module_classes": whole_classes, "prefetch": prefetch}
    hooks.attach_align_device_hook(model, device, True, weights, offload_buffers, **whole)
    return model


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
        ConfigError: A format is none of floating-point numbers.
    """
    hooks.check_float_dtypes(storage_dtype=storage_dtype, compute_dtype=compute_dtype)
    texts = skip_modules_pattern or ()
    patterns = [re.compile(text) for text in ([texts] if isinstance(texts, str) else texts)]
    for name, layer in _layers_to_cast(module, "", patterns, tuple(skip_modules_classes or ())):
        _hook_log.debug("Weights of %r are kept in %s", name, storage_dtype)
        hook = hooks.LayerwiseCastingHook(storage_dtype, compute_dtype, non_blocking)
        hooks.add_hook_to_module(layer, hook, append=True)


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
