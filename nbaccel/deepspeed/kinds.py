"""The kinds of values that a DeepSpeed configuration holds.

A field says what it means and in which unit; its kind says what may stand there and how to put a
wrong value right. ``None`` always means: left to DeepSpeed. ``"auto"`` is allowed everywhere,
because a file may hold it until it is resolved; `checking` says where nobody resolves it.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator

from nbaccel.config.json_text import json_like
from nbaccel.config.plain import numbers_read, plain

__all__ = [
    "AUTO",
    "Depth",
    "Device",
    "FloatFormat",
    "Fraction",
    "Kind",
    "Number",
    "Params",
    "Steps",
    "Table",
    "Text",
    "Truth",
    "Whole",
    "WholeFromOne",
    "Words",
    "table",
]

AUTO = "auto"


@dataclass(frozen=True, kw_only=True)
class Kind:
    """What may stand in a field.

    Attributes:
        must: What it must be, after "must be".
        do: The remedy, as an instruction.
        allowed: The words, where only some are allowed.
        words: What people write for one of them.
    """

    must: str
    do: str
    allowed: tuple[str, ...] = ()
    words: Mapping[str, str] = field(default_factory=dict)


def _open(value: Any) -> bool:
    return value is None or (isinstance(value, str) and value == AUTO)


def _whole(least: int, *, endless: bool = False) -> Callable[[Any], Any]:
    def read(value: Any) -> Any:
        value = plain(value)
        if _open(value):
            return value
        value = numbers_read(value)
        if value == math.inf and endless:
            return value
        if isinstance(value, float) and value.is_integer():  # 5e8 is how JSON writes it
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ValueError(f"{value!r} is no whole number from {least}")
        return value

    return read


def _number(least: float, most: float) -> Callable[[Any], Any]:
    def read(value: Any) -> Any:
        value = plain(value)
        if _open(value):
            return value
        if isinstance(value, str):
            value = float(value)
        good = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not good or not math.isfinite(value) or not least <= value <= most:
            raise ValueError(f"{value!r} is no number from {least} to {most}")
        return value

    return read


def _truth(value: Any) -> Any:
    value = plain(value)
    if isinstance(value, str) and value.strip().lower() in ("true", "false"):
        return value.strip().lower() == "true"
    if not _open(value) and not isinstance(value, bool):
        raise ValueError(f"{value!r} is neither true nor false")
    return value


def _text(value: Any) -> Any:
    value = os.fspath(value) if isinstance(value, os.PathLike) else plain(value)
    if value is not None and (not isinstance(value, str) or not value):
        raise ValueError(f"{value!r} is no text")
    return value


def _word(allowed: tuple[str, ...]) -> Callable[[Any], Any]:
    def read(value: Any) -> Any:
        value = plain(value)
        if value is None:
            return None
        if not isinstance(value, str):
            raise ValueError(f"{value!r} is no word")
        word = value.strip()
        if word.lower() not in (*allowed, AUTO):
            raise ValueError(f"{value!r} is not one of {allowed}")
        return word.lower()

    return read


def table(value: Any) -> Any:
    """A mapping as JSON holds it.

    Args:
        value: What was given for one.

    Returns:
        A copy of plain values, or None.

    Raises:
        ValueError: It is no mapping, or JSON cannot hold it.
    """
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise ValueError(f"{value!r} holds no keys and values")
    return json_like(value)


def _params(value: Any) -> Any:
    return numbers_read(table(value))


def _list(value: Any) -> Any:
    value = json_like(value)
    if value is None or (isinstance(value, list) and all(isinstance(e, str) for e in value)):
        return value
    raise ValueError(f"{value!r} is no list of texts")


def _choice(*allowed: str, do: str, words: Mapping[str, str] | None = None) -> Kind:
    must = f"one of {', '.join(allowed)}"
    return Kind(must=must, do=do, allowed=allowed, words=words or {})


_FORMATS = ("fp32", "fp16", "bf16")
_DEVICES = ("none", "cpu", "nvme")
_TABLE = Kind(must="a mapping of names to JSON values", do='Write for example {"lr": 0.001}')
_Auto = Literal["auto"]

Whole = Annotated[
    int | _Auto | None,
    BeforeValidator(_whole(0)),
    Kind(must="a whole number of at least 0", do="Give a number, such as 500000000 or 5e8"),
]
WholeFromOne = Annotated[
    int | _Auto | None,
    BeforeValidator(_whole(1)),
    Kind(must="a whole number of at least 1", do="Give a number, such as 1 or 500000000"),
]
Steps = Annotated[
    int | float | _Auto | None,
    BeforeValidator(_whole(1, endless=True)),
    Kind(must="a whole number of at least 1, or infinity", do="Give a number, such as 100"),
]
Depth = Annotated[
    int | _Auto | None,
    BeforeValidator(_whole(-1)),
    Kind(must="a whole number of at least -1", do="Give -1 for all"),
]
Number = Annotated[
    float | _Auto | None,
    BeforeValidator(_number(0.0, math.inf)),
    Kind(must="a number of at least 0", do="Give a number, such as 1.0"),
]
Fraction = Annotated[
    float | _Auto | None,
    BeforeValidator(_number(0.0, 1.0)),
    Kind(must="a number from 0 to 1", do="Give a fraction, such as 0.5"),
]
Truth = Annotated[
    bool | _Auto | None, BeforeValidator(_truth), Kind(must="true or false", do="Give one of them")
]
Text = Annotated[
    str | None, BeforeValidator(_text), Kind(must="text that is not empty", do="Write it in quotes")
]
Words = Annotated[
    list[str] | None,
    BeforeValidator(_list),
    Kind(must="a list of texts", do='Write for example ["a", "b"]'),
]
Table = Annotated[
    dict[str, Any] | None,
    BeforeValidator(table),
    _TABLE,
]
Params = Annotated[
    dict[str, Any] | None,
    BeforeValidator(_params),
    _TABLE,
]
Device = Annotated[
    Literal["none", "cpu", "nvme", "auto"] | None,
    BeforeValidator(_word(_DEVICES)),
    _choice(
        *_DEVICES,
        do='"none" keeps them on the device that computes',
        words={"gpu": "none", "cuda": "none", "disk": "nvme", "ssd": "nvme"},
    ),
]
FloatFormat = Annotated[
    str | None,
    BeforeValidator(_word(_FORMATS)),
    _choice(
        *_FORMATS,
        do="Leave it out and DeepSpeed follows the precision of training",
        words={"float32": "fp32", "float16": "fp16", "half": "fp16", "bfloat16": "bf16"},
    ),
]
