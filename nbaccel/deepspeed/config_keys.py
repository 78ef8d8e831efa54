"""The keys of a DeepSpeed configuration, compared with those that the installed DeepSpeed reads.

Outside of its own models DeepSpeed ignores a key that it does not know. A misspelt one would train
something else and is refused; a comment is left alone; what resembles nothing is a warning.
Without DeepSpeed only the keys that have a field here are known, which are fewer than it reads: a
key is a mistake then only where it is nearly one of them.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from typing import Any

from nbaccel.config.field_rules import FieldMistake
from nbaccel.config.given_values import closest, shown
from nbaccel.deepspeed.schema import Schema
from nbaccel.deepspeed.zero_config import ZERO, ZERO_KEYS, config_fields

_COMMENT_STARTS = ("_", "//", "#", "$")
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
_NEAR_ENOUGH = 0.75
_NEAR_A_FIELD = 0.83
"""`devise` is 0.833 like `device`; keys of DeepSpeed without a field are up to 0.828 like one."""


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
            if _is_comment(key):
                if section_path in schema.models:
                    text = (
                        f"{path} is a comment, and DeepSpeed {schema.version} refuses every key "
                        f"that it does not know in {section_path}: got {shown(value)}. Move it to "
                        "the top level."
                    )
                    yield FieldMistake(text, path)
                continue
            meant_key, advice = _advice(key, section_path, settings, schema)
            yield _unknown_key(path, value, section_path, advice, schema)
        inner_path = f"{prefix}{meant_key}"
        if isinstance(value, Mapping) and inner_path in schema.sections:
            # Keys inside a misspelt section are compared with the section that was meant, so that
            # their mistakes are reported at once, too.
            yield from key_findings(value, schema, inner_path)


def _is_comment(key: str) -> bool:
    return key.startswith(_COMMENT_STARTS) or key.lower() in ("comment", "comments")


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
    maker = "" if section_path else _maker_of(key, schema)
    if maker:
        return key, f"It belongs in {maker}.params."
    keys = schema.sections[section_path]
    # Keys that are not there yet first: one that stands in the file already was hardly meant twice.
    for candidates in ([known for known in keys if known not in settings], keys):
        near = _meant_at_the_top(key, candidates)
        if section_path:
            near = closest(key, candidates).partition("'")[2].partition("'")[0]
        if near:
            return near, f"Did you mean {near!r}?"
    for place, known_keys in schema.sections.items():
        near_keys = difflib.get_close_matches(key.lower(), known_keys, n=1, cutoff=0.8)
        if near_keys:
            return key, f"Did you mean {near_keys[0]!r} in {place or 'the top level'}?"
    if not section_path and key.lower().startswith(_OF_ZERO):
        zero_keys = ", ".join(sorted(schema.sections.get(ZERO, ())))
        return key, f"ZeRO is configured in {ZERO}: its keys are {zero_keys}."
    return key, ""


def _maker_of(key: str, schema: Schema) -> str:
    """The section whose ``params`` a key at the top level was meant for."""
    if key in _OF_OPTIMIZERS:
        return "optimizer"
    schedules = (schema.schedulers[name] for name in schema.own_schedulers)
    return "scheduler" if any(key in schedule.known for schedule in schedules) else ""


def _meant_at_the_top(key: str, known_keys: Iterable[str]) -> str:
    """As `closest`, for keys that are ignored: only what is near, or a known word, is a mistake."""
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
    cutoff = 0.0 if sharing else _NEAR_ENOUGH
    near_keys = difflib.get_close_matches(word, sharing or names, n=1, cutoff=cutoff)
    return names[near_keys[0]] if near_keys else ""


def misspelt_keys(settings: Mapping[str, Any], section_path: str = "") -> Iterator[FieldMistake]:
    """Keys that are nearly one that has a field here, for where DeepSpeed is not installed."""
    fields = _fields_by_section().get(section_path)
    if fields is None:
        return  # its keys are DeepSpeed's, or the user's own
    prefix = f"{section_path}." if section_path else ""
    for key, value in settings.items():
        meant_key, advice = key, ""
        if key not in fields:
            near = difflib.get_close_matches(
                str(key).strip().lower(), fields, n=1, cutoff=_NEAR_A_FIELD
            )
            if not section_path and key in ZERO_KEYS:
                advice = f"It belongs in {ZERO}."
            elif near:
                meant_key, advice = near[0], f"Did you mean {near[0]!r}?"
        if advice:
            yield FieldMistake(
                f"{prefix}{key} is no key that nbaccel knows of DeepSpeed: got "
                f"{prefix}{key}={shown(value)}. It would have no effect. {advice}",
                f"{prefix}{key}",
            )
        # Inside a misspelt section, too, so that its mistakes are reported at once.
        if isinstance(value, Mapping):
            yield from misspelt_keys(value, f"{prefix}{meant_key}")


@lru_cache(maxsize=1)
def _fields_by_section() -> dict[str, set[str]]:
    """Keys with a field by the path of their section; the top level is the empty path."""
    found: dict[str, set[str]] = {"": {ZERO}}
    for place, name, _ in config_fields():
        found.setdefault(place, set()).add(name)
    return found
