"""Values of a DeepSpeed configuration that are wrong, or right alone and wrong together.

DeepSpeed passes them on unchecked: a learning rate that is text fails in the first step, and with
one below zero the loss grows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from nbaccel.base.errors import ConfigError
from nbaccel.config.field_rules import FieldCheck, FieldRule, mistakes_in
from nbaccel.config.given_values import closest
from nbaccel.deepspeed import library
from nbaccel.deepspeed.cpp_operations import offloads_optimizer
from nbaccel.deepspeed.schema import Arguments, Schema, optimizer_arguments
from nbaccel.deepspeed.zero_config import (
    AUTO,
    ZERO,
    OptimizerSection,
    SchedulerSection,
    ZeroConfig,
)

# ------------------------------------------------------------------------------ what goes together


def combination_mistakes(config: ZeroConfig, *, world_size: int | None = None) -> Iterator[str]:
    """What cannot go together on any machine."""
    stage = config.zero_stage
    open_stage = config.stage == AUTO
    # `zero_stage` is 0 for "auto", for which offloading would be refused that may be right.
    if not open_stage:
        yield from _offload_mistakes(config)
    if config.is_on("fp16") and config.is_on("bf16"):
        yield (
            "fp16.enabled and bf16.enabled are both true. Training has one number format, and "
            "DeepSpeed refuses two. Turn one of them off."
        )
    if config.gradient_allreduce_op == "sum" and stage == 3:
        yield (
            'gradient_allreduce_op cannot be "sum" at stage 3. DeepSpeed refuses it there. '
            'Give "mean", or a stage below 3.'
        )
    for section_name in ("fp16", "bf16"):
        key = f"{section_name}_master_weights_and_grads"
        if getattr(getattr(config, section_name), key, None) is True and not (stage or open_stage):
            yield (
                f"{section_name}.{key} cannot be true at stage 0. Only ZeRO keeps master weights "
                "of that kind. Give stage 1, 2 or 3."
            )
    size = config.zero_hpz_partition_size
    if world_size is not None and isinstance(size, int) and stage == 3:
        fitting = [n for n in range(2, world_size + 1) if world_size % n == 0]
        if 1 < size < world_size and size not in fitting:
            yield (
                f"{ZERO}.zero_hpz_partition_size={size} does not divide {world_size} processes. "
                "DeepSpeed would fail in all of them when it makes its groups. Give "
                f"{' or '.join(map(str, fitting))}, or leave it out."
            )


def _offload_mistakes(config: ZeroConfig) -> Iterator[str]:
    stage = config.zero_stage
    for name in ("offload_param", "offload_optimizer"):
        section = getattr(config, name)
        if section is None or section.device not in ("cpu", "nvme"):
            continue
        key = f'{ZERO}.{name}.device="{section.device}"'
        if name == "offload_param" and stage < 3:
            yield (
                f"{key} needs stage 3: got stage {stage}. DeepSpeed would silently ignore it, and "
                f"parameters would stay where they are. Give stage 3, or leave {name} out."
            )
        elif stage == 0:
            yield (
                f"{key} needs stage 1, 2 or 3: got stage 0. Without ZeRO no state is offloaded. "
                f"Give a stage, or leave {name} out."
            )
        elif section.device == "nvme" and stage < 3:
            yield (
                f"{key} needs stage 3: got stage {stage}. DeepSpeed would keep the state in host "
                'memory and write nothing to disk. Give stage 3, or device="cpu".'
            )
        if section.device == "nvme" and not section.nvme_path:
            yield (
                f"{key} needs {ZERO}.{name}.nvme_path: got none. DeepSpeed would fail with a "
                "TypeError about a path. Give a folder on the fast disk."
            )


def batch_mistakes(config: ZeroConfig, *, world_size: int | None, open_ends: bool) -> Iterator[str]:
    """Where the batch sizes do not multiply out."""
    sizes = (
        config.train_batch_size,
        config.train_micro_batch_size_per_gpu,
        config.gradient_accumulation_steps,
    )
    total, micro, steps = (size if isinstance(size, int) else None for size in sizes)
    if total is None and micro is None and not open_ends:
        yield (
            "train_batch_size and train_micro_batch_size_per_gpu are both missing: got "
            f"gradient_accumulation_steps={steps}. DeepSpeed needs one of them. Give "
            "train_micro_batch_size_per_gpu, the batch size of one process."
        )
    # Without a total DeepSpeed multiplies the others, which cannot contradict each other.
    if total is None:
        return
    processes = world_size or 1
    # Ranks that share a sequence share its samples, too, and count as one.
    sharing = config.sequence_parallel_size
    if isinstance(sharing, int) and processes % sharing == 0:
        processes //= sharing
    product = (micro or 1) * (steps or 1) * processes
    # With a factor still open the total must at least be a multiple of the others.
    is_exact = None not in (micro, steps, world_size)
    if total == product or (total % product == 0 and not is_exact):
        return
    factors = [
        f"train_micro_batch_size_per_gpu={micro}" if micro else "",
        f"gradient_accumulation_steps={steps}" if steps else "",
        f"{processes} processes" if world_size is not None else "",
    ]
    yield (
        f"train_batch_size={total} {'is not' if is_exact else 'is no multiple of'} "
        f"{' * '.join(filter(None, factors))} = {product}. "
        "Every step takes micro batch * accumulation * processes samples. Leave train_batch_size "
        f"out, or give {'' if is_exact else 'a multiple of '}{product}."
    )


# ------------------------------------------------------------------------------ optimizer, schedule

# DeepSpeed removed these before 0.19.7; where they exist, they work on GPUs alone.
_REPLACED_OPTIMIZERS = {"onebitadam": "AdamW", "zerooneadam": "AdamW", "onebitlamb": "Lamb"}
_INSTEAD_OF_ONE_BIT = (
    f"; to send less, set communication_data_type or {ZERO}.zero_quantized_gradients."
)
# Names of transformers' `TrainingArguments`, which are copied into configurations.
_WRITTEN_WORDS = {"learning_rate": "lr", "warmup_steps": "warmup_num_steps"}


def maker_mistakes(config: ZeroConfig, schema: Schema) -> Iterator[str]:
    """What is wrong with the optimizer and the schedule that DeepSpeed is to make."""
    for name, section, example in (
        ("optimizer", config.optimizer, "AdamW"),
        ("scheduler", config.scheduler, "WarmupLR"),
    ):
        # With further keys, the one that was meant has been named already.
        if section is not None and section.type is None and not section.extra:
            yield (
                f"{name}.type is missing: got {name}={section.to_dict()!r}. Without a name "
                f'DeepSpeed would silently make none. Give for example "type": "{example}".'
            )
    if config.optimizer is not None and config.optimizer.type is not None:
        yield from _optimizer_mistakes(config.optimizer, config.optimizer.type, config, schema)
    if config.scheduler is not None and config.scheduler.type is not None:
        yield from _scheduler_mistakes(config.scheduler, config.scheduler.type, config, schema)


def _optimizer_mistakes(
    section: OptimizerSection, name: str, config: ZeroConfig, schema: Schema
) -> Iterator[str]:
    params = section.params or {}
    # DeepSpeed compares its optimizers' names in lower case, and torch's as they are written.
    is_own = name.lower() in schema.own_optimizers
    if not is_own and name.lower() in _REPLACED_OPTIMIZERS:
        yield (
            f"optimizer.type={name!r} has been removed from DeepSpeed: {schema.version} cannot "
            f"make it. Use {_REPLACED_OPTIMIZERS[name.lower()]!r}{_INSTEAD_OF_ONE_BIT}"
        )
        return
    if not is_own and name not in schema.optimizers:
        yield (
            f"optimizer.type={name!r} is no optimizer of DeepSpeed {schema.version} or torch. It "
            f"could not be made.{closest(name, schema.optimizers) or ' Use AdamW.'}"
        )
        return
    if config.zero_stage > 0 and not is_own and config.zero_allow_untested_optimizer is not True:
        yield (
            f"optimizer.type={name!r} is not tested with ZeRO: got stage {config.zero_stage}. "
            "DeepSpeed refuses it unless the configuration allows it. Add "
            '"zero_allow_untested_optimizer": true, or use AdamW.'
        )
    if "max_grad_norm" in params:
        yield (
            f"optimizer.params.max_grad_norm={params['max_grad_norm']!r} is no longer a parameter "
            "of an optimizer. DeepSpeed refuses it. Set gradient_clipping at the top level."
        )
    yield from value_mistakes("optimizer", params)
    known = optimizer_arguments(name, params, is_offloaded=offloads_optimizer(config))
    if known is not None:
        params = {key: value for key, value in params.items() if key != "max_grad_norm"}
        yield from _constructor_mistakes("optimizer", name, params, known)


def _scheduler_mistakes(
    section: SchedulerSection, name: str, config: ZeroConfig, schema: Schema
) -> Iterator[str]:
    params = section.params or {}
    known = schema.schedulers.get(name)
    if known is None:
        yield (
            f"scheduler.type={name!r} is no schedule of DeepSpeed {schema.version} or torch. It "
            f"could not be made.{closest(name, schema.schedulers) or ' Use WarmupLR.'}"
        )
        return
    if name not in schema.own_schedulers and config.zero_stage > 0:
        yield (
            f"scheduler.type={name!r} is torch's and cannot drive ZeRO's optimizer: got stage "
            f"{config.zero_stage}. torch would refuse it as no Optimizer. Use one of DeepSpeed's, "
            "such as WarmupDecayLR, or pass a schedule to deepspeed.initialize."
        )
    yield from _constructor_mistakes("scheduler", name, params, known)
    for parameter in sorted(known.needed - set(params)):
        yield (
            f"scheduler.params.{parameter} is missing: got {sorted(params)}. {name} has no default "
            f"for it. Give {parameter}."
        )
    yield from value_mistakes("scheduler", params)


def _constructor_mistakes(
    section_name: str, maker: str, params: Mapping[str, Any], known: Arguments
) -> Iterator[str]:
    words = {word: meant for word, meant in _WRITTEN_WORDS.items() if meant in known.known}
    for name in () if known.open else sorted(set(params) - known.known):
        meant = closest(name, known.known, words) or f" It takes {sorted(known.known)}."
        yield (
            f"{section_name}.params.{name} is no argument of {known.owner}: got "
            f"{name}={params[name]!r}. DeepSpeed could not make {maker}.{meant}"
        )


def _check(annotated_type: Any, must: str, do: str, allowed: tuple[str, ...] = ()) -> FieldCheck:
    why = "DeepSpeed passes it on unchecked, and training would fail or diverge"
    return FieldCheck(
        Annotated[annotated_type, FieldRule(must=must, do=do, why=why, allowed=allowed)]
    )


_FiniteNumber = Annotated[float, Field(ge=0, allow_inf_nan=False, strict=True)]
# One rate for all parameter groups, or one for each.
_RATE = _check(
    _FiniteNumber | Annotated[list[_FiniteNumber], Field(min_length=1)],
    "a number of at least 0",
    "Give for example 3e-5",
)
_SMALL = _check(_FiniteNumber, "a number of at least 0", "Give for example 1e-8")
_STEPS = _check(
    Annotated[_FiniteNumber, Field(gt=0, multiple_of=1)],
    "a whole number above 0",
    "Give for example 1000 (1 where there is no warm-up)",
)
_BETAS = _check(
    Annotated[
        list[Annotated[float, Field(ge=0, lt=1, strict=True)]], Field(min_length=2, max_length=2)
    ],
    "two numbers from 0 to below 1",
    "Give for example [0.9, 0.999]",
)
_SHAPE = _check(
    Literal["log", "linear"], "one of log, linear", "Give one of them", ("log", "linear")
)
_PARAMETER_CHECKS: dict[str, dict[str, FieldCheck]] = {
    "optimizer": {
        "lr": _RATE,
        "betas": _BETAS,
        "eps": _SMALL,
        "weight_decay": _SMALL,
        "momentum": _SMALL,
    },
    "scheduler": {
        "warmup_min_lr": _RATE,
        "warmup_max_lr": _RATE,
        "warmup_num_steps": _STEPS,
        "total_num_steps": _STEPS,
        "warmup_type": _SHAPE,
        "cycle_min_lr": _RATE,
        "cycle_max_lr": _RATE,
        "lr_range_test_min_lr": _RATE,
    },
}


def value_mistakes(section_name: str, params: Mapping[str, Any]) -> Iterator[str]:
    """What is wrong with the values of an optimizer's or a schedule's parameters."""
    for name, check in _PARAMETER_CHECKS[section_name].items():
        if params.get(name) in (None, AUTO):
            continue
        try:
            check.read(f"{section_name}.params.{name}", params[name])
        except ConfigError as error:
            yield from mistakes_in(error)


# ------------------------------------------------------------------------------ on one device


def device_mistakes(config: ZeroConfig, schema: Schema, *, device: str) -> Iterator[str]:
    """What works elsewhere, and not on this device."""
    if device != "cpu":
        return
    if config.is_on("fp16") and not _cpu_has_fp16():
        yield (
            "fp16.enabled cannot be true on this CPU, which has no float16 arithmetic: got "
            "fp16.enabled=True. DeepSpeed says 'Type fp16 is not supported on your device'. Use "
            "bf16."
        )
    place = config.offload_optimizer and config.offload_optimizer.device
    # Before that release no host memory counted as pinned without a GPU, so that nothing was
    # submitted, and waiting for writes that do not exist fails.
    if place == "nvme" and config.zero_stage == 3 and (old := library.older_than("0.19.6")):
        yield (
            f'{ZERO}.offload_optimizer.device="nvme" needs DeepSpeed 0.19.6 or newer where there '
            f"is no GPU: got {old}. It would end the process with a failed assertion in C++ "
            '(_num_pending_ops > 0). Install a newer one (pip install "deepspeed>=0.19.6"), or '
            'give device="cpu".'
        )
    name = (config.optimizer and config.optimizer.type) or ""
    remedy = {"lamb": "Use AdamW."}.get(name.lower(), "")
    if name.lower() == "lion" and not offloads_optimizer(config):
        remedy = f'Offload it: {ZERO}.offload_optimizer="cpu".'
    if remedy:
        yield (
            f"optimizer.type={name!r} cannot be made on the CPU. DeepSpeed says 'This op had not "
            f"been implemented on CPU backend'. {remedy}"
        )
    if name.lower() in _REPLACED_OPTIMIZERS and name.lower() in schema.own_optimizers:
        yield (
            f"optimizer.type={name!r} cannot be made on the CPU. It communicates by NCCL or MPI in "
            f"{schema.version}, and newer versions do not have it. Use "
            f"{_REPLACED_OPTIMIZERS[name.lower()]!r}{_INSTEAD_OF_ONE_BIT}"
        )


def doubts(config: ZeroConfig, *, device: str) -> Iterator[str]:
    """Settings that work but may not do what is expected."""
    if config.zero_stage == 3 and config.stage3_gather_16bit_weights_on_model_save is not True:
        yield (
            f"{ZERO}.stage3_gather_16bit_weights_on_model_save is not set: save_16bit_model() "
            "returns False and writes nothing. Set it to true to save whole weights."
        )
    is_swapped = config.offload_param is not None and config.offload_param.device == "nvme"
    is_float32 = not config.is_on("bf16") and not config.is_on("fp16")
    if is_swapped and is_float32 and device == "cpu" and not _cpu_has_fp16():
        yield (
            f"{ZERO}.offload_param on nvme with float32 on a CPU without float16 arithmetic: "
            "DeepSpeed keeps the weights as bfloat16 there. Turn on bf16 to make that explicit."
        )


def _cpu_has_fp16() -> bool:
    """DeepSpeed's test of a CPU before it trains in float16, and before it allocates weights."""
    # The class itself: `get_accelerator` would choose a device for the life of this process.
    module = library.load_module("deepspeed.accelerator.cpu_accelerator", why="float16")
    return bool(module.CPU_Accelerator().is_fp16_supported())
