"""Models built in shards (``deepspeed.zero.Init``), and layers that are gathered as one.

transformers decides it by a weak reference in a module, to the last ``HfDeepSpeedConfig``. The same
reference makes ``generate`` keep ranks in step.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from nbaccel.base import mapped_files
from nbaccel.base.errors import ConfigError
from nbaccel.base.optional_packages import is_installed
from nbaccel.config.given_values import drop_at
from nbaccel.deepspeed import private_api
from nbaccel.deepspeed.strategy import local_shards
from nbaccel.deepspeed.zero_config import ZeroConfig, auto_keys

if TYPE_CHECKING:
    from torch import nn


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
    from torch import nn

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
