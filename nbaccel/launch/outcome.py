"""What a launch hands to the notebook once all its workers are through."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

from nbaccel.errors import LaunchInterrupted
from nbaccel.launch import verdict
from nbaccel.launch.sharing.homecoming import Homecoming
from nbaccel.launch.system import uninterrupted
from nbaccel.plan import Plan
from nbaccel.units import counted

__all__ = ["Outcome", "conclude"]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a launch that succeeded hands to the notebook."""

    values: list[Any]
    plan: Plan
    state_dicts: dict[str, dict[str, Any]]
    """Weights of modules whose structure changed, so that they could not come home in place."""


def conclude(
    plan: Plan,
    watch: verdict.Watched,
    homecoming: Homecoming,
    *,
    stopped: str,
    stacklevel: int,
) -> Outcome:
    """Bring the weights home and open the results, or raise what went wrong.

    Args:
        plan: What was planned.
        watch: Who watched the workers.
        homecoming: Where the trained weights are.
        stopped: What to say if the user stopped it.
        stacklevel: Frames from here up to the user's own code.

    Raises:
        LaunchInterrupted: The user stopped it.
        WorkerFailed: A worker failed.
    """
    if watch.interrupted:
        raise LaunchInterrupted(verdict.stopped(watch, stopped))
    failed = verdict.error(watch, world_size=plan.world_size, timeout_s=plan.config.timeout)
    if failed is not None:
        raise failed
    reports = [m.returned.home for m in watch.members if m.returned and m.returned.home]
    disturbed = homecoming.disturbed()
    differing = homecoming.differing(reports)
    with uninterrupted():  # half of a model is worse than either
        homecoming.apply(reports)
    values, lost = verdict.results(watch.members)
    state_dicts = {k: v for report in reports for k, v in report.state_dicts.items()}
    if lost:
        more = f", and so did {counted(len(lost) - 1, 'more rank')}" if len(lost) > 1 else ""
        warnings.warn(f"{lost[0]}{more}. The results say so in its place.", stacklevel=stacklevel)
    for report in reports:
        for path, why in report.stranded.items():
            warnings.warn(
                f"The trained weights of {path} do not fit the notebook's module ({why}), so it is "
                f"as it was. They are in the results: results.state_dicts[{path!r}].",
                stacklevel=stacklevel,
            )
        for path, what in report.changes.items():
            warnings.warn(
                f"The trained weights of {path} were copied into the notebook's module, but are "
                f"not as they were in the worker: {what}. As they were, they are in the results: "
                f"results.state_dicts[{path!r}].",
                stacklevel=stacklevel,
            )
    for path in disturbed:
        warnings.warn(
            f"The notebook wrote to {path} while the workers used it (from another thread?). Ranks "
            "saw the new values wherever they had not written themselves, so they may have trained "
            "on a mixture. Let that thread wait until the launch is over, or give it a copy.",
            stacklevel=stacklevel,
        )
    for line in differing.values():
        warnings.warn(line, stacklevel=stacklevel)
    return Outcome(values=values, plan=plan, state_dicts=state_dicts)
