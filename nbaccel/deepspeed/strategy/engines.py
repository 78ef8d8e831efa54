"""Making DeepSpeed's engine, and what a notebook expects of it beyond that.

input, output   floating-point inputs take the engine's format, outputs come back as float32,
                as with every other strategy here
generate        keeps ranks in step where weights are in shards
quiet           no dozen lines of DeepSpeed's log, unless the configuration turns them on
memory          what is freed goes back to the system where that matters
shards          models built in shards (``deepspeed.zero.Init``), layers that are gathered as one
"""

from __future__ import annotations

import contextlib
import copy
import ctypes
import functools
import inspect
import io
import logging
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from nbaccel.base import mapped_files, torch_private
from nbaccel.base.errors import ConfigError
from nbaccel.base.optional_packages import is_installed
from nbaccel.config.given_values import drop_at
from nbaccel.deepspeed import library, private_api
from nbaccel.deepspeed.strategy import local_shards
from nbaccel.deepspeed.zero_config import ZeroConfig, auto_keys
from nbaccel.plan.contracts.training import DummyOptim, DummyScheduler
from nbaccel.precision.native import as_float32


def make_engine(
    model: nn.Module,
    optimizer: Any,
    scheduler: Any,
    zero_config: ZeroConfig,
    *,
    moe_layers: str | None,
    has_several: bool,
) -> Any:
    """Make an engine, where :func:`begin_comm` has been called."""
    deepspeed = library.load_module("deepspeed", why="Training with DeepSpeed")
    settings = zero_config.to_dict()
    settings.setdefault("steps_per_print", math.inf)
    arguments: dict[str, Any] = {"model": model, "config": settings}
    if isinstance(optimizer, DummyOptim):
        arguments["model_parameters"] = optimizer.params
    elif optimizer is not None:
        # Under ZeRO, DeepSpeed refuses optimizers that it does not know unless this is set.
        settings.setdefault("zero_allow_untested_optimizer", True)
        arguments["optimizer"] = _for_offload(optimizer, zero_config)
    if isinstance(scheduler, DummyScheduler):
        if scheduler.lr_scheduler_callable is not None:
            arguments["lr_scheduler"] = scheduler.lr_scheduler_callable
    elif scheduler is not None and is_engines(scheduler):
        arguments["lr_scheduler"] = scheduler
    if moe_layers and zero_config.zero_stage == 3:
        fetch_together(model, moe_layers)
    if has_several and zero_config.zero_stage == 3:
        shard_in_turn(model, zero_config)
    with _usual_logging(zero_config):
        engine, *_ = deepspeed.initialize(**arguments)
    private_api.check_fp32_copies(engine)
    _convert_inputs(engine)
    # Only here are the model's first tensors free: the engine has replaced them.
    return_all()
    local_shards.skip_repeated_reads(engine.module)
    if has_several and zero_config.zero_stage == 3:
        _keep_in_step(engine.module)
    return engine


def is_engines(scheduler: Any) -> bool:
    """Whether a schedule is of DeepSpeed's own kinds, which the engine advances."""
    # Not at the top of the file: importing DeepSpeed loads its accelerator, for good.
    from deepspeed.runtime.lr_schedules import VALID_LR_SCHEDULES

    return isinstance(scheduler, DummyScheduler) or type(scheduler).__name__ in VALID_LR_SCHEDULES


def _for_offload(optimizer: Any, zero_config: ZeroConfig) -> Any:
    """DeepSpeed's optimizer for steps on the CPU, in place of the one of torch."""
    offload_section = zero_config.offload_optimizer
    device = "none" if offload_section is None else offload_section.device or "none"
    if device == "none" or zero_config.zero_force_ds_cpu_optimizer is False:
        return optimizer
    if type(optimizer).__module__.startswith("deepspeed."):
        return optimizer
    from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    offload_classes: dict[type, tuple[Callable[..., Any], dict[str, Any]]] = {
        torch.optim.AdamW: (DeepSpeedCPUAdam, {"adamw_mode": True}),
        torch.optim.Adam: (DeepSpeedCPUAdam, {"adamw_mode": False}),
        torch.optim.Adagrad: (DeepSpeedCPUAdagrad, {}),
    }
    if type(optimizer) not in offload_classes:
        raise ConfigError(
            f"{type(optimizer).__name__} cannot step where DeepSpeed offloads "
            f"(offload_optimizer.device={device!r}): it has AdamW, Adam and Adagrad for the CPU. "
            'Use one of these, or set "zero_force_ds_cpu_optimizer": false for a slow one.'
        )
    make_optimizer, more_arguments = offload_classes[type(optimizer)]
    known_arguments = inspect.signature(make_optimizer).parameters
    known_defaults = {
        setting_name: setting_value
        for setting_name, setting_value in optimizer.defaults.items()
        if setting_name in known_arguments
    }
    # The same groups, not copies: a schedule made for the old one sets their learning rates.
    offload_optimizer = make_optimizer(
        optimizer.param_groups, **{**known_defaults, **more_arguments}
    )
    # Otherwise torch's schedules would warn that the old one never stepped.
    torch_private.mark_as_stepped(optimizer)
    return offload_optimizer


def _usual_logging(zero_config: ZeroConfig) -> contextlib.AbstractContextManager[None]:
    """A block without DeepSpeed's dozen lines, unless the configuration turns them on."""
    is_asked = zero_config.get("log_level") is not None or zero_config.get("dump_state")
    return contextlib.nullcontext() if is_asked else library.quiet_logger(logging.WARNING)


def begin_comm(zero_config: ZeroConfig) -> None:
    """Let DeepSpeed take up the process group, without which it cannot even destroy an engine."""
    deepspeed = library.load_module("deepspeed", why="Training with DeepSpeed")
    # It prints a line for the operation it loads.
    with _usual_logging(zero_config), contextlib.redirect_stdout(io.StringIO()):
        deepspeed.init_distributed(dist_init_required=False)


def _convert_inputs(engine: Any) -> None:
    """Let it take and give what models here take and give, whatever it computes in."""
    dtype = next(
        (
            parameter.dtype
            for parameter in engine.module.parameters()
            if parameter.dtype in (torch.bfloat16, torch.float16)
        ),
        None,
    )
    if dtype is None or not (engine.bfloat16_enabled() or engine.fp16_enabled()):
        return

    def before(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # Inputs may be nested, such as a dictionary of tensors.
        return torch_private.replace_tensors((args, kwargs), cast)

    def cast(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    engine.register_forward_pre_hook(before, with_kwargs=True)
    engine.register_forward_hook(lambda _, __, output: as_float32(output))


def _keep_in_step(module: nn.Module) -> None:
    """Let `generate` go on on every rank until the last has finished: transformers' guide."""
    generate: Any = getattr(module, "generate", None)
    if not callable(generate) or "synced_gpus" not in inspect.signature(generate).parameters:
        return

    @functools.wraps(generate)
    def in_step(*args: Any, **kwargs: Any) -> Any:
        # A rank that stopped early would leave the others waiting for its part of the weights.
        if kwargs.get("synced_gpus") is None:
            kwargs["synced_gpus"] = True
        return generate(*args, **kwargs)

    module.generate = in_step  # type: ignore[assignment]


# ------------------------------------------------------------------------------ shards
# transformers decides it by a weak reference in a module, to the last ``HfDeepSpeedConfig``. The
# same reference makes ``generate`` keep ranks in step.


def announced_config(zero_settings: Mapping[str, Any], world_size: int = 1) -> Any:
    """Let transformers build models in shards from here on."""
    if not is_installed("transformers"):
        return None
    from transformers.integrations.deepspeed import HfDeepSpeedConfig

    # As `Any`, since transformers' own constructor has no annotations.
    config: Any = HfDeepSpeedConfig
    return config(_without_auto(zero_settings, world_size))


@contextlib.contextmanager
def applied_config(zero_settings: Mapping[str, Any] | None) -> Iterator[None]:
    """The same for a block; with None models are built whole in it."""
    if not is_installed("transformers"):
        yield
        return
    from transformers.integrations import deepspeed as integration

    reference_before = private_api.hf_config_reference()
    unset_config: Any = integration.unset_hf_deepspeed_config
    unset_config()
    # A variable, because transformers' reference is weak: without one it would be gone at once.
    kept_config = announced_config(zero_settings) if zero_settings is not None else None
    try:
        yield
    finally:
        del kept_config
        private_api.keep_hf_config_reference(reference_before)


def building_whole() -> contextlib.AbstractContextManager[None]:
    """See :meth:`ShardReader.building_whole`: transformers does not use ``zero.Init`` meanwhile."""
    return applied_config(None)


def _without_auto(zero_settings: Mapping[str, Any], world_size: int) -> dict[str, Any]:
    """The settings for `zero.Init`, which reads batch sizes, has no use for them and no "auto"."""
    concrete_settings = copy.deepcopy(dict(zero_settings))
    for key in list(auto_keys(concrete_settings)):
        drop_at(concrete_settings, key)
    if not {"train_batch_size", "train_micro_batch_size_per_gpu"} & concrete_settings.keys():
        concrete_settings["train_micro_batch_size_per_gpu"] = 1
        concrete_settings["train_batch_size"] = world_size * concrete_settings.get(
            "gradient_accumulation_steps", 1
        )
    return concrete_settings


def shard_in_turn(model: nn.Module, zero_config: ZeroConfig) -> None:
    """Cut a model into shards, one parameter after the other; a collective.

    An engine would first cast the whole model in every process, and only then cut it. Nothing
    happens to a model whose weights are not mapped from files, or that is cut already.
    """
    parameters = [p for p in model.parameters() if not local_shards.is_partitioned(p)]
    # The same parameters on all processes, or none: cutting one is a collective.
    is_mapped = [all(map(_lies_in_file, parameters)) and bool(parameters)]
    all_mapped: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(all_mapped, is_mapped)
    if not all(answer[0] for answer in all_mapped):
        return
    half = torch.bfloat16 if zero_config.is_on("bf16") else torch.float32
    compute_dtype = torch.float16 if zero_config.is_on("fp16") else half
    settings = _without_auto(zero_config.to_dict(), dist.get_world_size())
    for buffer in model.buffers():
        # As the engine does with the buffers of a model that it casts itself.
        if buffer.is_floating_point():
            buffer.data = buffer.data.to(compute_dtype)
    for parameter in parameters:
        values = parameter.data
        # A copy even in the same format: process 0's values are received into it.
        dtype = compute_dtype if values.is_floating_point() else values.dtype
        parameter.data = values.to(dtype, copy=True)
        # What was written is kept, because another parameter may view the same memory.
        mapped_files.drop_pages(values.data_ptr(), values.nbytes, keep_written=True)
        _cut(parameter, parameters[0], settings, compute_dtype)


def _lies_in_file(parameter: torch.Tensor) -> bool:
    is_plain = parameter.device.type == "cpu" and parameter.is_contiguous()
    return is_plain and (
        not parameter.nbytes
        or mapped_files.find_mapping(parameter.data_ptr(), parameter.nbytes) is not None
    )


def _cut(
    parameter: Any, first_parameter: Any, settings: Mapping[str, Any], dtype: torch.dtype
) -> None:
    if parameter is not first_parameter:
        first_parameter.convert_to_zero_parameters(param_list=[parameter])
        return
    from deepspeed import zero

    # A module of its own, because the rest of the model is to be cut later.
    holder = nn.Module()
    holder.register_parameter("weight", parameter)
    zero.Init(module=holder, config_dict_or_path=settings, dtype=dtype)


def fetch_together(model: nn.Module, class_names: str) -> None:
    """Let ZeRO-3 gather layers as one, whose parts are not all used in every pass."""
    from deepspeed.utils import set_z3_leaf_modules

    names = [class_name.strip() for class_name in class_names.split(",") if class_name.strip()]
    # DeepSpeed is given classes, not names: those of this model, wherever they are defined.
    classes = {type(model_part).__name__: type(model_part) for model_part in model.modules()}
    missing_names = [class_name for class_name in names if class_name not in classes]
    if missing_names:
        raise ConfigError(
            f"transformer_moe_cls_names={class_names!r}: {type(model).__name__} has no layer of "
            f"class {', '.join(missing_names)}. Its experts would be fetched one by one, which can "
            f"hang. It has {', '.join(sorted(classes))}."
        )
    set_z3_leaf_modules(model, [classes[class_name] for class_name in names])


# ------------------------------------------------------------------------------ freed memory
# glibc keeps freed blocks of up to 32 MiB in its heaps (``mallopt(3)``, M_MMAP_THRESHOLD):
# gradients and gathered parameters are freed in each step, and the system counts more than there
# are tensors. Other C libraries return what is freed, and nothing is changed there.

# The number is in glibc's malloc.h, which Python does not expose.
_M_MMAP_THRESHOLD = -3
_RETURNED_FROM = 1 << 20
"""Bytes from which a block is returned when it is freed. To get it again takes time, more for many
small ones: activations of small models are below, gradients of large ones above."""


def return_all() -> None:
    """Return what was freed until now, such as the model's first tensors, which an engine replaces.

    These are 4 bytes for each parameter, in every process.
    """
    trim_heap = _of_glibc("malloc_trim")
    if trim_heap is not None:
        # The parameter is a `size_t`; ctypes passes a Python integer as an `int`.
        trim_heap(ctypes.c_size_t(0))


def return_at_once() -> None:
    """From now on return large blocks when they are freed, for the rest of this process."""
    option = _of_glibc("mallopt")
    if option is not None:
        option(ctypes.c_int(_M_MMAP_THRESHOLD), ctypes.c_int(_RETURNED_FROM))


def _of_glibc(name: str) -> Callable[..., Any] | None:
    # Without a name, `dlopen` gives the running program, with whichever C library it has.
    function = ctypes.CDLL(None)
    return getattr(function, name, None) if hasattr(function, "gnu_get_libc_version") else None
