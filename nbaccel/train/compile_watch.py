"""Watches a device that compiles: which steps were slow for that, and what made it compile again.

Such a device turns the operations of a step into a program the first time it meets them, which
takes seconds to minutes, and again for every other shape. The first step compiles; the second one
does, because the optimizer's state lives on the device by then; the third is the first at full
speed. Later programs have a cause that can be removed, and it is named once.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch

from nbaccel.base.log import write_notice
from nbaccel.loops import metrics_reporter
from nbaccel.plan.contracts.device import CompileCounts, DeviceRuntime
from nbaccel.train.trees import leaves

WARM_UP_STEPS = 3
"""Steps until the programs of a loop are compiled, the first one at full speed included."""

_SCALAR_STEPS = 3
"""Steps in a row that compile with shapes that are known, before they are told."""

_Shapes = tuple[tuple[str, tuple[int, ...]], ...]


class CompileWatch:
    """Counts the programs that steps compile."""

    def __init__(self, device: DeviceRuntime, counts: CompileCounts) -> None:
        self._device = device
        self.counts = counts  # what the device's compiler had done when the last step ended
        self._times_met: Counter[_Shapes] = Counter()
        self._in_a_row = 0
        # What the step under way is doing, in words; empty at full speed, and between steps.
        self.phase = ""
        # The causes that have been named: ``shapes``, ``numbers``.
        self.named_causes: set[str] = set()

    @classmethod
    def of(cls, device: DeviceRuntime) -> CompileWatch | None:
        """One for a device that compiles; None for any other."""
        counts = device.compile_counts()
        return None if counts is None else cls(device, counts)

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
        self._end(shapes, number)

    def _enter_phase(self, phase: str) -> None:
        self.phase = phase
        if reporter := metrics_reporter.current():
            reporter.note_phase(phase)

    def _end(self, shapes: _Shapes, number: int) -> None:
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

    def _tell(self, cause: str, text: str) -> None:
        # Without times, in which ranks differ: a line that all of them say is shown once.
        if cause not in self.named_causes:
            self.named_causes.add(cause)
            write_notice(f"nbaccel: {text}\n")


def _shapes_of(batch: Any) -> _Shapes:
    return tuple(
        (str(leaf.dtype).removeprefix("torch."), tuple(leaf.shape))
        for leaf in leaves(batch)
        if isinstance(leaf, torch.Tensor)
    )


def _describe(shapes: _Shapes) -> str:
    return ", ".join(f"{dtype} {list(shape)}" for dtype, shape in shapes)
