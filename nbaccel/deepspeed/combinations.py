"""Values of a DeepSpeed configuration that are right alone and wrong together, or wrong here."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from nbaccel.config.mistakes import closest
from nbaccel.deepspeed import library
from nbaccel.deepspeed.config import ZERO, ZeroConfig
from nbaccel.deepspeed.kinds import AUTO
from nbaccel.deepspeed.ops import offloads_optimizer
from nbaccel.deepspeed.schema import Arguments, Schema, optimizer_arguments, required
from nbaccel.deepspeed.values import value_mistakes

__all__ = [
    "batch_mistakes",
    "combination_mistakes",
    "doubts",
    "maker_mistakes",
    "sharing_mistakes",
]

# What DeepSpeed took out on the way to 0.19.7; before, these worked on GPUs alone.
_REPLACED = {
    "onebitadam": "AdamW",
    "zerooneadam": "AdamW",
    "onebitlamb": "Lamb",
}
_NO_OP_ON_CPU = {"lamb": "AdamW"}
# Those ZeRO is tested with, by DeepSpeed's own list.
_UNTESTED_HINT = '"zero_allow_untested_optimizer": true'


def combination_mistakes(config: ZeroConfig, *, device: str) -> Iterator[str]:
    """What cannot go together.

    Args:
        config: The configuration.
        device: What the processes compute on.

    Yields:
        A message each.
    """
    open_stage = config.stage == AUTO
    if not open_stage:
        yield from _offload_mistakes(config, device)
    half = [name for name in ("fp16", "bf16") if _enabled(config, name)]
    if len(half) == 2:
        yield (
            "fp16.enabled and bf16.enabled are both true. Training has one number format, and "
            "DeepSpeed refuses two. Turn one of them off."
        )
    if "fp16" in half and device == "cpu" and not _cpu_has_fp16():
        yield (
            "fp16.enabled cannot be true on this CPU, which has no float16 arithmetic: got "
            "fp16.enabled=True. DeepSpeed says 'Type fp16 is not supported on your device'. Use "
            "bf16."
        )
    if config.gradient_allreduce_op == "sum" and config.zero_stage == 3:
        yield (
            'gradient_allreduce_op cannot be "sum" at stage 3. DeepSpeed refuses it there. '
            'Give "mean", or a stage below 3.'
        )
    masters = [
        f"{name}.{name}_master_weights_and_grads"
        for name in ("fp16", "bf16")
        if getattr(getattr(config, name), f"{name}_master_weights_and_grads", None) is True
    ]
    if masters and config.zero_stage == 0 and not open_stage:
        yield (
            f"{masters[0]} cannot be true at stage 0. Only ZeRO keeps master weights of that "
            "kind. Give stage 1, 2 or 3."
        )


def _offload_mistakes(config: ZeroConfig, device: str) -> Iterator[str]:
    stage = config.zero_stage
    for name, section in (
        ("offload_param", config.offload_param),
        ("offload_optimizer", config.offload_optimizer),
    ):
        target = section.device if section is not None else None
        if section is None or target not in ("cpu", "nvme"):
            continue
        where = f'{ZERO}.{name}.device="{target}"'
        if name == "offload_param" and stage < 3:
            yield (
                f"{where} needs stage 3: got stage {stage}. DeepSpeed would ignore it without a "
                f"word, and parameters would stay where they are. Give stage 3, or leave {name} "
                "out."
            )
        elif stage == 0:
            yield (
                f"{where} needs stage 1, 2 or 3: got stage 0. Without ZeRO no state is offloaded. "
                f"Give a stage, or leave {name} out."
            )
        elif target == "nvme" and stage < 3:
            yield (
                f"{where} needs stage 3: got stage {stage}. DeepSpeed would keep the state in host "
                'memory and write nothing to disk. Give stage 3, or device="cpu".'
            )
        elif target == "nvme" and name == "offload_optimizer" and device == "cpu":
            yield from _aborts_on_disk(where)
        if target == "nvme" and not section.nvme_path:
            yield (
                f"{where} needs {ZERO}.{name}.nvme_path: got none. DeepSpeed would fail with a "
                "TypeError about a path. Give a folder on the fast disk."
            )


def _aborts_on_disk(where: str) -> Iterator[str]:
    # Before that release no memory of a CPU counted as pinned, and a write of nothing was awaited.
    if version := library.older_than(0, 19, 6):
        yield (
            f"{where} needs DeepSpeed 0.19.6 or newer where there is no GPU: got {version}. It "
            "would end the process with a failed assertion in C++ (_num_pending_ops > 0). Install "
            'a newer one (pip install "deepspeed>=0.19.6"), or give device="cpu".'
        )


def batch_mistakes(config: ZeroConfig, *, world_size: int | None, open_ends: bool) -> Iterator[str]:
    """Where the batch sizes do not multiply out.

    Args:
        config: The configuration.
        world_size: Processes that share the batch; None where not known.
        open_ends: Whether sizes may be missing, because they are resolved later.

    Yields:
        A message at most.
    """
    total, micro, steps = (
        value if isinstance(value, int) else None
        for value in (
            config.train_batch_size,
            config.train_micro_batch_size_per_gpu,
            config.gradient_accumulation_steps,
        )
    )
    if total is None and micro is None:
        if not open_ends:
            yield (
                "train_batch_size and train_micro_batch_size_per_gpu are both missing: got "
                f"gradient_accumulation_steps={steps}. DeepSpeed needs one of them. Give "
                "train_micro_batch_size_per_gpu, the batch size of one process."
            )
        return
    if total is None:
        return
    shared = config.sequence_parallel_size
    known = 1 if world_size is None else world_size
    known //= shared if isinstance(shared, int) and known % shared == 0 else 1
    parts = (micro or 1) * (steps or 1) * known
    exact = micro is not None and steps is not None and world_size is not None
    if total == parts if exact else total % parts == 0:
        return
    factors = [
        f"train_micro_batch_size_per_gpu={micro}" if micro else "",
        f"gradient_accumulation_steps={steps}" if steps else "",
        f"{known} processes" if world_size is not None else "",
    ]
    product = " * ".join(factor for factor in factors if factor)
    relation = "is not" if exact else "is no multiple of"
    yield (
        f"train_batch_size={total} {relation} {product} = {parts}. Every step takes "
        "micro batch * accumulation * processes samples. "
        f"Leave train_batch_size out, or give {'' if exact else 'a multiple of '}{parts}."
    )


def sharing_mistakes(config: ZeroConfig, *, world_size: int | None) -> Iterator[str]:
    """Where ZeRO++'s second shards do not come out even.

    Args:
        config: The configuration.
        world_size: Processes; None where not known.

    Yields:
        A message at most.
    """
    size = config.zero_hpz_partition_size
    if world_size is None or not isinstance(size, int) or config.zero_stage != 3:
        return
    if 1 < size < world_size and world_size % size:
        fits = [number for number in range(2, world_size + 1) if world_size % number == 0]
        yield (
            f"{ZERO}.zero_hpz_partition_size={size} does not divide {world_size} processes. "
            "DeepSpeed would fail in all of them when it makes its groups. Give "
            f"{' or '.join(map(str, fits))}, or leave it out."
        )


def maker_mistakes(config: ZeroConfig, schema: Schema, *, device: str) -> Iterator[str]:
    """What is wrong with the optimizer and the schedule that DeepSpeed is to make.

    Args:
        config: The configuration.
        schema: What the installed DeepSpeed knows.
        device: What the processes compute on.

    Yields:
        A message each.
    """
    if config.optimizer is not None:
        yield from _optimizer_mistakes(config, schema, device)
    if config.scheduler is not None:
        yield from _scheduler_mistakes(config, schema)


def _optimizer_mistakes(config: ZeroConfig, schema: Schema, device: str) -> Iterator[str]:
    section = config.optimizer
    if section is None:
        return
    name, params = section.type, section.params or {}
    if name is None:
        if not section.extra:  # else the key that was meant has been named already
            yield _typeless("optimizer", section.to_dict(), "AdamW")
        return
    low = name.lower()
    own = schema.own_optimizers
    if low in _REPLACED and (low not in own or device == "cpu"):
        why = (
            f"cannot be made on the CPU. It communicates by NCCL or MPI in {schema.version}, and "
            "newer versions have it no more"
            if low in own
            else f"has been removed from DeepSpeed: {schema.version} cannot make it"
        )
        yield (
            f"optimizer.type={name!r} {why}. Use {_REPLACED[low]!r}; to send less, set "
            f"communication_data_type or {ZERO}.zero_quantized_gradients."
        )
        return
    if low not in own and name not in schema.optimizers:
        yield (
            f"optimizer.type={name!r} is no optimizer of DeepSpeed {schema.version} or torch. "
            f"It could not be made.{closest(name, schema.optimizers) or ' Use AdamW.'}"
        )
        return
    host = offloads_optimizer(config)
    if device == "cpu" and (low == "lamb" or (low == "lion" and not host)):
        remedy = "Use AdamW." if low == "lamb" else f'Offload it: {ZERO}.offload_optimizer="cpu".'
        yield (
            f"optimizer.type={name!r} cannot be made on the CPU. DeepSpeed says 'This op had not "
            f"been implemented on CPU backend'. {remedy}"
        )
    tested = low in own
    if config.zero_stage > 0 and not tested and config.zero_allow_untested_optimizer is not True:
        yield (
            f"optimizer.type={name!r} is not tested with ZeRO: got stage {config.zero_stage}. "
            f"DeepSpeed refuses it until it is told. Add {_UNTESTED_HINT}, or use AdamW."
        )
    if "max_grad_norm" in params:
        yield (
            f"optimizer.params.max_grad_norm={params['max_grad_norm']!r} is no parameter of an "
            "optimizer any more. DeepSpeed refuses it. Set gradient_clipping at the top level."
        )
        params = {key: value for key, value in params.items() if key != "max_grad_norm"}
    yield from value_mistakes("optimizer", params)
    takes = optimizer_arguments(name, params, offloaded=host)
    if takes is not None:
        yield from _argument_mistakes("optimizer", name, params, takes)


def _scheduler_mistakes(config: ZeroConfig, schema: Schema) -> Iterator[str]:
    section = config.scheduler
    if section is None:
        return
    name, params = section.type, section.params or {}
    if name is None:
        if not section.extra:
            yield _typeless("scheduler", section.to_dict(), "WarmupLR")
        return
    takes = schema.schedulers.get(name)
    if takes is None:
        yield (
            f"scheduler.type={name!r} is no schedule of DeepSpeed {schema.version} or torch. "
            f"It could not be made.{closest(name, schema.schedulers) or ' Use WarmupLR.'}"
        )
        return
    torch_own = name not in (
        "WarmupLR",
        "WarmupDecayLR",
        "WarmupCosineLR",
        "OneCycle",
        "LRRangeTest",
    )
    if torch_own and config.zero_stage > 0:
        yield (
            f"scheduler.type={name!r} is torch's and cannot drive ZeRO's optimizer: got stage "
            f"{config.zero_stage}. torch would refuse it as no Optimizer. Use one of DeepSpeed's, "
            "such as WarmupDecayLR, or hand a schedule to deepspeed.initialize."
        )
    yield from _argument_mistakes("scheduler", name, params, takes)
    for key in required(takes, params):
        yield (
            f"scheduler.params.{key} is missing: got {sorted(params)}. {name} has no default for "
            f"it. Give {key}."
        )
    yield from value_mistakes("scheduler", params)


def _typeless(section: str, found: Any, example: str) -> str:
    return (
        f"{section}.type is missing: got {section}={found!r}. Without a name DeepSpeed would make "
        f'none, without a word. Give for example "type": "{example}".'
    )


def _argument_mistakes(
    section: str, name: str, params: dict[str, Any], takes: Arguments
) -> Iterator[str]:
    for key in () if takes.open else sorted(set(params) - takes.known):
        words = {"learning_rate": "lr", "warmup_steps": "warmup_num_steps"}
        meant = closest(key, takes.known, {k: v for k, v in words.items() if v in takes.known})
        yield (
            f"{section}.params.{key} is no argument of {takes.owner}: got {key}={params[key]!r}. "
            f"DeepSpeed could not make {name}.{meant or f' It takes {sorted(takes.known)}.'}"
        )


def doubts(config: ZeroConfig, *, device: str) -> Iterator[str]:
    """What will work and may disappoint.

    Args:
        config: The configuration.
        device: What the processes compute on.

    Yields:
        A sentence each.
    """
    if config.zero_stage == 3 and config.stage3_gather_16bit_weights_on_model_save is not True:
        yield (
            f"{ZERO}.stage3_gather_16bit_weights_on_model_save is not set: save_16bit_model() "
            "returns False and writes nothing. Set it to true to save whole weights."
        )
    swaps = config.offload_param is not None and config.offload_param.device == "nvme"
    exact = _enabled(config, "bf16") or _enabled(config, "fp16") or device != "cpu"
    if swaps and not exact and not _cpu_has_fp16():
        yield (
            f"{ZERO}.offload_param on nvme with float32 on a CPU without float16 arithmetic: "
            "DeepSpeed keeps the weights as bfloat16 there. Turn on bf16 to know what you "
            "train."
        )


def _cpu_has_fp16() -> bool:
    """What DeepSpeed asks of a CPU before it trains in float16, and before it allots weights."""
    cpu = library.load("deepspeed.accelerator.cpu_accelerator", why="float16")
    return bool(cpu.CPU_Accelerator().is_fp16_supported())


def _enabled(config: ZeroConfig, name: str) -> bool:
    section = getattr(config, name)
    return section is not None and section.enabled is True
