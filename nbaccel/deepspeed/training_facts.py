"""The facts of a training, gathered from its arguments, optimizer and schedule."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from typing import Any

from nbaccel.config import RunConfig
from nbaccel.config.value_readers import plain_value

__all__ = ["TrainingFacts", "defaults_of", "gathered", "hidden_size", "made_in"]


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
    facts: TrainingFacts | None,
    run: RunConfig | None,
    optimizer: object | None,
    scheduler: object | None,
) -> TrainingFacts:
    """All facts; of several sources the first one that has a fact decides."""
    known_values: dict[str, Any] = {}
    if run is not None:
        known_values |= _of_run(run)
    if optimizer is not None:
        known_values |= _of_optimizer(optimizer)
    if scheduler is not None:
        known_values["warmup_steps"] = getattr(scheduler, "warmup_num_steps", None)
        known_values["total_steps"] = getattr(scheduler, "total_num_steps", None)
    if facts is None:
        return TrainingFacts(**known_values)
    given_values = {
        fact_field.name: getattr(facts, fact_field.name) for fact_field in fields(facts)
    }
    world_size = given_values.pop("world_size")
    missing_facts = {
        fact_name: known_values[fact_name]
        for fact_name, fact_value in given_values.items()
        if fact_value is None and fact_name in known_values
    }
    # One process is the field's default, which cannot be told from a value that was given.
    return replace(
        facts,
        **missing_facts,
        world_size=world_size if world_size > 1 else known_values.get("world_size", 1),
    )


def defaults_of(*standins: object) -> frozenset[str]:
    """The facts that are only a stand-in's defaults: they fill in, and contradict nothing."""
    fact_by_argument = {
        "lr": "learning_rate",
        "weight_decay": "weight_decay",
        "warmup_num_steps": "warmup_steps",
    }
    return frozenset(
        fact_name
        for stand_in in standins
        if hasattr(stand_in, "given")
        for argument_name, fact_name in fact_by_argument.items()
        if hasattr(stand_in, argument_name) and argument_name not in stand_in.given
    )


def _of_run(config: RunConfig) -> dict[str, Any]:
    values: dict[str, Any] = {"zero_stage": config.zero_stage}
    if config.num_processes is not None:
        values["world_size"] = config.num_processes * config.num_nodes
    # Its default must not contradict a file that turns a precision on.
    if "mixed_precision" in config.model_fields_set:
        values["mixed_precision"] = config.mixed_precision
    return values


def _of_optimizer(optimizer: object) -> dict[str, Any]:
    # Accelerate's DummyOptim keeps its arguments as attributes, and the rest in kwargs.
    arguments = getattr(optimizer, "defaults", None)
    if not isinstance(arguments, dict):
        arguments = {**getattr(optimizer, "kwargs", {})}
        arguments |= {
            argument_name: getattr(optimizer, argument_name, None)
            for argument_name in ("lr", "weight_decay")
        }
    fact_by_argument = {
        "lr": "learning_rate",
        "weight_decay": "weight_decay",
        "betas": "betas",
        "eps": "eps",
    }
    return {
        fact_name: plain_value(arguments[argument_name])
        for argument_name, fact_name in fact_by_argument.items()
        if arguments.get(argument_name) is not None
    }


def made_in(model: Any) -> str | None:
    """The format in which a model's weights were made: ``bfloat16``; None where it is not known."""
    config = getattr(model, "config", None)
    model_dtype = getattr(config, "dtype", None)
    # The name before transformers 5, whose attribute of that name warns when it is read: so only
    # the instance's dictionary is looked at.
    if model_dtype is None:
        model_dtype = getattr(config, "__dict__", {}).get("torch_dtype")
    return None if model_dtype is None else str(model_dtype).removeprefix("torch.")


def hidden_size(model: object) -> tuple[int | None, str]:
    """The width of a model, and where it was found.

    Published rule first: ``config.hidden_size``, the largest of ``config.hidden_sizes``, and the
    same of ``config.text_config``. A model without those is measured: the widest linear layer by
    its smaller side, because the larger one may be a vocabulary.
    """
    model_config = getattr(model, "config", None)
    for config_path in ("config", "config.text_config"):
        holder = (
            model_config if config_path == "config" else getattr(model_config, "text_config", None)
        )
        if isinstance(hidden_width := getattr(holder, "hidden_size", None), int):
            return hidden_width, f"{config_path}.hidden_size"
        if hidden_widths := getattr(holder, "hidden_sizes", None):
            return max(hidden_widths), f"the largest of {config_path}.hidden_sizes"
    # By attributes, since not only `nn.Linear` has them: quantized layers do, too.
    list_modules = getattr(model, "modules", None)
    linear_layers: Iterable[Any] = list_modules() if callable(list_modules) else ()
    sides = [
        min(linear_layer.in_features, linear_layer.out_features)
        for linear_layer in linear_layers
        if isinstance(getattr(linear_layer, "in_features", None), int)
        and isinstance(getattr(linear_layer, "out_features", None), int)
    ]
    return (max(sides), "the widest linear layer's smaller side") if sides else (None, "")
