from __future__ import annotations

import dataclasses
import pickle
from dataclasses import FrozenInstanceError, dataclass
from typing import Any

import pytest

from nbaccel.base.record_pickling import quickly_pickled
from nbaccel.calls import pool_messages
from nbaccel.calls.cell_source import CellSource


@quickly_pickled
@dataclass(frozen=True, slots=True)
class One:
    value: Any


@quickly_pickled
@dataclass(frozen=True, slots=True, kw_only=True)
class Several:
    first: int
    second: str = "two"
    inner: One | None = None


@pytest.mark.parametrize(
    "record",
    [
        One(3),
        One((1, 2)),
        One(None),
        Several(first=1, inner=One("x")),
        CellSource.of_text("a = 1", filename="<a cell>", count=7),
        pool_messages.Task(
            number=3, body=pool_messages.RunCell(source=CellSource.of_text("1", filename="f"))
        ),
        pool_messages.Idle(number=3, shown={"data": {}}, sequence=(("0", 2),)),
    ],
)
@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_a_record_comes_back_equal_and_stays_frozen(record: Any, protocol: int) -> None:
    copy = pickle.loads(pickle.dumps(record, protocol=protocol))
    assert copy == record
    assert type(copy) is type(record)
    name = dataclasses.fields(record)[0].name
    with pytest.raises(FrozenInstanceError):
        setattr(copy, name, None)


def test_fields_are_not_looked_up_for_each_record(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("fields() was called")

    monkeypatch.setattr(dataclasses, "fields", refuse)
    assert pickle.loads(pickle.dumps(Several(first=1))) == Several(first=1)


def test_a_state_of_another_length_is_refused() -> None:
    with pytest.raises(ValueError, match="shorter"):
        One(1).__setstate__(())  # type: ignore[attr-defined]
