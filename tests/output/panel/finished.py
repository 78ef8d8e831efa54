"""What stays of a board, as tests look at it."""

from __future__ import annotations

from typing import Any

from nbaccel import RunConfig
from nbaccel.base.training_metrics import Metrics
from nbaccel.output.panel.facts import RunBoard
from nbaccel.output.report import facts_of, finished_line, summary_html
from nbaccel.plan.inspecting import inspect_machine
from nbaccel.plan.resolving import resolve

PLAN = resolve(RunConfig(num_processes=2, device="cpu"), inspect_machine())


def final_html(board: RunBoard) -> str:
    return summary_html(board, facts_of(board, PLAN))


def final_line(board: RunBoard) -> str:
    return finished_line(facts_of(board, PLAN))


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
