"""The advisor: the ladder walked by estimates and, with `try_it`, by real steps in workers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nbaccel.base.errors import ConfigError
from nbaccel.base.units import parse_bytes
from nbaccel.config import RunConfig
from nbaccel.deepspeed.advisor.advice import Advice, Rung
from nbaccel.deepspeed.advisor.ladder import Recipe, TrainingPrecision, batch_of, choose_precision
from nbaccel.deepspeed.advisor.search import Budget, Walk, climb
from nbaccel.deepspeed.checking import check_config
from nbaccel.deepspeed.load_config import load_settings
from nbaccel.deepspeed.zero_memory import nvme_folders
from nbaccel.memory.activations import num_samples
from nbaccel.memory.model_size import measure, refuse_unsized
from nbaccel.plan import Inventory, Plan, inspect_machine, registry, resolve
from nbaccel.strategies.gradient_checkpointing import (
    can_checkpoint_gradients,
    checkpoints_gradients,
)

if TYPE_CHECKING:
    from nbaccel.deepspeed.advisor.proving import Prover
    from nbaccel.deepspeed.advisor.trial import Search

__all__ = ["advise"]


def advise(
    model: Any,
    sample_batch: Any = None,
    *,
    config: Mapping[str, Any] | str | Path | Any = None,
    num_processes: int | None = None,
    num_nodes: int = 1,
    device_memory: int | str | None = None,
    host_memory: int | str | None = None,
    nvme_memory: int | str | None = None,
    nvme_path: str | Path | None = None,
    optimizer: str = "AdamW",
    precision: str = "auto",
    try_it: bool = False,
    max_trials: int = 12,
    timeout: float = 600.0,
    inventory: Inventory | None = None,
    launch: Callable[..., Any] | None = None,
) -> Advice:
    """Find the fastest DeepSpeed configuration that fits: ``nbaccel.advise`` with the launcher.

    All arguments but ``launch`` (``notebook_launcher``, with which `try_it` proves a rung), what is
    returned and what is raised are documented there.
    """
    __tracebackhide__ = True
    _check_advise_arguments(
        model, sample_batch, try_it=try_it, num_nodes=num_nodes, max_trials=max_trials
    )
    machine_inventory = inventory or inspect_machine()
    plan = resolve(RunConfig(num_processes=num_processes), machine_inventory)
    settings = {} if config is None else _load_checked(config, machine_inventory)
    world_size = plan.num_processes * num_nodes
    device = registry.device(plan.device)
    device_units = device.units(machine_inventory)[: plan.num_processes]
    training_precision = choose_precision(
        precision, base_config=settings, model=model, device_units=device_units
    )
    ladder_walk = Walk(
        recipe=Recipe(
            model=model,
            shape=measure(model),
            precision=training_precision.name,
            optimizer=optimizer,
            world_size=world_size,
            base=settings,
            nvme_path=_nvme_folder(settings, nvme_path),
            pin_memory=device.pins_host_memory,
        ),
        sample_batch=sample_batch,
        num_processes=plan.num_processes,
        num_nodes=num_nodes,
        inventory=machine_inventory,
        budget=Budget(
            device=_bytes_given(device_memory),
            host=_bytes_given(host_memory),
            nvme=_bytes_given(nvme_memory),
        ),
    )
    sample_count = None if sample_batch is None else num_samples(sample_batch)
    batch = batch_of(settings, samples=sample_count, world_size=world_size)
    ladder_rounds = ladder_walk.rounds(*batch)
    step_prover = None
    if try_it and launch is not None:
        step_prover = _new_prover(ladder_walk, plan, launch, max_trials, timeout)
    return _advice_of(ladder_walk, ladder_rounds, plan, training_precision, step_prover)


def _load_checked(
    config: Mapping[str, Any] | str | Path | Any, machine_inventory: Inventory
) -> dict[str, Any]:
    # Checked once before the walk, so that mistakes of the user's file are reported as such, and
    # not as the reason why a rung is not available.
    base_settings = load_settings(config)
    check_config(base_settings, inventory=machine_inventory, allow_auto=True, check_tools=False)
    return base_settings


def _new_prover(
    walk: Walk,
    plan: Plan,
    launch: Callable[..., Any],
    max_trials: int,
    timeout_s: float,
) -> Prover:
    # Imported here, because it brings the modules that train, which an estimate does not need.
    from nbaccel.deepspeed.advisor.proving import Prover

    return Prover(
        walk=walk,
        plan=plan,
        max_trials=max_trials,
        timeout_s=timeout_s,
        launch=launch,
    )


def _nvme_folder(settings: Mapping[str, Any], nvme_path: str | Path | None) -> str | None:
    if nvme_path is not None:
        return str(nvme_path)
    return next(map(str, nvme_folders(settings)), None)


def _advice_of(
    ladder_walk: Walk,
    ladder_rounds: Iterator[Any],
    launch_plan: Plan,
    precision: TrainingPrecision,
    step_prover: Prover | None,
) -> Advice:
    batch_search: Search | None = None
    if step_prover is not None:
        tried_rungs, rung = climb(ladder_rounds, step_prover.prove)
        if rung is not None:
            rung, batch_search = step_prover.largest(rung)
            # The chosen rung may have another batch now, and must be the same object as in the
            # table.
            tried_rungs = tuple(
                rung if ladder_rung.step == rung.step else ladder_rung
                for ladder_rung in tried_rungs
            )
    else:
        tried_rungs, rung = climb(ladder_rounds)
    return Advice(
        rungs=tried_rungs,
        chosen=rung,
        precision=precision.name,
        num_processes=launch_plan.num_processes,
        largest_batch_size=batch_search.works if batch_search else None,
        is_largest=batch_search is None or batch_search.fails is not None,
        warnings=tuple(_advice_warnings(ladder_walk, precision, rung)),
    )


def _advice_warnings(walk: Walk, precision: TrainingPrecision, rung: Rung | None) -> Iterator[str]:
    if walk.sample_batch is None:
        yield "Activations are not in it: they depend on the batch. Give sample_batch."
    if precision.warning:
        yield precision.warning
    yield from _checkpointing_note(walk, rung)
    config = rung.config if rung is not None else None
    if config is None:
        return
    # Only where the advisor has chosen it: the user's own setting needs no remark.
    if _torch_adam(config) and not _torch_adam(walk.recipe.base):
        yield "With torch's Adam (torch_adam), since DeepSpeed's own cannot be compiled here."
    yield from check_config(config, inventory=walk.inventory).warnings


def _checkpointing_note(walk: Walk, chosen_rung: Rung | None) -> Iterator[str]:
    """A remark where activations are counted as recomputed, which the user has to turn on."""
    model = walk.recipe.model
    if checkpoints_gradients(model) or not can_checkpoint_gradients(model):
        return
    if chosen_rung is None:
        counting_rungs = "All rungs but the first count"
    elif chosen_rung.step.gradient_checkpointing:
        counting_rungs = f"{chosen_rung.name} counts"
    else:
        return
    yield (
        f"{counting_rungs} with gradient checkpointing, which no DeepSpeed configuration turns on: "
        "call model.gradient_checkpointing_enable() before training."
    )


def _torch_adam(config: Mapping[str, Any]) -> bool:
    return bool(((config.get("optimizer") or {}).get("params") or {}).get("torch_adam"))


def _check_advise_arguments(
    model: Any, sample_batch: Any, *, try_it: bool, num_nodes: int, max_trials: int
) -> None:
    refuse_unsized(model)
    if not callable(getattr(model, "modules", None)):
        raise ConfigError(
            f"model={model!r} is no module: its parameters decide what fits. Give the model; it "
            "may be on meta."
        )
    mistakes = []
    if num_nodes < 1:
        mistakes.append(f"num_nodes={num_nodes} means no machine. Use 1 or more.")
    if try_it and sample_batch is None:
        mistakes.append(
            f"try_it=True needs a batch for its real step: got sample_batch={sample_batch}. Give "
            "what your loader gives one process."
        )
    if try_it and any(parameter.is_meta for parameter in model.parameters()):
        mistakes.append(
            f"try_it=True cannot run {type(model).__name__}, which is on meta: it has no values. "
            "Leave try_it out, or make the model with values."
        )
    if try_it and num_nodes > 1:
        mistakes.append(
            f"try_it=True can start processes on this machine only: got num_nodes={num_nodes}. "
            "Leave one of them out."
        )
    if try_it and max_trials < 1:
        mistakes.append(f"max_trials={max_trials} tries nothing. Use 1 or more, or try_it=False.")
    if mistakes:
        raise ConfigError(*mistakes)


def _bytes_given(size: int | str | None) -> int | None:
    return None if size is None else parse_bytes(size)
