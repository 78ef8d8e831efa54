"""One real step by DeepSpeed's engine, in a worker that ends with it. This is what workers run."""

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

from nbaccel import env
from nbaccel.deepspeed import toolchain
from nbaccel.deepspeed.batches import call, loss_of, mapped, resized
from nbaccel.deepspeed.live import LiveBytes, storage_key
from nbaccel.strategies.gradient_checkpointing import enable_gradient_checkpointing
from nbaccel.units import format_bytes

__all__ = ["Progress", "Search", "Trial", "run_trial"]

_PROCESS_BYTES = 192 * 2**20
"""What a worker takes beside tensors: stacks of gloo's and OpenMP's threads, compiled operations.

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
        """The size to try next: twice as much, then the middle.

        Returns:
            Samples; None when the two are within an eighth of each other.
        """
        if self.fails is None:
            twice = min(2 * self.works, self.most)
            return twice if twice > self.works else None
        if self.fails - self.works <= max(1, self.works // 8):
            return None
        return (self.works + self.fails) // 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """What workers are to do.

    Attributes:
        config: DeepSpeed's configuration.
        batch_size: Samples of the first step.
        gradient_checkpointing: Whether to turn it on.
        folder: Where each worker notes how far it came: a worker that is killed tells nothing else.
        search: Larger batches to try in the same engine; None for one step only.
        device_bytes: What it may use of a GPU; None for all.
        host_bytes: What it may use of host memory; None for all.
    """

    config: dict[str, Any]
    batch_size: int
    gradient_checkpointing: bool
    folder: str
    search: Search | None = None
    device_bytes: int | None = None
    host_bytes: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """How far a worker came.

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
    def read(cls, folder: str, num_processes: int) -> Progress:
        """What all workers noted: the least that worked, the most that was taken.

        Args:
            folder: Where they noted it.
            num_processes: How many there were.

        Returns:
            All in one.
        """
        files = [Path(folder, f"{rank}.json") for rank in range(num_processes)]
        found = [json.loads(file.read_text()) if file.exists() else {} for file in files]
        most = {
            key: max(note.get(key, 0) for note in found)
            for key in ("trying", "device_bytes", "host_bytes")
        }
        return cls(works=min(note.get("works", 0) for note in found), **most)


def run_trial(model: nn.Module, batch: Any, trial: Trial) -> None:
    """Make an engine and step, or step with each batch size of a search.

    Args:
        model: The model, as the launcher shares it.
        batch: What it is called with.
        trial: The configuration, the sizes and the limits.

    Raises:
        RuntimeError: Memory did not suffice, or whatever DeepSpeed and the model raise.
    """
    env.update({"PATH": toolchain.path_with_ninja()})
    with _quiet():
        import deepspeed

        toolchain.remove_forgotten_locks()
        accelerator = deepspeed.accelerator.get_accelerator()
        on_gpu = accelerator.device_name() != "cpu"
        own = [*model.parameters(), *model.buffers()]
        _limit(trial, own, on_gpu=on_gpu)
        if trial.gradient_checkpointing:
            enable_gradient_checkpointing(model)
        model.train()
        with LiveBytes(own, device="cpu") as live:
            note = _Note(trial, live, accelerator, on_gpu=on_gpu)
            with note.taken():
                engine, *_ = deepspeed.initialize(model=model, config=trial.config)
                if not on_gpu:
                    live.adopt(p for p in engine.module.parameters() if p.numel())
                _step_through(engine, batch, trial, note)


def _step_through(engine: Any, batch: Any, trial: Trial, note: _Note) -> None:
    size: int | None = trial.batch_size
    search = trial.search
    note.trying = trial.batch_size
    # Some optimizers make their states in the first step: the peak comes with the second.
    _step(engine, resized(batch, trial.batch_size))
    while size is not None:
        note.trying = size
        _step(engine, resized(batch, size))
        note.check()
        note.works = size
        note.write()
        if search is None:
            return
        search = Search(works=size, fails=search.fails, most=search.most)
        size = search.following()


def _step(engine: Any, batch: Any) -> None:
    """One optimizer step: as many forward and backward passes as are accumulated."""
    half = {"bf16": torch.bfloat16, "fp16": torch.float16}
    dtype = next((half[n] for n in half if getattr(engine, f"{_ENABLED[n]}")()), None)

    def moved(tensor: torch.Tensor) -> torch.Tensor:
        wanted = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
        return tensor.detach().to(engine.device, wanted)

    here = mapped(batch, moved)
    for _ in range(engine.gradient_accumulation_steps()):
        engine.backward(loss_of(call(engine, here, module=engine.module)))
        engine.step()


_ENABLED = {"bf16": "bfloat16_enabled", "fp16": "fp16_enabled"}


class _Note:
    """Writes down how far this worker came, whatever ends it."""

    def __init__(self, trial: Trial, live: LiveBytes, accelerator: Any, *, on_gpu: bool) -> None:
        self._host_bytes = trial.host_bytes
        self._file = Path(trial.folder, f"{env.read('RANK', '0')}.json")
        self._live = live
        self._accelerator = accelerator if on_gpu else None
        self.works = 0
        self.trying = 0
        if on_gpu:
            accelerator.reset_peak_memory_stats()

    def check(self) -> None:
        """The room that the limit of the process leaves beside tensors is not for tensors."""
        if self._host_bytes is not None and self._live.peak > self._host_bytes:
            raise MemoryError(
                f"tensors took {format_bytes(self._live.peak)} of host memory, and a worker's "
                f"share is {format_bytes(self._host_bytes)}, with a batch of {self.trying}"
            )

    def write(self) -> None:
        gpu = self._accelerator
        found = {
            "works": self.works,
            "trying": self.trying,
            "host_bytes": self._live.peak,
            "device_bytes": 0 if gpu is None else int(gpu.max_memory_allocated()),
        }
        self._file.write_text(json.dumps(found))

    @contextlib.contextmanager
    def taken(self) -> Iterator[None]:
        try:
            yield
        finally:
            self.write()


def _limit(trial: Trial, own: list[torch.Tensor], *, on_gpu: bool) -> None:
    """Hold this worker to its share, so that it alone meets the end of it."""
    if on_gpu and trial.device_bytes is not None:
        total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, trial.device_bytes / total))
    if trial.host_bytes is None:
        return
    # The model's pages are mapped already. Those that it trains in become the worker's own.
    pages = {storage_key(t): t.untyped_storage().nbytes() for t in own}
    most = _data_bytes() - sum(pages.values()) + trial.host_bytes + _PROCESS_BYTES
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    allowed = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (allowed, hard))


def _data_bytes() -> int:
    """What RLIMIT_DATA counts: private memory that can be written to (Linux, proc(5), VmData)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmData:"):
            return int(line.split()[1]) * 1024
    return 0


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """What DeepSpeed and torch say while they are tried is about them, not about the model."""
    logging.disable(logging.CRITICAL)  # for good: the process ends with the trial
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        yield
