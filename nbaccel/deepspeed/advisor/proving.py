"""Proof by launching: real steps by DeepSpeed's engine, in workers that end with them.

notebook   a launch for one way: its step, or ever larger batches in the same engine
worker     holds itself to its share of memory, and notes in a file how far it has come,
which is all that a killed one leaves
"""

from __future__ import annotations

import contextlib
import io
import json
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

import torch
from torch import nn

from nbaccel.base import env
from nbaccel.base.disk import nearest_folder
from nbaccel.base.errors import WorkerFailed
from nbaccel.base.units import format_bytes
from nbaccel.config.capabilities import device_row
from nbaccel.deepspeed import cpp_operations
from nbaccel.deepspeed.advisor.advice import Measured, Rung
from nbaccel.deepspeed.zero_config import ZERO
from nbaccel.memory.activations import LiveBytes, call, loss_of, mapped, resized, storage_key
from nbaccel.memory.memory_model import MemoryModel
from nbaccel.plan import Plan, registry
from nbaccel.strategies.gradient_checkpointing import (
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Search:
    """The largest batch that works, between one that does and one that does not.

    Attributes:
        works: Samples that are known to work.
        fails: Samples that are known not to; None where nothing is known.
        most: Samples not to go beyond.
    """

    works: int
    fails: int | None = None
    most: int

    def following(self) -> int | None:
        """The size to try next: twice as much, then the middle."""
        if self.fails is None:
            batch = min(2 * self.works, self.most)
            return batch if batch > self.works else None
        # Each further try takes a real step, for less than an eighth more.
        if self.fails - self.works <= max(1, self.works // 8):
            return None
        return (self.works + self.fails) // 2


@dataclass(frozen=True, kw_only=True, slots=True)
class _Trial:
    """The task of the workers: bytes that may be used are None for all."""

    config: dict[str, Any]
    batch_size: int
    gradient_checkpointing: bool
    folder: str
    device: str
    search: Search | None
    device_bytes: int | None
    host_bytes: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class _Progress:
    """How far workers came: samples of steps that worked and began, and the most bytes taken."""

    works: int = 0
    trying: int = 0
    device_bytes: int = 0
    host_bytes: int = 0


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
        progress, error = self._launched(rung, None)
        measured = Measured(device_bytes=progress.device_bytes, host_bytes=progress.host_bytes)
        verdict = "works"
        reason = f"A real step worked. {rung.reason}"
        if error is not None:
            verdict = "out of memory"
            when = "in its first step" if progress.trying else "while the engine was made"
            reason = f"Memory ran out {when}: {_failure_text(error)}. {rung.reason}"
        return replace(rung, verdict=verdict, reason=reason, measured=measured)

    def largest_batch(self, rung: Rung) -> tuple[int, bool]:
        """The largest batch that works, by doubling, then the middle; and whether that is known."""
        search = Search(works=rung.batch_size, most=rung.batch_size * _MOST_TIMES)
        while self.max_trials > 0 and (batch_size := search.following()) is not None:
            progress, error = self._launched(rung, search)
            fails = search.fails if error is None else progress.trying or batch_size
            search = replace(search, works=max(search.works, progress.works), fails=fails)
        return search.works, search.fails is not None

    def _launched(self, rung: Rung, search: Search | None) -> tuple[_Progress, WorkerFailed | None]:
        """One launch: its progress, and the error where memory ran out."""
        self.max_trials -= 1
        model = self.memory_model.model
        failure = None
        # The advice reports how a trial ended; a dashboard of failed launches would look like
        # errors.
        dashboard = env.applied({"NBACCEL_DASHBOARD": "0"})
        with _trial_folder(rung) as (folder, config), dashboard:
            trial = _Trial(
                config=config,
                batch_size=(search and search.following()) or rung.batch_size,
                gradient_checkpointing=rung.gradient_checkpointing
                and not checkpoints_gradients(model),
                folder=folder,
                device=self.plan.device,
                search=search,
                device_bytes=self.memory_model.limits.device,
                host_bytes=self._host_share(rung),
            )
            run = self.plan.config.changed(
                num_processes=self.plan.num_processes,
                start_method="template",
                share_back=False,  # a trial must not change the weights of the user's model
                timeout=self.timeout_s,
            )
            arguments = (model, self.memory_model.sample_batch, trial)
            try:
                self.launch(run_trial, arguments, config=run)
            except WorkerFailed as error:
                if not is_out_of_memory(error):
                    raise
                failure = error
            return self._progress(folder), failure

    def _host_share(self, rung: Rung) -> int | None:
        """The host memory that one process may use."""
        limits = self.memory_model.limits
        on_cpu = device_row(self.plan.device).in_host_memory
        host_bytes = limits.host
        if host_bytes is None and on_cpu and rung.estimate is not None:
            host_bytes = rung.estimate.host_free
        if host_bytes is None:
            return None
        share = host_bytes // self.plan.num_processes
        return share + (limits.device or 0) if on_cpu else share

    def _progress(self, folder: str) -> _Progress:
        """That of all workers in one: the least that worked, the most that was taken."""
        files = [Path(folder, f"{rank}.json") for rank in range(self.plan.num_processes)]
        notes = [
            _Progress(**json.loads(file.read_text())) if file.exists() else _Progress()
            for file in files
        ]
        return _Progress(
            works=min(note.works for note in notes),
            trying=max(note.trying for note in notes),
            device_bytes=max(note.device_bytes for note in notes),
            host_bytes=max(note.host_bytes for note in notes),
        )


@contextlib.contextmanager
def _trial_folder(rung: Rung) -> Iterator[tuple[str, dict[str, Any]]]:
    """A folder for notes, and the configuration with a folder for swap files; both are removed."""
    config = json.loads(json.dumps(rung.config or {}))
    config["gradient_accumulation_steps"] = min(rung.accumulation_steps, _PASSES_PER_STEP)
    zero = config.get(ZERO, {})
    swapped = [
        zero[name]
        for name in ("offload_optimizer", "offload_param")
        if zero.get(name, {}).get("nvme_path")
    ]
    with contextlib.ExitStack() as folders:
        notes = folders.enter_context(tempfile.TemporaryDirectory(prefix="nbaccel-trial-"))
        if swapped:
            # On the user's disk, since the trial is of that disk, but not among other runs' files.
            disk = nearest_folder(Path(swapped[0]["nvme_path"]))
            swap = tempfile.TemporaryDirectory(prefix="nbaccel-trial-", dir=disk)
            swap_folder = folders.enter_context(swap)
            for section in swapped:
                section["nvme_path"] = swap_folder
        yield notes, config


def _failure_text(error: WorkerFailed) -> str:
    """The failure of the rank that ran out of memory, in one line."""
    record: Any = next(filter(_is_want_of_memory, error.failures))
    text = " ".join(str(record.headline).split())[:160]
    peak = f" after {format_bytes(record.max_rss_bytes)}" if record.max_rss_bytes else ""
    return f"rank {record.rank} {text}{peak}"


# ----------------------------------------------------------------------- in a worker
def run_trial(model: nn.Module, sample_batch: Any, trial: _Trial) -> None:
    """Make an engine and step, or step with each batch size of a search."""
    env.update({"PATH": cpp_operations.path_with_ninja()})
    logging.disable(logging.CRITICAL)  # for good: the process ends with the trial
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        import deepspeed

        cpp_operations.remove_forgotten_locks()
        on_gpu = not device_row(trial.device).in_host_memory
        own_tensors = [*model.parameters(), *model.buffers()]
        _limit_memory(trial, own_tensors, on_gpu=on_gpu)
        if trial.gradient_checkpointing:
            enable_gradient_checkpointing(model)
        model.train()
        with LiveBytes(own_tensors, device="cpu") as live:
            steps = _Steps(trial, live, on_gpu=on_gpu)
            try:
                engine, *_ = deepspeed.initialize(model=model, config=trial.config)
                # It trains in the model's own tensors, whose shared pages become private then.
                if not on_gpu:
                    live.adopt(one for one in engine.module.parameters() if one.numel())
                steps.run(engine, sample_batch)
            finally:
                steps.note()


class _Steps:
    """The steps of one worker, and the note of them."""

    def __init__(self, trial: _Trial, live: LiveBytes, *, on_gpu: bool) -> None:
        self._trial = trial
        self._live = live
        self._works = 0
        self._trying = 0
        self._memory: Any = None
        if on_gpu:
            import deepspeed

            self._memory = deepspeed.accelerator.get_accelerator()
            self._memory.reset_peak_memory_stats()

    def run(self, engine: Any, sample_batch: Any) -> None:
        """Step with one batch size after the other, and note each that worked."""
        size: int | None = self._trial.batch_size
        search = self._trial.search
        self._trying = self._trial.batch_size
        # Some optimizers make their states in the first step: the peak comes with the second.
        training_step(engine, resized(sample_batch, self._trial.batch_size))
        while size is not None:
            self._trying = size
            training_step(engine, resized(sample_batch, size))
            registry.device(self._trial.device).synchronize()  # what fails later fails here
            self._check_share()
            # Noted after each size: the next one may get this process killed.
            self._works = size
            self.note()
            if search is None:
                return
            search = replace(search, works=size)
            size = search.following()

    def _check_share(self) -> None:
        """Refuse tensors in the room that the process's limit leaves for everything else."""
        share = self._trial.host_bytes
        if share is not None and self._live.peak > share:
            raise MemoryError(
                f"tensors took {format_bytes(self._live.peak)} of host memory, and a worker's "
                f"share is {format_bytes(share)}, with a batch of {self._trying}"
            )

    def note(self) -> None:
        """Write the progress."""
        values = {
            "works": self._works,
            "trying": self._trying,
            "host_bytes": self._live.peak,
            "device_bytes": int(self._memory.max_memory_allocated()) if self._memory else 0,
        }
        Path(self._trial.folder, f"{env.read('RANK', '0')}.json").write_text(json.dumps(values))


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


def _limit_memory(trial: _Trial, own_tensors: list[torch.Tensor], *, on_gpu: bool) -> None:
    """Limit this worker to its share, so that only this process fails when it is used up."""
    if on_gpu and trial.device_bytes is not None:
        registry.device(trial.device).limit_memory(trial.device_bytes)
    if trial.host_bytes is None:
        return
    # The model's pages are mapped privately and counted already, though shared with the notebook;
    # those that are trained become the worker's own memory, which the share must cover.
    pages = {storage_key(tensor): tensor.untyped_storage().nbytes() for tensor in own_tensors}
    limit = _data_bytes() - sum(pages.values()) + trial.host_bytes + _PROCESS_BYTES
    _, hard_limit = resource.getrlimit(resource.RLIMIT_DATA)
    if hard_limit != resource.RLIM_INFINITY:
        limit = min(limit, hard_limit)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, hard_limit))


def _data_bytes() -> int:
    """The memory that RLIMIT_DATA limits: private and writable (Linux, proc(5), VmData)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmData:"):
            return int(line.split()[1]) * 1024
    return 0
