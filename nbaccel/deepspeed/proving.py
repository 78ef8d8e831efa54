"""Proof by launching: a real step by DeepSpeed's engine, in workers that end with it.

Each trial is a launch: a worker that holds itself to its share of memory may run out of it, or be
killed, and nothing else is harmed.
"""

from __future__ import annotations

import contextlib
import copy
import io
import logging
import re
import resource
import signal
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import nn

from nbaccel.base import env
from nbaccel.base.atomic import nearest_folder
from nbaccel.base.errors import WorkerFailed
from nbaccel.base.units import format_bytes
from nbaccel.config.capabilities import device_row
from nbaccel.config.given_values import put_at, value_at
from nbaccel.deepspeed import library
from nbaccel.deepspeed.strategy.engines import make_engine
from nbaccel.deepspeed.zero_config import ZERO, ZeroConfig
from nbaccel.memory.activations import LiveBytes, call, loss_of, mapped, resized, storage_key
from nbaccel.memory.memory_model import MemoryModel
from nbaccel.plan import Plan, registry
from nbaccel.strategies.model_blocks import enable_gradient_checkpointing

_PASSES_PER_STEP = 2
"""Forward passes accumulated in a trial: the second shows what accumulation keeps."""
_PROCESS_BYTES = 192 * 2**20
"""Memory of a worker beside tensors: stacks of threads, compiled operations (100 to 130 MiB)."""
_OUT_OF_MEMORY_WORDS = re.compile(
    r"out of memory|(can't|cannot|unable to|could not) allocate|not enough memory"
    r"|CUBLAS_STATUS_ALLOC_FAILED|std::bad_alloc|can't start new thread",
    re.IGNORECASE,
)


def is_want_of_memory(record: Any) -> bool:
    """Whether a worker failed because memory ran out: on a device, on the host, or by a kill."""
    if record.exit_status is not None:
        # The system's out-of-memory killer leaves no other trace.
        was_killed = record.exit_status == -signal.SIGKILL
        return was_killed or bool(_OUT_OF_MEMORY_WORDS.search(record.evidence))
    error = record.raised
    while error is not None:  # it may have been wrapped in another
        if error.type_name.endswith("MemoryError") or _OUT_OF_MEMORY_WORDS.search(error.message):
            return True
        error = error.cause
    return False


# ----------------------------------------------------------------------- in the notebook
def try_once(
    memory_model: MemoryModel,
    plan: Plan,
    config: Mapping[str, Any],
    *,
    recomputes: bool,
    host_bytes: int | None,
    timeout_s: float,
    launch: Callable[..., Any],
) -> tuple[int | None, str]:
    """One launch with a configuration: the most bytes of tensors where it computes.

    Where memory ran out: None, and what failed. All processes together may use `host_bytes`.
    """
    model = memory_model.model
    run = plan.config.changed(
        num_processes=plan.num_processes,
        start_method="template",
        share_back=False,  # a trial must not change the weights of the user's model
        timeout=timeout_s,
    )
    device_bytes = memory_model.limits.device
    if host_bytes is not None:
        on_host = device_row(plan.device).in_host_memory
        host_bytes = host_bytes // plan.num_processes + (device_bytes or 0) * on_host
    # The advice reports how a trial ended; a dashboard of failed launches would look like errors.
    with trial_config(config) as tried, env.applied({"NBACCEL_DASHBOARD": "0"}):
        batch = resized(memory_model.sample_batch, tried["train_micro_batch_size_per_gpu"])
        arguments = (model, batch, tried, recomputes, plan.device, device_bytes, host_bytes)
        try:
            return max(launch(run_trial, arguments, config=run)), ""
        except WorkerFailed as error:
            failure: Any = next(filter(is_want_of_memory, error.failures), None)
            if failure is None:
                raise
    text = " ".join(str(failure.headline).split())[:160]
    peak = f" after {format_bytes(failure.max_rss_bytes)}" if failure.max_rss_bytes else ""
    return None, f"rank {failure.rank} {text}{peak}"


@contextlib.contextmanager
def trial_config(config: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The configuration for a trial, with a folder for swap files, which is removed."""
    tried = copy.deepcopy(dict(config))
    steps = tried.get("gradient_accumulation_steps", 1)
    tried["gradient_accumulation_steps"] = min(steps, _PASSES_PER_STEP)
    keys = [f"{ZERO}.{name}.nvme_path" for name in ("offload_optimizer", "offload_param")]
    swapped = {key: folder for key in keys if (folder := value_at(tried, key))}
    # On the user's disk, since the trial is of that disk, but not among other runs' files.
    disk = nearest_folder(Path(next(iter(swapped.values()), tempfile.gettempdir())))
    with tempfile.TemporaryDirectory(prefix="nbaccel-trial-", dir=disk) as swap_folder:
        for key in swapped:
            put_at(tried, key, swap_folder)
        yield tried


# ----------------------------------------------------------------------- in a worker
def run_trial(
    model: nn.Module,
    batch: Any,
    config: dict[str, Any],
    recomputes: bool,
    device_name: str,
    device_limit: int | None,
    host_limit: int | None,
) -> int:
    """Make an engine and step; the most bytes of tensors where it computes.

    A limit is in bytes; None is all that there is.
    """
    logging.disable(logging.CRITICAL)  # for good: the process ends with the trial
    device = registry.device(device_name)
    on_host = device_row(device_name).in_host_memory
    own_tensors = [*model.parameters(), *model.buffers()]
    zero_config = ZeroConfig.from_dict(config)
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        env.update({"PATH": library.ready_to_build(device_name)})
        if host_limit is not None:
            _limit_host_memory(host_limit, own_tensors)
        if not on_host and device_limit is not None:
            device.limit_memory(device_limit)
        if recomputes:
            enable_gradient_checkpointing(model)
        model.train()
        with LiveBytes(own_tensors, device="cpu") as live:
            engine = make_engine(model, None, None, zero_config, moe_layers=None, has_several=False)
            # It trains in the model's own tensors, whose shared pages become private then.
            if on_host:
                live.adopt(one for one in engine.module.parameters() if one.numel())
            # Some optimizers make their states in the first step: the peak comes with the second.
            for _ in range(2):
                training_step(engine, batch)
            device.synchronize()  # what fails later fails here
    from deepspeed.accelerator import get_accelerator

    # The process ends with the trial, so that the peak is the trial's.
    return live.peak if on_host else int(get_accelerator().max_memory_allocated())


def training_step(engine: Any, batch: Any) -> None:
    """One optimizer step: as many forward and backward passes as are accumulated."""
    batch = mapped(batch, lambda tensor: tensor.detach().to(engine.device))
    for _ in range(engine.gradient_accumulation_steps()):
        engine.backward(loss_of(call(engine, batch, module=engine.module)))
        engine.step()


def _limit_host_memory(host_bytes: int, own_tensors: list[torch.Tensor]) -> None:
    """Limit this worker to its share, so that only this process fails when it is used up."""
    # The model's pages are mapped privately and counted already, though shared with the notebook;
    # those that are trained become the worker's own memory, which the share must cover.
    pages = {storage_key(tensor): tensor.untyped_storage().nbytes() for tensor in own_tensors}
    own_bytes = psutil.Process().memory_info().data - sum(pages.values())
    limit = own_bytes + host_bytes + _PROCESS_BYTES
    _, hard_limit = resource.getrlimit(resource.RLIMIT_DATA)
    if hard_limit != resource.RLIM_INFINITY:
        limit = min(limit, hard_limit)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, hard_limit))
