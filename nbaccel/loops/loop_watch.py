"""Sees the training loops of code that reports nothing: steps, loss, learning rate, batches.

    torch.autograd.backward(loss)      the loss, kept where it is until the panel looks
    Optimizer.step                     a step, and the learning rate
    DistributedDataParallel(model)     how long the exchange of gradients takes
    tqdm(...)                          how far bars are, which the panel shows
    iter(DataLoader)                   batches, samples, epochs, and waiting for data
    Trainer, Lightning, Fabric, Accelerate   what they log

Most run in every step, so they do little (`benchmarks/report_cost.py`); `NBACCEL_WATCH_LOOPS=0`
leaves them out. Whoever reports by itself does so in a block of `telling`, and is not seen twice.
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
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim import optimizer as optimizers
from torch.utils.data import dataloader

from nbaccel.base import env, spent_time, torch_private
from nbaccel.base.errors import StoppedAtStep
from nbaccel.base.log import write_notice
from nbaccel.base.training_libraries import hooked, patch_module
from nbaccel.base.trees import find_batch_size
from nbaccel.config.capabilities import device_row
from nbaccel.loops import metrics_reporter
from nbaccel.loops.metrics_reporter import MetricsChannel, Reporter, RunningLoop
from nbaccel.plan.contracts.device import Device

SWITCH = "NBACCEL_WATCH_LOOPS"
_MEASURED_FIRST = 10  # passes of a DDP model that torch measures in any case
_MOST_WITHOUT_FIRST = 20  # then the first optimizer is of an earlier phase of the training
_awaited: set[str] = set()  # libraries that are looked for when they are imported
_Plain = Callable[..., Any]
_Hook = Callable[..., Any]  # what is called in place of a function, which is its first argument


class StepBoundaries:
    """Finds where steps end: before a batch is read, or the first optimizer's next step."""

    def __init__(self, is_asked: Callable[[], bool]) -> None:
        # Whether the function is to be stopped; called at each boundary, in its thread.
        self._is_asked = is_asked
        self.savers: list[Callable[[], None]] = []
        self.has_stepped = False
        self._is_open = False  # whether an optimizer has stepped since the last boundary
        self._first: int | None = None  # the optimizer that steps first in each step
        self._steps_since_first: dict[int, int] = {}
        self._steps_since_batch: dict[int, int] = {}
        self._reads_batches = False

    def reads_batch(self) -> None:
        """A batch is about to be read."""
        self._reads_batches = True
        self._steps_since_batch.clear()
        self._pass()

    def about_to_step(self, optimizer_id: int) -> None:
        """An optimizer is about to step; without a loader the first one's steps are the limit."""
        # Several steps of one optimizer: what was read from a loader is not the steps' batches.
        is_driven = self._reads_batches and max(self._steps_since_batch.values(), default=0) < 2
        if not is_driven and optimizer_id == self._first:
            self._pass()

    def stepped(self, optimizer_id: int) -> None:
        """An optimizer has stepped."""
        self.has_stepped = self._is_open = True
        steps = self._steps_since_first
        if optimizer_id == self._first:
            steps.clear()
        elif self._first is None or steps.get(optimizer_id, 0) >= _MOST_WITHOUT_FIRST:
            self._first = optimizer_id
        else:
            steps[optimizer_id] = steps.get(optimizer_id, 0) + 1
        self._steps_since_batch[optimizer_id] = self._steps_since_batch.get(optimizer_id, 0) + 1

    def _pass(self) -> None:
        if not self._is_open:
            return
        self._is_open = False
        if self._is_asked():
            for save in self.savers:
                # What was learned comes home all the same.
                try:
                    save()
                except Exception as error:  # whatever objects of the function's raise
                    write_notice(f"nbaccel: the next launch cannot go on from here: {error}\n")
            raise StoppedAtStep


class _Watch:
    """The hooks of this process, and what they have seen."""

    def __init__(self) -> None:
        self.is_on = False
        self._thread = threading.get_ident()
        self.streams = (sys.stdout, sys.stderr)
        self._replaced: list[tuple[Any, str, Any, Any]] = []
        self._step_hooks: list[Any] = []
        self.is_told = False  # whether what happens now is reported by who does it
        self.boundaries: StepBoundaries | None = None
        self.num_backwards = 0
        # Of each optimizer, by its id: a weak key would cost microseconds in each step.
        self._backwards_at_step: dict[int, int] = {}

    @property
    def reporter(self) -> Reporter | None:
        """Who is told; None where nobody is, or where it is told already."""
        if not self.is_on or self.is_told or self._is_beside():
            return None
        return metrics_reporter.current()

    @property
    def steps_end(self) -> StepBoundaries | None:
        """Who is told of the ends of steps; None where nobody is."""
        return None if self.boundaries is None or self._is_beside() else self.boundaries

    def bar_reporter(self) -> Reporter | None:
        """Who is told of bars that this thread draws; None where no panel shows them."""
        reporter = metrics_reporter.current()
        # A worker of a DataLoader has inherited the reporter, and is not the rank.
        if reporter is None or reporter.process_id != os.getpid() or self._is_beside():
            return None
        return reporter if self.is_on and reporter.shows_bars else None

    def _is_beside(self) -> bool:
        # A thread beside the function's does what it does beside the training.
        return threading.get_ident() != self._thread

    def set_hooks(self) -> None:
        """Begin to see."""
        self.is_on = True
        self.replace(torch.autograd, "backward", _note_backward)
        # Seen in torch 2.6 to 2.13; where it is missing, loops over loaders are not seen.
        iterator = vars(dataloader).get("_BaseDataLoaderIter")
        if iterator is not None:
            self.replace(iterator, "__next__", _note_batch)
        self.replace(DistributedDataParallel, "__init__", _measure_exchange)
        self._step_hooks = [
            optimizers.register_optimizer_step_pre_hook(self._note_begin_of_step),
            optimizers.register_optimizer_step_post_hook(self._note_step),
        ]

    def remove_hooks(self) -> None:
        """Leave everything as it was."""
        self.is_on = False
        for step_hook in self._step_hooks:
            step_hook.remove()
        for owner, name, plain, around in reversed(self._replaced):
            # Who has replaced it since calls this hook, which does nothing any more.
            if vars(owner).get(name) is around:
                setattr(owner, name, plain)
        self._replaced.clear()

    def replace(self, owner: Any, name: str, hook: _Hook) -> None:
        """Put a hook around a function of a module or class; called with that one in front."""
        plain = vars(owner).get(name)
        if plain is not None:
            around = hooked(plain, hook)
            setattr(owner, name, around)
            self._replaced.append((owner, name, plain, around))

    def _note_begin_of_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        boundaries = self.steps_end
        if boundaries is not None and not self._is_part_of_step(optimizer):
            boundaries.about_to_step(id(optimizer))

    def _is_part_of_step(self, optimizer: torch.optim.Optimizer) -> bool:
        # DeepSpeed steps once for each part of the parameters, all after one backward pass.
        return self._backwards_at_step.get(id(optimizer)) == self.num_backwards

    def _note_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if self._is_part_of_step(optimizer):
            return
        self._backwards_at_step[id(optimizer)] = self.num_backwards
        if (boundaries := self.steps_end) is not None:
            boundaries.stepped(id(optimizer))
        reporter = metrics_reporter.current()
        if reporter is not None:
            groups = optimizer.param_groups
            reporter.stepped(id(optimizer), groups[0].get("lr") if groups else None)


_watch = _Watch()


def begin(channel: MetricsChannel, hardware: Device, device: str, *, shows_bars: bool) -> None:
    """Let this worker report to the notebook from now on; steps are counted from here."""
    metrics_reporter.report_by(Reporter(channel, hardware, device, shows_bars=shows_bars))
    # All collectives that are called in Python, by torch or libraries, end in this method, at once
    # or when their result is needed. On a GPU it returns when the wait is queued: what the GPU then
    # waits is not seen.
    if not hasattr(dist.Work.wait, "__wrapped__"):
        dist.Work.wait = spent_time.communicating(dist.Work.wait)  # type: ignore[method-assign]
    _watch_loops()


@contextlib.contextmanager
def reporting_to(
    channel: MetricsChannel, hardware: Device, device: str, *, shows_bars: bool
) -> Iterator[None]:
    """A block in which loops of this thread, in a process that is no worker, report."""
    was_watching = _watch.is_on
    account_before = spent_time.present_account()
    reporter = Reporter(channel, hardware, device, shows_bars=shows_bars)
    before = metrics_reporter.report_by(reporter)
    _watch_loops()
    try:
        yield
    except BaseException:  # such as an interrupt while a bar was told of
        metrics_reporter.release_lock()
        raise
    finally:
        if not was_watching:
            _watch.remove_hooks()
        reporter.flush()
        metrics_reporter.report_by(before)
        spent_time.use_account(account_before)


def _watch_loops() -> None:
    """Set the hooks; from now on loops of this thread are seen."""
    global _watch  # noqa: PLW0603 - hooks of the process have no other handle on it
    if env.flag(SWITCH) is False or _watch.is_on:
        return
    _watch = _Watch()
    _watch.set_hooks()
    for name in _LIBRARIES:
        if name in sys.modules:
            _patch_library(sys.modules[name])
        elif name not in _awaited:
            _awaited.add(name)
            patch_module(name, _patch_library)


def _patch_library(module: ModuleType) -> None:
    for class_name, method, hook in _LIBRARIES[module.__name__]:
        owner = vars(module).get(class_name)
        # A module may be imported when nothing is watched any more.
        if owner is not None and _watch.is_on:
            _watch.replace(owner, method, hook)


def watch_boundaries(boundaries: StepBoundaries | None) -> None:
    """Say where steps end to these from now on, or to nobody."""
    _watch.boundaries = boundaries


class telling:  # noqa: N801 - used as a function is
    """A block that reports by itself what it does: it is not seen a second time."""

    def __enter__(self) -> bool:
        self._is_outermost = _watch.reporter is not None
        if self._is_outermost:
            _watch.is_told = True
        return self._is_outermost

    def __exit__(self, *exc: object) -> None:
        if self._is_outermost:
            _watch.is_told = False


def savers() -> list[Callable[[], None]]:
    """What is to be called before the function of this call is stopped where a step ends."""
    return _watch.boundaries.savers if _watch.boundaries is not None else []


def end_step() -> None:
    """A batch is about to be read, so a step is done; who reads in `telling` says so by itself."""
    if (boundaries := _watch.steps_end) is not None:
        boundaries.reads_batch()


def note_loss(loss: Any) -> None:
    """A backward pass begins from this loss, in the scale in which its user thinks."""
    reporter = _watch.reporter
    if reporter is not None and type(loss) is torch.Tensor and loss.numel() == 1:
        reporter.loss_seen(loss)


def begin_loop(loader: Any, dataset: Any) -> SeenLoop | None:
    """A loop over a loader begins; None where nobody is told of it."""
    reporter = _watch.reporter
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

    def __init__(self, reporter: Reporter, loop: RunningLoop) -> None:
        self._reporter = reporter
        self._loop = loop
        self._rows: int | None = None

    def read(self, read_batch: Callable[[], Any]) -> Any:
        """The next batch: the one before has been trained with."""
        if self._rows is not None:
            self.note_done(self._rows)
            spent_time.end_step()
        try:
            end_step()
            with spent_time.reading_data:
                batch = read_batch()
        except BaseException:  # StopIteration, mostly
            self._rows = None
            self.end()
            raise
        self._rows = find_batch_size(batch) or 0
        return batch

    def note_done(self, num_rows: int) -> None:
        """A batch has been trained with."""
        self._reporter.step_done(num_rows, self._loop)

    def end(self) -> None:
        """The loop is over, or was left."""
        self._reporter.loop_ends(self._loop)


def _note_backward(
    plain: _Plain, tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any
) -> None:
    if _watch.is_on and grad_tensors is None:
        _watch.num_backwards += 1
        note_loss(tensors)
    plain(tensors, grad_tensors, *args, **kwargs)


def _measure_exchange(plain: _Plain, ddp_model: Any, *args: Any, **kwargs: Any) -> None:
    plain(ddp_model, *args, **kwargs)
    spent_time.add_exchange(ExchangeDelay(ddp_model).read)


class ExchangeDelay:
    """For how long DDP's exchange of gradients has delayed training; keeps no model alive.

    Torch measures the first ten passes and each hundredth afterwards; in between a pass counts as
    the measured ones do. On a CPU it measures all; on a GPU reading a time would wait for the GPU.
    """

    def __init__(self, model: DistributedDataParallel) -> None:
        self._model = weakref.ref(model)
        self._each = 100
        if device_row(model.device_type).in_host_memory:
            self._each = 1
            torch_private.measure_each_exchange(model)
        self._passes = 0
        self._measured_s = 0.0
        self._delay_s = 0.0

    def read(self) -> float | None:
        """Seconds so far; None where torch does not tell."""
        model = self._model()
        if model is None:
            return self._delay_s
        delays = torch_private.exchange_delays(model)
        if delays is None:
            return None
        passes, mean_delay_s = delays
        measured_s = mean_delay_s * self._measured_of(passes)
        added_passes = self._measured_of(passes) - self._measured_of(self._passes)
        if added_passes > 0:
            mean_added_s = max(0.0, measured_s - self._measured_s) / added_passes
            self._delay_s += mean_added_s * (passes - self._passes)
            self._passes = passes
            self._measured_s = measured_s
        return self._delay_s

    def _measured_of(self, passes: int) -> int:
        first_passes = min(passes, _MEASURED_FIRST)
        return first_passes + max(0, passes // self._each - _MEASURED_FIRST // self._each)


def _note_batch(plain: _Plain, iterator: Any) -> Any:
    loop: SeenLoop | None = vars(iterator).get("nbaccel_loop")
    if loop is None:
        loop = begin_loop(iterator, vars(iterator).get("_dataset"))
        vars(iterator)["nbaccel_loop"] = loop
    if loop is not None:
        return loop.read(functools.partial(plain, iterator))
    if not _watch.is_told:
        end_step()
    return plain(iterator)


def _logging(read: Callable[..., tuple[Mapping[str, Any], int | None]]) -> _Hook:
    """The hook of a method that logs, from what finds values and step in its arguments."""

    def log(plain: _Plain, *args: Any, **kwargs: Any) -> Any:
        _log(*read(*args, **kwargs))
        return plain(*args, **kwargs)

    return log


def _log(values: Mapping[str, Any], step: int | None) -> None:
    reporter = _watch.reporter
    if reporter is not None and values:
        reporter.log(values, step)


def _note_scaled_loss(plain: _Plain, accelerator: Any, loss: Any, **kwargs: Any) -> Any:
    # What reaches autograd is divided by the steps of accumulation, and scaled for fp16.
    note_loss(loss)
    with telling():
        return plain(accelerator, loss, **kwargs)


def _of_lightning_module(
    module: Any, name: str, value: Any, *_: Any, **__: Any
) -> tuple[Mapping[str, Any], int | None]:
    trainer = vars(module).get("_trainer")
    # Of an evaluation the whole is of interest, which the trainer has at its end.
    if trainer is None or not trainer.training:
        return {}, None
    return {name: value}, trainer.global_step


def _log_evaluation(plain: _Plain, loop: Any) -> Any:
    results = plain(loop)
    # One dictionary for each loader.
    if not loop.trainer.sanity_checking:
        for values in results or ():
            _log(values, loop.trainer.global_step)
    return results


def _take_bar(plain: Any, bar: Any, *args: Any, **kwargs: Any) -> None:
    reporter = _watch.bar_reporter()
    is_drawn_elsewhere = bool(kwargs.get("gui"))
    is_in_panel = (
        reporter is not None
        # What this process prints to, and nothing that the user has put there.
        and any((kwargs.get("file") or sys.stderr) is own for own in _watch.streams)
        and len(args) < 5  # else the fifth is the file
        and not is_drawn_elsewhere
    )
    vars(bar)["nbaccel_in_panel"] = is_in_panel
    if is_in_panel:
        kwargs["file"] = metrics_reporter.NOWHERE
    # Since 4.66 it is no function: it reads defaults from the environment.
    plain.__get__(bar)(*args, **kwargs)
    if reporter is not None and is_drawn_elsewhere and not bar.disable:
        # Before it is displayed: the panel's place is above.
        reporter.note_bar(bar, is_elsewhere=True)


def _tell_of_bar(plain: _Plain, bar: Any, msg: str | None = None, *args: Any, **kwargs: Any) -> Any:
    if not vars(bar).get("nbaccel_in_panel"):
        return plain(bar, msg, *args, **kwargs)
    # With a text it erases itself, or says that it is one of too many.
    if msg is None and (reporter := _watch.bar_reporter()):
        reporter.note_bar(bar)
    return True


def _tell_of_widget(plain: _Plain, bar: Any, *args: Any, **kwargs: Any) -> Any:
    if reporter := _watch.bar_reporter():
        reporter.note_bar(bar, is_elsewhere=True)
    return plain(bar, *args, **kwargs)


def _tell_of_end(plain: _Plain, bar: Any) -> None:
    plain(bar)
    if (reporter := metrics_reporter.current()) is not None:
        reporter.bars.close(bar)


_LIGHTNING_LOG = ("LightningModule", "log", _logging(_of_lightning_module))
# Seen in Lightning 2.0 to 2.6; where it is missing, values of evaluations are not drawn.
_LIGHTNING_EVALUATION = ("_EvaluationLoop", "run", _log_evaluation)
_LIBRARIES: dict[str, tuple[tuple[str, str, _Hook], ...]] = {
    "tqdm.std": (
        ("tqdm", "__init__", _take_bar),
        ("tqdm", "display", _tell_of_bar),
        ("tqdm", "close", _tell_of_end),
    ),
    "tqdm.notebook": (("tqdm_notebook", "display", _tell_of_widget),),
    "transformers.trainer": (
        ("Trainer", "log", _logging(lambda self, logs, *_, **__: (logs, self.state.global_step))),
    ),
    "accelerate.accelerator": (
        ("Accelerator", "log", _logging(lambda _, values, step=None, **__: (values, step))),
        ("Accelerator", "backward", _note_scaled_loss),
    ),
    "lightning.fabric.fabric": (
        ("Fabric", "log_dict", _logging(lambda _, metrics, step=None: (metrics, step))),
    ),
    "lightning.pytorch.core.module": (_LIGHTNING_LOG,),
    "pytorch_lightning.core.module": (_LIGHTNING_LOG,),
    "lightning.pytorch.loops.evaluation_loop": (_LIGHTNING_EVALUATION,),
    "pytorch_lightning.loops.evaluation_loop": (_LIGHTNING_EVALUATION,),
}
"""Module → its classes and methods with the hooks around them."""
