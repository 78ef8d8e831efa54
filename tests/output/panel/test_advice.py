"""What facts mean: nothing where nothing is wrong, else one sentence with a remedy."""

from __future__ import annotations

import math

import pytest

from nbaccel import RunConfig, resolve
from nbaccel.base.spent_time import SpentTime
from nbaccel.output.panel.advice import advice_of
from nbaccel.output.panel.facts import RunBoard
from nbaccel.output.panel.live_html import live_html
from nbaccel.output.panel.words import live_text
from nbaccel.output.report.run_facts import facts_of
from nbaccel.output.report.run_report import RunReport
from tests.output.panel.finished import final_html
from tests.output.panel.reports import report

PLAN = resolve(RunConfig(num_processes=2, device="cpu"))


def board_of(
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


def test_a_run_that_does_well_gets_no_advice() -> None:
    assert advice_of(board_of(*FALLING)) == []
    assert advice_of(board_of(*FALLING, had_group=False, ranks=1)) == []
    assert advice_of(RunBoard([0], began_at=0.0)) == []


@pytest.mark.parametrize("odd", [math.nan, math.inf])
def test_a_loss_that_is_no_number_is_told_with_its_step(odd: float) -> None:
    (sentence,) = advice_of(board_of(4.0, odd, 3.0, odd, odd, odd))
    assert sentence.startswith(f"loss is {odd} since step 4: ")
    assert advice_of(board_of(4.0, odd, 3.0)) == [], "it has come back"


def test_waiting_for_data_is_told_with_a_remedy() -> None:
    (sentence,) = advice_of(board_of(*FALLING, data_s=0.4))
    assert sentence.startswith("40 % of the time goes into waiting for data.")
    assert "num_workers=2" in sentence
    assert advice_of(board_of(1.0, 0.5, data_s=0.4))[:1] != []
    assert advice_of(board_of(1.0, data_s=0.4)) == [], "too short to say"


def test_ranks_that_exchange_nothing_are_told() -> None:
    (sentence,) = advice_of(board_of(*FALLING, had_group=False))
    assert sentence.startswith("Ranks 0-1 have exchanged nothing")


def test_it_stands_in_every_form() -> None:
    board = board_of(*FALLING, data_s=0.4)
    words = "waiting for data. Let the DataLoader"
    facts = facts_of(board, PLAN)
    assert words in live_text(board)
    assert words in live_html(board, is_stoppable=True)
    assert final_html(board).count(words) == 1, "in sight, and not a second time below it"
    assert words in RunReport(facts)._repr_html_()
    assert words in str(RunReport(facts))
    assert RunReport.from_dict(RunReport(facts).to_dict()).facts.advice == facts.advice
