"""The keys of a DeepSpeed configuration, compared with those that the installed DeepSpeed reads.

The packages for DeepSpeed's loggers are looked for here, too.

Outside of its own models DeepSpeed ignores a key that it does not know. A misspelt one would train
something else and is refused; a comment is left alone; what resembles nothing is a warning.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from nbaccel.base.optional_packages import is_installed
from nbaccel.config.field_rules import FieldMistake
from nbaccel.config.mistakes import closest, shown
from nbaccel.deepspeed.schema import Schema
from nbaccel.deepspeed.zero_config import ZERO, ZeroConfig

__all__ = ["Finding", "key_findings", "missing_monitors", "removed_text"]


_MONITOR_PACKAGES = {"tensorboard": "tensorboard", "wandb": "wandb", "comet": "comet_ml"}
"""Section → the module that DeepSpeed imports for it, which is its package's name, too."""


def missing_monitors(zero_config: ZeroConfig) -> Iterator[str]:
    """The sections that are turned on without their package."""
    for section_name, package_name in _MONITOR_PACKAGES.items():
        section = getattr(zero_config, section_name)
        if section is not None and section.enabled is True and not is_installed(package_name):
            yield (
                f"{section_name}.enabled cannot be true without the package {package_name}, which "
                "is not installed. Every process would fail when DeepSpeed makes its engine. "
                f"Install it: pip install {package_name}, or leave {section_name} out."
            )


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
_OF_ZERO = ("zero", "offload", "stage3")
_NEAR_ENOUGH = 0.75


@dataclass(frozen=True, slots=True)
class Finding:
    """Something about a key.

    Attributes:
        text: The message.
        is_mistake: Whether the configuration is refused for it.
    """

    text: FieldMistake
    is_mistake: bool = True


def key_findings(
    config_settings: Mapping[str, Any], key_schema: Schema, section_path: str = ""
) -> Iterator[Finding]:
    """Look at every key of a configuration, section by section."""
    known_keys = key_schema.sections.get(section_path)
    prefix = f"{section_path}." if section_path else ""
    for config_key, key_value in config_settings.items():
        key_path = f"{prefix}{config_key}"
        if key_path in key_schema.removed:
            yield Finding(FieldMistake(removed_text(key_path, key_value, key_schema), key_path))
            continue
        meant_key = config_key
        if known_keys is not None and config_key not in known_keys:
            meant_key, key_finding = _unknown_key(
                config_key, key_value, section_path, config_settings, key_schema
            )
            if key_finding is not None:
                yield key_finding
        inner_path = f"{prefix}{meant_key}"
        if isinstance(key_value, Mapping) and inner_path in key_schema.sections:
            # Keys inside a misspelt section are compared with the section that was meant, so that
            # their mistakes are reported at once, too.
            yield from key_findings(key_value, key_schema, inner_path)


def removed_text(key_path: str, key_value: Any, key_schema: Schema) -> str:
    """The message about a key that DeepSpeed has removed."""
    return f"{key_path}={shown(key_value)} is of the past. {key_schema.removed[key_path]}".rstrip()


def _unknown_key(
    config_key: str,
    key_value: Any,
    section_path: str,
    config_settings: Mapping[str, Any],
    key_schema: Schema,
) -> tuple[str, Finding | None]:
    """The key that was probably meant, and the finding about the one that stands there."""
    key_path = f"{section_path}.{config_key}" if section_path else config_key
    is_refused = section_path in key_schema.models
    if _is_comment(config_key):
        if not is_refused:
            return config_key, None
        message_text = (
            f"{key_path} is a comment, and DeepSpeed {key_schema.version} refuses every key that "
            f"it does not know in {section_path}: got {shown(key_value)}. Move it to the top level."
        )
        return config_key, Finding(FieldMistake(message_text, key_path))
    meant_key, advice_text = _key_advice(config_key, section_path, config_settings, key_schema)
    # Published configurations have such keys, so they are not refused.
    if not advice_text and not is_refused and not section_path:
        message_text = (
            f"{key_path} is no key of DeepSpeed {key_schema.version}, which ignores it: got "
            f"{key_path}={shown(key_value)}."
        )
        return config_key, Finding(FieldMistake(message_text, key_path), is_mistake=False)
    key_fate = "refuse it" if is_refused else "silently ignore it"
    listed_advice = (
        advice_text
        or f" The keys there are: {', '.join(sorted(key_schema.sections[section_path]))}."
    )
    message_text = (
        f"{key_path} is no key of DeepSpeed {key_schema.version}: got "
        f"{key_path}={shown(key_value)}. It would {key_fate}.{listed_advice}"
    )
    return meant_key, Finding(FieldMistake(message_text, key_path))


def _is_comment(key: str) -> bool:
    return key.startswith(_COMMENT_STARTS) or key.lower() in ("comment", "comments")


def _key_advice(
    config_key: str, section_path: str, config_settings: Mapping[str, Any], schema: Schema
) -> tuple[str, str]:
    """The key that was probably meant, and the sentence that says so; empty where none is near."""
    known_places = schema.places(config_key)
    # A key that many sections have, such as "enabled", does not tell where it belongs.
    if 0 < len(known_places) <= 3:
        return (
            config_key,
            " It belongs in "
            f"{' or '.join(section_place or 'the top level' for section_place in known_places)}.",
        )
    section = _maker_of(config_key, config_settings if not section_path else {}, schema)
    if section:
        return config_key, f" It belongs in {section}.params."
    section_keys = schema.sections[section_path]
    # Keys that are not there yet first: one that stands in the file already was hardly meant twice.
    for known_keys in (
        [known_key for known_key in section_keys if known_key not in config_settings],
        section_keys,
    ):
        if (
            suggestion := closest(config_key, known_keys)
            if section_path
            else _meant_at_the_top(config_key, known_keys)
        ):
            return suggestion.split("'")[1], suggestion
    for section_place, known_keys in schema.sections.items():
        near_keys = difflib.get_close_matches(config_key.lower(), known_keys, n=1, cutoff=0.8)
        if near_keys:
            return (
                config_key,
                f" Did you mean {near_keys[0]!r} in {section_place or 'the top level'}?",
            )
    if not section_path and config_key.lower().startswith(_OF_ZERO):
        return (
            config_key,
            f" ZeRO is configured in {ZERO}: its keys are {_listed_keys(schema, ZERO)}.",
        )
    return config_key, ""


def _listed_keys(schema: Schema, path: str) -> str:
    return ", ".join(sorted(schema.sections.get(path, ())))


def _meant_at_the_top(config_key: str, known_keys: Any) -> str:
    """As `closest`, for keys that are ignored: only what is near, or a known word, is a mistake."""
    word = config_key.strip().lower()
    names_by_lower = {key.lower(): key for key in known_keys}
    meaning = _MEANT_KEYS.get(word)
    if meaning in names_by_lower.values():
        return f" Did you mean {meaning!r}?"
    # A name that shares whole words is nearer than one that only has similar letters.
    names = [key for key in names_by_lower if _is_part_of(word, key)]
    near_keys = difflib.get_close_matches(
        word,
        names or names_by_lower,
        n=1,
        cutoff=0.0 if names else _NEAR_ENOUGH,
    )
    return f" Did you mean {names_by_lower[near_keys[0]]!r}?" if near_keys else ""


def _is_part_of(word: str, key: str) -> bool:
    """``batch_size`` of ``train_batch_size``, ``zero_opt`` of ``zero_optimization``."""
    key_parts = [key_part for key_part in word.split("_") if key_part]
    return bool(key_parts) and all(
        any(whole_part.startswith(key_part) for whole_part in key.split("_"))
        for key_part in key_parts
    )


def _maker_of(key: str, settings: Mapping[str, Any], schema: Schema) -> str:
    """The section whose ``params`` a key at the top level was meant for."""
    if key in ("lr", "learning_rate", "betas", "eps", "weight_decay", "momentum"):
        return "optimizer"
    schedules = [
        name for name in schema.schedulers if name.startswith(("Warmup", "OneCycle", "LRR"))
    ]
    return "scheduler" if any(key in schema.schedulers[name].known for name in schedules) else ""
