"""``estimate_memory``: what a DeepSpeed run needs on each device, each host and the disk.

The model states are counted at the moment when there is most of them: when the optimizer steps.
All numbers follow from the configuration and from what DeepSpeed allocates for it; tests compare
them with real engines.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nbaccel.base.atomic import free_bytes
from nbaccel.base.errors import ConfigError
from nbaccel.base.units import format_bytes
from nbaccel.config import RunConfig
from nbaccel.config.field_rules import refuse_mistakes
from nbaccel.config.given_values import has_key, put_at, value_at
from nbaccel.deepspeed.auto_values import TrainingFacts, resolve_decided
from nbaccel.deepspeed.zero_config import ZERO, auto_keys, todays_settings
from nbaccel.memory import estimate
from nbaccel.memory.estimate import Bytes, MemoryEstimate, Shape, common_notes
from nbaccel.memory.memory_model import model_states, short_formats
from nbaccel.plan.inspecting import inspect_machine
from nbaccel.plan.inventory import Inventory

OPTIMIZER_PLACE = f"{ZERO}.offload_optimizer.device"
PARAM_PLACE = f"{ZERO}.offload_param.device"
NVME_PATHS = tuple(f"{ZERO}.{name}.nvme_path" for name in ("offload_optimizer", "offload_param"))
DEFAULTS = {
    f"{ZERO}.reduce_bucket_size": 500_000_000,
    f"{ZERO}.contiguous_gradients": True,
    f"{ZERO}.sub_group_size": 1_000_000_000,
    f"{ZERO}.stage3_prefetch_bucket_size": 50_000_000,
    f"{ZERO}.stage3_param_persistence_threshold": 100_000,
    f"{ZERO}.stage3_max_live_parameters": 1_000_000_000,
    f"{ZERO}.offload_optimizer.buffer_count": 4,
    f"{ZERO}.offload_param.buffer_count": 5,
    f"{ZERO}.offload_param.buffer_size": 100_000_000,
}
"""DeepSpeed's defaults, which count without it, too; a test compares them with the library."""
_COUNTED_KEYS = (
    *DEFAULTS,
    f"{ZERO}.stage",
    f"{ZERO}.overlap_comm",
    OPTIMIZER_PLACE,
    PARAM_PLACE,
    *("fp16", "bf16", "data_types", "zero_force_ds_cpu_optimizer"),
    *("optimizer.type", "optimizer.params.torch_adam"),
)
"""What memory depends on: a mistake or an "auto" elsewhere stops no estimate."""
BATCH_KEY = "train_micro_batch_size_per_gpu"
_NUM_STATES = {"adagrad": 1, "lion": 1, "muon": 1, "sgd": 0}
"""States of each parameter, by the optimizer's name in lower case; two for those of Adam's kind."""
_BYTES_OF_FORMAT = {"fp32": 4, "fp16": 2, "bf16": 2, "bfp16": 2}
_FP32_BYTES = 4
_REDUCED_AT_ONCE = 5 * 10**8  # DeepSpeed's constant, of gradients without ZeRO


@dataclass(frozen=True, kw_only=True, slots=True)
class CountedSettings:
    """What a configuration says of memory; bytes are of one number."""

    zero: Mapping[str, Any]  # of ``zero_optimization``, with DeepSpeed's defaults
    stage: int
    precision: str  # what the model computes in: ``fp32``, ``fp16`` or ``bf16``
    parameter_bytes: int
    gradient_bytes: int  # while gradients are accumulated
    master_bytes: int  # of a parameter as the optimizer keeps it
    state_bytes: int
    num_states: int  # that the optimizer keeps of each parameter: two for Adam
    torch_optimizer: bool  # torch's, or the caller's, not DeepSpeed's own
    optimizer_place: str  # "none" (on the device), "cpu" or "nvme"; so of the next one
    parameter_place: str
    unknown: tuple[str, ...]  # settings left to "auto", counted as DeepSpeed's defaults


def _counted(
    settings: Mapping[str, Any], model: Any, *, world_size: int, run: RunConfig | None
) -> CountedSettings:
    """What memory depends on in a configuration, with "auto" decided by the published rules."""
    part: dict[str, Any] = {}
    for key in _COUNTED_KEYS:
        if has_key(settings, key):
            put_at(part, key, value_at(settings, key))
    facts = TrainingFacts(world_size=world_size)
    config = resolve_decided(part, facts=facts, run=run, model=model)[0].config
    document = config.to_dict()
    stage = config.zero_stage
    precision = next((name for name in ("bf16", "fp16") if config.is_on(name)), "fp32")
    number_bytes = _BYTES_OF_FORMAT[precision]
    low = document.get(precision) or {}
    # DeepSpeed accumulates in the format of the model unless the configuration names another.
    accumulated = value_at(document, "data_types.grad_accum_dtype")
    optimizer_place, parameter_place = (
        place_at_stage(key, value_at(document, key, "none"), stage)
        for key in (OPTIMIZER_PLACE, PARAM_PLACE)
    )
    usual = {**DEFAULTS, f"{ZERO}.overlap_comm": stage == 3}
    # Torch's own: not made from the file, nor replaced for offloading.
    optimizer = config.optimizer
    is_torchs = optimizer_place == "none" or config.zero_force_ds_cpu_optimizer is False
    if optimizer is not None and optimizer.type is not None:
        is_torchs = is_torchs and bool((optimizer.params or {}).get("torch_adam"))
    return CountedSettings(
        zero={key.removeprefix(f"{ZERO}."): value_at(document, key, usual[key]) for key in usual},
        stage=stage,
        precision=precision,
        parameter_bytes=number_bytes,
        gradient_bytes=_BYTES_OF_FORMAT.get(str(accumulated), number_bytes),
        master_bytes=number_bytes if low.get(f"{precision}_master_weights_and_grads") else 4,
        state_bytes=number_bytes if low.get("bf16_optimizer_states") else 4,
        num_states=_NUM_STATES.get(str(value_at(document, "optimizer.type")).lower(), 2),
        torch_optimizer=is_torchs,
        optimizer_place=optimizer_place,
        parameter_place=parameter_place,
        unknown=tuple(key for key in auto_keys(part) if not has_key(document, key)),
    )


def place_at_stage(place_key: str, place: str, stage: int) -> str:
    """Where something is: DeepSpeed ignores what a stage does not have, and NVMe below stage 3."""
    if stage < (3 if place_key == PARAM_PLACE else 1):
        return "none"
    return "cpu" if place == "nvme" and stage < 3 else place


def nvme_folders(settings: Mapping[str, Any] | None) -> list[Path]:
    """The folders that parameters or the optimizer are swapped to."""
    folders = (value_at(settings, key) for key in NVME_PATHS)
    return [Path(folder) for folder in folders if folder not in (None, "", "auto")]


_Places = tuple[Bytes, Bytes, Bytes]  # of one process on device, host and disk


def _state_bytes(settings: CountedSettings, num_elements: int) -> int:
    return settings.num_states * settings.state_bytes * num_elements


def _temporary_bytes(settings: CountedSettings, num_elements: int, *, on_cpu: bool) -> int:
    """What torch's own optimizers hold for a moment while they update so many numbers."""
    # Adam divides by the root of the second moment: into a second temporary on CPUs
    # (``_single_tensor_adamw``), in place on GPUs; DeepSpeed's optimizers, one kernel, hold none.
    if not settings.torch_optimizer:
        return 0
    return min(settings.num_states, 2 if on_cpu else 1) * settings.state_bytes * num_elements


def largest_parameter(shape: Shape) -> int:
    """Elements of the largest parameter, or of the largest layer where only that is known."""
    return max(shape.sizes, default=shape.largest_layer)


def _part_of(num_elements: int, world_size: int) -> int:
    # Rounded up: the last part is padded to the size of the others.
    return -(-num_elements // world_size)


def _stage_0(settings: CountedSettings, shape: Shape, world_size: int, on_cpu: bool) -> _Places:
    """Everything everywhere. In 16 bit the optimizer has fp32 parameters and gradients."""
    trained = shape.trainable
    is_half = settings.parameter_bytes < _FP32_BYTES
    # torch's optimizers update one tensor after another on CPUs.
    updated = largest_parameter(shape) if on_cpu else trained
    update_bytes = _temporary_bytes(settings, updated, on_cpu=on_cpu)
    # Gradients are made flat, a bucket at a time; in 16 bit all of them, in their own format.
    in_step = max(_FP32_BYTES * min(trained, _REDUCED_AT_ONCE), update_bytes)
    if is_half:
        master = 0 if settings.torch_optimizer else _FP32_BYTES * trained
        in_step = master + settings.parameter_bytes * trained + update_bytes
    device = Bytes(
        parameters=settings.parameter_bytes * shape.total,
        gradients=_FP32_BYTES * trained,
        optimizer=_state_bytes(settings, trained) + is_half * _FP32_BYTES * trained,
        in_step=in_step,
    )
    return device, Bytes(), Bytes()


def _stages_1_and_2(
    settings: CountedSettings, shape: Shape, world_size: int, on_cpu: bool
) -> _Places:
    """The optimizer has one part of the parameters, as a copy, also where training is in fp32."""
    part_size = _part_of(shape.trainable, world_size)
    # Used twice: for its parameters, and for its gradients in the same format.
    own_bytes = settings.master_bytes * part_size
    states = Bytes(gradients=own_bytes, optimizer=own_bytes + _state_bytes(settings, part_size))
    whole_gradients = settings.gradient_bytes * shape.trainable
    is_offloaded = settings.optimizer_place != "none"
    update_bytes = _temporary_bytes(settings, part_size, on_cpu=on_cpu or is_offloaded)
    bucket_size = settings.zero["reduce_bucket_size"]
    is_copied = settings.zero["contiguous_gradients"]
    # One buffer is filled while the other is reduced.
    num_buffers = is_copied * (2 if settings.zero["overlap_comm"] else 1)
    buffer_bytes = settings.parameter_bytes * bucket_size * num_buffers
    # On CPUs only what is written of buffers takes memory. With room for all gradients they are in
    # the gradients' place, which stage 1 keeps and stage 2 copies when activations are gone.
    has_room = is_copied and bucket_size >= shape.trainable
    written_bytes = min(buffer_bytes, settings.parameter_bytes * shape.trainable) * on_cpu
    in_step = written_bytes if has_room and settings.stage == 2 else 0
    device = Bytes(
        parameters=settings.parameter_bytes * shape.total,
        buckets=0 if on_cpu else buffer_bytes,
        in_backward=max(whole_gradients * is_offloaded, 0 if has_room else written_bytes),
    )
    if not is_offloaded:
        # Stage 1 keeps whole gradients until the optimizer has taken its part of them.
        kept_bytes = max(0, whole_gradients - own_bytes) if settings.stage == 1 else 0
        in_step = max(own_bytes, in_step, update_bytes - kept_bytes)
        return device + states + Bytes(gradients=kept_bytes, in_step=in_step), Bytes(), Bytes()
    # New parameters are rounded into a copy; a gradient passes through a buffer on either side.
    rounded = Bytes(parameters=settings.parameter_bytes * part_size, in_step=update_bytes)
    passing = Bytes(buckets=settings.parameter_bytes * largest_parameter(shape))
    return device + passing + Bytes(in_step=in_step), states + rounded + passing, Bytes()


def _stage_3(settings: CountedSettings, shape: Shape, world_size: int, on_cpu: bool) -> _Places:
    """Parameters are divided, too; what is needed next is gathered."""
    zero = settings.zero
    weight_bytes = settings.parameter_bytes
    part_size = _part_of(shape.trainable, world_size)
    bucket_size = min(zero["reduce_bucket_size"], shape.trainable)
    reserved = bucket_size if on_cpu or not shape.trainable else zero["reduce_bucket_size"]
    # Tensors that are too small to be worth it stay whole, beside their parts.
    threshold = zero["stage3_param_persistence_threshold"]
    whole = sum(size for size in shape.sizes if size <= threshold)
    device = Bytes(buckets=weight_bytes * (reserved * zero["contiguous_gradients"] + whole))
    host = Bytes()
    nvme = Bytes()
    parameters = Bytes(parameters=weight_bytes * _part_of(shape.total, world_size))
    if settings.parameter_place == "none":
        device += parameters
    elif settings.parameter_place == "cpu":
        host += parameters
    else:
        nvme += parameters
        buffers = zero["offload_param.buffer_size"] * zero["offload_param.buffer_count"]
        host += Bytes(buckets=weight_bytes * buffers)
    # Gathered parameters stay for the backward pass, as many as may live; a full bucket is copied.
    ahead = zero["stage3_prefetch_bucket_size"] + shape.largest_layer
    at_once = min(max(zero["stage3_max_live_parameters"], ahead), shape.total)
    gathered_bytes = weight_bytes * (at_once + bucket_size)
    # The part of the parameters in the optimizer's format, beside that in the model's.
    own_bytes = settings.master_bytes * part_size
    optimizer = Bytes(optimizer=own_bytes + _state_bytes(settings, part_size))
    kept_bytes = settings.gradient_bytes * part_size
    place = settings.optimizer_place
    group_size = min(zero["sub_group_size"], part_size)
    update_bytes = settings.master_bytes * (part_size if place == "cpu" else group_size)
    gradients = Bytes(gradients=kept_bytes + update_bytes)
    temporary = _temporary_bytes(settings, group_size, on_cpu=on_cpu or place != "none")
    if place == "none":
        rounded = kept_bytes if settings.gradient_bytes < settings.master_bytes else 0
        moments = Bytes(
            in_backward=max(0, gathered_bytes - update_bytes), in_step=max(rounded, temporary)
        )
        return device + optimizer + gradients + moments, host, nvme
    leaving_bytes = 3 * settings.gradient_bytes * shape.largest_layer
    device += Bytes(in_backward=gathered_bytes + leaving_bytes)
    host += Bytes(in_step=temporary)
    if place == "cpu":
        return device, host + optimizer + gradients, nvme
    # On disk are gradients in the optimizer's format, too; a group of all of it is read at a time.
    swapped = settings.master_bytes * zero["offload_optimizer.buffer_count"] * group_size
    host += Bytes(gradients=kept_bytes, buckets=swapped)
    return device, host, nvme + optimizer + Bytes(gradients=own_bytes)


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
    estimate.refuse_unsized(model_or_shape)
    _check_arguments(model_or_shape, num_processes, num_nodes, sample_batch, activation_bytes)
    shape = estimate.shape_of(model_or_shape)
    world_size = num_processes * num_nodes
    given = {} if config is None else todays_settings(config)[0]
    formats = short_formats(run) if config is None else None  # of MS-AMP, without DeepSpeed
    settings = _counted(given, model_or_shape, world_size=world_size, run=run)
    if sample_batch is not None:
        precision = settings.precision if formats is None else "bf16"
        activation_bytes = _measured(
            model_or_shape, sample_batch, given.get(BATCH_KEY), precision, gradient_checkpointing
        )
    machine = inventory or inspect_machine()
    if formats is not None:
        return estimate.torch_estimate(
            shape,
            strategy=f"data parallel, fp8 at MS-AMP's {formats.level}",
            states=model_states(model_or_shape, world_size=world_size, formats=formats),
            num_processes=num_processes,
            num_nodes=num_nodes,
            activation_bytes=activation_bytes,
            inventory=machine,
        )
    # Processes take the first GPUs, one each.
    gpus = machine.gpus[:num_processes]
    of_stage = (_stage_0, _stages_1_and_2, _stages_1_and_2, _stage_3)[settings.stage]
    device, host, nvme = of_stage(settings, shape, world_size, not gpus)
    folders = tuple(nvme_folders(given))
    contents = {"optimizer": settings.optimizer_place, "parameters": settings.parameter_place}
    moved = [f"{content} on {place}" for content, place in contents.items() if place != "none"]
    names = ", ".join(settings.unknown)
    note = f'Counted with DeepSpeed\'s defaults, since they are "auto": {names}.'
    return MemoryEstimate(
        device=device + Bytes(activations=activation_bytes),
        host=host * num_processes,
        nvme=nvme * num_processes,
        shape=shape,
        strategy=", ".join([f"ZeRO-{settings.stage}", settings.precision, *moved]),
        num_processes=num_processes,
        num_nodes=num_nodes,
        device_free=min((gpu.free_bytes for gpu in gpus), default=None),
        host_free=machine.host_available_bytes,
        # Only where something is swapped: a folder of a section that is not used does not matter.
        nvme_free=min(map(free_bytes, folders), default=None) if nvme.total else None,
        nvme_folders=folders,
        notes=(*common_notes(activation_bytes, on_cpu=not gpus), *([note] if names else [])),
    )


def _measured(
    model: Any, batch: Any, num_rows: Any, precision: str, gradient_checkpointing: bool
) -> int:
    # Here, since importing torch's fake tensors takes about a second.
    from nbaccel.memory.activations import measure_activations, resized

    return measure_activations(
        model,
        resized(batch, num_rows) if isinstance(num_rows, int) else batch,
        precision=precision,
        gradient_checkpointing=gradient_checkpointing,
    )


def _check_arguments(
    model: Any, num_processes: int, num_nodes: int, sample_batch: Any, activation_bytes: int
) -> None:
    has_batch = sample_batch is not None
    is_module = callable(getattr(model, "modules", None))
    is_none = num_processes < 1 or num_nodes < 1
    problems = {
        f"num_processes={num_processes} on num_nodes={num_nodes} means no process: memory is "
        "divided among them. Use 1 or more of each.": is_none,
        f"sample_batch needs the model itself: got {model!r}. Give the module (it may be on meta), "
        "or activation_bytes.": has_batch and not is_module,
        f"activation_bytes={activation_bytes} and sample_batch were both given, and one would "
        "silently override the other. Give one of them.": has_batch and activation_bytes,
    }
    refuse_mistakes(text for text, is_there in problems.items() if is_there)


def host_bytes(need: MemoryEstimate, device: str) -> int:
    """What the processes of this node will take of its memory."""
    # On a CPU the weights are there already, one copy for all until they are written to.
    on_device = need.device.total * need.num_processes if device == "cpu" else 0
    return need.host.total + on_device


def check_host_memory(need: MemoryEstimate, device: str, machine: Inventory) -> None:
    """Say before it happens that the system will kill processes for want of memory."""
    needed_bytes = host_bytes(need, device)
    there = (
        f"{format_bytes(machine.host_available_bytes)} of {format_bytes(machine.host_total_bytes)}"
    )
    text = (
        f"DeepSpeed will need about {format_bytes(needed_bytes)} of host memory for "
        f"{need.num_processes} process(es), and {there} are free"
    )
    advice = (
        "Set offload_optimizer.device or offload_param.device to 'none' or 'nvme', a lower "
        "sub_group_size, or use fewer processes; nbaccel.advise finds what fits."
    )
    # What is free may grow until it is needed, so only a machine that is too small is refused.
    if needed_bytes > machine.host_total_bytes:
        raise ConfigError(f"{text}: the system would kill it at the start. {advice}")
    if needed_bytes > machine.host_available_bytes:
        warnings.warn(f"{text}: the system may kill it at the start. {advice}", stacklevel=2)


def check_disk(need: MemoryEstimate, in_use: Collection[Path] = ()) -> None:
    """Refuse to swap to a disk that is too small."""
    needed_bytes = need.nvme.total
    if not needed_bytes:
        return
    # Both folders may be on one disk: the whole need must fit on the fuller of the two.
    room_of = {
        folder: free_bytes(folder)
        # What an earlier run has left there will be overwritten.
        + sum(one.stat().st_size for one in folder.glob("zero_stage_3/*/rank*/*.swp"))
        * (folder not in in_use)
        for folder in need.nvme_folders
    }
    free_room, folder = min((room, folder) for folder, room in room_of.items())
    if needed_bytes > free_room:
        raise ConfigError(
            f"nvme_path={str(folder)!r} has too little room: DeepSpeed will write about "
            f"{format_bytes(needed_bytes)} ({needed_bytes} bytes) for {need.num_processes} "
            f"process(es), and {format_bytes(free_room)} ({free_room} bytes) are free. Training "
            'would end half-way. Make room, give another folder, or set the device to "cpu".'
        )
