from __future__ import annotations

import pytest

from nbaccel.base import env
from nbaccel.errors import ConfigError


def test_applied_sets_and_restores_exactly_its_variables(monkeypatch):
    monkeypatch.setenv("NB_KEPT", "old")
    monkeypatch.setenv("NB_GONE", "there")
    monkeypatch.delenv("NB_NEW", raising=False)

    with env.applied({"NB_KEPT": "new", "NB_GONE": None, "NB_NEW": "1"}):
        assert [env.read(name) for name in ("NB_KEPT", "NB_GONE", "NB_NEW")] == ["new", None, "1"]
        monkeypatch.setenv("NB_OTHER", "set inside")

    assert [env.read(name) for name in ("NB_KEPT", "NB_GONE", "NB_NEW")] == ["old", "there", None]
    assert env.read("NB_OTHER") == "set inside"


def test_replace_all_makes_it_exactly_that(monkeypatch):
    monkeypatch.setenv("NB_GONE", "there")
    before = env.snapshot()
    try:
        env.replace_all({"NB_ONLY": "1", "PATH": "/bin"})
        assert env.snapshot() == {"NB_ONLY": "1", "PATH": "/bin"}
    finally:
        env.replace_all(before)
    assert env.snapshot() == before


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        *((text, True) for text in ("1", "true", "YES", " on ")),
        *((text, False) for text in ("0", "False", "no", "off")),
        *((text, None) for text in ("", None)),
    ],
)
def test_flag(monkeypatch, text, expected):
    monkeypatch.delenv("NB_FLAG", raising=False)
    if text is not None:
        monkeypatch.setenv("NB_FLAG", text)
    assert env.flag("NB_FLAG") is expected


def test_a_flag_that_is_neither_is_named(monkeypatch):
    monkeypatch.setenv("NB_FLAG", "perhaps")
    with pytest.raises(ConfigError, match=r"NB_FLAG.*'perhaps'.*Set it to 1 or 0"):
        env.flag("NB_FLAG")
