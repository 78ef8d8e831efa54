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
from nbaccel.config.given_values import shown
from nbaccel.deepspeed import library
from nbaccel.deepspeed.zero_config import ZERO

# DeepSpeed reads these only where processes are connected, or in other places than its reader.
_UNASKED_KEYS = ("sequence_parallel_size",)
# Their inner names are the user's own, or are read by parsers that refuse what they do not know.
_FREE_SECTIONS = ("data_efficiency.data_sampling", "data_efficiency.data_routing", "pipeline")
_STRANGE_KEY = "nbaccel asks"
_ENOUGH_SETTINGS = {"train_micro_batch_size_per_gpu": 1}


@dataclass(frozen=True, slots=True)
class Schema:
    """The keys, models and classes of the installed DeepSpeed; `own_` are without torch's."""

    version: str
    sections: Mapping[str, frozenset[str]]
    """Keys by the section's path, empty at the top; one that is not here takes any key."""
    models: Mapping[str, type[BaseModel]]
    removed: Mapping[str, str]
    """Keys that DeepSpeed had, by path, and its sentence on each."""
    optimizers: tuple[str, ...]
    own_optimizers: tuple[str, ...]
    """In lower case; DeepSpeed takes them in any."""
    schedulers: tuple[str, ...]
    own_schedulers: tuple[str, ...]
    schedule_arguments: frozenset[str]
    """Of DeepSpeed's own."""

    def replaces_auto(self, config_key: str) -> bool:
        """Whether a key is of one of its models, which replace ``"auto"`` by their defaults."""
        section_path, _, name = config_key.rpartition(".")
        return section_path in self.models and name in self.sections[section_path]

    def removed_text(self, key_path: str, shown_value: str) -> str:
        """The message about a key that DeepSpeed has removed."""
        return f"{key_path}={shown_value} is of the past. {self.removed[key_path]}".rstrip()


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
    deepspeed = library.load_module("deepspeed", why=reason)
    config_module = library.load_module("deepspeed.runtime.config", why=reason)
    schedule_module = library.load_module("deepspeed.runtime.lr_schedules", why=reason)
    removed_keys = library.removed_keys(config_module)
    with library.quiet_logger():
        search = _Search(config_module.DeepSpeedConfig, removed_keys)
    own_schedulers = tuple(schedule_module.VALID_LR_SCHEDULES)
    own_classes = [getattr(schedule_module, name) for name in own_schedulers]
    own_optimizers = tuple(config_module.DEEPSPEED_OPTIMIZERS)
    return Schema(
        version=str(deepspeed.__version__),
        sections=search.sections,
        models=search.models,
        removed=removed_keys,
        optimizers=(*own_optimizers, *_classes_of("torch.optim", "Optimizer")),
        own_optimizers=own_optimizers,
        schedulers=(*own_schedulers, *_classes_of("torch.optim.lr_scheduler", "LRScheduler")),
        own_schedulers=own_schedulers,
        schedule_arguments=frozenset(
            name for made_class in own_classes for name in inspect.signature(made_class).parameters
        ),
    )


def _classes_of(module_name: str, base_name: str) -> Iterator[str]:
    module = require(module_name, extra="", why="Checking a DeepSpeed configuration")
    base = getattr(module, base_name)
    for name, item in sorted(vars(module).items()):
        if isinstance(item, type) and issubclass(item, base) and item is not base:
            yield name


class _Search:
    """Asks DeepSpeed's reader what it reads, section by section."""

    def __init__(self, reader: Callable[..., Any], removed_keys: Mapping[str, str]) -> None:
        self._reader = reader
        self.sections: dict[str, frozenset[str]] = {}
        self.models: dict[str, type[BaseModel]] = {}
        top_keys = (self._asked(()) | set(_UNASKED_KEYS)) - set(removed_keys)
        self.sections[""] = frozenset(top_keys)
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
        for key, content in (
            ("", {}),
            ("type", {"type": "Adam"}),
            ("enabled", {"enabled": True}),
        ):
            # Each try is a run of DeepSpeed's reader, and useless for a section without such a key.
            if key and key not in keys:
                continue
            recorder = _KeyRecorder(content if path else _ENOUGH_SETTINGS)
            # The reader fails on most of these settings, in many ways: what it had looked up until
            # then is the answer.
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
_OF_ZERO = ("zero", "offload", "stage3")


def key_findings(
    settings: Mapping[str, Any], schema: Schema, section_path: str = ""
) -> Iterator[str]:
    """What is wrong with each key, section by section; plain text where that is only advice."""
    known_keys = schema.sections.get(section_path)
    prefix = f"{section_path}." if section_path else ""
    for key, value in settings.items():
        path = f"{prefix}{key}"
        if path in schema.removed:
            yield FieldMistake(schema.removed_text(path, shown(value)), path)
            continue
        meant_key = key
        if known_keys is not None and key not in known_keys:
            # A comment, in one of the ways that people write one, where DeepSpeed ignores it.
            is_comment = key.startswith(("_", "//", "#", "$")) or key.lower().startswith("comment")
            if is_comment and section_path not in schema.models:
                continue
            meant_key, advice = _advice(key, section_path, settings, schema)
            yield _unknown_key(path, value, section_path, advice, schema)
        inner_path = f"{prefix}{meant_key}"
        if isinstance(value, Mapping) and inner_path in schema.sections:
            # Keys inside a misspelt section are compared with the section that was meant, so that
            # their mistakes are reported at once, too.
            yield from key_findings(value, schema, inner_path)


def _unknown_key(path: str, value: Any, section_path: str, advice: str, schema: Schema) -> str:
    head = f"{path} is no key of DeepSpeed {schema.version}"
    got = f"got {path}={shown(value)}"
    # Published configurations have such keys, so they are not refused.
    if not advice and not section_path:
        return f"{head}, which ignores it: {got}."
    fate = "refuse it" if section_path in schema.models else "silently ignore it"
    advice = advice or f"The keys there are: {', '.join(sorted(schema.sections[section_path]))}."
    return FieldMistake(f"{head}: {got}. It would {fate}. {advice}", path)


def _advice(
    key: str, section_path: str, settings: Mapping[str, Any], schema: Schema
) -> tuple[str, str]:
    """The key that was probably meant, and the sentence that says so; empty where none is near."""
    places = [path for path, keys in schema.sections.items() if key in keys]
    # A key that many sections have, such as "enabled", does not tell where it belongs.
    if 0 < len(places) <= 3:
        return key, f"It belongs in {' or '.join(place or 'the top level' for place in places)}."
    for maker, names in (("optimizer", _OF_OPTIMIZERS), ("scheduler", schema.schedule_arguments)):
        if not section_path and key in names:
            return key, f"It belongs in {maker}.params."
    keys = schema.sections[section_path]
    # Keys that are not there yet first: one that stands in the file already was hardly meant twice.
    for candidates in (keys - settings.keys(), keys):
        # At the top, where keys are only ignored, only what is near is taken for a mistake.
        if near := _nearest(key, candidates, cutoff=0.6 if section_path else 0.75):
            return near, f"Did you mean {near!r}?"
    if not section_path and key.lower().startswith(_OF_ZERO):
        zero_keys = ", ".join(sorted(schema.sections.get(ZERO, ())))
        return key, f"ZeRO is configured in {ZERO}: its keys are {zero_keys}."
    return key, ""


def _nearest(key: str, known_keys: Iterable[str], *, cutoff: float) -> str:
    word = key.strip().lower()
    names = {known.lower(): known for known in known_keys}
    if _MEANT_KEYS.get(word) in names.values():
        return _MEANT_KEYS[word]
    # A name that shares whole words is nearer than one that only has similar letters:
    # `batch_size` of `train_batch_size`, `zero_opt` of `zero_optimization`.
    parts = [part for part in word.split("_") if part]
    sharing = [
        name
        for name in names
        if parts and all(any(w.startswith(part) for w in name.split("_")) for part in parts)
    ]
    near_keys = difflib.get_close_matches(word, sharing or names, 1, 0.0 if sharing else cutoff)
    return names[near_keys[0]] if near_keys else ""
