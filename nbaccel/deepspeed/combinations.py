"""Values of a DeepSpeed configuration that are wrong, or right alone and wrong together.

DeepSpeed passes them on unchecked: a learning rate that is text fails in the first step, and with
one below zero the loss grows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, get_args

from pydantic import Field

from nbaccel.base.errors import ConfigError
from nbaccel.config.field_rules import FieldCheck, FieldRule, mistakes_in
from nbaccel.config.mistakes import closest
from nbaccel.deepspeed import library
from nbaccel.deepspeed.cpp_operations import offloads_optimizer
from nbaccel.deepspeed.field_types import AUTO
from nbaccel.deepspeed.schema import Arguments, Schema, missing_arguments, optimizer_arguments
from nbaccel.deepspeed.zero_config import ZERO, OptimizerSection, ZeroConfig

__all__ = [
    "batch_mistakes",
    "combination_mistakes",
    "doubts",
    "maker_mistakes",
    "sharing_mistakes",
    "value_mistakes",
]


_FiniteNumber = Annotated[float, Field(ge=0, allow_inf_nan=False, strict=True)]
_BetaValue = Annotated[float, Field(ge=0, lt=1, strict=True)]
_WarmupShape = Literal["log", "linear"]


def _parameter_check(annotated_type: Any, must_be: str, what_to_do: str) -> FieldCheck:
    reason = "DeepSpeed passes it on unchecked, and training would fail or diverge"
    words = get_args(_WarmupShape) if annotated_type is _WarmupShape else ()
    rule = FieldRule(must=must_be, do=what_to_do, why=reason, allowed=words)
    return FieldCheck(Annotated[annotated_type, rule])


# One rate for all parameter groups, or one for each.
_RATE_CHECK = _parameter_check(
    _FiniteNumber | Annotated[list[_FiniteNumber], Field(min_length=1)],
    "a number of at least 0",
    "Give for example 3e-5",
)
_SMALL_CHECK = _parameter_check(_FiniteNumber, "a number of at least 0", "Give for example 1e-8")
_DECAY_CHECK = _parameter_check(
    _FiniteNumber, "a number of at least 0", "Give for example 0.01, or leave it out"
)
_STEPS_CHECK = _parameter_check(
    Annotated[_FiniteNumber, Field(gt=0, multiple_of=1)],
    "a whole number above 0",
    "Give for example 1000 (1 where there is no warm-up)",
)
_BETAS_CHECK = _parameter_check(
    Annotated[list[_BetaValue], Field(min_length=2, max_length=2)],
    "two numbers from 0 to below 1",
    "Give for example [0.9, 0.999]",
)
_SHAPE_CHECK = _parameter_check(_WarmupShape, "one of log, linear", "Give one of them")

_PARAMETER_CHECKS: dict[str, dict[str, FieldCheck]] = {
    "optimizer": {
        "lr": _RATE_CHECK,
        "betas": _BETAS_CHECK,
        "eps": _SMALL_CHECK,
        "weight_decay": _DECAY_CHECK,
        "momentum": _SMALL_CHECK,
    },
    "scheduler": {
        "warmup_min_lr": _RATE_CHECK,
        "warmup_max_lr": _RATE_CHECK,
        "warmup_num_steps": _STEPS_CHECK,
        "total_num_steps": _STEPS_CHECK,
        "warmup_type": _SHAPE_CHECK,
        "cycle_min_lr": _RATE_CHECK,
        "cycle_max_lr": _RATE_CHECK,
        "lr_range_test_min_lr": _RATE_CHECK,
    },
}


def value_mistakes(section_name: str, params: Mapping[str, Any]) -> Iterator[str]:
    """What is wrong with the values of an optimizer's or a schedule's parameters."""
    for parameter_name, parameter_check in _PARAMETER_CHECKS[section_name].items():
        value = params.get(parameter_name)
        if value is None or value == AUTO:
            continue
        try:
            parameter_check.read(f"{section_name}.params.{parameter_name}", value)
        except ConfigError as error:
            yield from mistakes_in(error)


# DeepSpeed removed these before 0.19.7; where they exist, they work on GPUs alone.
_REPLACED_OPTIMIZERS = {
    "onebitadam": "AdamW",
    "zerooneadam": "AdamW",
    "onebitlamb": "Lamb",
}
_UNTESTED_HINT = '"zero_allow_untested_optimizer": true'


def combination_mistakes(zero_config: ZeroConfig, *, device: str) -> Iterator[str]:
    """What cannot go together."""
    open_stage = zero_config.stage == AUTO
    # `zero_stage` is 0 for "auto", for which offloading would be refused that may be right.
    if not open_stage:
        yield from _offload_mistakes(zero_config, device)
    halves = [
        section_name
        for section_name in ("fp16", "bf16")
        if _is_turned_on(zero_config, section_name)
    ]
    if len(halves) == 2:
        yield (
            "fp16.enabled and bf16.enabled are both true. Training has one number format, and "
            "DeepSpeed refuses two. Turn one of them off."
        )
    if "fp16" in halves and device == "cpu" and not _cpu_has_fp16():
        yield (
            "fp16.enabled cannot be true on this CPU, which has no float16 arithmetic: got "
            "fp16.enabled=True. DeepSpeed says 'Type fp16 is not supported on your device'. Use "
            "bf16."
        )
    if zero_config.gradient_allreduce_op == "sum" and zero_config.zero_stage == 3:
        yield (
            'gradient_allreduce_op cannot be "sum" at stage 3. DeepSpeed refuses it there. '
            'Give "mean", or a stage below 3.'
        )
    master_keys = [
        f"{section_name}.{section_name}_master_weights_and_grads"
        for section_name in ("fp16", "bf16")
        if getattr(
            getattr(zero_config, section_name), f"{section_name}_master_weights_and_grads", None
        )
        is True
    ]
    if master_keys and zero_config.zero_stage == 0 and not open_stage:
        yield (
            f"{master_keys[0]} cannot be true at stage 0. Only ZeRO keeps master weights of that "
            "kind. Give stage 1, 2 or 3."
        )


def _offload_mistakes(zero_config: ZeroConfig, device: str) -> Iterator[str]:
    stage = zero_config.zero_stage
    for section_name, offload_section in (
        ("offload_param", zero_config.offload_param),
        ("offload_optimizer", zero_config.offload_optimizer),
    ):
        offload_target = offload_section.device if offload_section is not None else None
        if offload_section is None or offload_target not in ("cpu", "nvme"):
            continue
        key_path = f'{ZERO}.{section_name}.device="{offload_target}"'
        if section_name == "offload_param" and stage < 3:
            yield (
                f"{key_path} needs stage 3: got stage {stage}. DeepSpeed would silently ignore it, "
                "and parameters would stay where they are. Give stage 3, or leave "
                f"{section_name} out."
            )
        elif stage == 0:
            yield (
                f"{key_path} needs stage 1, 2 or 3: got stage 0. Without ZeRO no state is "
                f"offloaded. Give a stage, or leave {section_name} out."
            )
        elif offload_target == "nvme" and stage < 3:
            yield (
                f"{key_path} needs stage 3: got stage {stage}. DeepSpeed would keep the state in "
                'host memory and write nothing to disk. Give stage 3, or device="cpu".'
            )
        elif offload_target == "nvme" and section_name == "offload_optimizer" and device == "cpu":
            yield from _aborts_on_disk(key_path)
        if offload_target == "nvme" and not offload_section.nvme_path:
            yield (
                f"{key_path} needs {ZERO}.{section_name}.nvme_path: got none. DeepSpeed would fail "
                "with a TypeError about a path. Give a folder on the fast disk."
            )


def _aborts_on_disk(path: str) -> Iterator[str]:
    # Before that release no host memory counted as pinned without a GPU, so that nothing was
    # submitted, and waiting for writes that do not exist fails.
    if old_version := library.older_than(0, 19, 6):
        yield (
            f"{path} needs DeepSpeed 0.19.6 or newer where there is no GPU: got {old_version}. "
            "It would end the process with a failed assertion in C++ (_num_pending_ops > 0). "
            'Install a newer one (pip install "deepspeed>=0.19.6"), or give device="cpu".'
        )


def batch_mistakes(
    zero_config: ZeroConfig, *, world_size: int | None, open_ends: bool
) -> Iterator[str]:
    """Where the batch sizes do not multiply out."""
    total_batch, micro_batch, accumulation_steps = (
        value if isinstance(value, int) else None
        for value in (
            zero_config.train_batch_size,
            zero_config.train_micro_batch_size_per_gpu,
            zero_config.gradient_accumulation_steps,
        )
    )
    if total_batch is None and micro_batch is None:
        if not open_ends:
            yield (
                "train_batch_size and train_micro_batch_size_per_gpu are both missing: got "
                f"gradient_accumulation_steps={accumulation_steps}. DeepSpeed needs one of them. "
                "Give train_micro_batch_size_per_gpu, the batch size of one process."
            )
        return
    # Without a total DeepSpeed multiplies the others, which cannot contradict each other.
    if total_batch is None:
        return
    sequence_ranks = zero_config.sequence_parallel_size
    known_processes = 1 if world_size is None else world_size
    # Ranks that share a sequence share its samples, too, and count as one.
    known_processes //= (
        sequence_ranks
        if isinstance(sequence_ranks, int) and known_processes % sequence_ranks == 0
        else 1
    )
    samples_per_step = (micro_batch or 1) * (accumulation_steps or 1) * known_processes
    # With a factor still open the total must at least be a multiple of the others.
    is_exact = micro_batch is not None and accumulation_steps is not None and world_size is not None
    if total_batch == samples_per_step if is_exact else total_batch % samples_per_step == 0:
        return
    factor_texts = [
        f"train_micro_batch_size_per_gpu={micro_batch}" if micro_batch else "",
        f"gradient_accumulation_steps={accumulation_steps}" if accumulation_steps else "",
        f"{known_processes} processes" if world_size is not None else "",
    ]
    product_text = " * ".join(factor_text for factor_text in factor_texts if factor_text)
    relation_text = "is not" if is_exact else "is no multiple of"
    yield (
        f"train_batch_size={total_batch} {relation_text} {product_text} = {samples_per_step}. "
        "Every step takes micro batch * accumulation * processes samples. Leave train_batch_size "
        f"out, or give {'' if is_exact else 'a multiple of '}{samples_per_step}."
    )


def sharing_mistakes(zero_config: ZeroConfig, *, world_size: int | None) -> Iterator[str]:
    """Where the secondary shards of ZeRO++ cannot be of equal size."""
    partition_size = zero_config.zero_hpz_partition_size
    if world_size is None or not isinstance(partition_size, int) or zero_config.zero_stage != 3:
        return
    if 1 < partition_size < world_size and world_size % partition_size:
        fitting_sizes = [
            rank_count for rank_count in range(2, world_size + 1) if world_size % rank_count == 0
        ]
        yield (
            f"{ZERO}.zero_hpz_partition_size={partition_size} does not divide {world_size} "
            "processes. DeepSpeed would fail in all of them when it makes its groups. Give "
            f"{' or '.join(map(str, fitting_sizes))}, or leave it out."
        )


def maker_mistakes(zero_config: ZeroConfig, schema: Schema, *, device: str) -> Iterator[str]:
    """What is wrong with the optimizer and the schedule that DeepSpeed is to make."""
    if zero_config.optimizer is not None:
        yield from _optimizer_mistakes(zero_config.optimizer, zero_config, schema, device)
    if zero_config.scheduler is not None:
        yield from _scheduler_mistakes(zero_config, schema)


def _optimizer_mistakes(
    section: OptimizerSection, zero_config: ZeroConfig, schema: Schema, device: str
) -> Iterator[str]:
    type_name = section.type
    params = section.params or {}
    if type_name is None:
        if not section.extra:  # otherwise the key that was meant has been named already
            yield _missing_type("optimizer", section.to_dict(), "AdamW")
        return
    # DeepSpeed compares its optimizers' names in lower case, and torch's as they are written.
    lower_name = type_name.lower()
    own_optimizers = schema.own_optimizers
    if lower_name in _REPLACED_OPTIMIZERS and (lower_name not in own_optimizers or device == "cpu"):
        reason = (
            f"cannot be made on the CPU. It communicates by NCCL or MPI in {schema.version}, "
            "and newer versions do not have it"
            if lower_name in own_optimizers
            else f"has been removed from DeepSpeed: {schema.version} cannot make it"
        )
        yield (
            f"optimizer.type={type_name!r} {reason}. Use "
            f"{_REPLACED_OPTIMIZERS[lower_name]!r}; to send less, set communication_data_type or "
            f"{ZERO}.zero_quantized_gradients."
        )
        return
    if lower_name not in own_optimizers and type_name not in schema.optimizers:
        yield (
            f"optimizer.type={type_name!r} is no optimizer of DeepSpeed {schema.version} or "
            "torch. It could not be made."
            f"{closest(type_name, schema.optimizers) or ' Use AdamW.'}"
        )
        return
    is_offloaded = offloads_optimizer(zero_config)
    if device == "cpu" and (lower_name == "lamb" or (lower_name == "lion" and not is_offloaded)):
        to_offload = f'Offload it: {ZERO}.offload_optimizer="cpu".'
        text = "Use AdamW." if lower_name == "lamb" else to_offload
        yield (
            f"optimizer.type={type_name!r} cannot be made on the CPU. DeepSpeed says 'This op had "
            f"not been implemented on CPU backend'. {text}"
        )
    is_allowed = lower_name in own_optimizers or zero_config.zero_allow_untested_optimizer is True
    if zero_config.zero_stage > 0 and not is_allowed:
        yield (
            f"optimizer.type={type_name!r} is not tested with ZeRO: got stage "
            f"{zero_config.zero_stage}. DeepSpeed refuses it unless the configuration allows it. "
            f"Add {_UNTESTED_HINT}, or use AdamW."
        )
    if "max_grad_norm" in params:
        yield (
            f"optimizer.params.max_grad_norm={params['max_grad_norm']!r} is no longer a "
            "parameter of an optimizer. DeepSpeed refuses it. Set gradient_clipping at the top "
            "level."
        )
        # Reported above; the check of the constructor's arguments would report it again.
        params = {k: v for k, v in params.items() if k != "max_grad_norm"}
    yield from value_mistakes("optimizer", params)
    # None where the class is not installed: then its arguments cannot be checked.
    known_arguments = optimizer_arguments(type_name, params, is_offloaded=is_offloaded)
    if known_arguments is not None:
        yield from _constructor_mistakes("optimizer", type_name, params, known_arguments)


def _scheduler_mistakes(zero_config: ZeroConfig, schema: Schema) -> Iterator[str]:
    section = zero_config.scheduler
    if section is None:
        return
    type_name = section.type
    params = section.params or {}
    if type_name is None:
        if not section.extra:
            yield _missing_type("scheduler", section.to_dict(), "WarmupLR")
        return
    known_arguments = schema.schedulers.get(type_name)
    if known_arguments is None:
        yield (
            f"scheduler.type={type_name!r} is no schedule of DeepSpeed {schema.version} or "
            "torch. It could not be made."
            f"{closest(type_name, schema.schedulers) or ' Use WarmupLR.'}"
        )
        return
    torch_own = type_name not in (
        "WarmupLR",
        "WarmupDecayLR",
        "WarmupCosineLR",
        "OneCycle",
        "LRRangeTest",
    )
    if torch_own and zero_config.zero_stage > 0:
        yield (
            f"scheduler.type={type_name!r} is torch's and cannot drive ZeRO's optimizer: got stage "
            f"{zero_config.zero_stage}. torch would refuse it as no Optimizer. Use one of "
            "DeepSpeed's, such as WarmupDecayLR, or pass a schedule to deepspeed.initialize."
        )
    yield from _constructor_mistakes("scheduler", type_name, params, known_arguments)
    for parameter_name in missing_arguments(known_arguments, params):
        yield (
            f"scheduler.params.{parameter_name} is missing: got {sorted(params)}. "
            f"{type_name} has no default for it. Give {parameter_name}."
        )
    yield from value_mistakes("scheduler", params)


def _missing_type(section_name: str, section: Any, example_type: str) -> str:
    return (
        f"{section_name}.type is missing: got {section_name}={section!r}. Without a name "
        f'DeepSpeed would silently make none. Give for example "type": "{example_type}".'
    )


def _constructor_mistakes(
    section_name: str, type_name: str, params: dict[str, Any], known_arguments: Arguments
) -> Iterator[str]:
    for parameter_name in (
        () if known_arguments.open else sorted(set(params) - known_arguments.known)
    ):
        # Names of transformers' `TrainingArguments`, which are copied into configurations.
        written_words = {"learning_rate": "lr", "warmup_steps": "warmup_num_steps"}
        meant_text = closest(
            parameter_name,
            known_arguments.known,
            {
                written_word: meant_word
                for written_word, meant_word in written_words.items()
                if meant_word in known_arguments.known
            },
        )
        yield (
            f"{section_name}.params.{parameter_name} is no argument of {known_arguments.owner}: "
            f"got {parameter_name}={params[parameter_name]!r}. DeepSpeed could not make "
            f"{type_name}.{meant_text or f' It takes {sorted(known_arguments.known)}.'}"
        )


def doubts(zero_config: ZeroConfig, *, device: str) -> Iterator[str]:
    """Settings that work but may not do what is expected."""
    if (
        zero_config.zero_stage == 3
        and zero_config.stage3_gather_16bit_weights_on_model_save is not True
    ):
        yield (
            f"{ZERO}.stage3_gather_16bit_weights_on_model_save is not set: save_16bit_model() "
            "returns False and writes nothing. Set it to true to save whole weights."
        )
    swaps_parameters = (
        zero_config.offload_param is not None and zero_config.offload_param.device == "nvme"
    )
    is_exact = (
        _is_turned_on(zero_config, "bf16") or _is_turned_on(zero_config, "fp16") or device != "cpu"
    )
    if swaps_parameters and not is_exact and not _cpu_has_fp16():
        yield (
            f"{ZERO}.offload_param on nvme with float32 on a CPU without float16 arithmetic: "
            "DeepSpeed keeps the weights as bfloat16 there. Turn on bf16 to make that explicit."
        )


def _cpu_has_fp16() -> bool:
    """DeepSpeed's test of a CPU before it trains in float16, and before it allocates weights."""
    # The class itself: `get_accelerator` would choose a device for the life of this process.
    module = library.load_module("deepspeed.accelerator.cpu_accelerator", why="float16")
    return bool(module.CPU_Accelerator().is_fp16_supported())


def _is_turned_on(config: ZeroConfig, section_name: str) -> bool:
    section = getattr(config, section_name)
    return section is not None and section.enabled is True
