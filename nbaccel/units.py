"""Sizes and durations as people write them, for the doors; inside, they are bytes and seconds."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from nbaccel.errors import ConfigError

__all__ = [
    "counted",
    "format_bytes",
    "format_seconds",
    "left_out",
    "parse_bytes",
    "shortened",
    "spans",
]

_BINARY = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_SIZE = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*(?:([kmgtp]?)(i?)(b|bytes?)?)\s*", re.IGNORECASE)
_LETTERS = " kmgtp"


def parse_bytes(text: str | int) -> int:
    """Read a size such as ``"16 GiB"``.

    ``KiB, MiB, GiB, ...`` are powers of 1024 and ``kB, MB, GB, ...`` powers of 1000. A bare
    letter (``"16G"``) counts in 1024, as it does for Docker and Slurm.

    Args:
        text: The size; a plain number counts bytes.

    Returns:
        The size in bytes, rounded to a whole byte.

    Raises:
        ConfigError: The text is not a size.
    """
    if isinstance(text, int) and not isinstance(text, bool) and text >= 0:
        return text
    match = _SIZE.fullmatch(text) if isinstance(text, str) else None
    if match is None:
        raise ConfigError(
            f"A size must be a number and a unit: got {text!r}. "
            'Without a unit it would count bytes. Write for example "16 GiB" or "500 MB".'
        )
    number, letter, binary, suffix = match.groups()
    decimal = bool(letter) and bool(suffix) and not binary
    base = 1000 if decimal else 1024
    exponent = _LETTERS.index(letter.lower()) if letter else 0
    return round(float(number) * float(base**exponent))


def counted(number: int, noun: str) -> str:
    """Write a count for people.

    Args:
        number: How many.
        noun: Of what, in the singular.

    Returns:
        ``"1 worker"``, ``"2 workers"``.
    """
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def first_few(names: Sequence[str], most: int, *, separator: str = ", ") -> str:
    """The first of many names, and how many more there are.

    Args:
        names: All of them.
        most: How many are named.
        separator: What stands between two.

    Returns:
        For example "a, b and 3 more".
    """
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return separator.join(names[:most]) + more


def format_bytes(num_bytes: int) -> str:
    """Write a size for people.

    Args:
        num_bytes: The size in bytes.

    Returns:
        The size in the largest unit of 1024s that keeps it at 1 or more: ``"16.0 GiB"``.
    """
    size = float(abs(num_bytes))
    sign = "-" if num_bytes < 0 else ""
    for unit in _BINARY:
        # 1023.96 would be printed as "1024.0" of the smaller unit.
        if size < 1023.95 or unit == _BINARY[-1]:
            break
        size /= 1024
    return f"{sign}{size:.0f} {unit}" if unit == "B" else f"{sign}{size:.1f} {unit}"


def format_seconds(seconds: float) -> str:
    """Write a duration for people.

    Args:
        seconds: The duration in seconds.

    Returns:
        Two units at most: ``"12 ms"``, ``"1.5 s"``, ``"2 min 5 s"``, ``"3 h 20 min"``.
    """
    if seconds < 0:
        return f"-{format_seconds(-seconds)}"
    if seconds < 0.9995:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes} min"


def spans(numbers: Iterable[int]) -> str:
    """Write a set of numbers for people.

    Args:
        numbers: Whole numbers, in any order.

    Returns:
        ``"0-2,5"`` for 0, 1, 2 and 5; an empty text for none.
    """
    parts: list[list[int]] = []
    for number in sorted(set(numbers)):
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ",".join(f"{a}" if a == b else f"{a}-{b}" for a, b in parts)


def shortened(text: str, max_chars: int) -> str:
    """Keep head and tail of a long text.

    Args:
        text: The text.
        max_chars: How long it may be.

    Returns:
        The text itself, or as many of its characters with a word on the others in the middle.
    """
    if len(text) <= max_chars:
        return text
    half = max_chars // 2
    return left_out(text[:half], len(text) - 2 * half, text[-half:])


def left_out(head: str, num_chars: int, tail: str) -> str:
    """Write a text whose middle is missing.

    Args:
        head: What was before it.
        num_chars: How many characters are missing.
        tail: What was behind it.

    Returns:
        Head and tail, with a word on what is missing between them.
    """
    return f"{head} … {num_chars:,} characters not shown … {tail}" if num_chars else head + tail
