"""One real step by DeepSpeed's engine, in a worker that ends with it; the code that workers run."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import resource
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from nbaccel.base import env
from nbaccel.base.units import format_bytes
from nbaccel.config.capabilities import device_row
from nbaccel.deepspeed import cpp_operations
from nbaccel.memory.activations import LiveBytes, call, loss_of, mapped, resized, storage_key
from nbaccel.plan import registry
from nbaccel.strategies.gradient_checkpointing import enable_gradient_checkpointing

__all__ = ["Search", "StepTrial", "TrialProgress", "run_trial"]


_PROCESS_BYTES = 192 * 2**20
"""Memory of a worker beside tensors: stacks of gloo's and OpenMP's threads, compiled operations.

Measured with engines of all stages and a model of 6 MB, 2 processes: 100 to 130 MiB of data.
"""


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
class StepTrial:
    """The task of the workers.

    Attributes:
        config: DeepSpeed's configuration.
        batch_size: Samples of the first step.
        gradient_checkpointing: Whether to turn it on.
        folder: Where each worker notes its progress, which is all that a killed one leaves.
        device: What workers compute on.
        search: Larger batches to try in the same engine; None for one step only.
        device_bytes: Bytes of a GPU that it may use; None for all.
        host_bytes: Bytes of host memory that it may use; None for all.
    """

    config: dict[str, Any]
    batch_size: int
    gradient_checkpointing: bool
    folder: str
    device: str
    search: Search | None = None
    device_bytes: int | None = None
    host_bytes: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class TrialProgress:
    """The progress of a worker.

    Attributes:
        works: Samples of the largest step that worked; 0 for none.
        trying: Samples of the step that was begun last; 0 while the engine was made.
        device_bytes: The most bytes of tensors on its GPU.
        host_bytes: The most bytes of tensors in host memory.
    """

    works: int = 0
    trying: int = 0
    device_bytes: int = 0
    host_bytes: int = 0

    @classmethod
    def read(cls, note_folder: str, num_processes: int) -> TrialProgress:
        """The notes of all workers in one: the least that worked, the most that was taken."""
        note_files = [Path(note_folder, f"{rank}.json") for rank in range(num_processes)]
        rank_notes = [
            json.loads(note_file.read_text()) if note_file.exists() else {}
            for note_file in note_files
        ]
        values = {
            note_key: max(trial_note.get(note_key, 0) for trial_note in rank_notes)
            for note_key in ("trying", "device_bytes", "host_bytes")
        }
        return cls(works=min(trial_note.get("works", 0) for trial_note in rank_notes), **values)


def run_trial(model: nn.Module, sample_batch: Any, step_trial: StepTrial) -> None:
    """Make an engine and step, or step with each batch size of a search."""
    env.update({"PATH": cpp_operations.path_with_ninja()})

    with _quiet_deepspeed():
        import deepspeed

        cpp_operations.remove_forgotten_locks()
        accelerator = deepspeed.accelerator.get_accelerator()
        on_gpu = not device_row(step_trial.device).in_host_memory
        own_tensors = [*model.parameters(), *model.buffers()]
        _limit_memory(step_trial, own_tensors, on_gpu=on_gpu)
        if step_trial.gradient_checkpointing:
            enable_gradient_checkpointing(model)
        model.train()
        with LiveBytes(own_tensors, device="cpu") as live_bytes:
            note = _TrialNote(step_trial, live_bytes, accelerator, on_gpu=on_gpu)
            with note.taken():
                engine, *_ = deepspeed.initialize(model=model, config=step_trial.config)
                # The engine trains in the model's own tensors, whose shared pages become private
                # then.
                if not on_gpu:
                    live_bytes.adopt(
                        parameter for parameter in engine.module.parameters() if parameter.numel()
                    )
                _step_through(engine, sample_batch, step_trial, note)


def _step_through(engine: Any, sample_batch: Any, step_trial: StepTrial, note: _TrialNote) -> None:
    batch_size: int | None = step_trial.batch_size
    batch_search = step_trial.search
    note.trying = step_trial.batch_size
    # Some optimizers make their states in the first step: the peak comes with the second.
    _training_step(engine, resized(sample_batch, step_trial.batch_size))
    while batch_size is not None:
        note.trying = batch_size
        _training_step(engine, resized(sample_batch, batch_size))
        registry.device(step_trial.device).synchronize()  # what fails later fails here
        note.check()
        # Written after each size: the next one may get this process killed.
        note.works = batch_size
        note.write()
        if batch_search is None:
            return
        batch_search = Search(works=batch_size, fails=batch_search.fails, most=batch_search.most)
        batch_size = batch_search.following()


def _training_step(engine: Any, sample_batch: Any) -> None:
    """One optimizer step: as many forward and backward passes as are accumulated."""
    half_dtypes = {"bf16": torch.bfloat16, "fp16": torch.float16}
    dtype = next(
        (
            half_dtypes[name]
            for name in half_dtypes
            if getattr(engine, f"{_ENABLED_SECTION[name]}")()
        ),
        None,
    )

    def moved(tensor: torch.Tensor) -> torch.Tensor:
        wanted_dtype = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
        return tensor.detach().to(engine.device, wanted_dtype)

    local_batch = mapped(sample_batch, moved)
    for _ in range(engine.gradient_accumulation_steps()):
        engine.backward(loss_of(call(engine, local_batch, module=engine.module)))
        engine.step()


_ENABLED_SECTION = {"bf16": "bfloat16_enabled", "fp16": "fp16_enabled"}


class _TrialNote:
    """Writes this worker's progress, however it ends."""

    def __init__(
        self, step_trial: StepTrial, live_bytes: LiveBytes, accelerator: Any, *, on_gpu: bool
    ) -> None:
        self._host_bytes = step_trial.host_bytes
        self._file = Path(step_trial.folder, f"{env.read('RANK', '0')}.json")
        self._live = live_bytes
        self._accelerator = accelerator if on_gpu else None
        self.works = 0
        self.trying = 0
        if on_gpu:
            accelerator.reset_peak_memory_stats()

    def check(self) -> None:
        """Refuse tensors in the room that the process's limit leaves for everything else."""
        if self._host_bytes is not None and self._live.peak > self._host_bytes:
            raise MemoryError(
                f"tensors took {format_bytes(self._live.peak)} of host memory, and a worker's "
                f"share is {format_bytes(self._host_bytes)}, with a batch of {self.trying}"
            )

    def write(self) -> None:
        gpu_accelerator = self._accelerator
        values = {
            "works": self.works,
            "trying": self.trying,
            "host_bytes": self._live.peak,
            "device_bytes": 0
            if gpu_accelerator is None
            else int(gpu_accelerator.max_memory_allocated()),
        }
        self._file.write_text(json.dumps(values))

    @contextlib.contextmanager
    def taken(self) -> Iterator[None]:
        try:
            yield
        finally:
            self.write()


def _limit_memory(step_trial: StepTrial, own_tensors: list[torch.Tensor], *, on_gpu: bool) -> None:
    """Limit this worker to its share, so that only this process fails when it is used up."""
    if on_gpu and step_trial.device_bytes is not None:
        registry.device(step_trial.device).limit_memory(step_trial.device_bytes)
    if step_trial.host_bytes is None:
        return
    # The model's pages are mapped privately and counted already, though shared with the notebook;
    # those that are trained become the worker's own memory, which the share must cover.
    pages = {storage_key(tensor): tensor.untyped_storage().nbytes() for tensor in own_tensors}
    soft_limit = _data_bytes() - sum(pages.values()) + step_trial.host_bytes + _PROCESS_BYTES
    _, hard_limit = resource.getrlimit(resource.RLIMIT_DATA)
    allowed_bytes = (
        soft_limit if hard_limit == resource.RLIM_INFINITY else min(soft_limit, hard_limit)
    )
    resource.setrlimit(resource.RLIMIT_DATA, (allowed_bytes, hard_limit))


def _data_bytes() -> int:
    """The memory that RLIMIT_DATA limits: private and writable (Linux, proc(5), VmData)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmData:"):
            return int(line.split()[1]) * 1024
    return 0


@contextlib.contextmanager
def _quiet_deepspeed() -> Iterator[None]:
    """A block without the messages of DeepSpeed and torch, which are not about the model."""
    logging.disable(logging.CRITICAL)  # for good: the process ends with the trial
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        yield
