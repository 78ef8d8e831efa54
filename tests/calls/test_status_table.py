"""What the ranks of a pool are at, as a table."""

from __future__ import annotations

import re
from typing import Any

from nbaccel.calls.status_table import StatusTable
from nbaccel.output.panel.facts import RankStatus
from tests.html_reader import Html

GIB = 2**30


def row(rank: int, doing: str = "", **more: Any) -> RankStatus:
    settled = {"state": "running", "seconds": 2.0, "rss_bytes": GIB} | more
    return RankStatus(rank=rank, doing=doing, **settled)


def test_the_table_is_read_as_text() -> None:
    rows = [
        row(0, "waiting in all_reduce"),
        row(10, state="idle", seconds=75, rss_bytes=GIB // 2),
    ]
    assert str(StatusTable(rows)).splitlines() == [
        "rank  state    for    memory     doing",
        "0     running  2.0 s  1.0 GiB    waiting in all_reduce",
        "10    idle     1 min  512.0 MiB",
    ]
    assert repr(StatusTable(rows)) == str(StatusTable(rows))


def test_what_waits_is_told_in_minutes_and_of_what_is_gone_nothing() -> None:
    """A board of workers that do nothing must not change every second."""
    seconds = (0.3, 59.9, 60, 3599, 3600, 9000)
    table = StatusTable([row(0, state="idle", seconds=spent) for spent in seconds])
    told = [re.split("  +", line)[2] for line in str(table).splitlines()[1:]]
    assert told == ["under 1 min", "under 1 min", "1 min", "59 min", "1 h", "2 h"]
    gone = StatusTable([row(1, state="gone", seconds=75, rss_bytes=0)])
    assert str(gone).splitlines()[1].split() == ["1", "gone", "-", "-"]


def test_a_device_has_a_column_where_there_is_one() -> None:
    text = str(StatusTable([row(0, device_bytes=GIB), row(1)]))
    assert [line.split("  ")[4].strip() or line for line in text.splitlines()]
    assert "on device" in text.splitlines()[0]
    assert text.splitlines()[2].split()[-1] == "-"


def test_a_table_without_rows_is_its_headline() -> None:
    assert str(StatusTable([], headline="new")) == "new"


def test_the_html_names_no_colour_runs_nothing_and_quotes_text() -> None:
    nasty = "in <lambda> & <script>"
    html = StatusTable([row(0, nasty)])._repr_html_()
    assert "in &lt;lambda&gt; &amp; &lt;script&gt;" in html
    page = Html(html)
    assert not [name for name, _ in page.attributes if name.startswith("on")]
    assert set(page.kinds) <= {"div", "table", "thead", "tbody", "tr", "th", "td"}
    assert not re.search(r"color\s*:|#[0-9a-f]{3}|rgb|background:(?!none)", html)
