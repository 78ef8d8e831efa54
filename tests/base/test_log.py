from __future__ import annotations

import logging
import sys

import pytest

from nbaccel.base.log import get_logger
from tests.programs import run_program


def test_a_message_carries_the_rank_where_there_is_one(caplog, monkeypatch):
    logger = get_logger("nbaccel.workers.worker")
    with caplog.at_level(logging.INFO, logger="nbaccel"):
        monkeypatch.delenv("RANK", raising=False)
        logger.info("ready after %d ms", 5)
        monkeypatch.setenv("RANK", "3")
        logger.info("ready after %d ms", 6)
    assert caplog.messages == ["ready after 5 ms", "[rank 3] ready after 6 ms"]


WARN = (
    "import logging\n"
    "{set_up}\n"
    "from nbaccel.base.log import get_logger\n"
    "for number in (1, 1, 2):\n"
    "    get_logger('nbaccel.x').warning('seen %d', number)\n"
    "get_logger('nbaccel.x').info('not asked for')\n"
)


@pytest.mark.parametrize(
    ("set_up", "written"),
    [
        ("", ["nbaccel: seen 1", "nbaccel: seen 2"]),
        ("logging.basicConfig(format='%(message)s')", ["seen 1", "seen 1", "seen 2"]),
        ("logging.getLogger('nbaccel').addHandler(logging.NullHandler())", []),
        ("logging.getLogger('nbaccel').setLevel('ERROR')", []),
    ],
    ids=["nothing set up", "a handler for all", "a handler for nbaccel", "a level"],
)
def test_a_warning_is_seen_once_or_by_who_has_set_up_logging(set_up, written):
    done = run_program([sys.executable, "-c", WARN.format(set_up=set_up)])
    assert (done.stdout, done.stderr.splitlines()) == ("", written)
