"""``advise``: the search of the strategy that has settings to find, given the launcher."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from nbaccel.launchers import notebook_launcher
from nbaccel.plan import Inventory, registry

if TYPE_CHECKING:
    from nbaccel.deepspeed.advise import Advice


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
    max_trials: int = 20,
    timeout: float = 600.0,
    inventory: Inventory | None = None,
) -> Advice:
    """Find the fastest DeepSpeed configuration that fits.

    The ways to train are tried in a published order, the fastest first: as it is, gradient
    checkpointing, ZeRO-1, ZeRO-2, with the optimizer offloaded, ZeRO-3, with the optimizer, with
    parameters, with both offloaded, NVMe; then again with half the batch and twice the
    accumulation, so that an optimizer step sees the same samples. (Source: the DeepSpeed guide of
    transformers, "Select a ZeRO stage".)

    Args:
        model: The model; without `try_it` it may be on ``meta``. It stays as it is.
        sample_batch: What one process calls it with: a dict, a tuple or a tensor, whose first
            dimension counts samples. Without it activations are left out.
        config: A DeepSpeed configuration to begin with: what the way does not decide is kept.
        num_processes: Processes on each machine. None: one per GPU or TPU chip, or one.
        num_nodes: Machines.
        device_memory: What may be used on each device: bytes, or ``"16 GiB"``. None: what is free.
        host_memory: What may be used of each host.
        nvme_memory: What may be used of the disk.
        nvme_path: A folder on the fast disk; None leaves NVMe out, unless `config` names one.
        optimizer: DeepSpeed's optimizer, where `config` has none.
        precision: ``"auto"`` as the hardware allows, ``"fp32"``, ``"bf16"`` or ``"fp16"``.
        try_it: Whether to prove the choice: one real step in worker processes that end with it,
            way after way until one works. On a CPU a worker is held to its share of memory, so
            that nothing else is harmed.
        max_trials: How many launches that may take.
        timeout: Seconds that one launch may take.
        inventory: What the machine has; None looks at this one.

    Returns:
        The advice: `config` to train with, and a table of all ways with reasons. Where nothing
        fits, `config` is None, and the table says what is missing.

    Raises:
        ConfigError: A setting is wrong, or activations cannot be measured.
        MissingBackend: DeepSpeed, or nbaccel's backend for it, is not installed.
        WorkerFailed: (With `try_it`) a step failed for another reason than memory.
    """
    asked = SimpleNamespace(**locals())
    __tracebackhide__ = True
    advice: Advice = registry.load_advisor()(asked, notebook_launcher)
    return advice
