"""Mistakes in a file are told with the file, the line and the reason, whoever reads it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from nbaccel.config import RunConfig
from nbaccel.config.given_values import shown
from nbaccel.config.text_forms import json_like, plain_object, read_file, read_object
from nbaccel.errors import ConfigError
from nbaccel.train.checkpoint.folder_writing import read_manifest

BROKEN = {
    "comment": ('{\n  // half\n  "a": 1}', "line 2 column 3"),
    "trailing comma": ('{"a": 1,\n}', r"line \d"),
    "yaml": ("zero_optimization:\n  stage: 2\n", "line 1 column 1"),
    "byte order mark": ('\ufeff{"a": 1}', "Unexpected UTF-8 BOM"),
    "cut off": ('{"a": {"b":', "line 1 column 12"),
    "empty": ("", "line 1 column 1"),
    "NaN": ('{"a": 1,\n "b": NaN}', "NaN is no number.*line 2"),
    "null": ("null", "JSON of null: got 'null'"),
    "a list": ("[1]", r"JSON of list: got '\[1\]'"),
    "twice": ('{"a": 1, "a": 2}', "names a more than once"),
    "deep": ('{"a":' * 100_000 + "1" + "}" * 100_000, "nested too deeply"),
    "5000 digits": ('{"a": ' + "9" * 5000 + "}", "5000 digits"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_file_is_told_with_line_and_reason(name, tmp_path):
    text, reason = BROKEN[name]
    path = tmp_path / "ds.json"
    path.write_text(text, encoding="utf-8")

    for read in (read_file, lambda path: RunConfig(deepspeed=path)):
        with pytest.raises(ConfigError, match=f"(?s){reason}") as caught:
            read(path)
        assert "ds.json" in str(caught.value)
        assert len(caught.value.mistakes) == 1


def test_what_is_no_readable_file_is_told(tmp_path):
    (tmp_path / "latin.json").write_bytes(b'{"a": "\xe4"}')
    for given, reason in (
        (tmp_path / "none.json", "No such file"),
        (tmp_path, "Is a directory"),
        (tmp_path / "latin.json", "utf-8"),
        ("a\0b", "null"),
        ("x" * 5000, "too long"),
    ):
        with pytest.raises(ConfigError, match=f"cannot be read: .*{reason}"):
            RunConfig(deepspeed=given)


def nested(depth: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for _ in range(depth):
        found = {"a": found}
    return found


def test_what_json_cannot_hold_is_told_and_plain_values_become_pythons():
    for given, reason in (
        ({1: 2}, "names settings by text, and 1 is none"),
        ({"fp16": {None: 1}}, "None at fp16 is none"),
        ({("a",): 1}, r"\('a',\) is none"),
        ({"a": {"b": object()}}, "JSON cannot hold <object.* at a.b"),
        ({"a": 10**5000}, "a whole number of 16610 bits at a is too large"),
        (nested(3000), "nested more than 64 levels"),
        ({"a": float("nan")}, "cannot hold nan at a"),
    ):
        for read in (
            lambda given: plain_object(given, "A thing"),
            lambda given: RunConfig(deepspeed=given),
        ):
            with pytest.raises(ConfigError, match=reason) as caught:
                read(given)
            assert len(str(caught.value)) < 1000
    assert json_like({"a": (np.int64(1), np.float32(0.5))}) == {"a": [1, 0.5]}
    assert read_object('{"a": Infinity}', "A thing") == {"a": float("inf")}


def test_what_is_deep_or_long_is_told_in_a_few_words(tmp_path):
    deep = "[" * 20_000 + "]" * 20_000
    with pytest.raises(ConfigError, match="cannot be read from") as caught:
        RunConfig.from_yaml(f'{{"fsdp": {deep}}}')
    assert len(str(caught.value)) < 1000
    (tmp_path / "nbaccel_manifest.json").write_text(deep)
    with pytest.raises(ConfigError, match="truncated or damaged"):
        read_manifest(tmp_path)
    value: object = "lol" * 100
    for _ in range(8):
        value = {str(n): value for n in range(10)}
    assert len(shown(value)) < 500
    assert str(ConfigError("x" * 100_000 + " Give less.")).endswith("Give less.")
    assert len(str(ConfigError("x" * 100_000 + " Give less."))) < 5_000
    many = str(ConfigError(*(f"mistake {n}" for n in range(500))))
    assert "500 settings are wrong" in many
    assert many.endswith("and 480 more")
