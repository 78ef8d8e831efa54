"""The work of `make gpu` in parts of at most four minutes, for machines that are lent for as long.

    python -m tests.gpu.parts                    # all, one after another
    python -m tests.gpu.parts fp8 -- -k rowwise  # one of them, with more arguments for pytest

Each result is written to build/gpu/PART.txt the moment it is there. A part whose time is over is
interrupted, so that it still tells what it has: pytest its failures, a benchmark its table.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from tests.gpu.results import RESULTS
from tests.isolation import ROOT

PART_S = 240.0
ENDING_S = 20.0  # for pytest and its tests to end their processes
FOLDER = ROOT / "build" / "gpu"
# Processes that test; each has one to three more that compute.
NUM_TESTERS = max(1, min(12, (os.cpu_count() or 1) * 3 // 4))
NOTHING_TO_RUN = 5  # pytest's status where no test was chosen


@dataclass(frozen=True)
class Part:
    """Test files, or a script that measures."""

    tests: tuple[str, ...] = ()
    script: tuple[str, ...] = ()
    dist: str = "load"  # of pytest-xdist; fixtures of modules want a file in one place


PARTS = {
    "launch": Part(
        (
            "tests/gpu/test_launch_cuda.py",
            "tests/devices/test_cuda.py",
            "tests/devices/test_device_contract.py",
            "tests/output/panel/test_shown.py",
        )
    ),
    "train": Part(("tests/gpu/test_accelerator_cuda.py", "tests/train/test_rng.py")),
    "fp8": Part(("tests/gpu/test_fp8_cuda.py",)),
    "bigmodel": Part(("tests/bigmodel/test_device_copies.py",)),
    "deepspeed": Part(("tests/deepspeed/test_on_cuda.py",), dist="loadfile"),
    "bench": Part(script=("benchmarks/gpu.py",)),
    "bench-fp8": Part(script=("benchmarks/fp8.py", "--sections", "gpu")),
}


def run_part(name: str, more: list[str], part_s: float = PART_S) -> int:
    """Run one part; 0 if nothing failed and all of it was run."""
    part = PARTS[name]
    until = time.monotonic() + part_s
    if part.script:
        return run_until([sys.executable, *part.script], until)
    results = FOLDER / f"{name}.txt"
    results.parent.mkdir(parents=True, exist_ok=True)
    results.unlink(missing_ok=True)
    pytest = [sys.executable, "-m", "pytest", "-p", "tests.gpu.results", *part.tests, *more]
    alone = ["-m", "gpu and alone"]
    together = ["-m", "gpu and not alone", "-n", str(NUM_TESTERS), "--dist", part.dist]
    # The few that must be alone come first, so that the others cannot use up their time.
    statuses = [run_until([*pytest, *chosen], until, results) for chosen in (alone, together)]
    return max(0 if status == NOTHING_TO_RUN else status for status in statuses)


def run_until(command: list[str], until: float, results: Path | None = None) -> int:
    """Run a command until its time is over; its status, or 124 as `timeout` has it."""
    late = f"make gpu: the time is over for {' '.join(command[1:])}"
    if time.monotonic() >= until:
        print(late, file=sys.stderr)
        return 124
    paths = filter(None, [str(ROOT), *os.environ.get("PYTHONPATH", "").split(os.pathsep)])
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    if results:
        environ[RESULTS] = str(results)
    # A group of its own, so that all that it has started is interrupted with it.
    child = subprocess.Popen(command, cwd=ROOT, env=environ, start_new_session=True)
    try:
        return child.wait(max(0.0, until - time.monotonic()))
    except subprocess.TimeoutExpired:
        print(late, file=sys.stderr)
        return 124
    finally:
        _end(child)


def _end(child: subprocess.Popen[bytes]) -> None:
    for number, patience_s in ((signal.SIGINT, ENDING_S), (signal.SIGKILL, ENDING_S)):
        if child.poll() is None:
            with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
                os.killpg(child.pid, number)
                child.wait(patience_s)


def main(arguments: list[str]) -> int:
    """Run the named parts, or all; what follows `--` is for pytest."""
    at = arguments.index("--") if "--" in arguments else len(arguments)
    names, more = arguments[:at] or list(PARTS), arguments[at + 1 :]
    if unknown := [name for name in names if name not in PARTS]:
        print(f"make gpu: no part {unknown[0]!r}: give {', '.join(PARTS)}", file=sys.stderr)
        return 2
    statuses = []
    for name in names:
        print(f"make gpu: {name}", file=sys.stderr)
        statuses.append(run_part(name, more))
    return max(statuses)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
