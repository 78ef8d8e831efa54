"""Files that stand for far more than they hold are refused before anything walks or shows them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nbaccel.config import RunConfig, load_config_file
from nbaccel.config.given_values import shown
from nbaccel.config.text_forms import read_object, read_yaml
from nbaccel.errors import ConfigError
from nbaccel.train.checkpoint.folder_writing import read_manifest
from nbaccel.train.checkpoint.layout import read_left_out

DEEP = "[" * 20_000 + "]" * 20_000
LAUGHS = "\n".join(
    ["a0: &a0 [lol, lol, lol, lol, lol, lol, lol, lol, lol, lol]"]
    + [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 10)]
)
MAPS = "\n".join(
    ["a0: &a0 {k: lol, l: lol}"]
    + [f"a{n}: &a{n} {{k: *a{n - 1}, l: *a{n - 1}}}" for n in range(1, 40)]
)
MERGED = "a: &a {b: 1}\n" + f"fsdp:\n  <<: [{', '.join(['*a'] * 20_000)}]\n"
BOMBS = {
    "fsdp": f"{LAUGHS}\nfsdp: *a9\n",
    "maps": f"{MAPS}\nfsdp: *a39\n",
    "unknown": f"{LAUGHS}\nfoo: *a9\n",
    "theirs": f"{LAUGHS}\nmachine_rank: 0\ndistributed_type: FSDP\nfsdp_config: *a9\n",
    "merged": MERGED,
    "deep": f"fsdp: {DEEP}\n",
    "itself": "fsdp: &a {b: *a}\n",
    "flat": f"fsdp: [{'1, ' * 20_000}]\n",
    "long": f"fsdp: {'x' * 2_000_000}\n",
    "deep json": f'{{"fsdp": {DEEP}}}',
    "long name": f"? {'x' * 500_000}\n: 1\n",
    "long value": f"mixed_precision: {'x' * 500_000}\n",
    "long file": "distributed_type: DEEPSPEED\ndeepspeed_config:\n"
    f"  deepspeed_config_file: {'x' * 500_000}\n",
    "many names": "".join(f"name{n}: 1\n" for n in range(4000)),
}


@pytest.mark.slow
@pytest.mark.parametrize("bomb", BOMBS)
def test_a_bomb_is_refused_in_a_few_words(tmp_path: Path, bomb: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(BOMBS[bomb])
    with pytest.raises(ConfigError) as refused:
        load_config_file(path)
    assert len(str(refused.value)) < (20_000 if bomb == "many names" else 5_000)
    with pytest.raises(ConfigError):
        RunConfig.from_yaml(BOMBS[bomb])


def test_what_is_wrong_is_said(tmp_path: Path) -> None:
    for bomb, words in {
        "fsdp": "more than 10,000 values where each alias counts",
        "deep": "nested more than 64 levels deep",
        "itself": "contains itself",
        "long": "has 2,000,007 characters",
    }.items():
        with pytest.raises(ValueError, match=words):
            read_yaml(BOMBS[bomb])


def test_aliases_of_ordinary_files_stay() -> None:
    assert read_yaml("a: &a {b: 3e-5}\nc: *a\nd: {<<: *a, e: [*a]}\n") == {
        "a": {"b": 3e-5},
        "c": {"b": 3e-5},
        "d": {"b": 3e-5, "e": [{"b": 3e-5}]},
    }


def test_json_is_bounded_too() -> None:
    for text in (f'{{"a": {DEEP}}}', f'{{"a": "{"x" * 2_000_000}"}}'):
        with pytest.raises(ConfigError) as refused:
            read_object(text, "The DeepSpeed configuration")
        assert len(str(refused.value)) < 2_000
    with pytest.raises(ConfigError, match="cannot be read from JSON"):
        RunConfig.from_json(f'{{"fsdp": {DEEP}}}')


def test_nested_files_of_checkpoints_are_damaged_ones(tmp_path: Path) -> None:
    for name, read in (
        ("nbaccel_manifest.json", read_manifest),
        ("nbaccel_left_out.json", read_left_out),
    ):
        (tmp_path / name).write_text(DEEP)
        with pytest.raises(ConfigError, match="truncated or damaged"):
            read(tmp_path)


def test_values_are_shown_short() -> None:
    value: object = "lol" * 100
    for _ in range(8):
        value = {str(n): value for n in range(10)}
    assert len(shown(value)) < 500
    assert len(str(ConfigError(f"{json.dumps('x' * 100_000)} is long. Give less."))) < 5_000
    assert str(ConfigError("x" * 100_000 + " Give less.")).endswith("Give less.")
    many = str(ConfigError(*(f"mistake {n}" for n in range(500))))
    assert "500 settings are wrong" in many
    assert many.endswith("and 480 more")
