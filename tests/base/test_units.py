from __future__ import annotations

import pytest

from nbaccel.base.units import count_noun, format_bytes, format_seconds, number_ranges, parse_bytes
from nbaccel.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("16 GiB", 16 * 2**30),
        ("16gib", 16 * 2**30),
        ("16G", 16 * 2**30),
        ("16 GB", 16 * 10**9),
        ("1.5 TiB", 3 * 2**39),
        (".5 MiB", 2**19),
        ("512", 512),
        ("512 B", 512),
        ("512 bytes", 512),
        ("0", 0),
        (4096, 4096),
    ],
)
def test_parse_bytes(text, num_bytes):
    assert parse_bytes(text) == num_bytes


@pytest.mark.parametrize("text", ["", "GiB", "-1 GiB", "16 GiX", "1e3", "16 GiB free", -1, True])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(ConfigError, match="16 GiB") as caught:
        parse_bytes(text)
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (16 * 2**30, "16.0 GiB"),
        (2**30 - 1, "1.0 GiB"),
        (-3 * 2**19, "-1.5 MiB"),
        (3 * 2**60, "3072.0 PiB"),
    ],
)
def test_format_bytes(num_bytes, text):
    assert format_bytes(num_bytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.012, "12 ms"),
        (0.9999, "1.0 s"),
        (1.5, "1.5 s"),
        (59.99, "1 min 0 s"),
        (125, "2 min 5 s"),
        (12000, "3 h 20 min"),
        (-2, "-2.0 s"),
    ],
)
def test_format_seconds(seconds, text):
    assert format_seconds(seconds) == text


def test_counted():
    found = [count_noun(number, "worker") for number in (0, 1, 2)]
    assert found == ["0 workers", "1 worker", "2 workers"]


@pytest.mark.parametrize(
    ("numbers", "text"),
    [([], ""), ([3], "3"), ([5, 0, 2, 1], "0-2,5"), (range(64), "0-63"), ([0, 2, 4, 4], "0,2,4")],
)
def test_spans(numbers, text):
    assert number_ranges(numbers) == text
