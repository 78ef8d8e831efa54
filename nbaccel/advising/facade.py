"""``advise``: a façade on the ladder's estimates and, where asked, on real steps in workers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nbaccel.config import RunConfig
from nbaccel.deepspeed.advisor.advice import Advice, Rung
from nbaccel.deepspeed.advisor.configs import Recipe, batch_of
from nbaccel.deepspeed.advisor.precision import Precision, choose_precision
from nbaccel.deepspeed.advisor.walking import Budget, Walk, climb
from nbaccel.deepspeed.batches import num_samples
from nbaccel.deepspeed.checking import check_config
from nbaccel.deepspeed.decided import nvme_folders
from nbaccel.deepspeed.reading import load_settings
from nbaccel.deepspeed.shape import measure
from nbaccel.errors import ConfigError
from nbaccel.plan import Inventory, Plan, inspect_machine, resolve
from nbaccel.strategies.gradient_checkpointing import (
    can_checkpoint_gradients,
    checkpoints_gradients,
)
from nbaccel.units import parse_bytes

if TYPE_CHECKING:
    from nbaccel.advising.trial import Search

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
) -> Advice:
    """Find the fastest DeepSpeed configuration that fits.

    The published ladder is walked, the fastest rung first: as it is, gradient checkpointing,
    ZeRO-2, with the optimizer offloaded, ZeRO-3, with parameters offloaded, with both, NVMe; then
    again with half the batch and twice the accumulation, so that an optimizer step sees the same
    samples. (Source: the DeepSpeed guide of transformers, "Select a ZeRO stage".)

    Args:
        model: The model; without `try_it` it may be on ``meta``. It stays as it is.
        sample_batch: What one process calls it with: a dict, a tuple or a tensor, whose first
            dimension counts samples. Without it activations are left out.
        config: A DeepSpeed configuration to begin with: what the ladder does not decide is kept.
        num_processes: Processes on each machine. None: one per GPU, or one.
        num_nodes: Machines.
        device_memory: What may be used on each device: bytes, or ``"16 GiB"``. None: what is free.
        host_memory: What may be used of each host.
        nvme_memory: What may be used of the disk.
        nvme_path: A folder on the fast disk; None leaves NVMe out, unless `config` names one.
        optimizer: DeepSpeed's optimizer, where `config` has none.
        precision: ``"auto"`` as the hardware allows, ``"fp32"``, ``"bf16"`` or ``"fp16"``.
        try_it: Whether to prove the choice: one real step in worker processes that end with it,
            rung after rung until one works, and then the largest batch that does. On a CPU a
            worker is held to its share of memory, so that nothing else is harmed.
        max_trials: How many launches that may take.
        timeout: Seconds that one launch may take.
        inventory: What the machine has; None looks at this one.

    Returns:
        The advice: `config` to train with, and a table of all rungs with reasons. Where nothing
        fits, `config` is None, and the table says what is missing.

    Raises:
        ConfigError: A setting is wrong, or activations cannot be measured.
        MissingBackend: DeepSpeed is not installed.
        WorkerFailed: (With `try_it`) a step failed for another reason than memory.
    """
    __tracebackhide__ = True
    _check(model, sample_batch, try_it=try_it, num_nodes=num_nodes, max_trials=max_trials)
    machine = inventory or inspect_machine()
    plan = resolve(RunConfig(num_processes=num_processes), machine)
    base = {} if config is None else load_settings(config)
    world = plan.num_processes * num_nodes
    if config is not None:  # its mistakes are the user's, and not a rung's
        check_config(base, inventory=machine, allow_auto=True, check_tools=False)
    gpus = machine.gpus[: plan.num_processes] if plan.device == "cuda" else ()
    folders = nvme_folders(base) if nvme_path is None else [nvme_path]
    format_ = choose_precision(precision, config=base, model=model, gpus=gpus)
    recipe = Recipe(
        model=model,
        shape=measure(model),
        precision=format_.name,
        optimizer=optimizer,
        world_size=world,
        base=base,
        nvme_path=next(map(str, folders), None),
        pin_memory=plan.device == "cuda",
    )
    walk = Walk(
        recipe=recipe,
        sample_batch=sample_batch,
        num_processes=plan.num_processes,
        num_nodes=num_nodes,
        inventory=machine,
        budget=Budget(
            device=_bytes(device_memory), host=_bytes(host_memory), nvme=_bytes(nvme_memory)
        ),
    )
    samples = None if sample_batch is None else num_samples(sample_batch)
    rounds = walk.rounds(*batch_of(base, samples=samples, world_size=world))
    return _advice(walk, rounds, plan, format_, max_trials if try_it else 0, timeout)


def _advice(
    walk: Walk, rounds: Iterator[Any], plan: Plan, format_: Precision, trials: int, timeout: float
) -> Advice:
    search: Search | None = None
    if trials:
        from nbaccel.advising.proving import Prover

        prover = Prover(walk=walk, plan=plan, max_trials=trials, timeout_s=timeout)
        rungs, chosen = climb(rounds, prover.prove)
        if chosen is not None:
            chosen, search = prover.largest(chosen)
            rungs = tuple(chosen if rung.step == chosen.step else rung for rung in rungs)
    else:
        rungs, chosen = climb(rounds)
    return Advice(
        rungs=rungs,
        chosen=chosen,
        precision=format_.name,
        num_processes=plan.num_processes,
        largest_batch_size=search.works if search else None,
        is_largest=search is None or search.fails is not None,
        warnings=tuple(_warnings(walk, format_, chosen)),
    )


def _warnings(walk: Walk, format_: Precision, chosen: Rung | None) -> Iterator[str]:
    if walk.sample_batch is None:
        yield "Activations are not in it: they depend on the batch. Give sample_batch."
    if format_.warning:
        yield format_.warning
    yield from _checkpointing(walk, chosen)
    config = chosen.config if chosen is not None else None
    if config is None:
        return
    if _torch_adam(config) and not _torch_adam(walk.recipe.base):
        yield "With torch's Adam (torch_adam), since DeepSpeed's own cannot be compiled here."
    yield from check_config(config, inventory=walk.inventory).warnings


def _checkpointing(walk: Walk, chosen: Rung | None) -> Iterator[str]:
    """Activations are counted as if they were computed again; that is to be turned on."""
    model = walk.recipe.model
    if checkpoints_gradients(model) or not can_checkpoint_gradients(model):
        return
    if chosen is None:
        which = "All rungs but the first count"
    elif chosen.step.gradient_checkpointing:
        which = f"{chosen.name} counts"
    else:
        return
    yield (
        f"{which} with gradient checkpointing, which no DeepSpeed configuration turns on: call "
        "model.gradient_checkpointing_enable() before training."
    )


def _torch_adam(config: Mapping[str, Any]) -> bool:
    return bool(((config.get("optimizer") or {}).get("params") or {}).get("torch_adam"))


def _check(model: Any, sample_batch: Any, *, try_it: bool, num_nodes: int, max_trials: int) -> None:
    if not callable(getattr(model, "modules", None)):
        raise ConfigError(
            f"model={model!r} is no module: its parameters decide what fits. Give the model; it "
            "may be on meta."
        )
    mistakes = []
    if num_nodes < 1:
        mistakes.append(f"num_nodes={num_nodes} is no machine. Use 1 or more.")
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


def _bytes(size: int | str | None) -> int | None:
    return None if size is None else parse_bytes(size)
