"""What stays of a board, as tests look at it."""

from __future__ import annotations

from nbaccel import RunConfig
from nbaccel.output.panel.facts import RunBoard
from nbaccel.output.report.report_parts import finished_line, summary_html
from nbaccel.output.report.run_facts import facts_of
from nbaccel.plan.inspecting import inspect_machine
from nbaccel.plan.resolving import resolve

PLAN = resolve(RunConfig(num_processes=2, device="cpu"), inspect_machine())


def final_html(board: RunBoard) -> str:
    return summary_html(board, facts_of(board, PLAN))


def final_line(board: RunBoard) -> str:
    return finished_line(facts_of(board, PLAN))
