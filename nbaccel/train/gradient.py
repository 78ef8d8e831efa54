"""``GradientState``: whether this batch ends with an optimizer step, and where the loaders are.

Each `Accelerator` has one of its own, which its optimizers, schedulers and loaders share, so two
accelerators in a notebook do not disturb each other. ``GradientState()`` without settings means the
newest accelerator's. Only which loaders are being iterated over is known to the whole process: a
function that makes an accelerator of its own, to gather metrics of batches that another one's
loader gives, must know where that loader is.
"""

from __future__ import annotations

import os
import weakref
from typing import Protocol

from nbaccel.config.handlers import GradientAccumulationPlugin
from nbaccel.plan.contracts.device import DeviceRuntime
from nbaccel.train import distributed
from nbaccel.train.compile_watch import CompileWatch
from nbaccel.train.resuming import Resuming


class IteratedLoader(Protocol):
    """What a gradient state needs of a loader."""

    end_of_dataloader: bool
    """Whether the current batch is the last."""

    @property
    def remainder(self) -> int:
        """Samples of the last total batch that are no duplicates; -1 where that is not known."""


# Of all accelerators of this process, the innermost last. A forked worker iterates over none.
_ITERATED_LOADERS: list[IteratedLoader] = []
# Those made from settings, the newest last; weak, because an accelerator may be dropped.
_LIVE_STATES: list[weakref.ref[GradientState]] = []
if hasattr(os, "register_at_fork"):  # Windows has no forks
    os.register_at_fork(after_in_child=_ITERATED_LOADERS.clear)
    os.register_at_fork(after_in_child=_LIVE_STATES.clear)


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
        self._has_told = False
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
        self._watch = self._watch or CompileWatch.of(device)
        return self._watch

    @property
    def compile_phase(self) -> str:
        """What the step under way is doing beside training, in words; empty for nothing."""
        return "" if self._watch is None else self._watch.phase

    @property
    def active_dataloader(self) -> IteratedLoader | None:
        """The innermost loader that is being iterated over, if any.

        Of this accelerator's; where it has none, of another one's in this process.
        """
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

    @property
    def sync_with_dataloader(self) -> bool:
        """Whether the last batch of a loader ends a group even if it is short."""
        return self.plugin.sync_with_dataloader

    @property
    def sync_each_batch(self) -> bool:
        """Whether gradients are reduced after every batch."""
        return self.plugin.sync_each_batch

    @property
    def adjust_scheduler(self) -> bool:
        """Whether schedules are written in batches, not in optimizer steps."""
        return bool(self.plugin.adjust_scheduler)

    def must_tell_adjusted(self) -> bool:
        """Whether it is still to be said that schedules advance by batches: once, on process 0."""
        already_told = self._has_told
        self._has_told = True
        return not already_told and distributed.rank() == 0

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
