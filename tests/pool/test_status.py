"""What a running cell tells of its ranks, and what stays of it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from html.parser import HTMLParser
from typing import Any

import pytest

from nbaccel.launch import publish
from nbaccel.pool.status import RankStatus, StatusLine, StatusTable

GIB = 2**30


def row(rank: int, doing: str = "", **more: Any) -> RankStatus:
    settled = {"state": "running", "seconds": 2.0, "rss_bytes": GIB} | more
    return RankStatus(rank=rank, doing=doing, **settled)


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


class Cell:
    """The notebook's end: what was published, and what stands in the cell by its handle."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(publish, "has_cells", lambda: True)
        monkeypatch.setattr(publish, "display", self.take)
        self.outputs: dict[str, Mapping[str, str]] = {}
        self.taken = 0

    def take(self, content: Mapping[str, Any]) -> None:
        self.taken += 1
        handle = content["transient"]["display_id"]
        assert content.get("update", False) == (handle in self.outputs)
        self.outputs[handle] = content["data"]

    @property
    def text(self) -> str:
        (found,) = self.outputs.values()
        return found["text/plain"]

    @property
    def html(self) -> str:
        (found,) = self.outputs.values()
        return found["text/html"]


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def cell(monkeypatch: pytest.MonkeyPatch) -> Cell:
    return Cell(monkeypatch)


def test_a_short_cell_shows_nothing(cell: Cell, clock: Clock) -> None:
    line = StatusLine([0, 1], clock=clock)
    clock.now += 0.9
    assert line.due_in() == pytest.approx(0.1)
    line.update([row(0), row(1)])
    line.finish()
    assert cell.taken == 0


def test_a_longer_one_is_told_in_place_once_a_second(cell: Cell, clock: Clock) -> None:
    line = StatusLine([0, 1], clock=clock)
    for _ in range(30):
        clock.now += 0.1
        line.update([row(0), row(1)])
    assert cell.taken in {2, 3}, "30 times 0.1 may be less than 3"
    assert len(cell.outputs) == 1
    clock.now += 10
    assert line.due_in() == 0
    line.update([row(0), row(1)])
    assert 0 < line.due_in() <= 1, "what was missed is not made up for"


def test_ranks_that_do_the_same_are_one_line(cell: Cell, clock: Clock) -> None:
    line = StatusLine(range(4), clock=clock)
    clock.now += 12
    waiting = "waiting in all_reduce (Cell In[3], line 5)"
    line.update([row(0, waiting), row(2, waiting), row(1, waiting), row(3, rss_bytes=2 * GIB)])
    assert cell.text == (
        "4 ranks · 12.0 s · up to 2.0 GiB each\n"
        "[0-2] waiting in all_reduce (Cell In[3], line 5) · 1.0 GiB\n"
        "[3] running · 2.0 GiB"
    )


def test_many_that_do_different_things_are_cut(cell: Cell, clock: Clock) -> None:
    line = StatusLine(range(64), clock=clock)
    clock.now += 2
    line.update([row(i, f"thing {i}") for i in range(64)])
    assert cell.text.count("\n") == 9
    assert cell.text.endswith("… and 56 more")


def test_afterwards_one_line_stays_with_the_peak(cell: Cell, clock: Clock) -> None:
    line = StatusLine([0], clock=clock)
    clock.now += 2
    line.update([row(0, rss_bytes=3 * GIB, device_bytes=5 * GIB)])
    clock.now += 2
    line.update([row(0, rss_bytes=GIB)])
    clock.now += 8.3
    line.finish()
    assert cell.text == "1 rank · 12.3 s · up to 3.0 GiB (on the device 5.0 GiB)"


@pytest.mark.parametrize(
    ("how", "word"), [({"failed": True}, "failed"), ({"interrupted": True}, "stopped")]
)
def test_a_cell_that_did_not_end_well_says_so(
    cell: Cell, clock: Clock, how: dict[str, bool], word: str
) -> None:
    line = StatusLine([0, 1], clock=clock)
    clock.now += 3
    line.update([row(0), row(1)])
    line.finish(**how)
    assert cell.text == f"2 ranks · {word} after 3.0 s · up to 1.0 GiB each"


def test_after_the_cell_was_cleared_it_is_shown_anew(cell: Cell, clock: Clock) -> None:
    line = StatusLine([0], clock=clock)
    clock.now += 1
    line.update([row(0)])
    line.cleared()
    cell.outputs.clear()
    line.finish()
    assert cell.text.startswith("1 rank")


def test_a_terminal_gets_a_line_now_and_then(
    clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    line = StatusLine([0, 1], clock=clock)
    at = []
    for second in range(700):
        line.update([row(0, "reading")])
        if "reading" in capsys.readouterr().err:
            at.append(second)
        clock.now += 1
    assert at == [1, 5, 15, 60, 120, 240, 480]
    line.finish(failed=True)
    assert capsys.readouterr().err == (
        "nbaccel: 2 ranks · failed after 11 min 40 s · up to 1.0 GiB each\n"
    )


def test_what_ranks_hold_is_told_from_least_to_most(clock: Clock) -> None:
    said: list[str] = []
    line = StatusLine([0, 1], say=said.append, clock=clock)
    clock.now += 1
    line.update([row(0, device_bytes=GIB), row(1, rss_bytes=2 * GIB, device_bytes=3 * GIB)])
    assert "[0-1] running · 1.0 GiB to 2.0 GiB, on the device 1.0 GiB to 3.0 GiB" in said[0]


def test_the_lines_of_a_terminal_go_where_they_are_told(clock: Clock) -> None:
    said: list[str] = []
    line = StatusLine([0], say=said.append, clock=clock)
    clock.now += 1
    line.update([row(0, "reading")])
    assert said == ["nbaccel: 1 rank · 1.0 s · up to 1.0 GiB\nnbaccel: [0] reading · 1.0 GiB"]


# ------------------------------------------------------------------------- the table


def test_the_table_is_read_as_text() -> None:
    rows = [
        row(0, "waiting in all_reduce"),
        row(10, state="idle", seconds=75, rss_bytes=GIB // 2),
    ]
    assert str(StatusTable(rows)).splitlines() == [
        "rank  state    for         memory     doing",
        "0     running  2.0 s       1.0 GiB    waiting in all_reduce",
        "10    idle     1 min 15 s  512.0 MiB",
    ]
    assert repr(StatusTable(rows)) == str(StatusTable(rows))


def test_a_device_has_a_column_where_there_is_one() -> None:
    text = str(StatusTable([row(0, device_bytes=GIB), row(1)]))
    assert [line.split("  ")[4].strip() or line for line in text.splitlines()]
    assert "on device" in text.splitlines()[0]
    assert text.splitlines()[2].split()[-1] == "-"


def test_a_table_without_rows_is_its_headline() -> None:
    assert str(StatusTable([], headline="new")) == "new"


# ------------------------------------------------------------------------- the HTML


class Balanced(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.kinds: set[str] = set()
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.open.append(tag)
        self.kinds.add(tag)
        assert not any(name.startswith("on") for name, _ in attrs)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_html_names_no_colour_runs_nothing_and_quotes_text(cell: Cell, clock: Clock) -> None:
    line = StatusLine([0], clock=clock)
    clock.now += 1
    nasty = "in <lambda> & <script>"
    line.update([row(0, nasty)])
    for html in (cell.html, StatusTable([row(0, nasty)])._repr_html_()):
        assert "in &lt;lambda&gt; &amp; &lt;script&gt;" in html
        assert Balanced(html).kinds <= {"div", "table", "thead", "tbody", "tr", "th", "td"}
        assert not re.search(r"color\s*:|#[0-9a-f]{3}|rgb|background:(?!none)", html)
