"""Proof by launching: real steps by DeepSpeed's engine, in workers that end with them.

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
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
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
from nbaccel.deepspeed import cpp_operations
from nbaccel.deepspeed.advisor.advice import Measured, Rung
from nbaccel.deepspeed.zero_config import ZERO
from nbaccel.memory.activations import LiveBytes, call, loss_of, mapped, resized, storage_key
from nbaccel.memory.memory_model import MemoryModel
from nbaccel.plan import Plan, registry
from nbaccel.strategies.model_blocks import (
    checkpoints_gradients,
    enable_gradient_checkpointing,
)

_MOST_TIMES = 2**10
"""How many times the first batch is the largest that is tried."""
_PASSES_PER_STEP = 2
"""Forward passes that are accumulated in a trial: the second shows what accumulation keeps."""
_PROCESS_BYTES = 192 * 2**20
"""Memory of a worker beside tensors: stacks of gloo's and OpenMP's threads, compiled operations.

Measured with engines of all stages and a model of 6 MB, 2 processes: 100 to 130 MiB of data.
"""
_OUT_OF_MEMORY_WORDS = re.compile(
    r"out of memory|(can't|cannot|unable to|could not) allocate|not enough memory"
    r"|CUBLAS_STATUS_ALLOC_FAILED|std::bad_alloc|can't start new thread",
    re.IGNORECASE,
)


def is_out_of_memory(error: WorkerFailed) -> bool:
    """Whether a launch failed because memory ran out: on a device, on the host, or by a kill."""
    return any(map(_is_want_of_memory, error.failures))


def _is_want_of_memory(record: Any) -> bool:
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
@dataclass(slots=True)
class Prover:
    """Tries ways with real steps, in at most `max_trials` launches."""

    memory_model: MemoryModel
    plan: Plan
    max_trials: int
    timeout_s: float
    launch: Callable[..., Any]

    def proved(self, rung: Rung) -> Rung:
        """Try a way with one step."""
        if self.max_trials < 1:
            reason = f"{rung.reason} It was not tried: no launch of max_trials was left."
            return replace(rung, verdict="not tried", reason=reason)
        measured, failure = self.tried(rung, rung.batch_size)
        if failure:
            reason = f"Memory ran out in a real step: {failure}. {rung.reason}"
            return replace(rung, verdict="out of memory", reason=reason)
        reason = f"A real step worked. {rung.reason}"
        return replace(rung, verdict="works", reason=reason, measured=measured)

    def largest_batch(self, rung: Rung) -> tuple[int, bool]:
        """The largest batch that works, by doubling, then the middle; and whether that is known."""
        works = rung.batch_size
        fails: int | None = None
        while self.max_trials > 0 and works < rung.batch_size * _MOST_TIMES:
            # Each further trial takes a launch, for less than an eighth more.
            if fails is not None and fails - works <= max(1, works // 8):
                break
            size = 2 * works if fails is None else (works + fails) // 2
            _, failure = self.tried(rung, size)
            if failure:
                fails = size
            else:
                works = size
        return works, fails is not None

    def tried(self, rung: Rung, batch_size: int) -> tuple[Measured | None, str]:
        """One launch: the most that a worker took, or what failed where memory ran out."""
        self.max_trials -= 1
        model = self.memory_model.model
        run = self.plan.config.changed(
            num_processes=self.plan.num_processes,
            start_method="template",
            share_back=False,  # a trial must not change the weights of the user's model
            timeout=self.timeout_s,
        )
        again = rung.gradient_checkpointing and not checkpoints_gradients(model)
        # The advice reports how a trial ended; a dashboard of failed launches would look like
        # errors.
        dashboard = env.applied({"NBACCEL_DASHBOARD": "0"})
        with _trial_config(rung) as config, dashboard:
            trial = (config, batch_size, again, self.plan.device)
            limits = (self.memory_model.limits.device, self._host_share(rung))
            arguments = (model, self.memory_model.sample_batch, *trial, *limits)
            try:
                peaks = list(self.launch(run_trial, arguments, config=run))
            except WorkerFailed as error:
                if not is_out_of_memory(error):
                    raise
                return None, _failure_text(error)
        device_bytes, host_bytes = map(max, zip(*peaks, strict=True))
        return Measured(device_bytes=device_bytes, host_bytes=host_bytes), ""

    def _host_share(self, rung: Rung) -> int | None:
        """The host memory that one process may use."""
        limits = self.memory_model.limits
        on_host = device_row(self.plan.device).in_host_memory
        host_bytes = limits.host
        if host_bytes is None and on_host and rung.estimate is not None:
            host_bytes = rung.estimate.host_free
        if host_bytes is None:
            return None
        return host_bytes // self.plan.num_processes + (limits.device or 0) * on_host


@contextlib.contextmanager
def _trial_config(rung: Rung) -> Iterator[dict[str, Any]]:
    """The configuration with a folder for swap files, which is removed."""
    config = copy.deepcopy(rung.config or {})
    config["gradient_accumulation_steps"] = min(rung.accumulation_steps, _PASSES_PER_STEP)
    keys = [f"{ZERO}.{name}.nvme_path" for name in ("offload_optimizer", "offload_param")]
    swapped = {key: folder for key in keys if (folder := value_at(config, key))}
    # On the user's disk, since the trial is of that disk, but not among other runs' files.
    disk = nearest_folder(Path(next(iter(swapped.values()), tempfile.gettempdir())))
    with tempfile.TemporaryDirectory(prefix="nbaccel-trial-", dir=disk) as swap_folder:
        for key in swapped:
            put_at(config, key, swap_folder)
        yield config


def _failure_text(error: WorkerFailed) -> str:
    """The failure of the rank that ran out of memory, in one line."""
    record: Any = next(filter(_is_want_of_memory, error.failures))
    text = " ".join(str(record.headline).split())[:160]
    peak = f" after {format_bytes(record.max_rss_bytes)}" if record.max_rss_bytes else ""
    return f"rank {record.rank} {text}{peak}"


# ----------------------------------------------------------------------- in a worker
def run_trial(
    model: nn.Module,
    sample_batch: Any,
    config: dict[str, Any],
    batch_size: int,
    recomputes: bool,
    device_name: str,
    device_limit: int | None,
    host_limit: int | None,
) -> tuple[int, int]:
    """Make an engine and step; the most bytes of tensors on the device and in host memory.

    A limit is in bytes; None is all that there is.
    """
    env.update({"PATH": cpp_operations.path_with_ninja()})
    logging.disable(logging.CRITICAL)  # for good: the process ends with the trial
    device = registry.device(device_name)
    on_host = device_row(device_name).in_host_memory
    own_tensors = [*model.parameters(), *model.buffers()]
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        import deepspeed

        cpp_operations.remove_forgotten_locks()
        if host_limit is not None:
            _limit_host_memory(host_limit, own_tensors)
        if not on_host and device_limit is not None:
            device.limit_memory(device_limit)
        if recomputes:
            enable_gradient_checkpointing(model)
        model.train()
        with LiveBytes(own_tensors, device="cpu") as live:
            engine, *_ = deepspeed.initialize(model=model, config=config)
            # It trains in the model's own tensors, whose shared pages become private then.
            if on_host:
                live.adopt(one for one in engine.module.parameters() if one.numel())
            # Some optimizers make their states in the first step: the peak comes with the second.
            for _ in range(2):
                training_step(engine, resized(sample_batch, batch_size))
            device.synchronize()  # what fails later fails here
    # Such tensors were in the room that the process's limit leaves for everything else.
    if host_limit is not None and live.peak > host_limit:
        raise MemoryError(
            f"tensors took {format_bytes(live.peak)} of host memory, and a worker's share is "
            f"{format_bytes(host_limit)}, with a batch of {batch_size}"
        )
    # The process ends with the trial, so that the peak is the trial's.
    memory = deepspeed.accelerator.get_accelerator()
    return 0 if on_host else int(memory.max_memory_allocated()), live.peak


def training_step(engine: Any, sample_batch: Any) -> None:
    """One optimizer step: as many forward and backward passes as are accumulated."""
    dtype = None
    if engine.bfloat16_enabled():
        dtype = torch.bfloat16
    elif engine.fp16_enabled():
        dtype = torch.float16

    def moved(tensor: torch.Tensor) -> torch.Tensor:
        wanted = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
        return tensor.detach().to(engine.device, wanted)

    batch = mapped(sample_batch, moved)
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
