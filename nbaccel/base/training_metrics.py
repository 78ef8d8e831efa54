"""What a rank reports of its training, and the values of a metric over a run, in bounded memory."""

from __future__ import annotations

import math
from dataclasses import dataclass
from operator import itemgetter

from nbaccel.base.spent_time import SpentTime

Point = tuple[float, float]  # step and value

_MAX_BUCKETS = 400
_MAX_UNSORTED = 32


class MetricHistory:
    """All values of a run while they are few; of many the extremes of each stretch."""

    def __init__(self, max_buckets: int = _MAX_BUCKETS) -> None:
        self._max_buckets = max_buckets
        self._buckets: list[list[Point]] = []
        self._values_each = 1
        self._num_values = 0
        self.first_point: Point | None = None
        self.last_point: Point | None = None

    def add(self, value: float, step: float) -> None:
        """Take in the next value."""
        self.last_point = (step, value)
        self.first_point = self.first_point or self.last_point
        if self._num_values % self._values_each == 0:
            self._buckets.append([self.last_point])
        else:
            bucket = self._buckets[-1]
            bucket.append(self.last_point)
            # Not with each value: that would cost microseconds in each step.
            if len(bucket) == _MAX_UNSORTED:
                self._buckets[-1] = _extremes(bucket)
        self._num_values += 1
        if len(self._buckets) > self._max_buckets:
            # An odd one stays alone: it goes on growing.
            buckets = [*self._buckets, *([[]] * (len(self._buckets) % 2))]
            self._buckets = [
                _extremes([*first, *second])
                for first, second in zip(buckets[::2], buckets[1::2], strict=True)
            ]
            self._values_each *= 2

    @property
    def last(self) -> float | None:
        """The latest value."""
        return None if self.last_point is None else self.last_point[1]

    def points(self) -> list[Point]:
        """Step and value, from the first to the latest."""
        if self.first_point is None or self.last_point is None:
            return []
        points = [point for bucket in self._buckets for point in _extremes(bucket)]
        begin = [self.first_point] if points[0] is not self.first_point else []
        end = [self.last_point] if points[-1] is not self.last_point else []
        return [*begin, *points, *end]


def _extremes(points: list[Point]) -> list[Point]:
    """The lowest and the highest point of a stretch, and one that is no number, in their order."""
    if len(points) <= 2:
        return points
    finite = [point for point in points if math.isfinite(point[1])]
    kept = [point for point in points if not math.isfinite(point[1])][:1]
    if finite:
        kept += {min(finite, key=itemgetter(1)), max(finite, key=itemgetter(1))}
    return sorted(kept, key=points.index)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgressBar:
    """A progress bar at one moment."""

    description: str = ""
    done: str = ""  # in the bar's own words: `2`, `1.5k`
    total: str = ""  # empty where that is not known
    fraction: float | None = None  # from 0 to 1; None where the total is not known
    left_s: float | None = None  # seconds that are left, as the bar estimates them
    elapsed_s: float = 0.0  # seconds since it began
    is_elsewhere: bool = False  # drawn elsewhere in the cell: the panel uses its numbers only


@dataclass(frozen=True, slots=True, kw_only=True)
class OuterLoop:
    """A loop over epochs at one moment. What follows its rounds is no part of it."""

    total: int  # epochs in all
    done: int  # epochs that are over
    done_s: float  # what these took, in seconds
    round_s: float  # seconds since then
    done_steps: int  # batches that were used in them, of all loops
    round_steps: int  # batches that have been used since then


@dataclass(frozen=True, slots=True, kw_only=True)
class Metrics:
    """What the training loop has reported; see `loops.metrics_reporter`."""

    time: float  # seconds of CLOCK_MONOTONIC, the same for all processes
    steps: int | None  # None where nothing counts them
    # Metric → pairs of step and value since the last message.
    points: tuple[tuple[str, tuple[Point, ...]], ...] = ()
    replaced: tuple[str, ...] = ()  # metrics that the function logs itself from now on
    device_bytes: int | None = None  # what torch holds on this worker's device; None on a CPU
    phase: str = ""  # what the step does beside training: `compiling, step 2 of about 3`
    programs: int | None = None  # that the device's compiler has made; None where it compiles none
    compile_s: float = 0.0  # time that took, in seconds
    spent: SpentTime | None = None  # where the time has gone; None before the first loop
    had_group: bool = False  # whether the process has been in a process group since it began
    loop_name: str = ""  # what the loop over batches is called; empty for no name
    epoch: int = 0  # how many loops of this name and length have begun, with this one
    batches: int = 0  # batches used in that loop
    total_batches: int | None = None  # batches that it has; None where that is not known
    loop_began_at_step: int = 0
    loop_is_seen: bool = False  # seen from outside: it did not say itself that it begins
    batches_in_all: int = 0  # batches that this rank has used in all its loops
    samples: int = 0  # samples that this rank has used in all its loops
    outer: OuterLoop | None = None  # the loop over epochs; None where its length is not known
    bars: tuple[ProgressBar, ...] = ()  # progress bars that its code has made, the outer one first
    bar_is_whole: bool = False  # whether the outer one is that of the whole training
    num_left_out: int = 0  # metrics that it has logged beside those that it reports
    left_out: tuple[str, ...] = ()  # the first of these by name
