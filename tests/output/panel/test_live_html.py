"""From facts to HTML and text: what a worker printed stays text, and a cluster stays readable."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import pytest
from hypothesis import given, strategies as st

from nbaccel.base.spent_time import SpentTime
from nbaccel.base.training_metrics import Metrics, ProgressBar
from nbaccel.output.panel import curves, live_html
from nbaccel.output.panel.curves import ACCENT_COLOUR
from nbaccel.output.panel.facts import RankStatus, RunBoard
from nbaccel.output.panel.live_html import ADVICE_COLOUR, advice_of, live_text
from nbaccel.output.report import RunReport, facts_of
from tests.html_reader import Html
from tests.output.panel.finished import PLAN, final_html, final_line, report

GIB = 2**30
NASTY = '</td><script>alert(1)</script> & \x1b[31mred\x1b[0m \x07"quoted"'


class Page(Html):
    """Reads HTML as a browser would, and holds it to what a front end lets through."""

    def __init__(self, text: str) -> None:
        self.rows: list[list[str]] = []
        # Charts have tests of their own.
        text = re.sub(r"<svg.*?</svg>|<img [^>]*>", "", text, flags=re.DOTALL)
        super().__init__(text)
        self.text = "".join(self.words)
        self.scopes = [value for name, value in self.attributes if name == "scope"]
        assert set(self.kinds) <= {
            *("div", "span", "b", "br", "pre", "table", "thead", "tbody", "tr", "th", "td"),
            *("details", "summary", "ul", "li"),
        }
        # A bar has a colour that is seen on light and on dark, and a grey that lets both through.
        for known in (
            *(f"background:{ACCENT_COLOUR}", "background:rgba(128,128,128,0.3)"),
            f"solid {ADVICE_COLOUR}",
        ):
            text = text.replace(known, "")
        # In tags only: a worker may print the name of a colour.
        tags = " ".join(re.findall(r"<[^>]*>", text))
        assert not re.search(r"color\s*:|#[0-9a-f]{3}|rgb|background:(?!none)|url\(", tags)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        super().handle_starttag(tag, attrs)
        assert {name for name, _ in attrs} <= {
            *("class", "open", "style", "scope", "colspan", "role", "aria-level")
        }
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_data(self, data: str) -> None:
        super().handle_data(data)
        if {"td", "th"} & set(self.open):
            self.rows[-1][-1] += data

    def column(self, name: str) -> list[str]:
        return [row[self.rows[0].index(name)] for row in self.rows[1:] if len(row) > 1]


def board_of(num_ranks: int, **more: object) -> RunBoard:
    board = RunBoard(range(num_ranks), began_at=0.0)
    board.now = 12.0
    settled = {"state": "running", "seconds": 12.0, "rss_bytes": GIB} | more
    board.see([RankStatus(rank=rank, **settled) for rank in range(num_ranks)])
    return board


def told(board: RunBoard, rank: int, steps: int, *losses: float, name: str = "loss") -> None:
    for i, loss in enumerate(losses):
        board.receive(rank, report(1.0 + i, steps + i, {name: loss, "lr": 0.5}))


def both(board: RunBoard) -> list[str]:
    return [live_html.live_html(board, is_stoppable=True), final_html(board)]


@pytest.mark.parametrize("which", [0, 1])
def test_whatever_a_worker_says_is_text(which):
    board = board_of(1, doing=NASTY, rewritten_lines=(NASTY,))
    told(board, 0, 1, 3.0, name=NASTY)
    told(board, 0, 2, 2.0, name=NASTY)
    board.library_messages.note(0, NASTY)
    text = both(board)[which]
    page = Page(text)
    assert "<script" not in text
    harmless = '</td><script>alert(1)</script> & red "quoted"'
    assert page.column("progress")[0].startswith(harmless)
    assert which or page.column("state")[0].startswith(harmless)
    assert page.text.count(harmless) >= 3
    assert "\x1b" not in text
    assert "\x07" not in text


@given(st.text(max_size=400))
def test_no_line_breaks_the_table(line):
    page = Page(both(board_of(2, doing=f"x{line}"))[0])
    assert len(page.rows) == 3


def test_columns_that_nobody_fills_are_left_out_and_of_many_ranks_the_worst_have_rows():
    bare = Page(both(board_of(2))[0])
    assert bare.rows[0] == ["rank", "state", "memory"]
    assert bare.scopes.count("col") == len(bare.rows[0]), "for screen readers"
    assert bare.scopes.count("row") == 2
    board = board_of(2, device_bytes=GIB, doing="waiting in all_reduce (Cell In[3], line 8)")
    told(board, 0, 1, 4.0, 2.0)
    full = Page(both(board)[0])
    assert full.rows[0] == [
        *("rank", "state", "step", "steps/s", "loss", "metrics", "memory", "on device")
    ]
    assert full.column("state")[0] == "waiting in all_reduceCell In[3], line 8"
    assert full.column("step") == ["2", "-"], "rank 1 has told nothing"
    assert full.column("loss")[0] == "2"
    assert full.column("metrics")[0] == "lr 0.5"
    (found, _) = Page(both(board_of(2, doing="y" * 500))[0]).column("state")
    assert found == "y" * (live_html.LINE_CHARS - 1) + "…"

    board = board_of(64)
    for rank in range(64):
        told(board, rank, 500 + rank % 3, 1.0)
    told(board, 40, 100, 1.0)  # a straggler
    board.see([RankStatus(rank=63, state="failed", seconds=0.0, rss_bytes=GIB)])
    page = Page(both(board)[0])
    assert [row[0] for row in page.rows[1:3]] == ["63", "40"]
    assert len(page.rows) == 1 + live_html.MOST_ROWS + 1
    assert page.rows[-1] == ["and 56 more ranks: running · steps 500 to 502 · 1.0 GiB"]


def test_states_memory_and_what_is_left_are_told_where_they_say_something():
    board = board_of(2)
    board.see([RankStatus(rank=1, state="done", seconds=0.0, rss_bytes=GIB)])
    board.now = 72.0
    assert Page(both(board)[0]).column("state") == ["running", "done, 1 min 0 s"]

    board = board_of(1, device_bytes=3 * GIB)
    board.host_total_bytes, board.ranks[0].memory.device_total = 24 * GIB, 15 * GIB
    page = Page(both(board)[0])
    assert page.column("memory of 24.0 GiB") == ["1.0 GiB"]
    assert page.column("on device") == ["3.0 GiBof 15.0 GiB"]
    assert "1.0 GiB of 24.0 GiB, on the device 3.0 GiB of 15.0 GiB" in live_html.live_text(board)

    board = board_of(2)
    for rank in (0, 1):
        for batches in (0, 5, 10):
            board.receive(rank, loop_message(batches))
    assert live_html.live_line(board) == (
        "2 ranks · 12.0 s · epoch 3, 30.0 s left in this epoch · step 10 (1/s) · 8 samples/s"
    )
    board.ending = "failed"
    assert final_line(board).startswith("2 ranks · failed after 12.0 s · step 10 (1/s)")

    board = board_of(2)
    assert "libraries" not in both(board)[0]
    for rank in (0, 1):
        board.library_messages.note(rank, "[c10d] harmless")
    for html in both(board):
        page = Page(html)
        assert "2 messages of libraries" in page.text
        assert "[0-1] [c10d] harmless" in page.text
        assert {"details", "summary"} <= {*page.kinds}


def test_what_stays_opens_with_the_summary_and_a_curve():
    board = board_of(2, state="done")
    told(board, 0, 1000, 4.0, 2.0, 1.0)
    page = Page(final_html(board))
    assert page.text.startswith(
        "✓ 2 ranks · 12.0 s · step 1,002 (1/s) · loss 1 · up to 1.0 GiB each"
    )
    assert page.column("loss")[0] == "4 → 1"
    assert page.column("state") == ["done", "done"]
    assert {"details", "summary"} <= {*page.kinds}
    html = final_html(board)
    assert html.rindex("</details>") < html.rindex("<img"), "the chart is in sight"
    assert "<svg" not in html, "of an element in an untrusted notebook only the texts are left"


def test_a_metric_of_another_name_gives_the_column_its_name():
    board = board_of(2)
    for rank in (0, 1):
        told(board, rank, 1, 3.0, 2.0, name="accuracy")
    live, saved = map(Page, both(board))
    assert live.column("accuracy") == ["2", "2"]
    assert saved.column("accuracy") == ["3 → 2", "3 → 2"]
    told(board, 1, 3, 2.0, name="train_loss")
    assert Page(both(board)[0]).column("loss") == ["accuracy 2", "train_loss 2"]
    # The mean is of ranks that mean the same.
    board = board_of(3)
    for rank, loss, name in ((0, 1.0, "loss"), (1, 3.0, "loss"), (2, 100.0, "eval_loss")):
        told(board, rank, 1, loss, name=name)
    assert "loss 2 " in final_line(board)
    board = board_of(2)
    told(board, 0, 1, 1.0, math.nan)
    told(board, 1, 1, 1.0, math.inf)
    page = Page(both(board)[0])
    assert [cell.split()[-1] for cell in page.column("loss")] == ["nan", "inf"]
    assert "loss nan" in page.text


def test_metrics_beyond_those_that_are_reported_are_named():
    board = board_of(2)
    told(board, 0, 1, 3.0)
    assert not any("not drawn" in page for page in both(board))
    message = report(2.0, 2, {"loss": 1.0}, num_left_out=1, left_out=("<b>",))
    board.receive(0, message)
    said = "1 more metric is not drawn (the first 2 are): <b>"
    assert live_html.left_out_sentence(board) == said
    assert all(said in Page(page).text for page in both(board))
    board.receive(1, replace(message, num_left_out=1_200, left_out=("a", NASTY)))
    said = "1,200 more metrics are not drawn (the first 1 are): a, </td><script>alert(1)</…, …"
    assert live_html.left_out_sentence(board) == said
    assert all(said in Page(page).text for page in both(board))


def test_progress_is_a_bar_with_words_above_bars_and_lines_drawn_in_place():
    board = board_of(2)
    for rank, batches in ((0, 30), (1, 20)):
        board.receive(rank, loop_message(batches))
    html = live_html.live_html(board, is_stoppable=False)
    page = Page(html)
    assert page.column("progress") == ["75 %epoch 3, 30 of 40", "50 %epoch 3, 20 of 40"]
    assert "width:75.0%" in html
    assert "step" not in page.rows[0], "the words say how far it is"
    assert "[0-1] running · epoch 3, 50 % (20 of 40) · 1.0 GiB" in live_html.live_text(board)

    bars = (
        ProgressBar(description="files", fraction=0.1, done="1", total="10"),
        ProgressBar(description="a widget", fraction=0.1, done="1", total="10", is_elsewhere=True),
    )
    board = board_of(1, rewritten_lines=("half of 3",))
    board.receive(0, report(1.0, bars=bars))
    told = "10 %files, 1 of 10half of 3"
    assert Page(both(board)[0]).column("progress") == [told]
    board.receive(0, loop_message(20, bars=bars))
    assert Page(both(board)[0]).column("progress") == [f"50 %epoch 3, 20 of 40{told}"]
    board = board_of(1)
    board.receive(0, loop_message(7, total_batches=None, loop_name="stream"))
    assert Page(both(board)[0]).column("progress") == ["stream, 7"], "a loop without a length"


def loop_message(batches: int, **more: object) -> Metrics:
    settled = {"steps": batches, "epoch": 3, "total_batches": 40, "samples": batches * 4} | more
    return report(float(batches), batches=batches, **settled)


def test_any_metric_has_a_chart_and_epochs_are_marked():
    board = board_of(2)
    for rank in (0, 1):
        for step in range(1, 41):
            message = loop_message(
                step % 20, steps=step, epoch=1 + step // 20, values={"loss": 1 / step, "lr": 0.1}
            )
            board.receive(rank, message)
    html = live_html.live_html(board, is_stoppable=False)
    assert html.count("<svg") == 3
    assert "linear axis" in Page(html).text
    assert "1 other metric" in Page(html).text
    chart = curves.metric_chart(board.curves("loss"), "loss", board.marks)
    for text in ("epoch 2", "rank 0", "rank 1", "mean of ranks", "step"):
        assert text in chart
    assert curves.metric_chart(board.curves("unknown"), "unknown") == ""


@pytest.mark.parametrize(
    ("steps", "seconds", "words"),
    [(1000, 2.0, "500/s"), (10, 4.0, "2.5/s"), (1, 8.0, "0.125/s"), (90_000, 1.0, "90,000/s")],
)
def test_speeds_are_read_at_a_glance(steps, seconds, words):
    board = board_of(1)
    for time, count in ((0.0, 0), (seconds, steps)):
        board.receive(0, report(time, count))
    assert f"step {steps:,} ({words})" in final_line(board)


@pytest.mark.parametrize(
    ("values", "blocks"),
    [
        ([11, 12, 13, 14, 15, 16, 17, 18], "▁▂▃▄▅▆▇█"),
        ([], ""),
        ([3.0, 3.0], "▄▄"),
        ([1.0, math.nan, 2.0, math.inf], "▁!█!"),  # what is no number is marked
        ([math.nan], "!"),
        # A long one is of groups, and spans all.
        ([10.0] * 500 + [20.0] * 500, "▁" * (curves.SPARK_CHARS // 2) + "█" * 10),
    ],
)
def test_a_curve_has_a_block_for_each_value(values, blocks):
    assert curves.sparkline(values) == blocks


def test_where_the_time_goes_is_a_bar_with_words_and_who_holds_up_is_named():
    board = board_of(2)
    for second in range(1, 21):
        for rank in (0, 1):
            # Rank 1 computes; rank 0 waits for it in collectives for half of the time.
            spent = SpentTime(
                total_s=float(second),
                data_s=0.0,
                communication_s=second * (0.5 if not rank else 0.0),
            )
            message = report(float(second), second, spent=spent)
            board.receive(rank, message)
    live, final = both(board)
    assert "computing 75 %" in live
    assert "waiting for others 25 %" in live
    assert "Rank 1 holds the others up" in final, "what stays has the times rank by rank"
    assert "waited for rank 1" in final_line(board)
    assert "waited for rank" not in live_html.live_line(board)


def trained_board(
    *losses: float, data_s: float = 0.0, had_group: bool = True, ranks: int = 2
) -> RunBoard:
    board = RunBoard(range(ranks), began_at=0.0, plan=PLAN)
    for step, loss in enumerate(losses, 1):
        for rank in range(ranks):
            spent = SpentTime(total_s=float(step), data_s=data_s * step, communication_s=0.0)
            message = report(float(step), step, {"loss": loss}, spent=spent, had_group=had_group)
            board.receive(rank, message)
    board.now = float(len(losses))
    return board


FALLING = [1 / step for step in range(1, 9)]


@pytest.mark.parametrize("odd", [math.nan, math.inf])
def test_a_loss_that_is_no_number_is_told_with_its_step(odd):
    (sentence,) = advice_of(trained_board(4.0, odd, 3.0, odd, odd, odd))
    assert sentence.startswith(f"loss is {odd} since step 4: ")
    assert advice_of(trained_board(4.0, odd, 3.0)) == [], "it has come back"


def test_waiting_for_data_and_ranks_that_exchange_nothing_are_told_with_a_remedy():
    assert advice_of(trained_board(*FALLING)) == []
    assert advice_of(trained_board(*FALLING, had_group=False, ranks=1)) == []
    assert advice_of(RunBoard([0], began_at=0.0)) == []
    (sentence,) = advice_of(trained_board(*FALLING, data_s=0.4))
    assert sentence.startswith("40 % of the time goes into waiting for data.")
    assert "num_workers=2" in sentence
    assert advice_of(trained_board(1.0, 0.5, data_s=0.4))[:1] != []
    assert advice_of(trained_board(1.0, data_s=0.4)) == [], "too short to say"
    (sentence,) = advice_of(trained_board(*FALLING, had_group=False))
    assert sentence.startswith("Ranks 0-1 have exchanged nothing")


def test_it_stands_in_every_form():
    board = trained_board(*FALLING, data_s=0.4)
    words = "waiting for data. Let the DataLoader"
    facts = facts_of(board, PLAN)
    assert words in live_text(board)
    assert words in live_html.live_html(board, is_stoppable=True)
    assert final_html(board).count(words) == 1, "in sight, and not a second time below it"
    assert words in RunReport(facts)._repr_html_()
    assert words in str(RunReport(facts))
    assert RunReport.from_dict(RunReport(facts).to_dict()).facts.advice == facts.advice
