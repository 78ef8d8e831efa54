"""``GradientState``: whether this batch ends with an optimizer step, and where the loaders are.

Each `Accelerator` has one of its own, which its optimizers, schedulers and loaders share, so two
accelerators in a notebook do not disturb each other. ``GradientState()`` without settings means the
newest accelerator's. Only which loaders are being iterated over is known to the whole process: a
function that makes an accelerator of its own, to gather metrics of batches that another one's
loader gives, must know where that loader is.
"""

from __future__ import annotations

import contextlib
import operator
import os
import weakref
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch

from nbaccel.base.log import write_notice
from nbaccel.base.trees import leaves
from nbaccel.config.handlers import GradientAccumulationPlugin
from nbaccel.loops import metrics_reporter
from nbaccel.plan.contracts.device import CompileCounts, DeviceRuntime
from nbaccel.train.resuming import Resuming

IteratedLoader = Any
"""A `PreparedLoader`; what is needed of it is `end_of_dataloader` and `remainder`."""

# Of all accelerators of this process, the innermost last. A forked worker iterates over none.
_ITERATED_LOADERS: list[IteratedLoader] = []
# Those made from settings, the newest last; weak, because an accelerator may be dropped.
_LIVE_STATES: list[weakref.ref[GradientState]] = []
if hasattr(os, "register_at_fork"):  # Windows has no forks
    os.register_at_fork(after_in_child=_ITERATED_LOADERS.clear)
    os.register_at_fork(after_in_child=_LIVE_STATES.clear)


def _of_plugin(name: str) -> Any:
    return property(operator.attrgetter(f"plugin.{name}"))


class GradientState:
    """Where an accelerator stands in its accumulation of gradients.

    Args:
        gradient_accumulation_plugin: The settings; its `num_steps` may be None for 1. Without
            them it is the same state as the newest one that has some, as long as that lives.

    Attributes:
        plugin: The settings.
        num_steps: Batches for one optimizer step; may be changed while training.
        sync_gradients: Whether the current batch ends a group, so that optimizers step.
        batches_in_group: Batches since the last optimizer step, the current one included.
        resuming: Lets a launch go on where an earlier one was stopped; None without `resume`.
    """

    def __init__(
        self, gradient_accumulation_plugin: GradientAccumulationPlugin | None = None
    ) -> None:
        _LIVE_STATES[:] = [reference for reference in _LIVE_STATES if reference() is not None]
        if gradient_accumulation_plugin is not None:
            _LIVE_STATES.append(weakref.ref(self))
        elif _LIVE_STATES and (newest := _LIVE_STATES[-1]()) is not None:
            self.__dict__ = newest.__dict__
            return
        self.plugin = gradient_accumulation_plugin or GradientAccumulationPlugin()
        self.num_steps = self.plugin.num_steps or 1
        self.sync_gradients = True
        self.batches_in_group = 1
        self._loader_stack: list[IteratedLoader] = []
        self._watch: CompileWatch | None = None
        self.resuming: Resuming | None = None

    @property
    def is_skipping(self) -> bool:
        """Whether what the function does now was done by an earlier launch that was stopped."""
        return self.resuming is not None and self.resuming.is_skipping

    @staticmethod
    def _reset_state() -> None:
        """Forget the states and loops of this process; Accelerate's name, for its users' tests."""
        _LIVE_STATES.clear()
        _ITERATED_LOADERS.clear()

    def compile_watch(self, device: DeviceRuntime) -> CompileWatch | None:
        """What watches the programs that steps compile; None for a device that compiles none."""
        if self._watch is None and (counts := device.compile_counts()) is not None:
            self._watch = CompileWatch(device, counts)
        return self._watch

    @property
    def compile_phase(self) -> str:
        """What the step under way is doing beside training, in words; empty for nothing."""
        return "" if self._watch is None else self._watch.phase

    @property
    def active_dataloader(self) -> IteratedLoader | None:
        """The innermost loader that is iterated over, of this accelerator or else of another."""
        loaders = self._loader_stack or _ITERATED_LOADERS
        return loaders[-1] if loaders else None

    @property
    def in_dataloader(self) -> bool:
        """Whether a prepared loader is being iterated over."""
        return self.active_dataloader is not None

    @property
    def end_of_dataloader(self) -> bool:
        """Whether the current batch is the last of the innermost loader."""
        active = self.active_dataloader
        return active is not None and active.end_of_dataloader

    @property
    def remainder(self) -> int:
        """Samples of the last total batch that are no duplicates; -1 where that is not known."""
        active = self.active_dataloader
        return active.remainder if active is not None else -1

    @property
    def unpadded_rows(self) -> int | None:
        """Rows to keep of a gathered batch, the current one; None to keep all."""
        return self.remainder if self.end_of_dataloader and self.remainder > 0 else None

    sync_with_dataloader: bool = _of_plugin("sync_with_dataloader")
    """Whether the last batch of a loader ends a group even if it is short."""
    sync_each_batch: bool = _of_plugin("sync_each_batch")
    """Whether gradients are reduced after every batch."""
    adjust_scheduler: bool = _of_plugin("adjust_scheduler")
    """Whether schedules are written in batches, not in optimizer steps."""

    def enter_loader(self, loader: IteratedLoader) -> None:
        """A loader is being iterated over from now on."""
        self._loader_stack.append(loader)
        _ITERATED_LOADERS.append(loader)

    @staticmethod
    def is_outermost(loader: IteratedLoader) -> bool:
        """Whether no loop over another loader is around that over this one."""
        return _ITERATED_LOADERS[0] is loader

    def end_loader(self, loader: IteratedLoader) -> None:
        """A loader is done, or was left early; loops that began inside it may still run."""
        for loader_stack in (self._loader_stack, _ITERATED_LOADERS):
            # By identity and from the end: `remove` would compare loaders with ==, and take the
            # outermost of two iterations of the same loader.
            for index in reversed(range(len(loader_stack))):
                if loader_stack[index] is loader:
                    del loader_stack[index]
                    break


WARM_UP_STEPS = 3
"""Steps until the programs of a loop are compiled, the first one at full speed included."""

_SCALAR_STEPS = 3
"""Steps in a row that compile with shapes that are known, before they are told."""

_Shapes = tuple[tuple[str, tuple[int, ...]], ...]


class CompileWatch:
    """Says which steps were slow because the device compiled, and what made it compile again.

    Such a device turns the operations of a step into a program the first time it meets them, which
    takes seconds to minutes, and again for every other shape. The first step compiles; the second
    does, because the optimizer's state lives on the device by then; the third is the first at full
    speed. Later programs have a cause that can be removed, and it is named once.
    """

    def __init__(self, device: DeviceRuntime, counts: CompileCounts) -> None:
        self._device = device
        self.counts = counts  # what the device's compiler had done when the last step ended
        self._times_met: Counter[_Shapes] = Counter()
        self._in_a_row = 0
        # What the step under way is doing, in words; empty at full speed, and between steps.
        self.phase = ""
        # The causes that have been named: ``shapes``, ``numbers``.
        self.named_causes: set[str] = set()

    @contextlib.contextmanager
    def step(self, batch: Any) -> Iterator[None]:
        """The loop's body at work on a batch, which it may leave early."""
        shapes = _shapes_of(batch)
        self._times_met[shapes] += 1
        number = self._times_met[shapes]
        is_warm = number >= WARM_UP_STEPS
        self._enter_phase("" if is_warm else f"compiling, step {number} of about {WARM_UP_STEPS}")
        try:
            yield
        finally:
            self._enter_phase("")
        counts = self._device.compile_counts() or self.counts
        has_compiled = counts.programs > self.counts.programs
        self.counts = counts
        if reporter := metrics_reporter.current():
            reporter.note_compiled(counts.programs, counts.seconds)
        if not has_compiled:
            self._in_a_row = 0
        # The first shapes of all have to be compiled; others could have been the same.
        elif number == 1 and len(self._times_met) > 1:
            earlier = next(iter(self._times_met))
            self._tell(
                "shapes",
                f"this batch has other shapes ({_describe(shapes)}) than those before "
                f"({_describe(earlier)}), and the device compiled for them again. Where it is a "
                "loader's last batch, give the DataLoader drop_last=True, or pad it; in "
                "evaluation, use the batch size of training; pad texts to one length.",
            )
        elif number > WARM_UP_STEPS:
            self._in_a_row += 1
            if self._in_a_row == _SCALAR_STEPS:
                self._tell(
                    "numbers",
                    f"{_SCALAR_STEPS} steps in a row compiled again although the batches had "
                    "shapes that were met before. A Python number that changes from step to step "
                    "is part of the program: give it to the operation as a tensor on the device.",
                )

    def _enter_phase(self, phase: str) -> None:
        self.phase = phase
        if reporter := metrics_reporter.current():
            reporter.note_phase(phase)

    def _tell(self, cause: str, text: str) -> None:
        # Without times, in which ranks differ: a line that all of them say is shown once.
        if cause not in self.named_causes:
            self.named_causes.add(cause)
            write_notice(f"nbaccel: {text}\n")


def _shapes_of(batch: Any) -> _Shapes:
    tensors = (leaf for leaf in leaves(batch) if isinstance(leaf, torch.Tensor))
    return tuple((str(it.dtype).removeprefix("torch."), tuple(it.shape)) for it in tensors)


def _describe(shapes: _Shapes) -> str:
    return ", ".join(f"{dtype} {list(shape)}" for dtype, shape in shapes)
