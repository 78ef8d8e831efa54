"""What a rank reports of its training."""

from __future__ import annotations

from dataclasses import dataclass

from nbaccel.base.metric_history import Point
from nbaccel.base.spent_time import SpentTime


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgressBar:
    """A progress bar at one moment."""

    description: str = ""
    done: str = ""
    """In the bar's own words: `2`, `1.5k`."""
    total: str = ""
    """Empty where that is not known."""
    fraction: float | None = None
    """How much is done, from 0 to 1; None where the total is not known."""
    left_s: float | None = None
    """Seconds that are left, as the bar estimates them."""
    elapsed_s: float = 0.0
    """Seconds since it began."""
    is_elsewhere: bool = False
    """Whether it is drawn elsewhere in the cell, so that the panel uses its numbers only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OuterLoop:
    """A loop over epochs at one moment. What follows its rounds is no part of it."""

    total: int
    """Epochs in all."""
    done: int
    """Epochs that are over."""
    done_s: float
    """What these took, in seconds."""
    round_s: float
    """Seconds since then."""
    done_steps: int
    """Batches that were used in them, of all loops."""
    round_steps: int
    """Batches that have been used since then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Metrics:
    """What the training loop has reported; see `loops.metrics_reporter`."""

    time: float
    """Seconds of CLOCK_MONOTONIC, the same for all processes."""
    steps: int | None
    """None where nothing counts them."""
    points: tuple[tuple[str, tuple[Point, ...]], ...] = ()
    """Metric → pairs of step and value since the last message."""
    replaced: tuple[str, ...] = ()
    """Metrics whose earlier points were nbaccel's own: the function logs them itself."""
    device_bytes: int | None = None
    """What torch holds on this worker's device; None on a CPU."""
    phase: str = ""
    """What the step under way is doing beside training: `compiling, step 2 of about 3`."""
    programs: int | None = None
    """Programs that the device's compiler has made; None for a device that compiles none."""
    compile_s: float = 0.0
    """Time that took, in seconds."""
    spent: SpentTime | None = None
    """Where the time has gone; None before the first loop over batches."""
    had_group: bool = False
    """Whether the process has been in a process group of torch's since the task began."""
    loop_name: str = ""
    """What the loop over batches is called; empty for no name."""
    epoch: int = 0
    """How many loops of this name and length have begun, this one included; 0 before the first."""
    batches: int = 0
    """Batches used in that loop."""
    total_batches: int | None = None
    """Batches that it has; None where that is not known."""
    loop_began_at_step: int = 0
    loop_is_seen: bool = False
    """Whether the loop was seen from outside, and did not say itself that it begins."""
    batches_in_all: int = 0
    """Batches that this rank has used in all its loops."""
    samples: int = 0
    """Samples that this rank has used in all its loops."""
    outer: OuterLoop | None = None
    """The loop over epochs around the loop over batches; None where its length is not known."""
    bars: tuple[ProgressBar, ...] = ()
    """Progress bars that its code has made, the outer one first."""
    bar_is_whole: bool = False
    """Whether the outer one is that of the whole training."""
    num_left_out: int = 0
    """Metrics that it has logged beside those that it reports."""
    left_out: tuple[str, ...] = ()
    """The first of these by name."""
