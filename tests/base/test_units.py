from __future__ import annotations

from collections.abc import Callable

import pytest

from nbaccel.base.units import count_noun, format_bytes, format_seconds, number_ranges, parse_bytes
from nbaccel.errors import ConfigError

CASES: dict[Callable[..., object], list[tuple[object, object]]] = {
    parse_bytes: [
        *((text, 16 * 2**30) for text in ("16 GiB", "16gib", "16G")),
        *(("16 GB", 16 * 10**9), ("1.5 TiB", 3 * 2**39), (".5 MiB", 2**19), ("0", 0), (4096, 4096)),
        *((text, 512) for text in ("512", "512 B", "512 bytes")),
    ],
    format_bytes: [
        *((0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (16 * 2**30, "16.0 GiB")),
        *((2**30 - 1, "1.0 GiB"), (-3 * 2**19, "-1.5 MiB"), (3 * 2**60, "3072.0 PiB")),
    ],
    format_seconds: [
        *((0.012, "12 ms"), (0.9999, "1.0 s"), (1.5, "1.5 s"), (59.99, "1 min 0 s")),
        *((125, "2 min 5 s"), (12000, "3 h 20 min"), (-2, "-2.0 s")),
    ],
    number_ranges: [
        *(([], ""), ([3], "3"), ([5, 0, 2, 1], "0-2,5"), (range(64), "0-63")),
        ([0, 2, 4, 4], "0,2,4"),
    ],
    lambda number: count_noun(number, "worker"): [
        *((0, "0 workers"), (1, "1 worker"), (2, "2 workers"))
    ],
}


@pytest.mark.parametrize("function", CASES)
def test_numbers_and_texts(function):
    for given, expected in CASES[function]:
        assert function(given) == expected, given


@pytest.mark.parametrize("text", ["", "GiB", "-1 GiB", "16 GiX", "1e3", "16 GiB free", -1, True])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(ConfigError, match="16 GiB") as caught:
        parse_bytes(text)
    assert repr(text) in str(caught.value)
