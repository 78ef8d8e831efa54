"""The interface of strategies with settings of their own to the pickers.

A library's settings, their memory and their text come from its folder through `SettingsForm`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from nbaccel.config import RunConfig
from nbaccel.plan import Inventory, Plan, registry
from nbaccel.plan.launch_plan import Choice

if TYPE_CHECKING:
    from nbaccel.memory.estimate import MemoryEstimate, Shape


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


class SettingsForm(Protocol):
    """The choices of one strategy."""

    title: ClassVar[str]  # its panel's heading
    file_name: ClassVar[str]  # of the languages that can be copied: ``DeepSpeed JSON``
    not_chosen: ClassVar[str]  # why there is none while the strategy is not chosen
    common: ClassVar[tuple[str, ...]]  # names that come first in its panel, also of `RunConfig`
    everyday: ClassVar[tuple[str, ...]] = ()  # names that are shown as soon as it is taken

    def settings(self) -> Iterator[Setting]:
        """All choices that are the strategy's own."""

    def key_of(self, field: str) -> str:
        """Where a setting of `RunConfig` lands in the strategy's configuration."""

    def is_chosen(self, config: RunConfig) -> bool:
        """Whether a run trains with the strategy."""

    def document(self, config: RunConfig) -> dict[str, Any] | None:
        """The strategy's whole configuration, with what the run itself says; None without it."""

    def value_of(self, config: RunConfig, setting: Setting) -> Any:
        """What a run holds for a choice of `settings`; None where it is left open."""

    def default_of(self, config: RunConfig, setting: Setting) -> Any:
        """What a choice comes to while it is left open."""
        return setting.default

    def edited(
        self, config: RunConfig, setting: Setting, value: Any, *, before: RunConfig | None
    ) -> Edit:
        """A run with another value for a choice of `settings`."""

    def check(self, config: RunConfig, device: str) -> None:
        """Refuse values and combinations that cannot be."""

    def option_refusal(self, config: RunConfig, setting: Setting, value: Any) -> str:
        """Why an option of a choice cannot be taken: a clause; empty where it can."""

    def setting_refusal(self, config: RunConfig, setting: Setting) -> str:
        """Why a whole choice cannot be made: a clause; empty where it can."""

    def is_shown(self, config: RunConfig, setting: Setting) -> bool:
        """Whether a choice means anything as things are."""

    def filled_in(
        self, config: RunConfig, plan: Plan | None, module: Any, sample_batch: Any
    ) -> FilledConfig:
        """Fill in ``"auto"`` where the run, the model or the batch decides it."""

    def batch_size(self, document: Mapping[str, Any]) -> int | None:
        """Samples of one process in one forward pass, where the configuration says so."""

    def estimate(self, shape: Shape, document: Mapping[str, Any], **inputs: Any) -> MemoryEstimate:
        """The memory that a run needs; the other arguments are those of ``estimate_memory``."""

    def ways(
        self, config: RunConfig, shape: Shape, *, on_host: bool, can_checkpoint: bool
    ) -> Iterator[TrainingWay]:
        """The ways to train with this strategy, by what they divide and where they put it."""

    def way_of(self, config: RunConfig) -> str:
        """The name, among `ways`, of how a run trains that has chosen the strategy."""

    @property
    def missing_library(self) -> str:
        """What to install for the strategy to train; empty where nothing is missing."""

    def read(
        self, settings: Mapping[str, Any], config: RunConfig, inventory: Inventory
    ) -> tuple[RunConfig, tuple[str, ...]]:
        """Take over a configuration of the strategy."""

    def is_document(self, settings: Mapping[str, Any]) -> bool:
        """Whether settings whose names are all those of `RunConfig`, too, are this strategy's."""


@cache
def settings_forms() -> tuple[SettingsForm, ...]:
    """The forms of the strategies that have settings of their own."""
    return registry.settings_forms()
