"""Watches a device that compiles: which steps were slow for that, and what made it compile again.

Such a device turns the operations of a step into a program the first time it meets them, which
takes seconds to minutes, and again for every other shape. The first step compiles; the second one
does, because the optimizer's state lives on the device by then; the third is the first at full
speed. Later programs have a cause that can be removed, and it is named once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from nbaccel.base.log import write_notice
from nbaccel.base.units import count_noun, format_seconds
from nbaccel.loops import metrics_reporter
from nbaccel.plan.contracts.device import CompileCounts, DeviceRuntime
from nbaccel.train.trees import leaves

WARM_UP_STEPS = 3
"""Steps until the programs of a loop are compiled, the first one at full speed included."""

_SCALAR_STEPS = 3
"""Steps in a row that compile with shapes that are known, before they are told."""

_Shapes = tuple[tuple[str, tuple[int, ...]], ...]


class CompileWatch:
    """Counts the programs that steps compile.

    Attributes:
        counts: What the device's compiler had done when the last step ended.
        steps: Batches since the last one whose shapes had not been met before; 0 before the first.
        phase: What the step under way is doing, in words; empty at full speed, and between steps.
        named_causes: The causes that have been named: ``shapes``, ``numbers``.
    """

    def __init__(self, device: DeviceRuntime, counts: CompileCounts) -> None:
        self._device = device
        self._known_shapes: dict[_Shapes, int] = {}
        self.counts = counts
        self._in_a_row = 0
        self._shapes: _Shapes = ()
        self.steps = 0
        self.phase = ""
        self.named_causes: set[str] = set()

    @classmethod
    def of(cls, device: DeviceRuntime) -> CompileWatch | None:
        """One for a device that compiles; None for any other."""
        counts = device.compile_counts()
        return None if counts is None else cls(device, counts)

    @contextlib.contextmanager
    def step(self, batch: Any) -> Iterator[None]:
        """The loop's body at work on a batch, which it may leave early."""
        self._begin(batch)
        try:
            yield
        finally:
            self._enter_phase("")
        self._end()

    def _begin(self, batch: Any) -> None:
        self._shapes = _shapes_of(batch)
        uses = self._known_shapes.get(self._shapes, 0)
        self._known_shapes[self._shapes] = uses + 1
        self.steps = uses + 1
        is_warm = self.steps >= WARM_UP_STEPS
        self._enter_phase(
            "" if is_warm else f"compiling, step {self.steps} of about {WARM_UP_STEPS}"
        )

    def _enter_phase(self, phase: str) -> None:
        self.phase = phase
        if reporter := metrics_reporter.current():
            reporter.note_phase(phase)

    def _end(self) -> None:
        counts = self._device.compile_counts() or self.counts
        programs = counts.programs - self.counts.programs
        self.counts = counts
        if reporter := metrics_reporter.current():
            reporter.note_compiled(counts.programs, counts.seconds)
        if not programs:
            self._in_a_row = 0
            return
        if self.steps <= WARM_UP_STEPS:
            # The first shapes of all have to be compiled; others could have been the same.
            if self.steps == 1 and len(self._known_shapes) > 1:
                self._tell_of_shapes()
            return
        self._in_a_row += 1
        if self._in_a_row == _SCALAR_STEPS:
            self._tell_of_numbers()

    def _tell_of_shapes(self) -> None:
        earlier = next(shapes for shapes in self._known_shapes if shapes != self._shapes)
        self._tell(
            "shapes",
            f"this batch has other shapes ({_describe(self._shapes)}) than those before "
            f"({_describe(earlier)}), and the device compiled for them again. Where it is a "
            "loader's last batch, give the DataLoader drop_last=True, or pad it; in evaluation, "
            "use the batch size of training; pad texts to one length.",
        )

    def _tell_of_numbers(self) -> None:
        self._tell(
            "numbers",
            f"{_SCALAR_STEPS} steps in a row compiled again although the batches had shapes that "
            "were met before. A Python number that changes from step to step is part of the "
            "program: give it to the operation as a tensor on the device.",
        )

    def _tell(self, cause: str, text: str) -> None:
        # Without times, in which ranks differ: a line that all of them say is shown once.
        if cause not in self.named_causes:
            self.named_causes.add(cause)
            write_notice(f"nbaccel: {text}\n")

    def describe(self) -> str:
        """How much was compiled so far: ``14 programs compiled in 3.2 s``."""
        programs = count_noun(self.counts.programs, "program")
        return f"{programs} compiled in {format_seconds(self.counts.seconds)}"


def _shapes_of(batch: Any) -> _Shapes:
    return tuple(
        (str(leaf.dtype).removeprefix("torch."), tuple(leaf.shape))
        for leaf in leaves(batch)
        if isinstance(leaf, torch.Tensor)
    )


def _describe(shapes: _Shapes) -> str:
    return ", ".join(f"{dtype} {list(shape)}" for dtype, shape in shapes)
