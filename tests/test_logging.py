from __future__ import annotations

import logging
from collections.abc import Iterator
from logging.handlers import BufferingHandler
from typing import Any

import pytest
import torch.distributed as dist

from nbaccel import notebook_launcher
from nbaccel.logging import get_logger

NAME = "tests.of.logging"


def texts(kept: BufferingHandler) -> list[str]:
    return [record.getMessage() for record in kept.buffer]


@pytest.fixture
def kept() -> Iterator[BufferingHandler]:
    handler, logger = BufferingHandler(99), logging.getLogger(NAME)
    level, root = logger.level, logging.root.level
    logger.addHandler(handler)
    yield handler
    logger.removeHandler(handler)
    logger.setLevel(level)
    logging.root.setLevel(root)


def test_one_process_speaks_with_its_number_from_the_callers_line(kept: BufferingHandler) -> None:
    logger = get_logger(NAME, log_level="info")
    logger.info("loss %s", 0.5)
    logger.debug("too quiet")
    logger.warning("careful", main_process_only=False)
    assert texts(kept) == ["[RANK 0] loss 0.5", "[RANK 0] careful"]
    assert {record.filename for record in kept.buffer} == {"test_logging.py"}
    assert {record.funcName for record in kept.buffer} == {
        "test_one_process_speaks_with_its_number_from_the_callers_line"
    }
    assert not dist.is_initialized()


def test_a_warning_can_be_given_once(kept: BufferingHandler) -> None:
    logger = get_logger(NAME)
    for _ in range(3):
        get_logger(NAME).warning_once("this is said %s", "once")
        logger.warning_once("this, too")
    assert texts(kept) == ["[RANK 0] this is said once", "[RANK 0] this, too"]


def test_the_level_may_come_from_the_environment(
    kept: BufferingHandler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACCELERATE_LOG_LEVEL", "error")
    logger = get_logger(NAME)
    logger.warning("not this")
    logger.error("but this")
    assert texts(kept) == ["[RANK 0] but this"]


def test_processes_speak_once_all_or_in_turn() -> None:
    def body() -> Any:
        handler = BufferingHandler(99)
        logging.getLogger(NAME).addHandler(handler)
        logger = get_logger(NAME, log_level="INFO")
        logger.info("main")
        logger.info("all", main_process_only=False)
        joined = dist.is_initialized()
        logger.info("turn", in_order=True)
        times = [record.created for record in handler.buffer]
        return texts(handler), joined, times[-1]

    (first, joined, one), (second, _, two) = notebook_launcher(body, num_processes=2)
    assert first == ["[RANK 0] main", "[RANK 0] all", "[RANK 0] turn"]
    assert second == ["[RANK 1] all", "[RANK 1] turn"]
    assert not joined  # messages alone do not join the processes
    assert one < two


def test_a_callers_own_stack_level_is_taken_as_it_is(kept: BufferingHandler) -> None:
    """An adapter around the logger counts frames as it would for one of logging's own."""

    class Outer(logging.LoggerAdapter):
        def log(self, level: int, msg: Any, *args: Any, **kwargs: Any) -> None:
            self.logger.log(level, msg, *args, stacklevel=3, **kwargs)

    Outer(get_logger(NAME, log_level="INFO"), {}).log(logging.INFO, "from here")
    assert kept.buffer[-1].funcName == "test_a_callers_own_stack_level_is_taken_as_it_is"
    get_logger(NAME).warning_once("and once from here")
    assert kept.buffer[-1].funcName == "test_a_callers_own_stack_level_is_taken_as_it_is"
