"""The facts of a training, gathered from its arguments, optimizer and schedule."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

from nbaccel.config import RunConfig
from nbaccel.config.given_values import plain_value

_FACT_OF_ARGUMENT = {
    "lr": "learning_rate",
    "weight_decay": "weight_decay",
    "betas": "betas",
    "eps": "eps",
    "warmup_num_steps": "warmup_steps",
    "total_num_steps": "total_steps",
}
"""Argument of an optimizer or a schedule → the fact that it tells."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingFacts:
    """What is known of a training. ``None`` means not known.

    Attributes:
        world_size: Processes that share a batch.
        micro_batch_size: Samples per process and forward pass.
        accumulation_steps: Forward passes per optimizer step.
        max_grad_norm: Largest norm of gradients.
        mixed_precision: ``no``, ``fp16``, ``bf16`` or ``fp8``.
        learning_rate: The optimizer's, and what a warm-up ends at.
        weight_decay: The optimizer's.
        betas: The optimizer's.
        eps: The optimizer's.
        warmup_steps: Steps; below 1 a share of all of them.
        total_steps: Optimizer steps in all.
        zero_stage: ZeRO stage.
        offload_optimizer: ``none``, ``cpu`` or ``nvme``.
        offload_param: ``none``, ``cpu`` or ``nvme``.
        nvme_path: Folder on the fast disk.
        gather_16bit_weights: Whether saving gathers weights at stage 3.
    """

    world_size: int = 1
    micro_batch_size: int | None = None
    accumulation_steps: int | None = None
    max_grad_norm: float | None = None
    mixed_precision: str | None = None
    learning_rate: float | None = None
    weight_decay: float | None = None
    betas: tuple[float, float] | None = None
    eps: float | None = None
    warmup_steps: float | None = None
    total_steps: int | None = None
    zero_stage: int | None = None
    offload_optimizer: str | None = None
    offload_param: str | None = None
    nvme_path: str | None = None
    gather_16bit_weights: bool | None = None


def gathered(
    facts: TrainingFacts | None, run: RunConfig | None, optimizer: object, scheduler: object
) -> TrainingFacts:
    """All facts; of several sources the first one that has a fact decides."""
    known: dict[str, Any] = {}
    if run is not None:
        known["zero_stage"] = run.zero_stage
        if run.num_processes is not None:
            known["world_size"] = run.num_processes * run.num_nodes
        # Its default must not contradict a file that turns a precision on.
        if "mixed_precision" in run.model_fields_set:
            known["mixed_precision"] = run.mixed_precision
    known |= _of_maker(optimizer) | _of_maker(scheduler)
    facts = facts or TrainingFacts()
    # A field's default cannot be told from the same value that was given.
    given = {one.name for one in fields(facts) if getattr(facts, one.name) != one.default}
    return replace(facts, **{name: value for name, value in known.items() if name not in given})


def _of_maker(maker: object) -> dict[str, Any]:
    # A torch optimizer has `defaults`; Accelerate's stand-ins keep arguments as attributes, and
    # the rest in `kwargs`.
    held = getattr(maker, "defaults", None)
    if not isinstance(held, dict):
        held = {**getattr(maker, "kwargs", {}), **getattr(maker, "__dict__", {})}
    return {
        fact: plain_value(held[name])
        for name, fact in _FACT_OF_ARGUMENT.items()
        if held.get(name) is not None
    }


def defaults_of(*stand_ins: object) -> frozenset[str]:
    """The facts that are only a stand-in's defaults: they fill in, and contradict nothing."""
    return frozenset(
        _FACT_OF_ARGUMENT[name]
        for stand_in in stand_ins
        if hasattr(stand_in, "given")
        for name in ("lr", "weight_decay", "warmup_num_steps")
        if hasattr(stand_in, name) and name not in stand_in.given
    )


def made_in(model: Any) -> str | None:
    """The format in which a model's weights were made: ``bfloat16``; None where it is not known."""
    config = getattr(model, "config", None)
    model_dtype = getattr(config, "dtype", None)
    # The name before transformers 5, whose attribute of that name warns when it is read: so only
    # the instance's dictionary is looked at.
    if model_dtype is None:
        model_dtype = getattr(config, "__dict__", {}).get("torch_dtype")
    return None if model_dtype is None else str(model_dtype).removeprefix("torch.")


def hidden_size(model: Any) -> tuple[int | None, str]:
    """The width of a model, and where it was found.

    Published rule first: ``config.hidden_size``, the largest of ``config.hidden_sizes``, and the
    same of ``config.text_config``. A model without those is measured: the widest linear layer by
    its smaller side, because the larger one may be a vocabulary.
    """
    config = getattr(model, "config", None)
    for path, holder in (
        ("config", config),
        ("config.text_config", getattr(config, "text_config", None)),
    ):
        if isinstance(width := getattr(holder, "hidden_size", None), int):
            return width, f"{path}.hidden_size"
        if widths := getattr(holder, "hidden_sizes", None):
            return max(widths), f"the largest of {path}.hidden_sizes"
    # By attributes, since not only `nn.Linear` has them: quantized layers do, too.
    layers = model.modules() if callable(getattr(model, "modules", None)) else ()
    sides = [
        min(layer.in_features, layer.out_features)
        for layer in layers
        if isinstance(getattr(layer, "in_features", None), int)
        and isinstance(getattr(layer, "out_features", None), int)
    ]
    return (max(sides), "the widest linear layer's smaller side") if sides else (None, "")
