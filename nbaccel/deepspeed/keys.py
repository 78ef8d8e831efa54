"""The keys of a DeepSpeed configuration, held against those that the installed DeepSpeed reads.

Outside of its own models DeepSpeed ignores a key that it does not know. A misspelt one would train
something else and is refused; a comment is left alone; what resembles nothing is told of.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from nbaccel.config.mistakes import closest, shown
from nbaccel.deepspeed.config import ZERO
from nbaccel.deepspeed.schema import Schema

__all__ = ["Finding", "key_findings", "removed_text"]

_COMMENTS = ("_", "//", "#", "$")
# What people write at the top level, and what they mean by it.
_MEANT = {
    "batch_size": "train_micro_batch_size_per_gpu",
    "clip_grad_norm": "gradient_clipping",
    "max_grad_norm": "gradient_clipping",
    "lr_scheduler": "scheduler",
    "mixed_precision": "bf16",
    "precision": "bf16",
}
_OF_ZERO = ("zero", "offload", "stage3")
_NEAR = 0.75


@dataclass(frozen=True, slots=True)
class Finding:
    """Something about a key.

    Attributes:
        text: What is told.
        is_mistake: Whether the configuration is refused for it.
    """

    text: str
    is_mistake: bool = True


def key_findings(settings: Mapping[str, Any], schema: Schema, path: str = "") -> Iterator[Finding]:
    """Look at every key of a configuration, section by section.

    Args:
        settings: The configuration, or a section of it.
        schema: What the installed DeepSpeed knows.
        path: The section that it is.

    Yields:
        What is found, key by key.
    """
    keys = schema.sections.get(path)
    prefix = f"{path}." if path else ""
    for key, value in settings.items():
        here = f"{prefix}{key}"
        if here in schema.removed:
            yield Finding(removed_text(here, value, schema))
            continue
        meant = key
        if keys is not None and key not in keys:
            meant, finding = _unknown(key, value, path, settings, schema)
            if finding is not None:
                yield finding
        inner = f"{prefix}{meant}"
        if isinstance(value, Mapping) and inner in schema.sections:
            # Inside a misspelt section keys are held against the one that was meant.
            yield from key_findings(value, schema, inner)


def removed_text(key: str, value: Any, schema: Schema) -> str:
    """What is told of a key that DeepSpeed had once.

    Args:
        key: Its dotted path.
        value: What stands there.
        schema: What the installed DeepSpeed knows.

    Returns:
        The sentence, with DeepSpeed's own.
    """
    return f"{key}={shown(value)} is of the past. {schema.removed[key]}".rstrip()


def _unknown(
    key: str, value: Any, path: str, settings: Mapping[str, Any], schema: Schema
) -> tuple[str, Finding | None]:
    """The key that was probably meant, and what is told of the one that stands there."""
    here = f"{path}.{key}" if path else key
    refuses = path in schema.models
    if _is_comment(key):
        if not refuses:
            return key, None
        return key, Finding(
            f"{here} is a comment, and DeepSpeed {schema.version} refuses every key that it does "
            f"not know in {path}: got {shown(value)}. Move it to the top level."
        )
    meant, advice = _advice(key, path, settings, schema)
    if not advice and not refuses and not path:
        return key, Finding(
            f"{here} is no key of DeepSpeed {schema.version}, which ignores it: got "
            f"{here}={shown(value)}.",
            is_mistake=False,
        )
    fate = "refuse it" if refuses else "ignore it without a word"
    listed = advice or f" The keys there are: {', '.join(sorted(schema.sections[path]))}."
    return meant, Finding(
        f"{here} is no key of DeepSpeed {schema.version}: got {here}={shown(value)}. It would "
        f"{fate}.{listed}"
    )


def _is_comment(key: str) -> bool:
    return key.startswith(_COMMENTS) or key.lower() in ("comment", "comments")


def _advice(key: str, path: str, settings: Mapping[str, Any], schema: Schema) -> tuple[str, str]:
    """The key that was probably meant, and the sentence that says so; empty where none is near."""
    places = schema.places(key)
    if 0 < len(places) <= 3:
        return key, f" It belongs in {' or '.join(place or 'the top level' for place in places)}."
    maker = _maker_of(key, settings if not path else {}, schema)
    if maker:
        return key, f" It belongs in {maker}.params."
    here = schema.sections[path]
    for keys in ([name for name in here if name not in settings], here):
        if said := closest(key, keys) if path else _meant_at_the_top(key, keys):
            return said.split("'")[1], said
    for place, keys in schema.sections.items():
        near = difflib.get_close_matches(key.lower(), keys, n=1, cutoff=0.8)
        if near:
            return key, f" Did you mean {near[0]!r} in {place or 'the top level'}?"
    if not path and key.lower().startswith(_OF_ZERO):
        return key, f" What ZeRO does is said in {ZERO}: its keys are {_listed(schema, ZERO)}."
    return key, ""


def _listed(schema: Schema, path: str) -> str:
    return ", ".join(sorted(schema.sections.get(path, ())))


def _meant_at_the_top(key: str, keys: Any) -> str:
    """As `closest`, for keys that are ignored: only what is near, or a known word, is a mistake."""
    word = key.strip().lower()
    names = {name.lower(): name for name in keys}
    found = _MEANT.get(word)
    if found in names.values():
        return f" Did you mean {found!r}?"
    # A whole part of a name says more than letters that are alike.
    part = [name for name in names if _is_part_of(word, name)]
    near = difflib.get_close_matches(word, part or names, n=1, cutoff=0.0 if part else _NEAR)
    return f" Did you mean {names[near[0]]!r}?" if near else ""


def _is_part_of(word: str, name: str) -> bool:
    """``batch_size`` of ``train_batch_size``, ``zero_opt`` of ``zero_optimization``."""
    parts = [part for part in word.split("_") if part]
    return bool(parts) and all(
        any(whole.startswith(part) for whole in name.split("_")) for part in parts
    )


def _maker_of(key: str, settings: Mapping[str, Any], schema: Schema) -> str:
    """The section whose ``params`` a key at the top level was meant for."""
    if key in ("lr", "learning_rate", "betas", "eps", "weight_decay", "momentum"):
        return "optimizer"
    own = [name for name in schema.schedulers if name.startswith(("Warmup", "OneCycle", "LRR"))]
    return "scheduler" if any(key in schema.schedulers[name].known for name in own) else ""
