"""What a rank reports, as tests make it."""

from __future__ import annotations

from typing import Any

from nbaccel.base.training_metrics import Metrics


def report(
    time: float, steps: int | None = None, values: dict[str, float] | None = None, **more: Any
) -> Metrics:
    """A report of one point of each metric, from a loop whose batches are its steps."""
    at_step = float(steps or 0)
    batches = more.get("batches", 0)
    counts = {"batches_in_all": steps or 0, "loop_began_at_step": (steps or 0) - batches}
    return Metrics(
        time=time,
        steps=steps,
        points=tuple((name, ((at_step, value),)) for name, value in (values or {}).items()),
        **(counts | more),
    )
