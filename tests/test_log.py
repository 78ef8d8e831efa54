from __future__ import annotations

import logging
import subprocess
import sys

from nbaccel.log import get_logger


def test_a_message_carries_the_rank_where_there_is_one(caplog, monkeypatch):
    logger = get_logger("nbaccel.workers.worker")
    with caplog.at_level(logging.INFO, logger="nbaccel"):
        monkeypatch.delenv("RANK", raising=False)
        logger.info("ready after %d ms", 5)
        monkeypatch.setenv("RANK", "3")
        logger.info("ready after %d ms", 6)
    assert caplog.messages == ["ready after 5 ms", "[rank 3] ready after 6 ms"]


def test_names_stay_under_the_package():
    assert get_logger("nbaccel.plan").logger.name == "nbaccel.plan"
    assert get_logger("mine").logger.name == "nbaccel.mine"
    assert get_logger().logger.name == "nbaccel"


def test_nothing_is_configured_and_nothing_is_printed():
    code = (
        "import logging, nbaccel.log as log\n"
        "before = list(logging.getLogger('nbaccel').handlers), logging.getLogger().handlers[:]\n"
        "assert before == ([], []), before\n"
        "log.get_logger('nbaccel.x').warning('should not appear')\n"
        "assert logging.getLogger('nbaccel').level == logging.NOTSET\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=800, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
