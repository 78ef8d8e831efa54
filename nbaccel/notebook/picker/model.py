"""``PickerModel``: what a picker shows and decides, without widgets, all from one `RunConfig`."""

from __future__ import annotations

import contextlib
import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, partial, wraps
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

from nbaccel.base import atomic
from nbaccel.base.errors import ConfigError, NbaccelError
from nbaccel.base.optional_packages import is_installed
from nbaccel.base.units import count_noun, format_bytes
from nbaccel.config import Fp8Config, RunConfig, capabilities as rows, run_config_of
from nbaccel.config.given_values import closest
from nbaccel.memory import settings_form
from nbaccel.memory.estimate import MemoryBar, MemoryNeed, refuse_unsized
from nbaccel.memory.memory_model import MemoryModel
from nbaccel.memory.ways import Candidate, CandidateFinder, Proposal, proposals, remedy
from nbaccel.notebook.picker import choices
from nbaccel.notebook.picker.config_text import faces_of, read_settings_source
from nbaccel.plan import Inventory, Plan, inspect_machine, registry, resolve
from nbaccel.plan.launch_plan import Choice
from nbaccel.plan.training_plan import HISTORY_SETTINGS, recipe_of

_MAX_UNDO = 100
_MOST_COUNTS = 5
_Computation = TypeVar("_Computation", bound=Callable[..., Any])


class FitVerdict(NamedTuple):
    """Whether a run fits, None where nothing is known, and what to do if it does not."""

    fits: bool | None
    text: str
    remedy: str = ""


def _kept(compute: _Computation) -> _Computation:
    """Compute a value when it is first needed, and keep it until the state changes."""

    @wraps(compute)
    def kept(self: PickerModel, *arguments: Any) -> Any:
        key = (compute.__name__, *arguments)
        if key not in self._known:
            self._known[key] = compute(self, *arguments)
        return self._known[key]

    return cast("_Computation", kept)


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
        # Taken by whoever changes or shows it; a picker's observer takes it again.
        self.lock = threading.RLock()
        self.inventory = inventory or inspect_machine()
        self.remarks: tuple[str, ...] = ()  # what the last change changed besides
        self.config = RunConfig() if config is None else run_config_of(config)
        self.module = model
        self._memory_model = MemoryModel(
            model=model, sample_batch=sample_batch, inventory=self.inventory
        )
        self._finder = CandidateFinder(self._memory_model)
        self.is_memory_postponed = False  # whether the memory is still to be estimated
        self._past: list[RunConfig] = []
        self._before: dict[settings_form.SettingsForm, RunConfig] = {}
        self._observers: list[Callable[[], None]] = []
        # What `_kept` keeps; cleared with every change.
        self._known: dict[tuple[Any, ...], Any] = {}
        self._take_over(self.config, ())

    def setting(self, name: str) -> settings_form.Setting:
        """A choice by its name."""
        found = choices.by_name().get(name)
        if found is None:
            known = closest(name, choices.by_name()) or " The form, configure(), lists them."
            raise ConfigError(f"There is no choice {name!r}.{known}")
        return found

    def value(self, name: str) -> Any:
        """What is chosen; None where it is left to the plan or to DeepSpeed."""
        return choices.value_of(self.config, self.setting(name))

    def observe(self, callback: Callable[[], None]) -> None:
        """Call back after each change."""
        self._observers.append(callback)

    @cached_property
    def trained(self) -> str:
        """What is trained; empty without a model."""
        return "" if self.module is None else describe_model(self.module)

    @cached_property
    def batch_shapes(self) -> str:
        """The shapes of the batch; empty where there is none."""
        return ", ".join(_shapes_of(self._memory_model.sample_batch, ""))

    @property
    def machine_parts(self) -> tuple[tuple[str, bool], ...]:
        """Each device, host memory and cores, with what is free and whether the run uses it."""
        machine, plan = self.inventory, self.plan
        of_plan = [] if plan is None else registry.device(plan.device).units(machine)
        num_used = 0 if plan is None else min(plan.num_processes, len(of_plan))
        described = [
            (one.kind, one.name + _unit_size(one.total_bytes, one.free_bytes), place < num_used)
            for place, one in enumerate(of_plan or registry.usable_units(machine))
        ]
        parts: list[tuple[str, bool]] = []
        for (kind, text, is_used), equal_units in groupby(enumerate(described), itemgetter(1)):
            numbers = [str(number) for number, _ in equal_units]
            if len(numbers) > _MAX_SINGLE_UNITS:
                numbers = [f"{numbers[0]} to {numbers[-1]}"]
            noun = rows.device_row(kind).noun
            parts += [(f"{noun} {number} · {text}", is_used) for number in numbers]
        host_text = _unit_size(machine.host_total_bytes, machine.host_available_bytes)
        return (
            *parts,
            (f"host memory{host_text}", num_used == 0),
            (count_noun(machine.cpu_cores, "core"), num_used == 0),
        )

    @property
    def usual_process_counts(self) -> list[int]:
        """Numbers of processes that suit this machine: each power of two, and one per device."""
        most = len(registry.usable_units(self.inventory)) or self.inventory.cpu_cores
        powers = (2**exponent for exponent in range(_MOST_COUNTS - 1))
        return sorted({most, *(count for count in powers if count < most)})[:_MOST_COUNTS]

    @property
    def samples_of_step(self) -> str:
        """The samples of one optimizer step in one sentence; empty where that is not known."""
        if self.plan is None or self.module is None:
            return ""
        document = next(iter(self._documents().values()), {})
        told = (form.batch_size(document) for form in settings_form.settings_forms())
        per_process = next(told, None) or self._memory_model.num_samples
        if per_process is None:
            return ""
        accumulated = self.config.gradient_accumulation_steps or 1
        world_size = self.plan.world_size
        total = count_noun(per_process * accumulated * world_size, "sample")
        factors = [f"{accumulated} accumulated"] if accumulated > 1 else []
        factors += [count_noun(world_size, "process")] if world_size > 1 else []
        product = " times ".join([f": {per_process} per process", *factors]) if factors else ""
        return f"{total} per step{product}."

    @_kept
    def offers(self, name: str) -> tuple[tuple[settings_form.ChoiceOption, str], ...]:
        """The options of a choice, each with why it cannot be chosen; empty where it can."""
        setting = self.setting(name)
        return tuple((one, self._option_refusal(setting, one.value)) for one in setting.options)

    def _option_refusal(self, setting: settings_form.Setting, value: Any) -> str:
        if value == self.value(setting.name):
            return ""  # the present value stays selectable, whatever is wrong with it
        form = choices.form_of(setting.name)
        if form is not None:
            return str(form.option_refusal(self.config, setting, value))
        if setting.name == "fp8.backend":
            row = {row.name: row for row in rows.FP8_BACKENDS}.get(value)
            if row is not None and row.package and not is_installed(row.package):
                return f"{row.package} is not installed"
        try:
            config = choices.with_value(self.config, setting.name, value)
        except ConfigError as error:
            return _first_clause(error.mistakes[0], setting.name)
        _, problems = _plan_or_problems(config, self.inventory)
        # Problems of the present settings would grey every option.
        new_problems = [text for text in problems if text not in self.problems]
        return _first_clause(new_problems[0], setting.name) if new_problems else ""

    def refusal(self, name: str) -> str:
        """Why a whole choice is greyed; empty where it can be made."""
        if name == "activation_checkpointing" and self.module is not None:
            from nbaccel.strategies.model_blocks import can_checkpoint_gradients

            if can_checkpoint_gradients(self.module):
                return ""
            return f"{type(self.module).__name__} has no gradient_checkpointing_enable()"
        form = choices.form_of(name)
        return "" if form is None else form.setting_refusal(self.config, self.setting(name))

    def is_shown(self, name: str) -> bool:
        """Whether a choice means anything as things are."""
        if name.startswith(choices.FP8):
            if not rows.precision_row(self.config.mixed_precision).has_backends:
                return False
            return name == "fp8.backend" or self._is_read(name.removeprefix(choices.FP8))
        form = choices.form_of(name)
        if form is not None:
            return bool(form.is_shown(self.config, self.setting(name)))
        if name == "tpu_driver":
            return self.inventory.tpu_chips > 0
        return name not in _MULTI_NODE_FIELDS or self.config.num_nodes > 1

    def _is_read(self, fp8_name: str) -> bool:
        """Whether the FP8 backend, with its recipe, reads a setting."""
        fp8 = self.config.fp8 or Fp8Config()
        row = {row.name: row for row in rows.FP8_BACKENDS}.get(fp8.backend)
        if row is None:
            units = registry.usable_units(self.inventory)
            name = self.config.device
            if name == "auto":
                name = units[0].kind if units else rows.DEVICES[0].name
            known = [unit.compute_capability for unit in units if unit.kind == name]
            row = rows.fp8_backend("auto", rows.device_row(name), min(known, default=None)).row
        if row is None or fp8_name not in row.settings:
            return False
        return fp8_name not in HISTORY_SETTINGS or recipe_of(fp8, row) == "delayed"

    def choose(self, name: str, value: Any) -> None:
        """Make a choice."""
        setting = self.setting(name)
        # Python code can give a value that the form shows greyed.
        for option, reason in self.offers(name):
            if option.value == value and reason:
                raise ConfigError(f"{name}={value!r} cannot be chosen: {reason}. Choose another.")
        device = self.plan.device if self.plan is not None else "cpu"
        edit = choices.edit_config(
            self.config, setting, value, device=device, earlier_configs=self._before
        )
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
        self._become(*self.read(source))

    def read(self, source: str | Path | Mapping[str, Any]) -> tuple[RunConfig, tuple[str, ...]]:
        """Read a file, and take nothing over."""
        return read_settings_source(source, self.config, self.inventory)

    def editable_text(self) -> str:
        """The configuration as JSON that `load` takes: a strategy's own, or the `RunConfig`."""
        documents = (form.document(self.config) for form in settings_form.settings_forms())
        settings = next(filter(None, documents), None)
        if settings is None:
            settings = json.loads(self.config.model_dump_json(exclude_defaults=True))
        return json.dumps(settings, indent=2)

    def save(self, path: str | Path, face: str = "YAML") -> None:
        """Write one of the faces to a file, whole or not at all."""
        faces = self.faces()
        if face not in faces:
            raise ConfigError(
                f"There is no {face!r} to save: at present there are {', '.join(faces)}. "
                "Name one of them; DeepSpeed's JSON needs a ZeRO stage."
            )
        try:
            atomic.write_text(Path(path).expanduser(), faces[face].rstrip("\n") + "\n")
        except OSError as error:
            raise ConfigError(
                f"{str(path)!r} cannot be written: {error}. Give another path."
            ) from error

    def _become(self, config: RunConfig, remarks: tuple[str, ...]) -> None:
        # A choice of the value that is there already must not need an undo.
        if config != self.config:
            for form in settings_form.settings_forms():
                if form.is_chosen(self.config):
                    self._before[form] = self.config
            # A new list of at most `_MAX_UNDO` entries, the present state included.
            self._past = [*self._past[1 - _MAX_UNDO :], self.config]
        self._take_over(config, remarks)

    def _take_over(self, config: RunConfig, remarks: tuple[str, ...]) -> None:
        self.config = config
        # The plan for this machine; or None, and why this machine cannot run what is chosen.
        self.plan, self.problems = _plan_or_problems(config, self.inventory)
        self._known.clear()
        self.remarks = (*remarks, *self.problems, *(self.plan.warnings if self.plan else ()))
        for callback in self._observers:
            callback()

    def postpone_memory(self) -> None:
        """Estimate no memory until `estimate_memory`, unless that has been done."""
        if self.module is not None and ("_measured",) not in self._known:
            self.is_memory_postponed = True

    def estimate_memory(self) -> None:
        """Estimate what was postponed, and call back as after a change."""
        if self.is_memory_postponed:
            # First, so that an estimate that is interrupted is made at the next change.
            self.is_memory_postponed = False
            self._known.clear()
            for callback in self._observers:
                callback()

    @property
    def need(self) -> MemoryNeed | None:
        """The memory of the run; None without a model, while postponed, or without a plan."""
        return self._measured()[0]

    @_kept
    def _measured(self) -> tuple[MemoryNeed | None, str]:
        if self.module is None or self.plan is None or self.is_memory_postponed:
            return None, ""
        filled = ((form, one.config) for form, one in self._filled() if one.config is not None)
        form, document = next(filled, (None, {}))
        try:
            return self._memory_model.need(self.config, self.plan, form, document), ""
        except ConfigError as error:
            return None, error.mistakes[0]

    def bars(self) -> tuple[MemoryBar, ...]:
        """Memory by place; empty without a model."""
        return () if self.need is None else self.need.bars

    @property
    @_kept
    def verdict(self) -> FitVerdict:
        """Whether it fits, with what to do if it does not."""
        if self.is_memory_postponed:
            return FitVerdict(None, "Memory is being estimated …")
        if self.plan is None:
            return FitVerdict(None, "This machine cannot serve what is chosen.", self.problems[0])
        if self.module is None:
            remedy_text = "Give the model: configure(model, batch)."
            return FitVerdict(None, "Memory is not shown.", remedy_text)
        if self.need is None:
            return FitVerdict(None, "Memory cannot be estimated.", self._measured()[1])
        if self.need.lacking:
            would_fit = remedy(self._finder, self.config)
            return FitVerdict(False, f"Does not fit: {self.need.lacking_text}.", would_fit)
        no_batch = "Activations are not in it: give configure(model, sample_batch)."
        remark = "" if self._memory_model.sample_batch is not None else no_batch
        return FitVerdict(True, f"Fits: {self.need.shares_text}.", remark)

    @_kept
    def faces(self) -> dict[str, str]:
        """The configuration in all languages."""
        return faces_of(self.config, self._documents())

    def resolved(self) -> tuple[Choice, ...]:
        """The open settings, as the plan decides them and as ``"auto"`` is filled in."""
        plan_choices = () if self.plan is None else self.plan.choices
        return (*plan_choices, *(choice for _, one in self._filled() for choice in one.choices))

    def _documents(self) -> dict[str, dict[str, Any]]:
        filled = ((form.file_name, one.config) for form, one in self._filled())
        return {name: document for name, document in filled if document is not None}

    @_kept
    def _filled(self) -> list[tuple[settings_form.SettingsForm, settings_form.FilledConfig]]:
        """Each strategy's own configuration, with ``"auto"`` filled in."""
        inputs = (self.config, self.plan, self.module, self._memory_model.sample_batch)
        return [(form, form.filled_in(*inputs)) for form in settings_form.settings_forms()]

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

    @_kept
    def proposals(self) -> tuple[Proposal, ...]:
        """Settings to take, the fastest first: one to three."""
        if self.suggest_refusal:
            raise ConfigError(
                f"Nothing can be suggested for model={type(self.module).__name__}: "
                f"{self.suggest_refusal}."
            )
        return proposals(self._finder, self.config)

    def take_proposal(self, proposal: Proposal) -> None:
        """Take one of the `proposals`, as one change."""
        remarks = (f"Suggested: {proposal.title}", *proposal.why, *proposal.advice)
        self._become(proposal.config, remarks)

    @_kept
    def candidates(self) -> tuple[Candidate, ...]:
        """The ways to train the model here, with their memory."""
        if self.module is None or self.is_memory_postponed or self.plan is None:
            return ()
        return self._finder.find(self.config)

    def take(self, name: str) -> None:
        """Train in one of the ways of `candidates`, as one change."""
        named = {one.name: one for one in self.candidates()}
        if name not in named:
            known = closest(name, named) or f" They are: {', '.join(named)}."
            raise ConfigError(f"There is no way to train called {name!r}.{known}")
        candidate = named[name]
        if candidate.refusal:
            raise ConfigError(
                f"{name!r} cannot be taken: {candidate.refusal}. Training would fail. Take another."
            )
        remarks = () if candidate.fits else (f"{name}: {candidate.verdict}",)
        self._become(candidate.config, remarks)

    def later_estimates(self) -> tuple[Callable[[], None], ...]:
        """Measures all precisions, so that no later choice waits for that."""
        if self._memory_model.sample_batch is None:
            return ()
        precisions = [one.value for one, reason in self.offers("mixed_precision") if not reason]
        may_recompute = not self.refusal("activation_checkpointing")
        return tuple(
            partial(
                self._measure_later, mixed_precision=precision, activation_checkpointing=recomputes
            )
            for precision in precisions
            for recomputes in (False, True)
            if may_recompute or recomputes == self.config.activation_checkpointing
        )

    def _measure_later(self, **changes: Any) -> None:
        with contextlib.suppress(ConfigError):  # reported when it is chosen
            config = self.config.changed(**changes)
            forms = settings_form.settings_forms()
            sizes = (form.batch_size(form.document(config) or {}) for form in forms)
            self._memory_model.activation_bytes(config, next(filter(None, sizes), None))


_MULTI_NODE_FIELDS = (
    *("node_rank", "master_addr", "rdzv_endpoint", "rdzv_conf", "rdzv_id", "rdzv_backend"),
)


def _plan_or_problems(config: RunConfig, machine: Inventory) -> tuple[Plan | None, tuple[str, ...]]:
    try:
        return resolve(config, machine), ()
    except ConfigError as error:
        return None, error.mistakes
    except NbaccelError as error:
        return None, (str(error),)


def _first_clause(text: str, name: str) -> str:
    """The first sentence without its subject, which the field's label names already."""
    first_sentence = text.partition(". ")[0].replace("`", "")
    first_word, _, other_words = first_sentence.partition(" ")
    names = (f"{name}=", f"{name.removeprefix(choices.FP8)}=")
    return other_words if first_word.startswith(names) else first_sentence


_MAX_SINGLE_UNITS = 4  # more equal ones are described together
_COUNT_UNITS = ((10**12, "T"), (10**9, "B"), (10**6, "M"), (10**3, "k"))


def describe_model(module: Any) -> str:
    """The class of a model, and its numbers; tied weights are counted once."""
    named = list(module.named_parameters(remove_duplicate=False))
    # By id, not by address: all tensors on `meta` have the address 0.
    parameters = {id(parameter): parameter for _, parameter in named}.values()
    format_sizes: Counter[str] = Counter()
    for parameter in parameters:
        format_sizes[str(parameter.dtype).removeprefix("torch.")] += int(parameter.numel())
    num_tied = len(named) - len(parameters)
    is_on_meta = any(bool(parameter.is_meta) for parameter in parameters)
    facts = (
        type(module).__name__,
        f"{_short_count(format_sizes.total())} parameters in "
        f"{count_noun(len(parameters), 'tensor')}",
        _repeated_layers(module),
        ", ".join(name for name, _ in format_sizes.most_common()),
        count_noun(num_tied, "tied weight") if num_tied else "",
        "on meta: shapes only" if is_on_meta else "",
    )
    return " · ".join(filter(None, facts))


def _unit_size(total_bytes: int, free_bytes: int) -> str:
    if not total_bytes:
        return ""
    total_text = format_bytes(total_bytes)
    free_text = format_bytes(free_bytes)
    # The same unit twice says nothing: "80.0 GiB, 78.0 free".
    return f" · {total_text}, {free_text.removesuffix(total_text[-4:])} free"


def _repeated_layers(module: Any) -> str:
    """The kind of child that stands most often below one parent, if it has parameters."""
    most: tuple[str, int] = ("", 1)
    for parent in module.modules():
        names = (type(child).__name__ for child in parent.children() if [*child.parameters()])
        for found in Counter(names).most_common(1):
            most = max(most, found, key=lambda one: one[1])
    return f"{most[1]} {most[0]}" if most[0] else ""


def _shapes_of(part: Any, name: str) -> Iterator[str]:
    if hasattr(part, "shape"):
        text = str(tuple(int(size) for size in part.shape))
        yield f"{name} {text}".strip()
    elif isinstance(part, Mapping):
        for key, inner in part.items():
            yield from _shapes_of(inner, str(key))
    elif isinstance(part, Sequence) and not isinstance(part, (str, bytes)):
        for inner in part:
            yield from _shapes_of(inner, name)


def _short_count(number: int) -> str:
    """``6.74 B``: three digits are enough to tell models apart."""
    for size, letter in _COUNT_UNITS:
        if number >= size:
            return f"{number / size:.3g} {letter}"
    return str(number)


def check_model_and_batch(model: Any, sample_batch: Any) -> None:
    """Refuse what cannot be described."""
    refuse_unsized(model)
    # By its method, because `isinstance` would import torch for a form without a model.
    if model is not None and not callable(getattr(model, "modules", None)):
        raise ConfigError(
            f"model={type(model).__name__} is no module. Give a torch module; it may be on meta."
        )
    if model is None and sample_batch is not None:
        raise ConfigError(
            f"sample_batch={type(sample_batch).__name__} was given without a model. Give it, too."
        )
