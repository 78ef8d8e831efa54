"""What workers print, as the notebook shows it: through real pipes, folded or not."""

from __future__ import annotations

import ctypes
import errno
import linecache
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tqdm import tqdm

from nbaccel import Pool, RunConfig, notebook_launcher
from nbaccel.errors import ConfigError
from nbaccel.output.console import Console, RankLogs, hidden_streams
from tests import worker_functions as workers

Show = Callable[..., tuple[str, str]]


@pytest.fixture(params=["template", "fork"])
def show(request: pytest.FixtureRequest, capfd: pytest.CaptureFixture[str]) -> Show:
    """Launch a function in two workers; what came to stdout and stderr."""

    def launch(function: Callable[[], Any], **settings: Any) -> tuple[str, str]:
        capfd.readouterr()
        notebook_launcher(function, (), 2, start_method=request.param, **settings)
        found = capfd.readouterr()
        return found.out, found.err

    return launch


def of_rank(rank: int, out: str) -> list[str]:
    """This rank's lines, in order."""
    prefixes = (f"[{rank}] ", "[0-1] ")
    return [line.partition("] ")[2] for line in out.splitlines() if line.startswith(prefixes)]


def test_thousands_of_lines_arrive_whole_and_in_order(show):
    def talk() -> None:
        for i in range(2000):
            print(f"rank {workers.rank()} line {i} " + "x" * 60)

    out, err = show(talk)
    for rank in (0, 1):
        expected = [f"rank {rank} line {i} " + "x" * 60 for i in range(2000)]
        assert of_rank(rank, out) == expected
    assert len(out.splitlines()) == 4000
    assert err == ""


def test_output_of_c_code_and_of_programs_is_heard_in_order(show):
    def talk() -> None:
        print("python")
        os.write(1, b"written\n")
        libc = ctypes.CDLL(None)
        libc.printf(b"from C\n")
        libc.fflush(None)
        subprocess.run(["sh", "-c", "echo program; echo complaint >&2"], check=True)
        print("a name:", os.fsdecode(b"bad\xff"))  # no Unicode: as in a kernel
        sys.stderr.write("\udcff of errors\n")
        logging.getLogger("mine").addHandler(logging.StreamHandler())
        logging.getLogger("mine").warning("logged %s", 1)
        sys.stdout.write("no end of line")

    out, err = show(talk)
    for rank in (0, 1):
        name = "a name: bad\\udcff"
        expected = ["python", "written", "from C", "program", name, "no end of line"]
        assert of_rank(rank, out) == expected
        assert of_rank(rank, err) == ["complaint", "\\udcff of errors", "logged 1"]


def test_a_warning_about_results_names_the_line_that_launched():
    def generate() -> Any:
        return (number for number in range(3))

    def source_of_the_warning(launch: Callable[[], Any]) -> str:
        with pytest.warns(UserWarning, match="cannot be sent to the notebook") as found:
            launch()
        return linecache.getline(found[0].filename, found[0].lineno)

    assert "(generate, (), 2)" in source_of_the_warning(lambda: notebook_launcher(generate, (), 2))
    with Pool(2, namespace={}) as pool:
        told = source_of_the_warning(lambda: notebook_launcher(generate, (), pool=pool))
        assert "(generate, (), pool=pool)" in told
        assert "pool.call(generate)" in source_of_the_warning(lambda: pool.call(generate))


def test_displays_keep_their_places_between_lines(capfd):
    def draw() -> None:
        from IPython.display import display

        for i in range(20 if workers.rank() == 0 else 0):
            print(f"before {i}")
            display({"text/plain": f"picture {i}"}, raw=True)
            print(f"after {i}")

    with Pool(2, namespace={}) as pool:
        pool.call(draw)
    lines = [line.removeprefix("[0] ") for line in capfd.readouterr().out.splitlines()]
    expected = [f"{what} {i}" for i in range(20) for what in ("before", "picture", "after")]
    assert [line for line in lines if line != "[0]"] == expected


def test_a_bar_that_the_notebook_had_is_no_reason_for_a_warning(show):
    with tqdm(range(3), desc="outer") as outer:
        assert any(thread.name == "tqdm_monitor" for thread in threading.enumerate())

        def talk() -> list[int]:
            return list(tqdm(range(4), disable=workers.rank() > 0))

        _, err = show(talk)
        outer.update()
    assert "4/4" in err
    assert "of yours are running" not in err


def run_folder(log_dir: Path) -> Path:
    [folder] = log_dir.iterdir()
    return folder


def speak(lines: int) -> None:
    import sys

    rank = os.environ["RANK"]
    for number in range(lines):
        print(f"line {number}")
    print(f"rank {rank} is done", file=sys.stderr)
    os.write(1, b"no newline at the end")


def test_eight_ranks_have_whole_files_of_their_own(tmp_path, capfd):
    config = RunConfig(num_processes=8, device="cpu", log_dir=str(tmp_path / "logs"))
    notebook_launcher(speak, (200,), config=config)
    folder = run_folder(tmp_path / "logs")
    whole = "".join(f"line {number}\n" for number in range(200)) + "no newline at the end"
    for rank in range(8):
        assert (folder / f"rank_{rank}.stdout.log").read_text() == whole
        assert (folder / f"rank_{rank}.stderr.log").read_text() == f"rank {rank} is done\n"
    shown = capfd.readouterr()
    assert shown.out.count("line 7\n") < 8, "what all print is shown folded"
    assert f"is written to {folder}" in shown.err


def test_hidden_output_is_in_files_those_of_one_process_and_of_live_workers_too(tmp_path, capfd):
    def fail() -> None:
        print("the last words")
        raise ValueError

    config = RunConfig(num_processes=2, device="cpu", log_dir=str(tmp_path), shown_output="0")
    with pytest.raises(ValueError, match="the last words"):
        notebook_launcher(fail, config=config)
    assert "the last words" not in capfd.readouterr().out
    assert (run_folder(tmp_path) / "rank_1.stdout.log").read_text() == "the last words\n"

    (tmp_path / "file").touch()
    config = RunConfig(num_processes=2, device="cpu", log_dir=str(tmp_path / "file"))
    with pytest.raises(ConfigError, match=r"log_dir='.*/file' cannot be written.*Give a folder"):
        notebook_launcher(print, config=config)


def test_one_process_has_files_too(tmp_path):
    results = notebook_launcher(speak, (1,), config=RunConfig(device="cpu", log_dir=str(tmp_path)))
    assert results.plan.start_method == "template"
    assert "log_dir needs" in results.plan.explain()
    assert (run_folder(tmp_path) / "rank_0.stdout.log").read_text().startswith("line 0\n")


def test_live_workers_append_to_the_same_files(tmp_path):
    with Pool(config=RunConfig(num_processes=2, device="cpu", log_dir=str(tmp_path))) as pool:
        pool.call(print, "one")
        pool.call(print, "two")
    assert (run_folder(tmp_path) / "rank_1.stdout.log").read_text() == "one\ntwo\n"
    for _ in range(3):
        RankLogs(str(tmp_path), [0]).close()
    assert len(list(tmp_path.iterdir())) == 4, "each run has a folder of its own"


def test_a_full_disk_is_told_once_and_ends_nothing(tmp_path, capfd):
    logs = RankLogs(str(tmp_path), [0])
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, logs._files[0, "stdout"].fileno())
    os.close(full)
    console = Console([0], rank_logs=logs)
    for _ in range(2):
        console.feed(0, "stdout", b"a step\n")
    console.feed(0, "stderr", b"a warning\n")
    console.tick(is_final=True)
    logs.close()
    shown = capfd.readouterr()
    assert shown.out == "[0] a step\n" * 2
    assert shown.err.count(os.strerror(errno.ENOSPC)) == 1
    assert (logs.folder / "rank_0.stderr.log").read_text() == "a warning\n"


@pytest.mark.parametrize(
    ("shown_output", "hidden"),
    [
        ("3", set()),
        ("1", {(4, "stderr"), (5, "stderr")}),
        ("0:3", {(5, "stdout"), (5, "stderr")}),
        ("3,1:2", {(5, "stdout")}),
    ],
)
def test_hidden_streams_go_by_local_ranks(shown_output, hidden):
    assert hidden_streams(shown_output, [4, 5]) == hidden
