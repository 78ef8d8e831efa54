"""Sizes and durations as people write them; inside nbaccel they are bytes and seconds."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from nbaccel.base.errors import ConfigError

_BINARY_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_SIZE_TEXT = re.compile(
    r"\s*(\d+(?:\.\d*)?|\.\d+)\s*(?:([kmgtp]?)(i?)(b|bytes?)?)\s*", re.IGNORECASE
)
_UNIT_LETTERS = " kmgtp"
# Terminal sequences mean nothing in HTML and would count as characters of the width.
_CONTROL_CHARACTERS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|[\x00-\x1f\x7f-\x9f]")


def parse_bytes(text: str | int) -> int:
    """Read a size such as ``"16 GiB"``.

    ``KiB, MiB, GiB, ...`` are powers of 1024 and ``kB, MB, GB, ...`` powers of 1000. A bare
    letter (``"16G"``) counts in 1024, as it does for Docker and Slurm.
    """
    # A bool is an int, and no size.
    if isinstance(text, int) and not isinstance(text, bool) and text >= 0:
        return text
    size_match = _SIZE_TEXT.fullmatch(text) if isinstance(text, str) else None
    if size_match is None:
        raise ConfigError(
            f"A size must be a number and a unit: got {text!r}. "
            'Without a unit it would count bytes. Write for example "16 GiB" or "500 MB".'
        )
    number_text, unit_letter, mark, suffix = size_match.groups()
    # `MB` is decimal; `MiB` and the bare `M` are not.
    is_decimal = bool(unit_letter) and bool(suffix) and not mark
    unit_base = 1000 if is_decimal else 1024
    exponent = _UNIT_LETTERS.index(unit_letter.lower()) if unit_letter else 0
    return round(float(number_text) * float(unit_base**exponent))


def count_noun(number: int, noun: str) -> str:
    """Write a count for people."""
    plural = f"{noun}es" if noun.endswith("s") else f"{noun}s"
    return f"{number} {noun if number == 1 else plural}"


def first_few(names: Sequence[str], most: int, *, separator: str = ", ") -> str:
    """The first of many names, and how many more there are."""
    text = f" and {len(names) - most} more" if len(names) > most else ""
    return separator.join(names[:most]) + text


def format_bytes(num_bytes: int) -> str:
    """Write a size for people."""
    size = float(abs(num_bytes))
    text = "-" if num_bytes < 0 else ""
    for name in _BINARY_UNITS:
        # 1023.96 would be printed as "1024.0" of the smaller unit.
        if size < 1023.95 or name == _BINARY_UNITS[-1]:
            break
        size /= 1024
    return f"{text}{size:.0f} {name}" if name == "B" else f"{text}{size:.1f} {name}"


def format_number(value: float | None) -> str:
    """Write a number for people, in few characters: `0.0912`, `1,904`, `2e-7`; `-` for none."""
    if value is None:
        return "-"
    if 1000 <= abs(value) < 1e9:
        return f"{value:,.0f}"
    mantissa, has_exponent, exponent = f"{value:.4g}".partition("e")
    return f"{mantissa}e{int(exponent)}" if has_exponent else mantissa


def format_seconds(seconds: float) -> str:
    """Write a duration for people."""
    if seconds < 0:
        return f"-{format_seconds(-seconds)}"
    # The bounds are where rounding would print the next unit: 1000 ms, 60.0 s.
    if seconds < 0.9995:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest_seconds = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest_seconds} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes} min"


def number_ranges(numbers: Iterable[int]) -> str:
    """Write a set of numbers for people."""
    ranges: list[list[int]] = []
    for number in sorted(set(numbers)):
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return ",".join(
        f"{first_number}" if first_number == last_number else f"{first_number}-{last_number}"
        for first_number, last_number in ranges
    )


def shorten_text(text: str, max_chars: int) -> str:
    """Keep head and tail of a long text."""
    if len(text) <= max_chars:
        return text
    half = max_chars // 2
    return mark_left_out(text[:half], len(text) - 2 * half, text[-half:])


def plain_text(text: str, max_chars: int, *, keeps_start: bool = False) -> str:
    """A text without control characters, cut to a width."""
    # Cut first: a line may have megabytes, and control characters take few of them.
    text = _CONTROL_CHARACTERS.sub("", text[: 8 * max_chars].replace("\t", "    "))
    text = text.rstrip() if keeps_start else text.strip()
    return text if len(text) <= max_chars else f"{text[: max_chars - 1]}…"


def mark_left_out(head: str, num_chars: int, tail: str) -> str:
    """Write a text whose middle is missing."""
    return f"{head} … {num_chars:,} characters not shown … {tail}" if num_chars else head + tail
