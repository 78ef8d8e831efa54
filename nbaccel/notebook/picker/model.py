"""``PickerModel``: what a picker shows and decides, without widgets.

Its state is one frozen `RunConfig`. A choice makes a new one or is refused with the reason, and all
that is shown (what is greyed and why, memory, JSON, YAML) is computed from it, the inventory and
the rows of ``nbaccel.config.capabilities``.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from nbaccel.base.errors import ConfigError, NbaccelError
from nbaccel.config import RunConfig, run_config_of
from nbaccel.config.given_values import closest
from nbaccel.memory.estimate import MemoryBar, MemoryEstimate, MemoryNeed
from nbaccel.memory.memory_model import MemoryModel
from nbaccel.memory.settings_form import (
    ChoiceOption,
    FilledConfig,
    Setting,
    SettingsForm,
    settings_forms,
)
from nbaccel.memory.ways import Candidate, CandidateFinder, Proposal, proposals, remedy
from nbaccel.notebook.picker import availability
from nbaccel.notebook.picker.availability import (
    MachinePart,
    TrainedModel,
    check_model_and_batch,
    describe_batch,
    describe_model,
    machine_parts,
    samples_sentence,
)
from nbaccel.notebook.picker.choices import (
    by_name,
    edit_config,
    hint_of,
    name_with_precision,
    precision_label,
    settings,
    value_of,
)
from nbaccel.notebook.picker.exporters import (
    faces_of,
    mistakes_by_setting,
    read_settings_source,
    save_face,
)
from nbaccel.plan import Inventory, Plan, inspect_machine, registry, resolve
from nbaccel.plan.launch_plan import Choice

_MAX_UNDO = 100
_MOST_COUNTS = 5
_Cached = TypeVar("_Cached")


class OptionOffer(NamedTuple):
    """An option, and why it cannot be chosen; empty where it can."""

    option: ChoiceOption
    reason: str = ""


class FitVerdict(NamedTuple):
    """Whether a run fits, None where nothing is known, and what to do if it does not."""

    fits: bool | None
    text: str
    remedy: str = ""


class PickerModel:
    """The choices of one picker."""

    def __init__(
        self,
        config: Any = None,
        *,
        model: Any = None,
        sample_batch: Any = None,
        inventory: Inventory | None = None,
    ) -> None:
        check_model_and_batch(model, sample_batch)
        self.inventory = inventory or inspect_machine()
        self.remarks: tuple[str, ...] = ()
        """What the last change changed besides, and warnings of the plan."""
        self.config = RunConfig() if config is None else run_config_of(config)
        self.module = model
        self._memory_model = None
        self._finder = None
        if model is not None:
            self._memory_model = MemoryModel(
                model=model, sample_batch=sample_batch, inventory=self.inventory
            )
            self._finder = CandidateFinder(self._memory_model)
        self.is_memory_postponed = False
        """Whether the memory is still to be estimated."""
        self._compares_precisions = self._may_hint = False
        self._past: list[RunConfig] = []
        self._before: dict[SettingsForm, RunConfig] = {}
        self._observers: list[Callable[[], None]] = []
        # Values computed from the present state; cleared with every change of it.
        self._known: dict[str, Any] = {}
        self._take_over(self.config, ())

    # ------------------------------------------------------------------- the state

    @property
    def plan(self) -> Plan | None:
        """The plan for this machine; None where this machine cannot run it."""
        return self._once("plan", self._resolve)

    def _resolve(self) -> Plan | None:
        try:
            return resolve(self.config, self.inventory)
        except NbaccelError:  # reported by `problems`
            return None

    def _once(self, key: str, make_value: Callable[[], _Cached]) -> _Cached:
        """A value computed from the present state, when it is first needed."""
        if key not in self._known:
            self._known[key] = make_value()
        value: _Cached = self._known[key]
        return value

    @property
    def problems(self) -> tuple[str, ...]:
        """Why this machine cannot run the chosen settings; empty where it can."""
        if self.plan is not None:
            return ()
        return availability.problems_of(self.config, self.inventory)

    def settings(self, panel_name: str) -> tuple[Setting, ...]:
        """The choices of a panel: ``precision``, ``zero`` or ``launch``."""
        return settings(panel_name)

    def setting(self, name: str) -> Setting:
        """A choice by its name."""
        known_setting = by_name().get(name)
        if known_setting is None:
            raise ConfigError(
                f"There is no choice {name!r}: nothing would change."
                f"{closest(name, by_name()) or ' PickerModel.settings() lists them.'}"
            )
        return known_setting

    def value(self, name: str) -> Any:
        """What is chosen; None where it is left to the plan or to DeepSpeed."""
        return value_of(self.config, self.setting(name))

    def observe(self, callback: Callable[[], None]) -> None:
        """Call back after each change."""
        self._observers.append(callback)

    # ------------------------------------------------------------------- model and machine

    @cached_property
    def trained(self) -> TrainedModel | None:
        """What is trained; None without a model."""
        return None if self.module is None else describe_model(self.module)

    @cached_property
    def batch_shapes(self) -> str:
        """The shapes of the batch; empty where there is none."""
        return "" if self._memory_model is None else describe_batch(self._memory_model.sample_batch)

    @property
    def machine_parts(self) -> tuple[MachinePart, ...]:
        """Devices, host memory and cores, with those marked that the run computes on."""
        return self._once("machine parts", lambda: machine_parts(self.inventory, self.plan))

    @property
    def usual_process_counts(self) -> list[int]:
        """Numbers of processes that suit this machine: each power of two, and one per device."""
        most = len(registry.usable_units(self.inventory)) or self.inventory.cpu_cores
        powers = (2**exponent for exponent in range(_MOST_COUNTS - 1))
        return sorted({most, *(count for count in powers if count < most)})[:_MOST_COUNTS]

    @property
    def samples_of_step(self) -> str:
        """The samples of one optimizer step in one sentence; empty where that is not known."""
        return self._once("samples", self._count_samples)

    def _count_samples(self) -> str:
        if self.plan is None or self._memory_model is None:
            return ""
        document = next(iter(self._documents().values()), {})
        told = (form.batch_size(document) for form in settings_forms())
        per_process = next(told, None) or self._memory_model.num_samples
        if per_process is None:
            return ""
        accumulated = self.config.gradient_accumulation_steps or 1
        return samples_sentence(per_process, accumulated, self.plan.world_size)

    # ------------------------------------------------------------------- what is greyed

    def offers(self, name: str) -> tuple[OptionOffer, ...]:
        """The options of a choice, those that cannot be chosen with the reason."""
        setting = self.setting(name)
        return self._once(
            f"offers {name}",
            lambda: tuple(
                OptionOffer(option, availability.option_refusal(self, setting, option))
                for option in setting.options
            ),
        )

    def refusal(self, name: str) -> str:
        """Why a whole choice is greyed; empty where it can be made."""
        return availability.setting_refusal(self, self.setting(name))

    def is_shown(self, name: str) -> bool:
        """Whether a choice means anything as things are."""
        return availability.is_shown(self, self.setting(name))

    # ------------------------------------------------------------------- changing

    def choose(self, name: str, value: Any) -> None:
        """Make a choice."""
        setting = self.setting(name)
        # Python code can give a value that the form shows greyed.
        for offer in self.offers(name):
            if offer.option.value == value and offer.reason:
                raise ConfigError(
                    f"{name}={value!r} cannot be chosen: {offer.reason}. Training would "
                    "fail or ignore it. Choose another."
                )
        device = self.plan.device if self.plan is not None else "cpu"
        edit = edit_config(self.config, setting, value, device=device, earlier_configs=self._before)
        self._become(edit.config, edit.remarks)

    def replace(self, config: Any) -> None:
        """Take over a whole configuration, as one change."""
        self._become(run_config_of(config), ())

    @property
    def can_undo(self) -> bool:
        """Whether there is something to take back."""
        return bool(self._past)

    def undo(self) -> None:
        """Undo the last change, if there is one."""
        if self._past:
            self._take_over(self._past.pop(), ())

    def load(self, source: str | Path | Mapping[str, Any]) -> None:
        """Take over a file: DeepSpeed's configuration, or a `RunConfig` as JSON or YAML."""
        config, remarks = read_settings_source(source, self.config, self.inventory)
        self._become(config, remarks)

    def check_source(self, source: str | Path | Mapping[str, Any]) -> None:
        """Read a file as `load` does, and take nothing over."""
        read_settings_source(source, self.config, self.inventory)

    def editable_text(self) -> str:
        """The configuration as JSON that `load` takes: a strategy's own, or the `RunConfig`."""
        documents = (settings_form.document(self.config) for settings_form in settings_forms())
        settings = next(filter(None, documents), None)
        if settings is None:
            settings = json.loads(self.config.model_dump_json(exclude_defaults=True))
        return json.dumps(settings, indent=2)

    def save(self, path: str | Path, face: str = "YAML") -> None:
        """Write one of the faces to a file, whole or not at all."""
        save_face(self.faces(), path, face)

    def mistakes_of(self, error: ConfigError) -> dict[str, list[str]]:
        """Mistakes by the choice beside which they belong; under ``""`` the others."""
        return mistakes_by_setting(error)

    def _become(self, new_config: RunConfig, remarks: tuple[str, ...]) -> None:
        # A choice of the value that is there already must not need an undo.
        if new_config != self.config:
            for settings_form in settings_forms():
                if settings_form.is_chosen(self.config):
                    self._before[settings_form] = self.config
            # A new list of at most `_MAX_UNDO` entries, the present state included.
            self._past = [*self._past[1 - _MAX_UNDO :], self.config]
        self._take_over(new_config, remarks)

    def _take_over(self, new_config: RunConfig, remarks: tuple[str, ...]) -> None:
        self.config = new_config
        self._known.clear()
        self.remarks = (*remarks, *self.problems, *(self.plan.warnings if self.plan else ()))
        self._call_observers()

    def _call_observers(self) -> None:
        for callback in self._observers:
            callback()

    # ------------------------------------------------------------------- memory

    def postpone_memory(self) -> None:
        """Estimate no memory until `estimate_memory`, unless that has been done.

        A large model takes seconds, for which what is shown first need not wait.
        """
        self.is_memory_postponed = self._memory_model is not None and "need" not in self._known

    def estimate_memory(self) -> None:
        """Estimate what was postponed, and call back as after a change."""
        if self.is_memory_postponed:
            # First, so that an estimate that is interrupted is made at the next change.
            self.is_memory_postponed = False
            self._call_observers()

    @property
    def need(self) -> MemoryNeed | None:
        """The memory of the run.

        None without a model, as long as it is postponed, or where this machine cannot run it.
        """
        return None if self.is_memory_postponed else self._once("need", self._measured)[0]

    def _measured(self) -> tuple[MemoryNeed | None, str]:
        """The need, or why it cannot be estimated."""
        if self._memory_model is None or self.plan is None:
            return None, ""
        filled = ((form, one.config) for form, one in self._filled() if one.config is not None)
        form, document = next(filled, (None, {}))
        try:
            return self._memory_model.need(self.config, self.plan, form, document), ""
        except ConfigError as error:
            return None, error.mistakes[0]

    @property
    def estimate(self) -> MemoryEstimate | None:
        """The numbers behind the bars."""
        return None if self.need is None else self.need.estimate

    def bars(self) -> tuple[MemoryBar, ...]:
        """Memory by place; empty without a model."""
        return () if self.need is None else self.need.bars

    @property
    def verdict(self) -> FitVerdict:
        """Whether it fits, with what to do if it does not."""
        if self.is_memory_postponed:
            return FitVerdict(None, "Memory is being estimated …")
        return self._once("verdict", self._judge)

    def _judge(self) -> FitVerdict:
        if self.plan is None:
            return FitVerdict(None, "This machine cannot serve what is chosen.", self.problems[0])
        if self._memory_model is None:
            remedy_text = "Give the model: configure(model, batch)."
            return FitVerdict(None, "Memory is not shown.", remedy_text)
        if self.need is None:
            reason = self._once("need", self._measured)[1]
            return FitVerdict(None, "Memory cannot be estimated.", reason)
        if self.need.lacking:
            would_fit = "" if self._finder is None else remedy(self._finder, self.config)
            return FitVerdict(False, f"Does not fit: {self.need.lacking_text}.", would_fit)
        remark = "" if self._memory_model.sample_batch is not None else _NO_BATCH
        return FitVerdict(True, f"Fits: {self.need.shares_text}.", remark)

    # ------------------------------------------------------------------- faces

    def faces(self) -> dict[str, str]:
        """The configuration in all languages."""
        return self._once("faces", lambda: faces_of(self.config, self._documents()))

    def resolved(self) -> tuple[Choice, ...]:
        """The open settings, as the plan decides them and as ``"auto"`` is filled in."""
        plan_choices = () if self.plan is None else self.plan.choices
        return (*plan_choices, *(choice for _, one in self._filled() for choice in one.choices))

    def _documents(self) -> dict[str, dict[str, Any]]:
        filled = ((form.file_name, one.config) for form, one in self._filled())
        return {name: document for name, document in filled if document is not None}

    def _filled(self) -> list[tuple[SettingsForm, FilledConfig]]:
        """Each strategy's own configuration, with ``"auto"`` filled in."""
        batch = None if self._memory_model is None else self._memory_model.sample_batch
        inputs = (self.config, self.plan, self.module, batch)
        return self._once(
            "filled", lambda: [(form, form.filled_in(*inputs)) for form in settings_forms()]
        )

    # ------------------------------------------------------------------- suggesting

    @property
    def suggest_refusal(self) -> str:
        """Why nothing can be suggested; empty where something can."""
        if self.module is None:
            return "give the model, configure(model, sample_batch)"
        return "" if self.plan is not None else "this machine cannot serve what is chosen"

    def suggest(self) -> str:
        """Take the fastest settings that fit, as one change."""
        proposal = self.proposals()[0]
        self.take_proposal(proposal)
        return f"Suggested: {proposal.title}"

    def proposals(self) -> tuple[Proposal, ...]:
        """Settings to take, the fastest first: one to three."""
        finder = self._finder
        if self.suggest_refusal or finder is None:
            raise ConfigError(
                f"Nothing can be suggested for model={type(self.module).__name__}: "
                f"{self.suggest_refusal}."
            )
        return self._once("proposals", lambda: proposals(finder, self.config))

    def take_proposal(self, proposal: Proposal) -> None:
        """Take one of the `proposals`, as one change."""
        self._become(
            proposal.config, (f"Suggested: {proposal.title}", *proposal.why, *proposal.advice)
        )

    # ------------------------------------------------------------------- ways to train

    def candidates(self) -> tuple[Candidate, ...]:
        """The ways to train the model here, with their memory."""
        finder = self._finder
        if finder is None or self.is_memory_postponed or self.plan is None:
            return ()
        return self._once("candidates", lambda: finder.find(self.config))

    @property
    def precisions(self) -> tuple[str, ...]:
        """The precisions that the machine has, as things are; the chosen one is among them."""
        offers = self.offers("mixed_precision")
        return tuple(str(offer.option.value) for offer in offers if not offer.reason)

    @property
    def compares_precisions(self) -> bool:
        """Whether the ways to train are shown in each precision, not in the chosen one alone."""
        return self._compares_precisions and len(self.precisions) > 1

    def compare_precisions(self, *, is_on: bool) -> None:
        """Show the ways to train in each precision, or in the chosen one alone.

        It changes nothing of what is chosen, so there is nothing to undo.
        """
        if is_on != self._compares_precisions:
            self._compares_precisions = is_on
            self._call_observers()

    def shown_candidates(self) -> tuple[Candidate, ...]:
        """The `candidates`; of each way one for each precision while these are compared."""
        return self.compared_candidates() if self.compares_precisions else self.candidates()

    @property
    def has_compared(self) -> bool:
        """Whether all precisions have been measured, so that none of them is waited for."""
        return self._may_hint

    def compared_candidates(self) -> tuple[Candidate, ...]:
        """The `candidates`, of each way one for each of `precisions`: all of these are measured."""
        finder = self._finder
        if finder is None or not self.candidates():
            return ()
        return self._once("compared", lambda: finder.compare(self.config, self.precisions))

    @property
    def precision_hint(self) -> str:
        """What another precision would do better, in a sentence; empty where nothing is known.

        It is known once all precisions have been measured, by `later_estimates`.
        """
        if not self._may_hint or self.compares_precisions or self.is_memory_postponed:
            return ""
        return self._once("hint", lambda: hint_of(self.candidates(), self.compared_candidates()))

    @property
    def best_mark(self) -> str:
        """How the best way is marked; with its precision where another one would be better."""
        if not self.precision_hint:
            return "★ best"
        return f"★ best in {precision_label(self.config.mixed_precision)}"

    def take(self, name: str, precision: str | None = None) -> None:
        """Train in one of the ways of `candidates`, as one change."""
        is_other = precision not in (None, self.config.mixed_precision)
        candidates = self.compared_candidates() if is_other else self.candidates()
        named = {one.name: one for one in candidates if not is_other or one.precision == precision}
        if name not in named:
            raise ConfigError(
                f"There is no way to train called {name!r}: nothing would change."
                f"{closest(name, named) or ' PickerModel.candidates() lists them.'}"
            )
        candidate = named[name]
        told_name = name_with_precision(candidate) if is_other else name
        if candidate.refusal:
            raise ConfigError(
                f"{told_name!r} cannot be taken: {candidate.refusal}. Training would fail. Take "
                "another."
            )
        remarks = () if candidate.fits else (f"{told_name}: {candidate.verdict}",)
        self._become(candidate.config, remarks)

    def later_estimates(self) -> tuple[Callable[[], None], ...]:
        """Measures all precisions, so that no later choice waits for that."""
        model = self._memory_model
        if model is None:
            return ()
        may_recompute = not self.refusal("activation_checkpointing")
        changes = [
            {"mixed_precision": precision, "activation_checkpointing": recomputes}
            for precision in (self.precisions if model.sample_batch is not None else ())
            for recomputes in (False, True)
            if may_recompute or recomputes == self.config.activation_checkpointing
        ]
        measures = (partial(self._measure_later, model, change) for change in changes)
        return (*measures, self._compare_in_advance)

    def _measure_later(self, model: MemoryModel, changes: Mapping[str, Any]) -> None:
        """Measure the activations of a run, so that a later choice need not."""
        with contextlib.suppress(ConfigError):  # reported when it is chosen
            config = self.config.changed(**changes)
            sizes = (form.batch_size(form.document(config) or {}) for form in settings_forms())
            model.activation_bytes(config, next(filter(None, sizes), None))

    def _compare_in_advance(self) -> None:
        self._may_hint = True
        if self.precision_hint:
            self._call_observers()


_NO_BATCH = "Activations are not in it: give configure(model, sample_batch)."
