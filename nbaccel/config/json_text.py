"""JSON of people's own: files read strictly, with the line and the reason, and values made plain.

DeepSpeed's configuration comes as a file, as text, or as a dictionary that somebody built. All
three are read here and nowhere else, so that the same mistake is told in the same words.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nbaccel.config.exchange import each_once
from nbaccel.config.mistakes import shown
from nbaccel.config.plain import plain
from nbaccel.errors import ConfigError

__all__ = ["json_like", "plain_object", "read_file", "read_object"]

_MAX_DEPTH = 64
_MAX_BITS = 1024
"""Of a whole number: what is larger fits in no number of a training."""


def read_file(path: str | Path, what: str = "The DeepSpeed configuration") -> dict[str, Any]:
    """Read a file that holds a JSON object.

    Args:
        path: A JSON file.
        what: What it holds, for messages.

    Returns:
        The object in it.

    Raises:
        ConfigError: There is no such file, or it holds no JSON object.
    """
    named = f"{what} {shown(str(path))}"
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:  # ValueError: no UTF-8, or a null character in the name
        raise ConfigError(
            f"{named} cannot be read: {error}. "
            "Training would run without it. Give the path of a JSON file."
        ) from error
    return read_object(text, named)


def read_object(text: str, what: str) -> dict[str, Any]:
    """Read a JSON object in which no key stands twice.

    Args:
        text: JSON.
        what: What it describes, for messages.

    Returns:
        The object.

    Raises:
        ConfigError: It is no JSON object, or a key stands twice in it.
    """
    try:
        found = json.loads(text, object_pairs_hook=each_once(what), parse_constant=_constant)
    except json.JSONDecodeError as error:
        raise _unreadable(what, str(error), _reason(text, error.pos)) from error
    except RecursionError as error:
        raise _unreadable(what, "it is nested too deeply") from error
    except ConfigError:
        raise
    except ValueError as error:  # NaN, or a number of thousands of digits
        raise _unreadable(what, f"{error}{_line_of('NaN', text)}") from error
    if not isinstance(found, dict):
        kind = "null" if found is None else type(found).__name__
        raise ConfigError(
            f"{what} cannot be read from JSON of {kind}: got {shown(text)}. Settings need names. "
            'Write names and values: {"train_batch_size": 8}, for example.'
        )
    return found


def json_like(value: Any, path: str = "", depth: int = 0) -> Any:
    """A value as JSON holds it: lists for tuples, plain numbers for NumPy's, text for paths.

    Args:
        value: A value of a configuration.
        path: Where it stands, for messages.
        depth: How deep it is nested.

    Returns:
        A copy of plain values.

    Raises:
        ValueError: JSON cannot hold it.
    """
    value = plain(value)
    at = f" at {path}" if path else ""
    if depth > _MAX_DEPTH:
        raise ValueError(f"it is nested more than {_MAX_DEPTH} levels deep{at[:60]}")
    if isinstance(value, Mapping):
        wrong = [key for key in value if not isinstance(key, str)]
        if wrong:
            raise ValueError(f"JSON names settings by text, and {shown(wrong[0])}{at} is none")
        prefix = f"{path}." if path else ""
        return {key: json_like(e, f"{prefix}{key}", depth + 1) for key, e in value.items()}
    if isinstance(value, (list, tuple)):
        return [json_like(entry, path, depth + 1) for entry in value]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, int) and value.bit_length() > _MAX_BITS:
        raise ValueError(f"a whole number of {value.bit_length()} bits{at} is too large")
    if value is None or isinstance(value, (str, bool, int)):
        return value
    if isinstance(value, float) and not math.isnan(value):  # "never print" is Infinity
        return value
    raise ValueError(f"JSON cannot hold {shown(value)}{at}")


def plain_object(settings: Mapping[str, Any], what: str) -> dict[str, Any]:
    """A mapping as JSON holds it.

    Args:
        settings: What somebody built.
        what: What it describes, for messages.

    Returns:
        A copy of plain values.

    Raises:
        ConfigError: JSON cannot hold it.
    """
    try:
        found: dict[str, Any] = json_like(settings)
    except ValueError as error:
        raise ConfigError(
            f"{what} cannot be read from {shown(settings)}: {error}. "
            "DeepSpeed reads JSON. Give names as text, and plain values."
        ) from error
    return found


def _constant(name: str) -> float:
    if name == "NaN":
        raise ValueError(f"{name} is no number, and JSON has no word for it")
    return float(name)


def _line_of(word: str, text: str) -> str:
    before, found, _ = text.partition(word)
    line = before.count("\n") + 1
    return f": line {line}" if found else ""


def _unreadable(what: str, said: str, reason: str = "") -> ConfigError:
    return ConfigError(
        f"{what} cannot be read from JSON: {said.rstrip('.')}. {reason}"
        "A setting half read would train something else. Correct the text there."
    )


def _reason(text: str, position: int) -> str:
    """What is probably wrong at a place where the reader gave up."""
    if text.startswith("\ufeff"):
        return "It begins with a byte order mark: save it as UTF-8 without one. "
    rest, before = text[position:].lstrip(), text[:position].rstrip()
    if rest.startswith(("//", "/*", "#")) and before:
        return "JSON has no comments: remove them. "
    if before.endswith(",") and rest[:1] in ("}", "]"):
        return "A comma before a closing bracket is one too many: remove it. "
    # Newer versions of Python name the comma itself.
    if rest.startswith(",") and rest[1:].lstrip()[:1] in ("}", "]"):
        return "A comma before a closing bracket is one too many: remove it. "
    if not rest:
        return "The text ends there: it is empty, or was cut off. "
    if not text.lstrip().startswith(("{", "[")):
        return "It may be YAML, which DeepSpeed does not read: write it as JSON. "
    return ""
