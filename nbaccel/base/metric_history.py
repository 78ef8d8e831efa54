"""The values of a metric over a whole run, in bounded memory."""

from __future__ import annotations

import math

Point = tuple[float, float]
"""Step and value."""

_MAX_BUCKETS = 400
_MAX_UNSORTED = 32


class MetricHistory:
    """All values of a run while they are few; of many the lowest and the highest of each stretch.

    A spike of one step stays, however long the run: stretches become longer, and are as many.
    """

    def __init__(self, max_buckets: int = _MAX_BUCKETS) -> None:
        self._max_buckets = max_buckets
        self._buckets: list[list[Point]] = []
        self._values_each = 1
        self._num_values = 0
        self.first_point: Point | None = None
        self.last_point: Point | None = None

    def add(self, value: float, step: float | None = None) -> None:
        """Take in the next value."""
        if step is None:
            step = 0.0 if self.last_point is None else self.last_point[0] + 1
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
    def first(self) -> float | None:
        """The first value of all."""
        return None if self.first_point is None else self.first_point[1]

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

    def values(self) -> list[float]:
        """The values of `points`."""
        return [value for _, value in self.points()]


def _extremes(points: list[Point]) -> list[Point]:
    """The lowest and the highest point of a stretch, and one that is no number, in their order."""
    if len(points) <= 2:
        return points
    finite = [point for point in points if math.isfinite(point[1])]
    kept = [point for point in points if not math.isfinite(point[1])][:1]
    if finite:
        kept += {min(finite, key=_value_of), max(finite, key=_value_of)}
    return sorted(kept, key=points.index)


def _value_of(point: Point) -> float:
    return point[1]
