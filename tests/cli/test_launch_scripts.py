"""``nbaccel launch`` runs scripts as Python would, in all workers, and ends as a shell expects."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from nbaccel.cli import main
from tests.cli import scripts
from tests.process import lives

TWO = ("launch", "--cpu", "-n", "2")


@pytest.fixture(autouse=True)
def in_own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_a_script_finds_its_place_and_its_arguments(tmp_path: Path, capfd) -> None:
    scripts.write(tmp_path / "jobs" / "train.py", scripts.PLACES)
    assert main([*TWO, "jobs/train.py", "--lr", "0.5", "--", "-n", "--cpu"]) == 0
    lines = sorted(capfd.readouterr().out.splitlines())
    end = f"of 2, lr 0.5, ['-n', '--cpu'], {tmp_path}/jobs/train.py, {tmp_path}/jobs"
    assert lines == [f"[0] rank 0 {end}", f"[1] rank 1 {end}"]


def test_one_process_is_as_python_alone(tmp_path: Path, capfd) -> None:
    scripts.write(tmp_path / "train.py", scripts.PLACES)
    before = (sys.argv[:], sys.path[:], sys.modules["__main__"])
    assert main(["launch", "--cpu", "train.py", "--lr", "0.5"]) == 0
    assert f"rank 0 of 1, lr 0.5, [], {tmp_path}/train.py, {tmp_path}\n" in capfd.readouterr().out
    assert (sys.argv, sys.path, sys.modules["__main__"]) == before


def test_a_module_is_run_by_its_name_and_a_program_without_python(tmp_path, capfd) -> None:
    scripts.write(tmp_path / "jobs" / "__init__.py", "")
    scripts.write(tmp_path / "jobs" / "train.py", scripts.PLACES)
    assert main([*TWO, "-m", "jobs.train", "--lr", "0.5"]) == 0
    printed = capfd.readouterr().out
    assert f"rank 1 of 2, lr 0.5, [], {tmp_path}/jobs/train.py, {tmp_path}" in printed
    program = ["sh", "-c", "echo $RANK/$WORLD_SIZE; sleep $RANK; exit $RANK"]
    assert main([*TWO, "--no_python", *program]) == 1
    assert sorted(capfd.readouterr().out.splitlines()) == ["[0] 0/2", "[1] 1/2"]


def test_classes_of_the_script_are_saved_and_loaded(tmp_path: Path, capfd) -> None:
    scripts.write(tmp_path / "train.py", scripts.TRAINS)
    sums = []
    for words in (TWO, ("launch", "--cpu")):
        assert main([*words, "train.py", "net.pt"]) == 0
        name, total = capfd.readouterr().out.split()[-2:]
        sums.append(float(total))
        assert name == "__main__"
    # Two ranks see two batches each step, so that the weights are others.
    assert sums[0] != sums[1]


def test_it_ends_as_a_script_of_python_does(tmp_path: Path, capfd) -> None:
    text = """
        import atexit, threading, time
        def late():
            time.sleep(0.3)
            print("thread")
        atexit.register(print, "handler")
        threading.Thread(target=late).start()
        print("main")
    """
    scripts.write(tmp_path / "train.py", text)
    assert main([*TWO, "train.py"]) == 0
    printed = capfd.readouterr().out
    for rank in (0, 1):
        assert scripts.of_rank(rank, printed) == ["main", "thread", "handler"]


def test_loader_workers_get_classes_of_the_script(tmp_path: Path, capfd) -> None:
    text = """
        import multiprocessing
        import torch
        from torch.utils.data import DataLoader, Dataset

        class Item:
            def __init__(self, number): self.number = number

        class Items(Dataset):
            def __len__(self): return 4
            def __getitem__(self, index): return Item(index)

        def together(items): return Item(sum(item.number for item in items))
        def square(pipe, number): pipe.send(number * number)

        if __name__ == "__main__":
            loader = DataLoader(Items(), 2, num_workers=1, collate_fn=together)
            print([item.number for item in loader], {type(item).__name__ for item in loader})
            # Not a pool: its named semaphores are seen by tests that run beside this one.
            context = multiprocessing.get_context("spawn")
            here, there = context.Pipe()
            child = context.Process(target=square, args=(there, 3))
            child.start()
            print(here.recv())
            child.join()
    """
    scripts.write(tmp_path / "train.py", text)
    assert main([*TWO, "train.py"]) == 0
    printed = capfd.readouterr().out
    for rank in (0, 1):
        assert scripts.of_rank(rank, printed) == ["[1, 5] {'Item'}", "9"]


@pytest.mark.parametrize("count", ["1", "2"])
def test_a_status_of_the_script_is_that_of_the_command(count: str, tmp_path: Path, capfd) -> None:
    scripts.write(tmp_path / "train.py", "import sys\nsys.exit(int(sys.argv[1]))")
    assert main(["launch", "--cpu", "-n", count, "train.py", "7"]) == 7
    assert main(["launch", "--cpu", "-n", count, "train.py", "0"]) == 0
    scripts.write(tmp_path / "train.py", "import sys\nsys.exit('no data')")
    assert main(["launch", "--cpu", "-n", count, "train.py"]) == 1
    assert "no data" in capfd.readouterr().err


@pytest.mark.parametrize("count", ["1", "2"])
def test_a_failure_is_reported_with_source_lines(count: str, tmp_path: Path, capfd) -> None:
    text = """
        def train(lr):
            raise ValueError(f"lr {lr} is too high")  # this very line

        train(3)
    """
    scripts.write(tmp_path / "train.py", text)
    assert main(["launch", "--cpu", "-n", count, "train.py"]) == 1
    told = capfd.readouterr().err
    assert f"of {count} raised ValueError: lr 3 is too high" in told
    assert "train.py:3, in train" in told
    assert "# this very line" in told
    assert "Traceback (most recent call last)" not in told
    assert main(["launch", "--cpu", "-n", count, "--debug", "train.py"]) == 1
    assert "Traceback (most recent call last)" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([], "SCRIPT must be given"),
        (["gone.py"], "'gone.py' is not there"),
        (["-m", "no_such_module.train"], "no module 'no_such_module'"),
        (["--no_python", "no-such-program"], "no such program"),
        (["-m", "--no_python", "x"], "contradict each other"),
        (["--config-file", "gone.yaml", "gone.py"], "gone.yaml cannot be read"),
        (["--mixed_precision", "fp17", "gone.py"], "'fp17'"),
    ],
    ids=str,
)
def test_a_mistake_is_told_before_anything_starts(words: list[str], told: str, capfd) -> None:
    assert main(["launch", *words]) == 2
    assert told in " ".join(capfd.readouterr().err.split())


def test_notes_and_warnings_are_left_out_if_quiet(tmp_path: Path, capfd) -> None:
    scripts.write(tmp_path / "train.py", "print('trained')")
    words = ["--role", "x", "--threads-per-process", "4", "train.py"]
    assert main([*TWO, *words]) == 0
    assert "--role has no effect" in capfd.readouterr().err
    assert main([*TWO, "--quiet", *words]) == 0
    shown = capfd.readouterr()
    assert scripts.of_rank(1, shown.out) == ["trained"]
    assert shown.err == ""


def test_settings_reach_the_training_code(tmp_path: Path, capfd) -> None:
    text = """
        from nbaccel import Accelerator, FullyShardedDataParallelPlugin
        plugin = FullyShardedDataParallelPlugin()
        print(plugin.reshard_after_forward, plugin.auto_wrap_policy,
              plugin.transformer_cls_names_to_wrap, plugin.min_num_params)
        accelerator = Accelerator()
        print(accelerator.mixed_precision, accelerator.gradient_accumulation_steps)
    """
    scripts.write(tmp_path / "train.py", text)
    words = [
        *("--use_fsdp", "--fsdp_version=2", "--fsdp_reshard_after_forward=false"),
        *("--fsdp_auto_wrap_policy", "TRANSFORMER_BASED_WRAP", "--fsdp_min_num_params=7"),
        *("--fsdp_transformer_layer_cls_to_wrap", "Block,Head", "--mixed_precision=bf16"),
        *("--gradient_accumulation_steps", "4", "train.py"),
    ]
    assert main([*TWO, *words]) == 0
    expected = ["False transformer_based_wrap ['Block', 'Head'] 7", "bf16 4"]
    assert scripts.of_rank(1, capfd.readouterr().out) == expected


WAITS = """
    import os, pathlib, subprocess, time
    child = subprocess.Popen(["sleep", "600"])
    pathlib.Path(f"pid_{os.environ['RANK']}").write_text(f"{os.getpid()} {child.pid}")
    time.sleep(600)
"""


@pytest.fixture
def running(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """A launch of two ranks that wait, and all processes of them."""
    scripts.write(tmp_path / "train.py", WAITS)
    with subprocess.Popen(
        [sys.executable, "-m", "nbaccel", "launch", "--cpu", "-n", "2", "train.py"],
        cwd=tmp_path,
        env=scripts.environment(),
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        deadline = time.monotonic() + 60
        while len(texts := [path.read_text() for path in tmp_path.glob("pid_*")]) < 2 or not all(
            texts
        ):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
        yield process, [int(pid) for text in texts for pid in text.split()]
        process.kill()


@pytest.mark.slow
@pytest.mark.parametrize(("signal_number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_stops_all_in_order(running, signal_number: int, status: int) -> None:
    process, pids = running
    process.send_signal(signal_number)
    _, told = process.communicate(timeout=30)
    assert process.returncode == status
    assert "all 2 workers have been stopped" in told
    assert not any(map(lives, pids))


@pytest.mark.slow
def test_no_worker_outlives_a_command_that_is_killed(running) -> None:
    process, pids = running
    os.kill(process.pid, signal.SIGKILL)
    process.communicate(timeout=30)
    deadline = time.monotonic() + 10
    while any(map(lives, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(lives, pids))
