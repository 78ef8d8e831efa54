"""What the pickers get from strategies with settings of their own, by their forms."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeAlias

from nbaccel.config import RunConfig
from nbaccel.plan import registry
from nbaccel.plan.launch_plan import Choice


@dataclass(frozen=True, slots=True)
class ChoiceOption:
    """One of the values of a choice."""

    value: Any  # none leaves it to the plan or to the strategy
    label: str
    meaning: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """One choice."""

    name: str  # among all choices; for a key of a strategy's configuration that key, with dots
    label: str  # its name in the form
    meaning: str  # what it does, in one line
    panel: str  # ``precision``, ``zero`` or ``launch``
    kind: str  # ``one-of``, ``whole``, ``number``, ``truth``, ``text``, ``words`` or ``table``
    run_field: str  # where it lands in `RunConfig`, with dots
    unit: str = ""  # of a number: ``elements``, ``samples``; empty where it counts nothing
    section: str = ""  # its heading among the advanced; empty where it is shown at once
    options: tuple[ChoiceOption, ...] = ()  # the values of ``one-of``
    strategy_key: str = ""  # where it lands in the strategy's own configuration, with dots
    default: Any = None  # the value where nothing is chosen; None where that depends
    takes_auto: bool = False  # whether ``"auto"`` may stand there
    may_be_open: bool = False  # whether nothing need stand there, also where there is a default
    docs_link: str = ""  # where its library documents it; empty where nowhere


@dataclass(slots=True)
class Edit:
    """A configuration in the making, and what was changed besides the choice itself."""

    config: RunConfig
    remarks: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class FilledConfig:
    """A strategy's configuration, filled in, with each key that was or will be, and its reason."""

    config: dict[str, Any] | None  # ``"auto"`` where the training decides; None: not chosen
    choices: tuple[Choice, ...] = ()


@dataclass(frozen=True, slots=True)
class StatePlacement:
    """Who holds what in a way to train."""

    divided: int = 0  # how many of optimizer, gradients and parameters, in this order, are in parts
    optimizer: str = "none"  # where it is: ``none`` (on the device), ``cpu`` or ``nvme``
    parameters: str = "none"

    @property
    def leaves_device(self) -> bool:
        """Whether anything is in host memory or on disk."""
        return (self.optimizer, self.parameters) != ("none", "none")

    @property
    def uses_disk(self) -> bool:
        """Whether anything is on disk."""
        return "nvme" in (self.optimizer, self.parameters)


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingWay:
    """One way to train."""

    name: str  # as people call it: ``ZeRO-2, optimizer on the CPU``
    # The fastest first, each in less memory than the one before; made while they are looked at.
    configs: Iterable[RunConfig]
    placement: StatePlacement
    refusal: str = ""  # why it cannot be taken: a clause


SettingsForm: TypeAlias = Any
"""The choices of one strategy: an object of the class that its row names, as `DeepSpeedForm`."""


settings_forms = cache(registry.settings_forms)
"""The forms of the strategies that have settings of their own, each made once."""
