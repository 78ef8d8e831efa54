"""``estimate_memory``: what a DeepSpeed run needs on each device, each host and the disk.

The model states are counted at the moment when there is most of them: when the optimizer steps.
All numbers follow from the configuration and from what DeepSpeed allocates for it; tests compare
them with real engines.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nbaccel.base.disk import free_bytes
from nbaccel.base.errors import ConfigError
from nbaccel.config import RunConfig
from nbaccel.config.nested_keys import drop_at, put_at, value_at
from nbaccel.deepspeed.auto_values import AUTO_KEYS, resolve_auto
from nbaccel.deepspeed.memory_inputs import MemoryInputs, read_settings
from nbaccel.deepspeed.training_facts import TrainingFacts, hidden_size
from nbaccel.deepspeed.zero_config import auto_keys, load_settings
from nbaccel.memory.estimate import Bytes, MemoryEstimate, common_notes, replicated
from nbaccel.memory.model_size import Shape, refuse_unsized, shape_of
from nbaccel.memory.model_states import model_states, short_formats
from nbaccel.plan.inspecting import inspect_machine
from nbaccel.plan.inventory import Inventory

_ZERO_SETTINGS = "zero_optimization"
_MEMORY_SECTIONS = (
    *(_ZERO_SETTINGS, "fp16", "bf16", "bfloat16", "data_types"),
    "zero_force_ds_cpu_optimizer",
)
_BY_WIDTH = (
    f"{_ZERO_SETTINGS}.reduce_bucket_size",
    f"{_ZERO_SETTINGS}.stage3_prefetch_bucket_size",
    f"{_ZERO_SETTINGS}.stage3_param_persistence_threshold",
)
_NVME_PATH_KEYS = (
    f"{_ZERO_SETTINGS}.offload_optimizer.nvme_path",
    f"{_ZERO_SETTINGS}.offload_param.nvme_path",
)


def memory_part(part: Mapping[str, Any] | str | Path | Any = None) -> dict[str, Any]:
    """The settings of a configuration that memory depends on."""
    settings = {} if part is None else load_settings(part)
    part = {
        section_key: copy.deepcopy(settings[section_key])
        for section_key in _MEMORY_SECTIONS
        if section_key in settings
    }
    optimizer = settings.get("optimizer")
    if isinstance(optimizer, Mapping) and "type" in optimizer:
        part["optimizer"] = {"type": optimizer["type"]}
        if (optimizer.get("params") or {}).get("torch_adam"):
            part["optimizer"]["params"] = {"torch_adam": True}
    # Not for the states of the model: the sample batch is cut or repeated to this size.
    if isinstance(settings.get("train_micro_batch_size_per_gpu"), int):
        part["train_micro_batch_size_per_gpu"] = settings["train_micro_batch_size_per_gpu"]
    return part


def decided(
    part: dict[str, Any],
    model: Any,
    *,
    world_size: int = 1,
    run_config: RunConfig | None = None,
) -> dict[str, Any]:
    """Fill in ``"auto"`` by the published rules, where something decides it."""
    waiting_keys = set(auto_keys(part))
    # Keys without a rule are counted with DeepSpeed's defaults, and a folder changes no size.
    open_keys = {
        open_key
        for open_key in waiting_keys
        if open_key not in AUTO_KEYS or open_key in _NVME_PATH_KEYS
    }
    # A model given by its size alone has no width, from which buckets are computed.
    if not callable(getattr(model, "modules", None)) or hidden_size(model)[0] is None:
        open_keys |= waiting_keys & set(_BY_WIDTH)
    if not waiting_keys - open_keys and run_config is None:
        return part
    remaining_settings = copy.deepcopy(part)
    # Taken out and put back, since `resolve_auto` raises for what nothing decides.
    for open_key in open_keys:
        drop_at(remaining_settings, open_key)
    facts = TrainingFacts(world_size=world_size)
    resolved_config = resolve_auto(
        remaining_settings, facts=facts, run=run_config, model=model
    ).config.to_dict()
    for open_key in open_keys:
        put_at(resolved_config, open_key, "auto")
    return resolved_config


def free_on_disk(settings: Mapping[str, Any]) -> int | None:
    """What is free where parameters or the optimizer are swapped to."""
    return min(map(free_bytes, nvme_folders(settings)), default=None)


def nvme_folders(settings: Mapping[str, Any] | None) -> list[Path]:
    """The folders that parameters or the optimizer are swapped to."""
    folders = (value_at(settings, key) for key in _NVME_PATH_KEYS)
    return [Path(nvme_folder) for nvme_folder in folders if nvme_folder not in (None, "", "auto")]


_FP32_BYTES = 4
_REDUCED_AT_ONCE = 5 * 10**8
"""Gradients in a bucket without ZeRO: DeepSpeed's constant, which no setting changes."""


def places(
    memory_inputs: MemoryInputs, shape: Shape, world_size: int, *, on_cpu: bool = False
) -> tuple[Bytes, Bytes, Bytes]:
    """What one process needs on its device, in host memory and on disk."""
    stage_rule = (_stage_0, _stage_1_2, _stage_1_2, _bytes_of_stage_3)[memory_inputs.stage]
    return stage_rule(memory_inputs, shape, world_size, on_cpu)


def _optimizer_state_bytes(memory_inputs: MemoryInputs, element_count: int) -> int:
    return memory_inputs.num_states * memory_inputs.state_bytes * element_count


def _temporary_bytes(memory_inputs: MemoryInputs, element_count: int, *, on_cpu: bool) -> int:
    """What torch's own optimizers hold for a moment while they update so many numbers.

    Adam takes the root of the second moment and divides it: into a second temporary on CPUs
    (``_single_tensor_adamw``), in place on GPUs (``_multi_tensor_adamw``). DeepSpeed's optimizers
    are one kernel and hold none.
    """
    if not memory_inputs.torch_optimizer:
        return 0
    return (
        min(memory_inputs.num_states, 2 if on_cpu else 1)
        * memory_inputs.state_bytes
        * element_count
    )


def _stage_0(
    memory_inputs: MemoryInputs, shape: Shape, world_size: int, on_cpu: bool
) -> tuple[Bytes, Bytes, Bytes]:
    """Everything everywhere. In 16 bit the optimizer has fp32 parameters and gradients."""
    is_half = memory_inputs.parameter_bytes < _FP32_BYTES
    # torch's optimizers have the model's own tensors, or one copy for each of them: on CPUs they
    # update one after another.
    parameter = max(shape.sizes, default=shape.largest_layer)
    update_bytes = _temporary_bytes(
        memory_inputs, parameter if on_cpu else shape.trainable, on_cpu=on_cpu
    )
    # Gradients are made flat, a bucket at a time, to be reduced; in 16 bit DeepSpeed's optimizers
    # make all of them flat in their own format, beside those of the model.
    in_step = max(_FP32_BYTES * min(shape.trainable, _REDUCED_AT_ONCE), update_bytes)
    if is_half:
        master = 0 if memory_inputs.torch_optimizer else _FP32_BYTES * shape.trainable
        in_step = master + memory_inputs.parameter_bytes * shape.trainable + update_bytes
    device = Bytes(
        parameters=memory_inputs.parameter_bytes * shape.total,
        gradients=_FP32_BYTES * shape.trainable,
        optimizer=_optimizer_state_bytes(memory_inputs, shape.trainable)
        + is_half * _FP32_BYTES * shape.trainable,
        in_step=in_step,
    )
    return device, Bytes(), Bytes()


def _stage_1_2(
    memory_inputs: MemoryInputs, shape: Shape, world_size: int, on_cpu: bool
) -> tuple[Bytes, Bytes, Bytes]:
    """The optimizer has one part of the parameters, as a copy, also where training is in fp32."""
    part_size = _part_of(shape.trainable, world_size)
    # Used twice: for its parameters, and for its gradients in the same format.
    own_bytes = memory_inputs.master_bytes * part_size
    reduce_buffers = _reduce_buffers(memory_inputs)
    device = Bytes(
        parameters=memory_inputs.parameter_bytes * shape.total,
        buckets=0 if on_cpu else reduce_buffers,
    )
    state_bytes = Bytes(
        gradients=own_bytes, optimizer=own_bytes + _optimizer_state_bytes(memory_inputs, part_size)
    )
    is_offloaded = memory_inputs.optimizer_place != "none"
    update_bytes = _temporary_bytes(memory_inputs, part_size, on_cpu=on_cpu or is_offloaded)
    leaving_bytes = memory_inputs.gradient_bytes * shape.trainable if is_offloaded else 0
    in_step = 0
    if on_cpu:
        # Of buffers that are made for each backward pass only what is written takes memory. With
        # room for all gradients they are where the gradients are, which stage 1 keeps until then
        # and stage 2 copies at the end, when activations are gone.
        has_room = memory_inputs.contiguous and memory_inputs.reduce_bucket >= shape.trainable
        written_bytes = min(reduce_buffers, memory_inputs.parameter_bytes * shape.trainable)
        in_step = written_bytes if has_room and memory_inputs.stage == 2 else 0
        device += Bytes(in_backward=max(leaving_bytes, 0 if has_room else written_bytes))
    else:
        device += Bytes(in_backward=leaving_bytes)
    if not is_offloaded:
        # Stage 1 keeps whole gradients until the optimizer has taken its part of them.
        whole_bytes = (
            max(0, memory_inputs.gradient_bytes * shape.trainable - own_bytes)
            if memory_inputs.stage == 1
            else 0
        )
        more_bytes = Bytes(
            gradients=whole_bytes, in_step=max(own_bytes, in_step, update_bytes - whole_bytes)
        )
        return device + state_bytes + more_bytes, Bytes(), Bytes()
    # Before they are copied back to the device, the new parameters are rounded into a separate
    # copy; a gradient that is copied to the host passes through a buffer on either side.
    weight_copy = Bytes(parameters=memory_inputs.parameter_bytes * part_size, in_step=update_bytes)
    passing_bytes = Bytes(
        buckets=memory_inputs.parameter_bytes * max(shape.sizes, default=shape.largest_layer)
    )
    return (
        device + passing_bytes + Bytes(in_step=in_step),
        state_bytes + weight_copy + passing_bytes,
        Bytes(),
    )


def _bytes_of_stage_3(
    memory_inputs: MemoryInputs, shape: Shape, world_size: int, on_cpu: bool
) -> tuple[Bytes, Bytes, Bytes]:
    """Parameters are divided, too; what is needed next is gathered."""
    part_size = _part_of(shape.trainable, world_size)
    weight_bytes = memory_inputs.parameter_bytes
    parameter_content = Bytes(parameters=weight_bytes * _part_of(shape.total, world_size))
    # Tensors that are too small to be worth it stay whole, beside their parts.
    buffer = memory_inputs.reduce_bucket * memory_inputs.contiguous if shape.trainable else 0
    if on_cpu:
        buffer = min(buffer, shape.trainable)
    whole_bytes = buffer + shape.at_most(memory_inputs.persist)
    device = Bytes(buckets=weight_bytes * whole_bytes)
    # The part of the parameters in the optimizer's format, beside that in the model's.
    own_bytes = memory_inputs.master_bytes * part_size
    kept_bytes = memory_inputs.gradient_bytes * part_size
    subgroup_size = min(memory_inputs.sub_group, part_size)
    update_bytes = memory_inputs.master_bytes * (
        subgroup_size if memory_inputs.optimizer_place != "cpu" else part_size
    )
    optimizer = Bytes(optimizer=own_bytes + _optimizer_state_bytes(memory_inputs, part_size))
    gradient_bytes = Bytes(gradients=kept_bytes + update_bytes)
    temporary_bytes = _temporary_bytes(
        memory_inputs, subgroup_size, on_cpu=on_cpu or memory_inputs.optimizer_place != "none"
    )
    host_bytes = Bytes()
    nvme_bytes = Bytes()
    if memory_inputs.parameter_place == "none":
        device += parameter_content
    elif memory_inputs.parameter_place == "cpu":
        host_bytes += parameter_content
    else:
        nvme_bytes += parameter_content
        elements = memory_inputs.swap_buffer * memory_inputs.num_swap_buffers
        host_bytes += Bytes(buckets=weight_bytes * elements)
    # Parameters gathered for the forward pass stay for the backward pass, as many as may live.
    at_once = max(memory_inputs.live, memory_inputs.prefetch + shape.largest_layer)
    gathered_bytes = weight_bytes * min(at_once, shape.total)
    # A full bucket of gradients is copied in the order in which it is divided among the processes.
    gathered_bytes += weight_bytes * min(memory_inputs.reduce_bucket, shape.trainable)
    if memory_inputs.optimizer_place == "none":
        is_rounded = memory_inputs.gradient_bytes < memory_inputs.master_bytes
        in_step = max(kept_bytes if is_rounded else 0, temporary_bytes)
        backward_bytes = Bytes(in_backward=max(0, gathered_bytes - update_bytes), in_step=in_step)
        return device + optimizer + gradient_bytes + backward_bytes, host_bytes, nvme_bytes
    device += Bytes(
        in_backward=gathered_bytes + 3 * memory_inputs.gradient_bytes * shape.largest_layer
    )
    host_bytes += Bytes(in_step=temporary_bytes)
    if memory_inputs.optimizer_place == "cpu":
        return device, host_bytes + optimizer + gradient_bytes, nvme_bytes
    # On disk are gradients in the optimizer's format, too; a group of all of it is read at a time.
    swapped_bytes = Bytes(
        buckets=memory_inputs.master_bytes * memory_inputs.num_state_buffers * subgroup_size
    )
    return (
        device,
        host_bytes + Bytes(gradients=kept_bytes) + swapped_bytes,
        nvme_bytes + optimizer + Bytes(gradients=own_bytes),
    )


def _reduce_buffers(memory_inputs: MemoryInputs) -> int:
    if not memory_inputs.contiguous:
        return 0
    return (
        memory_inputs.parameter_bytes
        * memory_inputs.reduce_bucket
        * (2 if memory_inputs.overlap else 1)
    )


def _part_of(element_count: int, world_size: int) -> int:
    # Rounded up: the last part is padded to the size of the others.
    return -(-element_count // world_size)


def estimate_memory(
    model_or_shape: Any,
    config: Mapping[str, Any] | str | Path | Any = None,
    *,
    num_processes: int = 1,
    num_nodes: int = 1,
    sample_batch: Any = None,
    gradient_checkpointing: bool = False,
    activation_bytes: int = 0,
    run: RunConfig | None = None,
    inventory: Inventory | None = None,
) -> MemoryEstimate:
    """Estimate what a DeepSpeed run needs, before anything is allocated.

    Args:
        model_or_shape: A module, also on ``meta``, or (parameters, parameters of the largest
            layer).
        config: DeepSpeed's configuration: a mapping, a file, or a `ZeroConfig`. None: plain
            data-parallel training in fp32. What is ``"auto"`` in it is filled in by the rules of
            `resolve_auto`.
        num_processes: Processes on each host.
        num_nodes: Hosts.
        sample_batch: What one process calls the model with: its activations are measured, on a
            copy that has no memory. Where the configuration names another
            ``train_micro_batch_size_per_gpu``, it is cut or repeated to that.
        gradient_checkpointing: Whether it will be turned on; a model in which it is on already,
            or that calls ``torch.utils.checkpoint`` itself, is measured as it is.
        activation_bytes: What is needed for activations on a device, where that is known.
        run: How it will be run; decides what is ``"auto"``. Without a configuration, MS-AMP's
            levels are counted where it asks for them (``mixed_precision="fp8"``).
        inventory: What the machine has; None looks at this one.

    Returns:
        The estimate, to print or to show in a cell.

    Raises:
        ConfigError: The model's size or a setting cannot be read, or activations not be measured.
    """
    refuse_unsized(model_or_shape)
    _check_arguments(model_or_shape, num_processes, num_nodes, sample_batch, activation_bytes)
    shape = shape_of(model_or_shape)
    world_size = num_processes * num_nodes
    if config is None and short_formats(run) is not None:
        return _in_short_formats(
            model_or_shape,
            run=run,
            num_processes=num_processes,
            num_nodes=num_nodes,
            activation_bytes=_activation_bytes(
                model_or_shape, sample_batch, "bf16", gradient_checkpointing
            )
            if sample_batch is not None
            else activation_bytes,
            inventory=inventory or inspect_machine(),
        )
    config_part = decided(
        memory_part(config), model_or_shape, world_size=world_size, run_config=run
    )
    memory_inputs = read_settings(config_part)
    if sample_batch is not None:
        sized_batch = _cut_batch(sample_batch, config_part.get("train_micro_batch_size_per_gpu"))
        activation_bytes = _activation_bytes(
            model_or_shape, sized_batch, memory_inputs.precision, gradient_checkpointing
        )
    machine_inventory = inventory or inspect_machine()
    # Processes take the first GPUs, one each.
    machine_gpus = machine_inventory.gpus[:num_processes]
    device, host_bytes, nvme_bytes = places(
        memory_inputs, shape, world_size, on_cpu=not machine_gpus
    )
    return MemoryEstimate(
        device=device + Bytes(activations=activation_bytes),
        host=host_bytes * num_processes,
        nvme=nvme_bytes * num_processes,
        shape=shape,
        strategy=_in_words(memory_inputs),
        settings=memory_inputs,
        num_processes=num_processes,
        num_nodes=num_nodes,
        device_free=min((machine_gpu.free_bytes for machine_gpu in machine_gpus), default=None),
        host_free=machine_inventory.host_available_bytes,
        # Only where something is swapped: a folder of a section that is not used does not matter.
        nvme_free=free_on_disk(config_part) if nvme_bytes.total else None,
        nvme_folders=tuple(nvme_folders(config_part)),
        notes=_estimate_notes(memory_inputs, activation_bytes, on_cpu=not machine_gpus),
    )


def _in_short_formats(
    model: Any,
    *,
    run: RunConfig | None,
    num_processes: int,
    num_nodes: int,
    activation_bytes: int,
    inventory: Inventory,
) -> MemoryEstimate:
    """The estimate for MS-AMP's levels, which train without DeepSpeed."""
    formats = short_formats(run)
    level = "" if formats is None else formats.level
    if not callable(getattr(model, "modules", None)):
        raise ConfigError(
            f"The memory of MS-AMP's {level} cannot be estimated from {model!r}: it depends on "
            "which weights belong to linear layers. Give the module (it may be on meta)."
        )
    return replicated(
        shape_of(model),
        states=model_states(model, world_size=num_processes * num_nodes, formats=formats),
        num_processes=num_processes,
        num_nodes=num_nodes,
        activation_bytes=activation_bytes,
        inventory=inventory,
        level=level,
    )


def _in_words(memory_inputs: MemoryInputs) -> str:
    parts = [
        f"{content_name} on {place_name}"
        for content_name, place_name in (
            ("optimizer", memory_inputs.optimizer_place),
            ("parameters", memory_inputs.parameter_place),
        )
        if place_name != "none"
    ]
    return ", ".join([f"ZeRO-{memory_inputs.stage}", memory_inputs.precision, *parts])


def _check_arguments(
    model: Any, num_processes: int, num_nodes: int, sample_batch: Any, activation_bytes: int
) -> None:
    mistakes = []
    if num_processes < 1 or num_nodes < 1:
        mistakes.append(
            f"num_processes={num_processes} on num_nodes={num_nodes} means no process: memory is "
            "divided among them. Use 1 or more of each."
        )
    if sample_batch is not None and not callable(getattr(model, "modules", None)):
        mistakes.append(
            f"sample_batch needs the model itself: got {model!r}, with which nothing can be "
            "measured. Give the module (it may be on meta), or activation_bytes."
        )
    if sample_batch is not None and activation_bytes:
        mistakes.append(
            f"activation_bytes={activation_bytes} and sample_batch were both given, and one would "
            "silently override the other. Give one of them."
        )
    if mistakes:
        raise ConfigError(*mistakes)


def _cut_batch(sample_batch: Any, sample_count: int | None) -> Any:
    from nbaccel.memory.activations import resized

    return sample_batch if sample_count is None else resized(sample_batch, sample_count)


def _activation_bytes(model: Any, batch: Any, name: str, with_checkpointing: bool) -> int:
    # Here, since importing torch's fake tensors takes about a second.
    from nbaccel.memory.activations import measure_activations

    return measure_activations(
        model, batch, precision=name, gradient_checkpointing=with_checkpointing
    ).peak


def _estimate_notes(
    memory_inputs: MemoryInputs, activation_bytes: int, *, on_cpu: bool
) -> tuple[str, ...]:
    estimate_notes = common_notes(activation_bytes, on_cpu=on_cpu)
    if not memory_inputs.unknown:
        return estimate_notes
    names = ", ".join(memory_inputs.unknown)
    return (
        *estimate_notes,
        f'Counted with DeepSpeed\'s defaults, since they are "auto": {names}.',
    )
