"""Models without their wrappers, files, ports and names: what fits in no other module."""

from __future__ import annotations

import functools
import platform
import re
import socket
import sys
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import nn

from nbaccel.base import atomic, torch_private
from nbaccel.base.errors import ConfigError
from nbaccel.base.log import get_logger
from nbaccel.base.public_names import hand_on
from nbaccel.base.units import format_bytes
from nbaccel.config.config_files import accelerate_path
from nbaccel.config.enumerations import PrecisionType
from nbaccel.plan.inspecting import inspect_machine
from nbaccel.precision.native import restore_forward
from nbaccel.state import PartialState
from nbaccel.strategies.model_blocks import compile_regions as compile_regions
from nbaccel.train import checkpoint
from nbaccel.train.checkpoint import files
from nbaccel.utils.modeling import id_tensor_storage
from nbaccel.utils.operations import wait_for_everyone as wait_for_everyone

_log = get_logger(__name__)
_DEFAULT_PORT = 29500  # torchrun's
_OLDEST_KERNEL = (5, 5)  # before it, processes that wait for each other were seen to hang


def extract_model_from_parallel(
    model: nn.Module,
    keep_fp32_wrapper: bool = True,
    keep_torch_compile: bool = True,
    recursive: bool = False,
) -> nn.Module:
    """The user's own module inside of wrappers that train it in several processes.

    Args:
        model: A module in DDP, DataParallel, FSDP, DeepSpeed's engine or ``torch.compile``.
        keep_fp32_wrapper: Whether its forward goes on computing in the accelerator's precision.
        keep_torch_compile: Whether it stays compiled.
        recursive: Whether submodules are unwrapped, too.

    Returns:
        The module.
    """
    compiled: Any = model if is_compiled_module(model) else None
    inner = _unwrapped(torch_private.uncompiled(model) if compiled is not None else model)
    if recursive:
        inner = _unwrapped_throughout(inner)
    # Also by Accelerate's users, where they wrap a forward themselves.
    if not keep_fp32_wrapper and (forward := inner.__dict__.get("_original_forward")) is not None:
        restore_forward(inner, forward)
    if compiled is None or not keep_torch_compile:
        return inner
    # Replaced inside the compiled wrapper, so that its compiled code is kept.
    torch_private.replace_wrapped(compiled, inner)
    return model


def _unwrapped(model: nn.Module) -> nn.Module:
    # A module that was not imported can have no instances; importing DeepSpeed takes seconds.
    named_classes = (
        ("torch.distributed.fsdp.fully_sharded_data_parallel", "FullyShardedDataParallel"),
        ("deepspeed", "DeepSpeedEngine"),
    )
    imported = (getattr(sys.modules.get(module), name, None) for module, name in named_classes)
    classes = (nn.parallel.DistributedDataParallel, nn.DataParallel, *filter(None, imported))
    # Wrappers may be nested.
    while isinstance(model, classes):
        model = model.module
    return model


def _unwrapped_throughout(module: nn.Module) -> nn.Module:
    inner: Any = getattr(module, "module", module)
    # A list, because `setattr` replaces entries of the dictionary that is iterated over.
    for name, child in list(inner.named_children()):
        setattr(inner, name, _unwrapped_throughout(child))
    return inner  # type: ignore[no-any-return]


def is_compiled_module(module: nn.Module) -> bool:
    """Whether ``torch.compile`` made it."""
    return torch_private.is_compiled(module)


def has_compiled_regions(module: nn.Module) -> bool:
    """Whether ``torch.compile`` made one of its submodules."""
    return any(is_compiled_module(inner) for inner in module.modules())


# Accelerate compiles differently by strategy; in place, one way serves all of them.
compile_regions_deepspeed = compile_regions
compile_regions_fsdp2 = compile_regions


def model_has_dtensor(model: nn.Module) -> bool:
    """Whether parameters of it are sharded."""
    from torch.distributed.tensor import DTensor

    return any(isinstance(parameter, DTensor) for parameter in model.parameters())


def get_model_tp_size(model: nn.Module) -> int | None:
    """Over how many devices transformers has cut the layers of a model; None where it has not."""
    config = getattr(getattr(model, "config", None), "distributed_config", None)
    if isinstance(config, Mapping):
        return config.get("tp_size")
    tp_size: int | None = getattr(model, "tp_size", None) or getattr(config, "tp_size", None)
    return tp_size


def get_module_children_bottom_up(model: nn.Module, return_fqns: bool = False) -> list[Any]:
    """All submodules, each after those inside of it, the model itself last; or also their names."""
    named_modules: list[tuple[str, nn.Module]] = []
    waiting = [("", model)]
    while waiting:
        name, module = waiting.pop()
        named_modules.append((name, module))
        prefix = f"{name}." if name else ""
        waiting += [(f"{prefix}{child}", inner) for child, inner in module.named_children()]
    # Every module was listed before its children; the reverse has children first.
    named_modules.reverse()
    return [*named_modules] if return_fqns else [module for _, module in named_modules]


def save(
    obj: Any, f: Any, save_on_each_node: bool = False, safe_serialization: bool = False
) -> None:
    """Write an object to a file, once per run or node; a reader sees the old file or the new."""
    state = PartialState()
    if state.is_local_main_process if save_on_each_node else state.is_main_process:
        if safe_serialization and isinstance(obj, Mapping) and (names := _sharing_names(obj)):
            _log.warning("stored once, because they share memory with others: %s", names)
        checkpoint.save(obj, f, safe_serialization)


def load(f: Any, map_location: Any = None, **kwargs: Any) -> Any:
    """Read what :func:`save` wrote; no code in it runs unless ``weights_only=False`` allows it."""
    path = Path(f) if isinstance(f, str) else f
    return files.read_torch_file(path, map_location=map_location, **kwargs)


def clean_state_dict_for_safetensors(state_dict: MutableMapping[str, Any]) -> dict[str, Any]:
    """A state dict with the first of those tensors that share memory."""
    dropped = _sharing_names(state_dict)
    for name in dropped:
        del state_dict[name]
    if dropped:
        _log.warning("left out of the file, because they share memory with others: %s", dropped)
    return {k: v.contiguous() if hasattr(v, "contiguous") else v for k, v in state_dict.items()}


def _sharing_names(state_dict: Mapping[str, Any]) -> list[str]:
    """Names of tensors that share memory with an earlier one."""
    first_names: dict[Any, str] = {}
    return [
        name
        for name, value in state_dict.items()
        if isinstance(value, torch.Tensor) and first_names.setdefault(_place(value), name) != name
    ]


def _place(tensor: torch.Tensor) -> Any:
    # Empty tensors all have the same address and share nothing.
    return id_tensor_storage(tensor) if tensor.numel() else id(tensor)


def is_port_in_use(port: int | None = None) -> bool:
    """Whether something listens on a port of this machine; 29500 where none is given."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        return probe.connect_ex(("localhost", _DEFAULT_PORT if port is None else port)) == 0


def get_free_port() -> int:
    """A port on which nothing listens now; another program may take it before it is used."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def check_os_kernel() -> None:
    """Warn of a Linux too old to train in several processes."""
    release = platform.release()
    numbers = re.match(r"(\d+)\.(\d+)", release)
    if sys.platform != "linux" or numbers is None:
        return
    if tuple(map(int, numbers.groups())) < _OLDEST_KERNEL:
        _log.warning("Linux %s is older than 5.5: processes may hang. Update it.", release)


def convert_bytes(size: float) -> str:
    """A number of bytes as people write it."""
    return format_bytes(round(size))


def get_pretty_name(obj: Any) -> str:
    """The name of a function, a class, or the class of anything else."""
    named = obj if hasattr(obj, "__qualname__") or hasattr(obj, "__name__") else type(obj)
    return str(getattr(named, "__qualname__", None) or named.__name__)


def merge_dicts(source: Mapping[Any, Any], destination: dict[Any, Any]) -> dict[Any, Any]:
    """Put a nested dictionary into another, in place; returns that."""
    for key, value in source.items():
        if isinstance(value, dict):
            merge_dicts(value, destination.setdefault(key, {}))
        else:
            destination[key] = value
    return destination


def recursive_getattr(obj: Any, attr: str) -> Any:
    """An attribute of an attribute: ``"model.layers.weight"``."""
    return functools.reduce(getattr, attr.split("."), obj)


default_json_config_file = str(accelerate_path())


def write_basic_config(
    mixed_precision: str = "no", save_location: str | Path = default_json_config_file
) -> Path | bool:
    """Write down how scripts are to be launched on this machine: processes, device, precision.

    The file is the one that `accelerate launch` reads. `notebook_launcher` needs none: give it
    `num_processes` and `mixed_precision`.

    Args:
        mixed_precision: ``no``, ``fp16``, ``bf16`` or ``fp8``.
        save_location: The file.

    Returns:
        The file; False where there is one already, which stays as it is.

    Raises:
        ConfigError: The precision is unknown.
    """
    path = Path(save_location)
    precision = mixed_precision.lower()
    if precision not in PrecisionType:
        raise ConfigError(
            f"write_basic_config(mixed_precision={mixed_precision!r}) is unknown: scripts would "
            f"fail when they start. Give one of {', '.join(PrecisionType.list())}."
        )
    if path.exists():
        print(  # noqa: T201 - called in a cell, whose output is the answer
            f"{path} is there already and stays as it is. Delete it, or give another save_location."
        )
        return False
    num_gpus = len(inspect_machine().gpus)
    content = {
        "compute_environment": "LOCAL_MACHINE",
        "debug": False,
        "distributed_type": "MULTI_GPU" if num_gpus > 1 else "NO",
        "enable_cpu_affinity": False,
        "machine_rank": 0,
        "main_training_function": "main",
        "mixed_precision": precision,
        "num_machines": 1,
        "num_processes": num_gpus or 1,
        "use_cpu": num_gpus == 0,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic.write_text(path, yaml.safe_dump(content, sort_keys=True))
    return path


hand_on(globals(), "compile_regions_deepspeed", "compile_regions_fsdp2")
