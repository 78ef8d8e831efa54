"""`logging` as the notebook configured it is in force in workers, launched and live."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from logging.handlers import RotatingFileHandler

import pytest

from nbaccel import Pool, notebook_launcher


@pytest.fixture(autouse=True)
def as_it_was() -> Iterator[None]:
    root = logging.getLogger()
    before = root.level, list(root.handlers)
    yield
    root.setLevel(before[0])
    for handler in root.handlers:
        if handler not in before[1]:
            handler.close()
    root.handlers[:] = before[1]
    logging.disable(logging.NOTSET)
    for name in ("my.train", "quiet"):
        one = logging.getLogger(name)
        one.handlers.clear()
        one.setLevel(logging.NOTSET)
        one.propagate = True


def work() -> None:
    log = logging.getLogger("my.train")
    log.debug("too much")
    log.info("loss is low")
    logging.getLogger("quiet").warning("hardly")


def stderr_handler(text: str) -> logging.Handler:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(text))
    return handler


@pytest.mark.parametrize(
    ("start_method", "kind"),
    [
        ("template", logging.FileHandler),
        ("template", RotatingFileHandler),
        ("fork", RotatingFileHandler),
    ],
)
def test_levels_handlers_and_formats_hold_and_all_ranks_append_to_a_file(
    start_method, kind, tmp_path, capfd
):
    file = tmp_path / "train.log"
    handler = kind(file, "w")
    handler.setFormatter(logging.Formatter("%(message)s"))
    root = logging.getLogger()
    root.setLevel(logging.INFO)
    root.addHandler(handler)
    root.addHandler(stderr_handler("at last: %(message)s"))
    logging.getLogger("quiet").setLevel(logging.ERROR)
    logging.getLogger("here").info("before")
    notebook_launcher(work, (), 2, start_method=start_method)
    logging.getLogger("here").info("after")
    assert file.read_text().split("\n") == ["before", *["loss is low"] * 2, "after", ""]
    told = capfd.readouterr().err
    assert "] at last: loss is low\n" in told
    assert told.count("loss is low") <= 2
    assert "too much" not in told
    assert "hardly" not in told


def test_what_is_changed_later_holds_in_the_next_cell(capfd):
    with Pool(2, namespace={"work": work}) as pool:
        pool.run("work()")
        assert "loss is low" not in capfd.readouterr().err
        root = logging.getLogger()
        root.setLevel(logging.INFO)
        handler = stderr_handler("%(levelname)s:%(name)s:%(message)s")
        root.addHandler(handler)
        pool.run("work()")
        assert 1 <= capfd.readouterr().err.count("INFO:my.train:loss is low") <= 2
        pool.call(work)
        assert 1 <= capfd.readouterr().err.count("INFO:my.train:loss is low") <= 2
        pool.run("import logging; logging.getLogger('my.train').setLevel('DEBUG')")
        pool.run("work()")  # nothing has changed in the notebook: the workers' own setting holds
        assert "too much" in capfd.readouterr().err
        logging.disable(logging.INFO)
        pool.run("work()")
        assert "loss is low" not in capfd.readouterr().err


def test_a_library_that_configures_its_own_logger_says_everything_once(capfd):
    def in_a_worker() -> None:
        from transformers.utils import logging as theirs

        theirs.get_logger("transformers.trainer").warning(f"only once by {os.environ['RANK']}")

    from transformers.utils import logging as theirs

    theirs.get_logger("transformers.trainer")
    notebook_launcher(in_a_worker, (), 2)
    assert capfd.readouterr().err.count("only once by 0") == 1
