"""``PickerModel``: what a picker shows and decides, without widgets.

Its state is one frozen `RunConfig`. A choice makes a new one or is refused with the reason, and all
that is shown (what is greyed and why, memory, JSON, YAML) is computed from it, the inventory and
the rows of ``nbaccel.capabilities``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from nbaccel import atomic
from nbaccel.config import RunConfig, run_config_of
from nbaccel.config.engine import engine_config
from nbaccel.config.mistakes import closest
from nbaccel.deepspeed.estimate import MemoryEstimate
from nbaccel.errors import ConfigError, NbaccelError
from nbaccel.notebook.picker import greying
from nbaccel.notebook.picker.choices import Option, Setting, by_name, settings
from nbaccel.notebook.picker.edits import edited, value_of
from nbaccel.notebook.picker.files import mistakes_by_setting, read_source
from nbaccel.notebook.picker.memory import Bar, Need, Segment, Yardstick, told_together
from nbaccel.notebook.picker.opens import Opens, filled_in
from nbaccel.notebook.picker.suggesting import Suggester, refusal_of
from nbaccel.notebook.picker.texts import Face, faces_of
from nbaccel.plan import Inventory, Plan, inspect_machine, resolve
from nbaccel.plan.plan import Choice
from nbaccel.units import format_bytes

__all__ = ["Bar", "Face", "Offer", "Option", "PickerModel", "Segment", "Setting", "Verdict"]

_MAX_UNDO = 100
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Offer:
    """An option, and whether it can be chosen.

    Attributes:
        option: The option.
        reason: Why it cannot; empty where it can.
    """

    option: Option
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a run fits.

    Attributes:
        fits: None where nothing is known.
        text: The verdict with its numbers.
        remedy: What to do; empty where nothing is to be done.
    """

    fits: bool | None
    text: str
    remedy: str = ""


class PickerModel:
    """The choices of one picker.

    Args:
        config: Where to begin, a `RunConfig` or another picker; None: the defaults.
        model: The module whose memory is shown; it may be on ``meta``. None shows none.
        sample_batch: What one process calls it with, for its activations.
        inventory: The machine; None looks at this one.

    Attributes:
        inventory: The machine.
        remarks: What the last change changed besides, and what may disappoint.
    """

    def __init__(
        self,
        config: Any = None,
        *,
        model: Any = None,
        sample_batch: Any = None,
        inventory: Inventory | None = None,
    ) -> None:
        _check(model, sample_batch)
        self.inventory = inventory or inspect_machine()
        self.remarks: tuple[str, ...] = ()
        self._config = RunConfig() if config is None else run_config_of(config)
        self._module = model
        self._yardstick = None
        if model is not None:
            self._yardstick = Yardstick(
                model=model, sample_batch=sample_batch, inventory=self.inventory
            )
        self._past: list[RunConfig] = []
        self._shelf: dict[str, Any] = {}
        self._observers: list[Callable[[], None]] = []
        self._known: dict[str, Any] = {}  # what follows from the present state, found when asked
        self._settle(self._config, ())

    # ------------------------------------------------------------------- the state

    @property
    def config(self) -> RunConfig:
        """What is chosen now."""
        return self._config

    @property
    def plan(self) -> Plan | None:
        """What it comes to on this machine; None where this machine cannot serve it."""
        return self._once("plan", self._resolve)

    def _resolve(self) -> Plan | None:
        try:
            return resolve(self._config, self.inventory)
        except NbaccelError:  # told by `problems`
            return None

    def _once(self, name: str, make: Callable[[], _T]) -> _T:
        """What follows from the present state, found when it is first asked for."""
        if name not in self._known:
            self._known[name] = make()
        found: _T = self._known[name]
        return found

    @property
    def problems(self) -> tuple[str, ...]:
        """Why this machine cannot serve what is chosen; nothing where it can."""
        if self.plan is not None:
            return ()
        return greying.problems_of(self._config, self.inventory)

    def settings(self, panel: str) -> tuple[Setting, ...]:
        """The choices of a panel: ``precision``, ``zero`` or ``launch``."""
        return settings(panel)

    def setting(self, name: str) -> Setting:
        """A choice by its name.

        Raises:
            ConfigError: There is none.
        """
        found = by_name().get(name)
        if found is None:
            raise ConfigError(
                f"There is no choice {name!r}: nothing would change."
                f"{closest(name, by_name()) or ' PickerModel.settings() lists them.'}"
            )
        return found

    def value(self, name: str) -> Any:
        """What is chosen; None where it is left to the plan or to DeepSpeed."""
        return value_of(self._config, self.setting(name))

    def observe(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Call back after each change.

        Args:
            callback: Called without arguments.

        Returns:
            What ends it.
        """
        self._observers.append(callback)

        def end() -> None:
            if callback in self._observers:
                self._observers.remove(callback)

        return end

    # ------------------------------------------------------------------- what is greyed

    def offers(self, name: str) -> tuple[Offer, ...]:
        """The options of a choice, those that cannot be chosen with the reason."""
        return self._once(f"offers {name}", lambda: self._find_offers(self.setting(name)))

    def _find_offers(self, setting: Setting) -> tuple[Offer, ...]:
        view = self._view()
        return tuple(
            Offer(option, greying.option_refusal(view, setting, option))
            for option in setting.options
        )

    def refusal(self, name: str) -> str:
        """Why a whole choice is greyed; empty where it can be made."""
        return greying.setting_refusal(self._view(), self.setting(name))

    def is_shown(self, name: str) -> bool:
        """Whether a choice means anything as things are."""
        return greying.is_shown(self._view(), self.setting(name))

    def _view(self) -> greying.View:
        return self._once(
            "view",
            lambda: greying.View(self._config, self.inventory, self._module, self.problems),
        )

    # ------------------------------------------------------------------- changing

    def choose(self, name: str, value: Any) -> None:
        """Make a choice.

        Args:
            name: The choice.
            value: What to take; None leaves it open.

        Raises:
            ConfigError: It cannot be taken; everything stays as it was.
        """
        setting = self.setting(name)
        for offer in self.offers(name):
            if offer.option.value == value and offer.reason:
                raise ConfigError(
                    f"{name}={value!r} cannot be chosen: {offer.reason}. Training would fail or "
                    "ignore it. Choose another."
                )
        device = self.plan.device if self.plan is not None else "cpu"
        edit = edited(self._config, setting, value, device=device, shelf=self._shelf)
        self._become(edit.config, edit.remarks)

    def replace(self, config: Any) -> None:
        """Take over a whole configuration, as one change.

        Args:
            config: A `RunConfig`, or another picker.

        Raises:
            ConfigError: It is neither.
        """
        self._become(run_config_of(config), ())

    @property
    def can_undo(self) -> bool:
        """Whether there is something to take back."""
        return bool(self._past)

    def undo(self) -> None:
        """Take the last change back; without one, nothing happens."""
        if self._past:
            self._settle(self._past.pop(), ())

    def load(self, source: str | Path | Mapping[str, Any]) -> None:
        """Take over a file: DeepSpeed's configuration, or a `RunConfig` as JSON or YAML.

        Args:
            source: A path, the text itself, or what is in it.

        Raises:
            ConfigError: It cannot be read or holds mistakes, all of them; nothing is changed.
        """
        config, remarks = read_source(source, self._config, self.inventory)
        self._become(config, remarks)

    def save(self, path: str | Path, face: str = "YAML") -> None:
        """Write one of the faces to a file, whole or not at all.

        Args:
            path: The file.
            face: The name of the face.

        Raises:
            ConfigError: There is no such face now, or the file cannot be written.
        """
        found = {each.name: each.text for each in self.faces()}
        if face not in found:
            raise ConfigError(
                f"There is no {face!r} to save: as things are there are {', '.join(found)}. "
                "Name one of them; DeepSpeed's JSON needs a ZeRO stage."
            )
        try:
            atomic.write_text(Path(path).expanduser(), found[face].rstrip("\n") + "\n")
        except OSError as error:
            raise ConfigError(
                f"{str(path)!r} cannot be written: {error}. The configuration would be lost with "
                "the notebook. Give another path."
            ) from error

    def mistakes_of(self, error: ConfigError) -> dict[str, list[str]]:
        """Mistakes by the choice beside which they belong; under ``""`` the others."""
        return mistakes_by_setting(error)

    def _become(self, config: RunConfig, remarks: tuple[str, ...]) -> None:
        if config != self._config:
            if self._config.uses_deepspeed:
                self._shelf = dict(self._config.deepspeed or {})
            self._past = [*self._past[1 - _MAX_UNDO :], self._config]
        self._settle(config, remarks)

    def _settle(self, config: RunConfig, remarks: tuple[str, ...]) -> None:
        self._config = config
        self._known.clear()
        self.remarks = (*remarks, *self.problems, *(self.plan.warnings if self.plan else ()))
        for callback in tuple(self._observers):
            callback()

    # ------------------------------------------------------------------- memory

    @property
    def need(self) -> Need | None:
        """What the run needs; None without a model, or where this machine cannot serve it."""
        return self._once("need", self._measured)[0]

    def _measured(self) -> tuple[Need | None, str]:
        """The need, or why it cannot be told."""
        if self._yardstick is None or self.plan is None:
            return None, ""
        try:
            return self._yardstick.need(self._config, self.plan, self._opens().config), ""
        except ConfigError as error:
            return None, error.mistakes[0]

    @property
    def estimate(self) -> MemoryEstimate | None:
        """The numbers behind the bars."""
        return None if self.need is None else self.need.estimate

    def bars(self) -> tuple[Bar, ...]:
        """Memory, place by place; nothing without a model."""
        return () if self.need is None else self.need.bars

    @property
    def verdict(self) -> Verdict:
        """Whether it fits, with what to do if it does not."""
        return self._once("verdict", self._judge)

    def _judge(self) -> Verdict:
        if self.plan is None:
            return Verdict(None, "This machine cannot serve what is chosen.", self.problems[0])
        if self._yardstick is None:
            return Verdict(None, "Memory is not shown.", "Give the model: configure(model, batch).")
        if self.need is None:
            return Verdict(
                None, "Memory cannot be estimated.", self._once("need", self._measured)[1]
            )
        short = [bar for bar in self.bars() if bar.lacking]
        if short:
            told = ", ".join(
                told_together(short, lambda bar: f"{format_bytes(bar.lacking)} too little")
            )
            return Verdict(False, f"Does not fit: {told}.", self._suggester().remedy(self._config))
        needed = [bar for bar in self.bars() if bar.needed]
        told = ", ".join(
            told_together(
                needed,
                lambda bar: f"{format_bytes(bar.needed)} of {format_bytes(bar.capacity)}",
            )
        )
        more = "" if self._yardstick.sample_batch is not None else _NO_BATCH
        return Verdict(True, f"Fits: {told}.", more)

    # ------------------------------------------------------------------- faces

    def faces(self) -> tuple[Face, ...]:
        """The configuration in all languages."""
        return self._once("faces", lambda: faces_of(self._config, self._opens().config))

    def resolved(self) -> tuple[Choice, ...]:
        """What is left open, as the plan decides it and as ``"auto"`` is filled in."""
        plan = () if self.plan is None else self.plan.choices
        return (*plan, *self._opens().choices)

    def _opens(self) -> Opens:
        batch = None if self._yardstick is None else self._yardstick.sample_batch
        return self._once(
            "opens",
            lambda: filled_in(
                engine_config(self._config), self._config, self.plan, self._module, batch
            ),
        )

    # ------------------------------------------------------------------- suggesting

    @property
    def suggest_refusal(self) -> str:
        """Why nothing can be suggested; empty where something can."""
        return refusal_of(self._module, self.plan)

    def suggest(self) -> str:
        """Take the fastest settings that fit, as one change.

        Returns:
            What was taken, in one line.

        Raises:
            ConfigError: Nothing fits, or nothing can be suggested; everything stays as it was.
        """
        if self.suggest_refusal:
            raise ConfigError(
                f"Nothing can be suggested for {self._config}: {self.suggest_refusal}."
            )
        suggestion = self._suggester().suggest(self._config)
        self._become(suggestion.config, (suggestion.headline, *suggestion.remarks))
        return suggestion.headline

    def _suggester(self) -> Suggester:
        if self._yardstick is None:
            raise ConfigError(f"Nothing can be suggested for model={self._module}: give a model.")
        return Suggester(self._yardstick)

    def rehearse(self) -> None:
        """Measure activations of all precisions now, so that no later choice waits for it.

        Each is a forward and backward pass without memory: seconds for a large model. A second
        time it costs nothing.
        """
        if self._yardstick is None or self._yardstick.sample_batch is None:
            return
        for config in _variants(self):
            with contextlib.suppress(ConfigError):  # told where it is chosen
                self._yardstick.activation_bytes(config, engine_config(config) or {})


_NO_BATCH = "Activations are not in it: give configure(model, sample_batch)."


def _variants(model: PickerModel) -> Iterator[RunConfig]:
    recomputes = (False, True)
    if model.refusal("activation_checkpointing"):
        recomputes = (model.config.activation_checkpointing,) * 2
    for offer in model.offers("mixed_precision"):
        if not offer.reason:
            for again in dict.fromkeys(recomputes):
                yield model.config.changed(
                    mixed_precision=offer.option.value, activation_checkpointing=again
                )


def _check(model: Any, sample_batch: Any) -> None:
    if model is not None and not callable(getattr(model, "modules", None)):
        raise ConfigError(
            f"model={type(model).__name__} is no module: its parameters decide what fits. Give a "
            "torch module; it may be on meta."
        )
    if model is None and sample_batch is not None:
        raise ConfigError(
            f"sample_batch={type(sample_batch).__name__} was given without a model: there is "
            "nothing to call with it. Give the model, too."
        )
