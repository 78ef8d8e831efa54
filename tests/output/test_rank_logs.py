"""Files with what each rank prints: complete, whatever is shown, and never a reason to end."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from nbaccel import Pool, RunConfig, notebook_launcher
from nbaccel.errors import ConfigError
from nbaccel.output.console import Console
from nbaccel.output.rank_logs import RankLogs, hidden_streams


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


def test_eight_ranks_have_whole_files_of_their_own(tmp_path: Path, capfd) -> None:
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


def test_what_is_hidden_is_in_the_files_and_in_the_report(tmp_path: Path, capfd) -> None:
    def fail() -> None:
        print("the last words")
        raise ValueError

    config = RunConfig(num_processes=2, device="cpu", log_dir=str(tmp_path), shown_output="0")
    with pytest.raises(ValueError, match="the last words"):
        notebook_launcher(fail, config=config)
    assert "the last words" not in capfd.readouterr().out
    assert (run_folder(tmp_path) / "rank_1.stdout.log").read_text() == "the last words\n"


def test_one_process_has_files_too(tmp_path: Path) -> None:
    results = notebook_launcher(speak, (1,), config=RunConfig(device="cpu", log_dir=str(tmp_path)))
    assert results.plan.start_method == "template"
    assert "log_dir needs" in results.plan.explain()
    assert (run_folder(tmp_path) / "rank_0.stdout.log").read_text().startswith("line 0\n")


def test_live_workers_append_to_the_same_files(tmp_path: Path) -> None:
    with Pool(config=RunConfig(num_processes=2, device="cpu", log_dir=str(tmp_path))) as pool:
        pool.call(print, "one")
        pool.call(print, "two")
    assert (run_folder(tmp_path) / "rank_1.stdout.log").read_text() == "one\ntwo\n"


def test_each_run_has_a_folder_of_its_own(tmp_path: Path) -> None:
    for _ in range(3):
        RankLogs(str(tmp_path), [0]).close()
    assert len(list(tmp_path.iterdir())) == 3


def test_a_folder_that_cannot_be_made_is_refused_before_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    config = RunConfig(num_processes=2, device="cpu", log_dir=str(tmp_path / "file"))
    with pytest.raises(ConfigError, match=r"log_dir='.*/file' cannot be written.*Give a folder"):
        notebook_launcher(print, config=config)


def test_a_full_disk_is_told_once_and_ends_nothing(tmp_path: Path, capfd) -> None:
    logs = RankLogs(str(tmp_path), [0])
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, logs._files[0, "stdout"])
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
def test_hidden_streams_go_by_local_ranks(shown_output, hidden: set[tuple[int, str]]) -> None:
    assert hidden_streams(shown_output, [4, 5]) == hidden
