"""How a strategy is requested: what was said, and what a strategy makes of it.

Each strategy decides for itself, in a light module that its capability row names (``wanted``), so
that no list of strategies is kept anywhere else and none of them is imported unnecessarily.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from nbaccel.config import RunConfig
    from nbaccel.plan.launch_plan import Choice

__all__ = ["Said", "SaidBySettings", "Source", "Wanted"]

Source = Literal["argument", "config", "environment", "default"]
"""Where a setting comes from, the strongest first: a call's arguments win over a configuration."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Said:
    """Everything that may request a strategy.

    Attributes:
        run: The configuration; None where none was given.
        arguments: Plugins that an `Accelerator` was given, by the argument's name.
        handlers: Its ``kwargs_handlers``.
        has_environment: Whether environment variables count: they do in a process that trains, and
            not where a launch is planned, whose workers get variables of their own.
    """

    run: RunConfig | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)
    handlers: tuple[Any, ...] = ()
    has_environment: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """A strategy's answer that it was requested.

    Attributes:
        strategy: Its name.
        source: Where the request comes from.
        what: The request, as messages write it: ``zero_stage=2``, ``fsdp_plugin``.
        reason: Why it is taken, for the training plan.
        settings: Makes its settings; called where training begins, and not for a launch's plan.
        headline: Its part of the launch plan's first line.
        choices: Its lines of the launch plan's table.
    """

    strategy: str
    source: Source
    what: str
    reason: str
    settings: Callable[[], Any]
    headline: str = ""
    choices: tuple[Choice, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class SaidBySettings:
    """What a strategy's settings say of training beside sharding.

    Attributes:
        mixed_precision: The precision by name; None where they leave it open.
        accumulation_steps: Batches for one optimizer step; None where they leave it open.
        writes_shards: Whether every process writes its own part of a checkpoint.
        reason: Why the strategy is taken, where only the settings can tell.
        speaker: What says it, as messages call it.
        remedy: How a contradiction with it can be resolved other than by leaving it out.
    """

    mixed_precision: str | None = None
    accumulation_steps: int | None = None
    writes_shards: bool = False
    reason: str = ""
    speaker: str = "what the strategy was told"
    remedy: str = ""
