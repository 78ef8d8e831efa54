"""What a pool is asked, and how it stands: without torch, so that a refusal comes at once."""

from __future__ import annotations

import enum
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from nbaccel.base.errors import ConfigError, PlatformUnsupported
from nbaccel.base.frames import keep_lines
from nbaccel.base.units import number_ranges
from nbaccel.config import RunConfig
from nbaccel.config.capabilities import start_method_row
from nbaccel.plan import Plan, registry, resolve


class PoolState(enum.Enum):
    """How a pool stands. Only `IDLE` takes work; the others say why not, or start anew."""

    NEW = "no workers yet; the first cell starts them"
    STARTING = "workers are being started"
    IDLE = "workers wait for a cell"
    RUNNING = "workers run a cell"
    BROKEN = "a worker was lost, and the others were ended; the next cell starts new ones"
    STOPPED = "workers were ended on request; the next cell starts new ones"


def plan_pool(config: RunConfig) -> Plan:
    """Decide what a pool's start will do."""
    if not sys.platform.startswith("linux"):
        raise PlatformUnsupported(
            f"Live workers need Linux (memfd_create, pidfd_open): this is {sys.platform}. Run the "
            "code in an ordinary cell."
        )
    mistakes = []
    if config.num_nodes > 1:
        mistakes.append(
            f"num_nodes={config.num_nodes}: live workers belong to one notebook on one machine. "
            "Use notebook_launcher(num_nodes=...) for several."
        )
    if config.start_method == "inline":
        mistakes.append(
            'start_method="inline" has no workers: the code would run in this very process. Run it '
            'in an ordinary cell, or use "template".'
        )
    if config.max_restarts:
        mistakes.append(
            f"max_restarts={config.max_restarts}: a cell is not run again after a failure, because "
            "its variables would be those of the first try. Leave it at 0."
        )
    if mistakes:
        raise ConfigError(*mistakes)
    plan = resolve(config)
    registry.check_strategy(plan.strategy, plan.device, config)
    if start_method_row(plan.start_method).separate_processes:
        return plan
    refusal_reason = "live workers are processes of their own, whatever their number"
    return plan.with_start_method("template", refusal_reason)


def ranks_of(ranks: Sequence[int] | None, num_processes: int) -> tuple[int, ...]:
    """The ranks that a task is for."""
    all_ranks = range(num_processes)
    if ranks is None:
        return tuple(all_ranks)
    unknown_ranks = [rank for rank in ranks if rank not in all_ranks]
    if unknown_ranks or not ranks:
        raise ConfigError(
            f"The workers' ranks are {number_ranges(all_ranks)}: got "
            f"{number_ranges(ranks) or 'none'}. A cell that runs nowhere would do nothing. Name "
            "some of these, leave ranks out for all, or start more: %accelerate restart -n "
            f"{max(ranks, default=0) + 1}."
        )
    return tuple(dict.fromkeys(ranks))


@dataclass(frozen=True, kw_only=True)
class CellSource:
    """What is to be run, and the lines by which notebook and workers show frames in it."""

    text: str  # the code: a cell without its magic line
    filename: str  # under which frames name it
    cell: tuple[str, ...]  # the lines of the cell as the user sees them, each with its line end
    first_line: int = 1  # its number in the cell: 2 behind a line with `%%accelerate`
    count: int | None = None  # the cell's execution count: 7 for `In [7]`

    def publish(self) -> None:
        """Let tracebacks of this process find the lines."""
        keep_lines({self.filename: self.cell})
