"""Sees the training loops of code that reports nothing: steps, loss, learning rate, batches.

    torch.autograd.backward(loss)      the loss, kept where it is until the panel looks
    Optimizer.step                     a step, and the learning rate
    iter(DataLoader)                   batches, samples, epochs, and waiting for data
    Trainer, Lightning, Fabric, Accelerate   what they log

Each is a hook that costs about a microsecond. `NBACCEL_WATCH_LOOPS=0` leaves them out. A loop that
reports by itself is not seen a second time: whoever reports does it in a block of `telling`.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import dataloader

from nbaccel.base import env, spent_time
from nbaccel.base.import_patches import patch_module

if TYPE_CHECKING:
    from nbaccel.workers.training_loops import RunningLoop

__all__ = ["SeenLoop", "begin_loop", "note_loss", "telling", "watch_loops", "watching_loops"]

SWITCH = "NBACCEL_WATCH_LOOPS"
_MAX_DEPTH = 4  # of containers in which a batch's tensors are looked for
_watch: _Watch | None = None
_awaited: set[str] = set()
"""Libraries that are looked for when they are imported."""


class LoopListener(Protocol):
    """Whom to tell; see `metrics_reporter.Reporter`."""

    process_id: int

    def log(self, values: Mapping[str, Any], step: int | None) -> None:
        """Take in what is logged."""

    def loss_seen(self, loss: torch.Tensor) -> None:
        """A backward pass begins."""

    def stepped(self, optimizer_id: int, learning_rate: Any) -> None:
        """An optimizer has stepped."""

    def loop_begins(
        self, name: str, total_batches: int | None, epochs: int | None, source: str | None
    ) -> RunningLoop:
        """A loop over batches begins."""

    def step_done(self, num_samples: int, loop: RunningLoop | None) -> None:
        """A batch was used."""

    def loop_ends(self, loop: RunningLoop) -> None:
        """A loop is over."""


class _Watch:
    """The hooks of this process, and what they have seen."""

    def __init__(self, current_reporter: Callable[[], LoopListener | None]) -> None:
        self._current_reporter = current_reporter
        self._thread = threading.get_ident()
        self._replaced: list[tuple[Any, str, Any, Any]] = []
        self._step_hook: Any = None
        self.is_told = False
        """Whether what happens now is reported by who does it."""
        self.num_backwards = 0
        self._backwards_at_step: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()

    @property
    def reporter(self) -> LoopListener | None:
        """Who is told; None where nobody is, or where it is told already."""
        # A thread beside the function's does what it does beside the training.
        if self.is_told or threading.get_ident() != self._thread:
            return None
        return self._current_reporter()

    def set_hooks(self) -> None:
        """Begin to see."""
        self.replace(torch.autograd, "backward", _noting_backward)
        # Seen in torch 2.6 to 2.13; where it is missing, loops over loaders are not seen.
        iterator = vars(dataloader).get("_BaseDataLoaderIter")
        if iterator is not None:
            self.replace(iterator, "__next__", _noting_batches)
        self._step_hook = register_optimizer_step_post_hook(self._note_step)

    def remove_hooks(self) -> None:
        """Leave everything as it was."""
        self._step_hook.remove()
        for owner, name, plain, hook in reversed(self._replaced):
            # Who has replaced it since calls this hook, which does nothing any more.
            if vars(owner).get(name) is hook:
                setattr(owner, name, plain)
        self._replaced.clear()

    def replace(self, owner: Any, name: str, make_hook: Callable[[Any], Any]) -> None:
        """Put a hook around a function of a module or class."""
        plain = vars(owner).get(name)
        if plain is not None:
            hook = functools.wraps(plain)(make_hook(plain))
            setattr(owner, name, hook)
            self._replaced.append((owner, name, plain, hook))

    def _note_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        reporter = self._current_reporter()
        # DeepSpeed calls its optimizer once for each part of the parameters: a step has a backward
        # pass of its own at least.
        if reporter is None or self._backwards_at_step.get(optimizer) == self.num_backwards:
            return
        self._backwards_at_step[optimizer] = self.num_backwards
        groups = optimizer.param_groups
        reporter.stepped(id(optimizer), groups[0].get("lr") if groups else None)


def watch_loops(current_reporter: Callable[[], LoopListener | None]) -> None:
    """Set the hooks for good; from now on loops of this thread are seen."""
    global _watch  # noqa: PLW0603 - hooks of the process have no other handle on it
    if env.flag(SWITCH) is False or _watch is not None:
        return
    _watch = _Watch(current_reporter)
    _watch.set_hooks()
    for name, patch in _LIBRARIES.items():
        if name in sys.modules:
            patch(_watch, sys.modules[name])
        elif name not in _awaited:
            _awaited.add(name)
            patch_module(name, functools.partial(_patch_library, patch=patch))


@contextlib.contextmanager
def watching_loops(current_reporter: Callable[[], LoopListener | None]) -> Iterator[None]:
    """A block in which loops of this thread are seen."""
    global _watch  # noqa: PLW0603 - see `watch_loops`
    was_watching = _watch is not None
    watch_loops(current_reporter)
    try:
        yield
    finally:
        if _watch is not None and not was_watching:
            _watch.remove_hooks()
            _watch = None


def _patch_library(module: ModuleType, patch: Callable[[_Watch, ModuleType], None]) -> None:
    # A module may be imported when nothing is watched any more.
    if _watch is not None:
        patch(_watch, module)


class _Telling:
    """A block that reports by itself what it does: it is not seen a second time."""

    def __enter__(self) -> bool:
        watch = _watch
        self._is_outermost = watch is not None and watch.reporter is not None
        if watch is not None and self._is_outermost:
            watch.is_told = True
        return self._is_outermost

    def __exit__(self, *exc: object) -> None:
        if self._is_outermost and _watch is not None:
            _watch.is_told = False


def telling() -> _Telling:
    """A block that reports by itself what it does: it is not seen a second time."""
    return _Telling()


def note_loss(loss: Any) -> None:
    """A backward pass begins from this loss, in the scale in which its user thinks."""
    reporter = _watch.reporter if _watch is not None else None
    if reporter is not None and type(loss) is torch.Tensor and loss.numel() == 1:
        reporter.loss_seen(loss)


def begin_loop(loader: Any, dataset: Any) -> SeenLoop | None:
    """A loop over a loader begins; None where nobody is told of it."""
    reporter = _watch.reporter if _watch is not None else None
    # A worker of a DataLoader has inherited the reporter, and is not the rank.
    if reporter is None or reporter.process_id != os.getpid():
        return None
    # Not the loader or dataset itself: there may be a new one for each epoch.
    source = f"{type(dataset).__qualname__} of {_length(dataset)}"
    return SeenLoop(reporter, reporter.loop_begins("", _length(loader), None, source))


def _length(sized: Any) -> int | None:
    try:
        return len(sized)
    except TypeError:  # an iterable dataset has none
        return None


class SeenLoop:
    """A loop over batches that was seen from outside."""

    def __init__(self, reporter: LoopListener, loop: RunningLoop) -> None:
        self._reporter = reporter
        self._loop = loop
        self._rows: int | None = None

    def read(self, read_batch: Callable[[], Any]) -> Any:
        """The next batch: the one before has been trained with."""
        if self._rows is not None:
            self.note_done(self._rows)
            spent_time.end_step()
        try:
            with spent_time.reading_data:
                batch = read_batch()
        except BaseException:  # StopIteration, mostly
            self._rows = None
            self.end()
            raise
        self._rows = _num_rows(batch)
        return batch

    def note_done(self, num_rows: int) -> None:
        """A batch has been trained with."""
        self._reporter.step_done(num_rows, self._loop)

    def end(self) -> None:
        """The loop is over, or was left."""
        self._reporter.loop_ends(self._loop)


# ------------------------------------------------------------------------- torch


def _noting_backward(plain: Callable[..., None]) -> Callable[..., None]:
    def backward(tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any) -> None:
        if _watch is not None and grad_tensors is None:
            _watch.num_backwards += 1
            note_loss(tensors)
        plain(tensors, grad_tensors, *args, **kwargs)

    return backward


def _noting_batches(plain: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def read_next(self: Any) -> Any:
        loop: SeenLoop | None = vars(self).get("_nbaccel_loop")
        if loop is None:
            loop = self._nbaccel_loop = begin_loop(self, vars(self).get("_dataset"))
        return plain(self) if loop is None else loop.read(functools.partial(plain, self))

    return read_next


def _num_rows(batch: Any, depth: int = 0) -> int:
    """Rows of the first tensor with a dimension; 0 where there is none."""
    if isinstance(batch, torch.Tensor):
        return int(batch.shape[0]) if batch.dim() else 0
    if depth == _MAX_DEPTH or not isinstance(batch, (Mapping, list, tuple)):
        return 0
    parts = batch.values() if isinstance(batch, Mapping) else batch
    return next(filter(None, (_num_rows(part, depth + 1) for part in parts)), 0)


# ------------------------------------------------------------------------- libraries


def _log(values: Mapping[str, Any], step: int | None = None) -> None:
    reporter = _watch.reporter if _watch is not None else None
    if reporter is not None:
        reporter.log(values, step)


def _patch_transformers(watch: _Watch, module: ModuleType) -> None:
    def make_log(plain: Callable[..., Any]) -> Callable[..., Any]:
        def log(self: Any, logs: dict[str, float], *args: Any, **kwargs: Any) -> Any:
            _log(logs, self.state.global_step)
            return plain(self, logs, *args, **kwargs)

        return log

    watch.replace(module.Trainer, "log", make_log)


def _patch_accelerate(watch: _Watch, module: ModuleType) -> None:
    def make_log(plain: Callable[..., Any]) -> Callable[..., Any]:
        def log(self: Any, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> Any:
            _log(values, step)
            return plain(self, values, step, **kwargs)

        return log

    def make_backward(plain: Callable[..., Any]) -> Callable[..., Any]:
        def backward(self: Any, loss: Any, **kwargs: Any) -> Any:
            # What reaches autograd is divided by the steps of accumulation, and scaled for fp16.
            note_loss(loss)
            with telling():
                return plain(self, loss, **kwargs)

        return backward

    watch.replace(module.Accelerator, "log", make_log)
    watch.replace(module.Accelerator, "backward", make_backward)


def _patch_fabric(watch: _Watch, module: ModuleType) -> None:
    def make_log(plain: Callable[..., Any]) -> Callable[..., Any]:
        def log_dict(self: Any, metrics: Mapping[str, Any], step: int | None = None) -> Any:
            _log(metrics, step)
            return plain(self, metrics, step)

        return log_dict

    watch.replace(module.Fabric, "log_dict", make_log)


def _patch_lightning_module(watch: _Watch, module: ModuleType) -> None:
    def make_log(plain: Callable[..., Any]) -> Callable[..., Any]:
        def log(self: Any, name: str, value: Any, *args: Any, **kwargs: Any) -> Any:
            trainer = vars(self).get("_trainer")
            # Of an evaluation the whole is of interest, which the trainer has at its end.
            if trainer is not None and trainer.training:
                _log({name: value}, trainer.global_step)
            return plain(self, name, value, *args, **kwargs)

        return log

    watch.replace(module.LightningModule, "log", make_log)


def _patch_lightning_trainer(watch: _Watch, module: ModuleType) -> None:
    def make_run(plain: Callable[..., Any]) -> Callable[..., Any]:
        def run(self: Any) -> Any:
            results = plain(self)
            # One dictionary for each loader.
            if not self.trainer.sanity_checking:
                for values in results or ():
                    _log(values, self.trainer.global_step)
            return results

        return run

    # Seen in Lightning 2.0 to 2.6; where it is missing, values of evaluations are not drawn.
    loop = vars(module).get("_EvaluationLoop")
    if loop is not None:
        watch.replace(loop, "run", make_run)


_LIBRARIES: dict[str, Callable[[_Watch, ModuleType], None]] = {
    "transformers.trainer": _patch_transformers,
    "accelerate.accelerator": _patch_accelerate,
    "lightning.fabric.fabric": _patch_fabric,
    "lightning.pytorch.core.module": _patch_lightning_module,
    "pytorch_lightning.core.module": _patch_lightning_module,
    "lightning.pytorch.loops.evaluation_loop": _patch_lightning_trainer,
    "pytorch_lightning.loops.evaluation_loop": _patch_lightning_trainer,
}
