"""What a run says about itself, gathered from where it is said: arguments, optimizer, schedule."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from typing import Any

from nbaccel.config import RunConfig
from nbaccel.config.plain import plain

__all__ = ["TrainingFacts", "defaults_of", "gathered", "hidden_size", "made_in"]


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingFacts:
    """What is known of a training. ``None`` says nothing.

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
    """Everything that is said, the first source that says something deciding.

    Args:
        facts: What is known already.
        run: How it will be run.
        optimizer: A torch or dummy optimizer.
        scheduler: A dummy schedule.

    Returns:
        The facts together.
    """
    found: dict[str, Any] = {}
    if run is not None:
        found |= _of_run(run)
    if optimizer is not None:
        found |= _of_optimizer(optimizer)
    if scheduler is not None:
        found["warmup_steps"] = getattr(scheduler, "warmup_num_steps", None)
        found["total_steps"] = getattr(scheduler, "total_num_steps", None)
    if facts is None:
        return TrainingFacts(**found)
    said = {entry.name: getattr(facts, entry.name) for entry in fields(facts)}
    world = said.pop("world_size")
    missing = {name: found[name] for name, value in said.items() if value is None and name in found}
    # Facts that leave the number of processes at one say nothing about it.
    return replace(facts, **missing, world_size=world if world > 1 else found.get("world_size", 1))


def defaults_of(*standins: object) -> frozenset[str]:
    """The facts that a stand-in's defaults tell: they fill in what is open, and contradict nobody.

    Args:
        *standins: A dummy optimizer, a dummy schedule, or anything else.

    Returns:
        Names of facts.
    """
    names = {
        "lr": "learning_rate",
        "weight_decay": "weight_decay",
        "warmup_num_steps": "warmup_steps",
    }
    return frozenset(
        fact
        for standin in standins
        if hasattr(standin, "given")
        for name, fact in names.items()
        if hasattr(standin, name) and name not in standin.given
    )


def _of_run(run: RunConfig) -> dict[str, Any]:
    found: dict[str, Any] = {"zero_stage": run.zero_stage}
    if run.num_processes is not None:
        found["world_size"] = run.num_processes * run.num_nodes
    if "mixed_precision" in run.model_fields_set:
        found["mixed_precision"] = run.mixed_precision
    return found


def _of_optimizer(optimizer: object) -> dict[str, Any]:
    # Accelerate's DummyOptim keeps its arguments as attributes, and the rest in kwargs.
    own = getattr(optimizer, "defaults", None)
    if not isinstance(own, dict):
        own = {**getattr(optimizer, "kwargs", {})}
        own |= {key: getattr(optimizer, key, None) for key in ("lr", "weight_decay")}
    names = {"lr": "learning_rate", "weight_decay": "weight_decay", "betas": "betas", "eps": "eps"}
    return {name: plain(own[key]) for key, name in names.items() if own.get(key) is not None}


def made_in(model: Any) -> str | None:
    """The format in which a model's weights were made: ``bfloat16``; None where nothing says it.

    Args:
        model: For example one of transformers, whose configuration says it.
    """
    config = getattr(model, "config", None)
    found = getattr(config, "dtype", None)
    if found is None:  # its name before transformers 5, which warns whoever asks for it
        found = getattr(config, "__dict__", {}).get("torch_dtype")
    return None if found is None else str(found).removeprefix("torch.")


def hidden_size(model: object) -> tuple[int | None, str]:
    """The width of a model, and where it was found.

    Published rule first: ``config.hidden_size``, the largest of ``config.hidden_sizes``, and the
    same of ``config.text_config``. A model without those is measured: the widest linear layer by
    its smaller side, because the larger one may be a vocabulary.

    Args:
        model: A model.

    Returns:
        Elements and the source; None where nothing tells it.
    """
    config = getattr(model, "config", None)
    for where in ("config", "config.text_config"):
        holder = config if where == "config" else getattr(config, "text_config", None)
        if isinstance(width := getattr(holder, "hidden_size", None), int):
            return width, f"{where}.hidden_size"
        if widths := getattr(holder, "hidden_sizes", None):
            return max(widths), f"the largest of {where}.hidden_sizes"
    modules = getattr(model, "modules", None)
    layers: Iterable[Any] = modules() if callable(modules) else ()
    sides = [
        min(layer.in_features, layer.out_features)
        for layer in layers
        if isinstance(getattr(layer, "in_features", None), int)
        and isinstance(getattr(layer, "out_features", None), int)
    ]
    return (max(sides), "the widest linear layer's smaller side") if sides else (None, "")
