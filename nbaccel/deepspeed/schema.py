"""Which keys the installed DeepSpeed reads, found out by letting it read.

DeepSpeed has no schema of its whole configuration. Some sections are pydantic models, which name
their fields; the rest are dictionaries that it reads with ``get``. So it is given a dictionary that
records which keys are looked up, and a key that no model has, so that the model of a section raises
an error with its class name. Nothing here lists a key that DeepSpeed reads.
"""

from __future__ import annotations

import contextlib
import difflib
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from pydantic import BaseModel, ValidationError

from nbaccel.base.optional_packages import require
from nbaccel.config.field_rules import FieldMistake
from nbaccel.config.given_values import closest, shown
from nbaccel.deepspeed import library
from nbaccel.deepspeed.zero_config import ZERO, ZERO_KEYS, config_fields

# DeepSpeed reads these only where processes are connected, or in other places than its reader.
_UNASKED_KEYS = ("sequence_parallel_size",)
# Their inner names are the user's own, or are read by parsers that refuse what they do not know.
_FREE_SECTIONS = ("data_efficiency.data_sampling", "data_efficiency.data_routing", "pipeline")
_STRANGE_KEY = "nbaccel asks"
_ENOUGH_SETTINGS = {"train_micro_batch_size_per_gpu": 1}
_ADAM_ALSO = ("torch_adam", "adam_w_mode", "fp32_optimizer_states")


@dataclass(frozen=True, slots=True)
class Arguments:
    """What the constructor of a class, the owner, takes."""

    owner: str
    known: frozenset[str]
    needed: frozenset[str] = frozenset()  # those without a default
    open: bool = False  # whether it takes any name

    @classmethod
    def of(cls, made_class: type, *also: str) -> Arguments:
        """What a class takes, after what it works on: an optimizer, or the model's parameters."""
        parameters = list(inspect.signature(made_class).parameters.values())[1:]
        named = [p for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
        return cls(
            owner=made_class.__name__,
            known=frozenset(p.name for p in named) | frozenset(also),
            needed=frozenset(p.name for p in named if p.default is p.empty),
            open=any(p.kind is p.VAR_KEYWORD for p in parameters),
        )


@dataclass(frozen=True, slots=True)
class Schema:
    """The keys, models and classes of the installed DeepSpeed; `own_` are without torch's."""

    version: str
    sections: Mapping[str, frozenset[str]]  # by path; one that is not here takes any
    models: Mapping[str, type[BaseModel]]
    removed: Mapping[str, str]  # keys that DeepSpeed had, by path, and its sentence on each
    optimizers: tuple[str, ...]
    own_optimizers: tuple[str, ...]  # in lower case; DeepSpeed takes them in any
    schedulers: Mapping[str, Arguments]
    own_schedulers: tuple[str, ...]

    def defaults(self, config_key: str) -> tuple[Any, ...]:
        """DeepSpeed's default for a key of one of its models, which replace ``"auto"`` by it."""
        section_path, _, name = config_key.rpartition(".")
        model = self.models.get(section_path)
        for field_name, model_field in model.model_fields.items() if model else ():
            if name in (model_field.alias, field_name) and not model_field.is_required():
                value = model_field.get_default(call_default_factory=True)
                # Of a subclass of `int` there, whose `repr` has commas.
                return (int(value) if isinstance(value, int) and value > 1 else value,)
        return ()

    def removed_mistake(self, key_path: str, value: Any) -> FieldMistake:
        """The message about a key that DeepSpeed has removed."""
        text = f"{key_path}={shown(value)} is of the past. {self.removed[key_path]}"
        return FieldMistake(text.rstrip(), key_path)


class _KeyRecorder(dict[str, Any]):
    """A dictionary that records every key that is looked up in it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.asked: set[str] = set()

    def __getitem__(self, key: str) -> Any:
        self.asked.add(key)
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        self.asked.add(str(key))
        return super().__contains__(key)

    def get(self, key: str, default: Any = None) -> Any:
        """As a dictionary does."""
        self.asked.add(key)
        return super().get(key, default)

    def keys(self) -> Any:
        """Itself: ``key in holder.keys()`` is a question for a key as well."""
        return self

    def __copy__(self) -> _KeyRecorder:
        # DeepSpeed copies the dictionary and reads the copy: look-ups must be recorded here.
        return self


@lru_cache(maxsize=1)
def deepspeed_schema() -> Schema:
    """Find out what the installed DeepSpeed reads; once per process."""
    reason = "Checking a DeepSpeed configuration"
    config_module = library.load_module("deepspeed.runtime.config", why=reason)
    schedules = library.load_module("deepspeed.runtime.lr_schedules", why=reason)
    removed_keys = library.removed_keys(config_module)
    with library.quiet_logger():
        search = _Search(config_module.DeepSpeedConfig, removed_keys)
    own_schedulers = {name: getattr(schedules, name) for name in schedules.VALID_LR_SCHEDULES}
    all_schedulers = own_schedulers | _classes_of("torch.optim.lr_scheduler", "LRScheduler")
    return Schema(
        version=str(library.load_module("deepspeed", why=reason).__version__),
        sections=search.sections,
        models=search.models,
        removed=removed_keys,
        optimizers=(*config_module.DEEPSPEED_OPTIMIZERS, *_classes_of("torch.optim", "Optimizer")),
        own_optimizers=tuple(config_module.DEEPSPEED_OPTIMIZERS),
        schedulers={name: Arguments.of(made) for name, made in all_schedulers.items()},
        own_schedulers=tuple(own_schedulers),
    )


def _classes_of(module_name: str, base_name: str) -> dict[str, type]:
    module = require(module_name, extra="", why="Checking a DeepSpeed configuration")
    base = getattr(module, base_name)
    return {
        name: item
        for name, item in sorted(vars(module).items())
        if isinstance(item, type) and issubclass(item, base) and item is not base
    }


class _Search:
    """Asks DeepSpeed's reader what it reads, section by section."""

    def __init__(self, reader: Callable[..., Any], removed_keys: Mapping[str, str]) -> None:
        self._reader = reader
        self.models: dict[str, type[BaseModel]] = {}
        top_keys = (self._asked(()) | set(_UNASKED_KEYS)) - set(removed_keys)
        self.sections = {"": frozenset(top_keys)}
        for key in sorted(top_keys):
            self._look_behind((key,))

    def _read(self, path: tuple[str, ...], content: dict[str, Any]) -> None:
        for key in reversed(path):
            content = {key: content}
        self._reader({**_ENOUGH_SETTINGS, **content} if path else content)

    def _asked(self, path: tuple[str, ...]) -> set[str]:
        """The keys that DeepSpeed looks up in a plain section."""
        keys: set[str] = set()
        # Some sections are read on only where they have a type, or are turned on.
        for key, content in (("", {}), ("type", {"type": "Adam"}), ("enabled", {"enabled": True})):
            # Each try is a run of DeepSpeed's reader, and useless for a section without such a key.
            if key and key not in keys:
                continue
            recorder = _KeyRecorder(content if path else _ENOUGH_SETTINGS)
            # It fails on most of these, in many ways: what it looked up until then is the answer.
            with contextlib.suppress(Exception):
                self._read(path, recorder)
            keys |= recorder.asked
        return keys

    def _look_behind(self, path: tuple[str, ...]) -> None:
        """Find out what a path leads to: a model, a plain section, or a value."""
        if ".".join(path) in _FREE_SECTIONS:
            return
        if model := self._model_behind(path):
            self._add_model(path, model)
            return
        keys = self._asked(path)
        if not keys - {"enabled"}:  # with that key alone, the others are read elsewhere, and later
            return
        self.sections[".".join(path)] = frozenset(keys)
        # Each look runs DeepSpeed's reader, so the search ends at two levels.
        for key in sorted(keys - {"params", "type"}) if len(path) < 2 else ():
            self._look_behind((*path, key))

    def _model_behind(self, path: tuple[str, ...]) -> type[BaseModel] | None:
        try:
            self._read(path, {_STRANGE_KEY: None})
        except ValidationError as error:
            module = library.load_module("deepspeed.runtime.config_utils", why="A model")
            waiting: list[type[BaseModel]] = [module.DeepSpeedConfigModel]
            # Without a list of its models: its base class has them as subclasses, at any depth.
            for known in waiting:
                waiting += known.__subclasses__()
            models = {known.__name__: known for known in waiting}
            for detail in error.errors(include_url=False):
                if detail["type"] == "extra_forbidden" and detail["loc"][-1] == _STRANGE_KEY:
                    model = models.get(error.title)
                    for step in detail["loc"][:-1]:
                        model = dict(_inner_models(model)).get(str(step)) if model else None
                    return model
        except Exception:  # a section without a model fails in other ways
            return None
        return None

    def _add_model(self, path: tuple[str, ...], model: type[BaseModel]) -> None:
        """Write down a model and those inside it."""
        aliases = {model_field.alias or name for name, model_field in model.model_fields.items()}
        self.sections[".".join(path)] = frozenset(aliases | set(model.model_fields))
        self.models[".".join(path)] = model
        for key, inner_model in _inner_models(model):
            self._add_model((*path, key), inner_model)


def _inner_models(model: type[BaseModel]) -> Iterator[tuple[str, type[BaseModel]]]:
    for name, model_field in model.model_fields.items():
        annotation = model_field.annotation
        for part in (annotation, *getattr(annotation, "__args__", ())):
            if isinstance(part, type) and issubclass(part, BaseModel):
                yield model_field.alias or name, part


def optimizer_arguments(
    optimizer_type: str, params: Mapping[str, Any], *, is_offloaded: bool
) -> Arguments | None:
    """What the optimizer takes that DeepSpeed makes under a name; None where it is not known."""
    reason = f"The optimizer {optimizer_type}"
    optim_module = require("torch.optim", extra="", why=reason)
    name = optimizer_type.lower()
    if name == "muon":
        return None  # it takes other names than torch's of that name
    also = _ADAM_ALSO if name in ("adam", "adamw") else ()
    if operation := library.own_operation(optimizer_type, params, is_offloaded=is_offloaded):
        place, _, kind = operation.partition("_")
        class_name = {"cpu": "DeepSpeedCPU", "fused": "Fused"}[place] + kind.capitalize()
        module = library.load_module(f"deepspeed.ops.{kind}", why=reason)
        return Arguments.of(getattr(module, class_name), *also)
    class_name = "AdamW" if also else {"adagrad": "Adagrad"}.get(name, optimizer_type)
    made_class = vars(optim_module).get(class_name)
    return None if made_class is None else Arguments.of(made_class, *also)


# What people write at the top level, and what they mean by it.
_MEANT_KEYS = {
    "batch_size": "train_micro_batch_size_per_gpu",
    "clip_grad_norm": "gradient_clipping",
    "max_grad_norm": "gradient_clipping",
    "lr_scheduler": "scheduler",
    "mixed_precision": "bf16",
    "precision": "bf16",
}
_OF_OPTIMIZERS = ("lr", "learning_rate", "betas", "eps", "weight_decay", "momentum")
_NEAR_ENOUGH = 0.75
_NEAR_A_FIELD = 0.83  # `devise` is 0.833 like `device`; keys without a field are up to 0.828


def key_findings(settings: Mapping[str, Any], schema: Schema, section: str = "") -> Iterator[str]:
    """What is wrong with each key, section by section; plain text where that is only advice."""
    known_keys = schema.sections.get(section)
    prefix = f"{section}." if section else ""
    for key, value in settings.items():
        path = f"{prefix}{key}"
        if path in schema.removed:
            yield schema.removed_mistake(path, value)
            continue
        meant_key = key
        if known_keys is not None and key not in known_keys:
            # A comment, in one of the ways that people write one.
            if key.startswith(("_", "//", "#", "$")) or key.lower() in ("comment", "comments"):
                if section in schema.models:
                    text = (
                        f"{path} is a comment, and DeepSpeed {schema.version} refuses keys that it "
                        f"does not know there: got {shown(value)}. Move it to the top level."
                    )
                    yield FieldMistake(text, path)
                continue
            meant_key, advice = _advice(key, section, settings, schema)
            yield _unknown_key(path, value, section, advice, schema)
        inner_path = f"{prefix}{meant_key}"
        if isinstance(value, Mapping) and inner_path in schema.sections:
            # With the section that was meant, so that mistakes inside a misspelt one are told, too.
            yield from key_findings(value, schema, inner_path)


def _unknown_key(path: str, value: Any, section: str, advice: str, schema: Schema) -> str:
    head = f"{path} is no key of DeepSpeed {schema.version}"
    got = f"got {path}={shown(value)}"
    # Published configurations have such keys, so they are not refused.
    if not advice and not section:
        return f"{head}, which ignores it: {got}."
    fate = "refuse it" if section in schema.models else "silently ignore it"
    advice = advice or f"The keys there are: {', '.join(sorted(schema.sections[section]))}."
    return FieldMistake(f"{head}: {got}. It would {fate}. {advice}", path)


def _advice(key: str, section: str, settings: Mapping[str, Any], schema: Schema) -> tuple[str, str]:
    """The key that was probably meant, and the sentence that says so; empty where none is near."""
    places = [path for path, keys in schema.sections.items() if key in keys]
    # A key that many sections have, such as "enabled", does not tell where it belongs.
    if 0 < len(places) <= 3:
        return key, f"It belongs in {' or '.join(place or 'the top level' for place in places)}."
    if not section:
        schedules = [schema.schedulers[name].known for name in schema.own_schedulers]
        if key in _OF_OPTIMIZERS or any(key in known for known in schedules):
            maker = "optimizer" if key in _OF_OPTIMIZERS else "scheduler"
            return key, f"It belongs in {maker}.params."
    keys = schema.sections[section]
    # Keys that are not there yet first: one that stands in the file already was hardly meant twice.
    for candidates in ([known for known in keys if known not in settings], keys):
        near = _meant_at_the_top(key, candidates)
        if section:
            near = closest(key, candidates).partition("'")[2].partition("'")[0]
        if near:
            return near, f"Did you mean {near!r}?"
    for place, known_keys in schema.sections.items():
        if near_keys := difflib.get_close_matches(key.lower(), known_keys, n=1, cutoff=0.8):
            return key, f"Did you mean {near_keys[0]!r} in {place or 'the top level'}?"
    if not section and key.lower().startswith(("zero", "offload", "stage3")):
        zero_keys = ", ".join(sorted(schema.sections.get(ZERO, ())))
        return key, f"ZeRO is configured in {ZERO}: its keys are {zero_keys}."
    return key, ""


def _meant_at_the_top(key: str, known_keys: Iterable[str]) -> str:
    """As `closest`, for keys that are ignored: only what is near, or a known word, is a mistake."""
    word = key.strip().lower()
    names = {known.lower(): known for known in known_keys}
    if _MEANT_KEYS.get(word) in names.values():
        return _MEANT_KEYS[word]
    # Shared words are nearer than similar letters: `batch_size` of `train_batch_size`.
    parts = [part for part in word.split("_") if part]
    sharing = [
        name
        for name in names
        if parts and all(any(w.startswith(part) for w in name.split("_")) for part in parts)
    ]
    cutoff = 0.0 if sharing else _NEAR_ENOUGH
    near_keys = difflib.get_close_matches(word, sharing or names, n=1, cutoff=cutoff)
    return names[near_keys[0]] if near_keys else ""


def misspelt_keys(settings: Mapping[str, Any], section: str = "") -> Iterator[FieldMistake]:
    """Keys that are nearly one that has a field here, for where DeepSpeed is not installed."""
    fields = {name for place, name, _ in config_fields() if place == section}
    if not fields:
        return  # its keys are DeepSpeed's, or the user's own
    if not section:
        fields.add(ZERO)
    prefix = f"{section}." if section else ""
    for key, value in settings.items():
        near = difflib.get_close_matches(key.strip().lower(), fields, n=1, cutoff=_NEAR_A_FIELD)
        meant_key, advice = key, ""
        if not section and key in ZERO_KEYS:
            advice = f"It belongs in {ZERO}."
        elif key not in fields and near:
            meant_key, advice = near[0], f"Did you mean {near[0]!r}?"
        if advice:
            path = f"{prefix}{key}"
            text = f"{path} is no key that nbaccel knows of DeepSpeed: got {path}={shown(value)}."
            yield FieldMistake(f"{text} It would have no effect. {advice}", path)
        # Inside a misspelt section, too, so that its mistakes are reported at once.
        if isinstance(value, Mapping):
            yield from misspelt_keys(value, f"{prefix}{meant_key}")
