"""The loops over batches of a training function, and the loop over epochs around them.

A loop within which another one begins (`for epoch in accelerator.progress(range(14))`) is over
epochs, and its rounds are no batches. One that is told `epochs=14` begins anew for each epoch.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from nbaccel.outer_loop import OuterLoop

__all__ = ["RunningLoop", "TrainingLoops"]

_DIGITS = re.compile(r"\d+")


class EpochCount:
    """Counts the epochs of one training, by the clock of this process.

    Args:
        total: Epochs in all.
        began_at: When the first one began (CLOCK_MONOTONIC).
        began_steps: Batches that had been used until then.
    """

    def __init__(self, total: int, began_at: float, began_steps: int) -> None:
        self.total = total
        self.done = 0
        self._began_at = self._done_at = began_at
        self._began_steps = self._done_steps = began_steps

    def note_done(self, current_time: float, steps: int) -> None:
        """One more is over."""
        self.done, self._done_at, self._done_steps = self.done + 1, current_time, steps

    def told(self, current_time: float, steps: int) -> OuterLoop:
        """How far it is."""
        return OuterLoop(
            total=self.total,
            done=self.done,
            done_s=self._done_at - self._began_at,
            round_s=current_time - self._done_at,
            done_steps=self._done_steps - self._began_steps,
            round_steps=steps - self._done_steps,
        )


@dataclass(kw_only=True, slots=True, eq=False)
class RunningLoop:
    """A loop that is under way, or was last."""

    name: str = ""
    epoch: int = 0
    """How many of its kind have begun, this one included."""
    batches: int = 0
    total_batches: int | None = None
    epochs: EpochCount | None = None
    """Of a loop of known length: for the case that other loops begin within it."""
    holds_loops: bool = False
    """Whether others have begun within it, so that its rounds are no batches."""


class TrainingLoops:
    """All loops of one function that have a bar."""

    def __init__(self) -> None:
        self.latest = RunningLoop()
        """The loop over batches that is under way, or was last."""
        self._open: list[RunningLoop] = []
        self._begun: dict[tuple[int, str, int | None], int] = {}
        self._around: EpochCount | None = None
        """What counts the epochs of the training, if that is known."""
        self._given_key: tuple[int, str, int | None] | None = None
        """The loop whose number of epochs was given, if that is where it is known from."""

    def begin(
        self,
        name: str,
        total_batches: int | None,
        *,
        epochs: int | None,
        current_time: float,
        steps: int,
    ) -> RunningLoop:
        """A loop begins.

        Args:
            name: What the user calls it; empty for no name.
            total_batches: How many rounds it has; None where that is not known.
            epochs: How often it is run in all; None where that was not said.
            current_time: Now (CLOCK_MONOTONIC).
            steps: Batches that have been used so far.
        """
        if self._open:
            self._open[-1].holds_loops = True
        outermost = next((loop.epochs for loop in self._open if loop.epochs is not None), None)
        # By its place and length, not by the loader, of which there may be a new one for each
        # epoch; `epoch 1` and `epoch 2` are the same loop.
        loop_key = (len(self._open), _DIGITS.sub("#", name), total_batches)
        self._begun[loop_key] = self._begun.get(loop_key, 0) + 1
        if outermost is not None:
            self._around, self._given_key = outermost, None
        elif epochs:
            self._count_given(loop_key, epochs, current_time, steps)
        elif self._given_key is None and not self._open:
            self._around = None  # an earlier loop over epochs is over
        new_loop = RunningLoop(
            name=name,
            epoch=self._begun[loop_key],
            total_batches=total_batches,
            epochs=EpochCount(total_batches, current_time, steps) if total_batches else None,
        )
        self._open.append(new_loop)
        self.latest = new_loop
        return new_loop

    def _count_given(
        self, loop_key: tuple[int, str, int | None], epochs: int, current_time: float, steps: int
    ) -> None:
        """Count the epochs of a loop of which it was said how many there are."""
        if loop_key == self._given_key and self._around is not None:
            self._around.note_done(current_time, steps)
            is_over = self._around.done >= epochs
        else:
            # A loop for validation says the same number, and begins as often as the first one.
            is_over = self._given_key is None or (
                self._begun[loop_key] == 1
                and self._around is not None
                and self._around.done + 1 >= self._around.total
                and self._around.total > 1
            )
        if is_over:
            self._begun[loop_key] = 1
            self._given_key = loop_key
            self._around = EpochCount(epochs, current_time, steps)

    def round_done(self, loop: RunningLoop | None, current_time: float, steps: int) -> bool:
        """A round of a loop is over.

        Args:
            loop: What `begin` returned; None for the latest.
            current_time: Now (CLOCK_MONOTONIC).
            steps: Batches that have been used so far, without this one.

        Returns:
            Whether it was a batch.
        """
        done_loop = loop or self.latest
        if done_loop.holds_loops:
            if done_loop.epochs is not None:
                done_loop.epochs.note_done(current_time, steps)
            return False
        done_loop.batches += 1
        return True

    def end(self, loop: RunningLoop) -> None:
        """A loop is over, or was left."""
        if loop in self._open:
            # Loops within it that were left without an end are over, too.
            del self._open[self._open.index(loop) :]

    def around(self, current_time: float, steps: int) -> OuterLoop | None:
        """How far the epochs of the training are; None where it is not known how many there are.

        Args:
            current_time: Now (CLOCK_MONOTONIC).
            steps: Batches that have been used so far.
        """
        return None if self._around is None else self._around.told(current_time, steps)
