"""A cell's way to live workers and back, in this checkout and in another revision of it.

    python benchmarks/round_trip.py REVISION             20 rounds, about two minutes
    python benchmarks/round_trip.py REVISION --rounds 4 --no-page --output /tmp/quick.json
    python benchmarks/round_trip.py --render             the table again, from the stored result

Two kernels live side by side, one with each revision, and two workers each. In a round each runs
the same cells, now this one first, now the other; a ratio is that of the two times of a round.
Read docs/pages/figures.md for what each row means.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from harness.live import TOOLS
from harness.report import Report
from harness.revision import REPOSITORY, checkout_of
from harness.samples import Results, say
from harness.table import as_grid
from jupyter_client.manager import KernelManager

NEW, OLD, PIPE = "this checkout", "before", "a pipe"
CELLS = {"nothing to show": "_ = 1+1", "with results": "1+1"}
WARM_UP, TRIPS, PIPE_TRIPS = 50, 60, 200
HALF = 0.5
# What stands between: parts of the way that both revisions have, and where their code is.
PARTS = {
    "settings are read": (("nbaccel.transfer.library_settings", "library_settings"),),
    "the dashboard is made, and ended unseen": (
        ("nbaccel.output.panel.display", "Dashboard.__init__"),
        ("nbaccel.output.panel.display", "Dashboard.end"),
    ),
    "the cell's lines and number are found": (
        ("nbaccel.notebook.cells", "Cells.source"),
        ("nbaccel.notebook.cells", "Cells.as_written"),
    ),
    "names are compared": (("nbaccel.transfer.namespace_sync", "NamespaceSync.prepare"),),
    "the task is pickled": (("nbaccel.workers.messaging", "pack_message"),),
    "ranks' output is read to its end": (
        ("nbaccel.calls.supervisor", "Supervisor.drain_output"),
        ("nbaccel.output.console", "Console.close"),
    ),
    "the result is shown": (("nbaccel.output.publish", "show_results"),),
}
IN_WORKER = "the cell runs in a worker"
WATCH = """
import functools as _functools, importlib as _importlib, time as _time
_seconds = {}


def _watch(part, module, path):
    owner = _importlib.import_module(module)
    *holders, name = path.split(".")
    for holder in holders:
        owner = getattr(owner, holder)
    function = getattr(owner, name)

    @_functools.wraps(function)
    def timed(*args, **settings):
        began = _time.perf_counter()
        try:
            return function(*args, **settings)
        finally:
            _seconds[part] = _seconds.get(part, 0.0) + _time.perf_counter() - began

    setattr(owner, name, timed)
"""
WATCH_IN_WORKER = """
import time as _time
from nbaccel.calls.worker_shell import WorkerShell as _Shell
_run, _runs = _Shell.run, []
def _timed(self, source):
    began = _time.perf_counter()
    try:
        return _run(self, source)
    finally:
        _runs.append(_time.perf_counter() - began)
_Shell.run = _timed
"""
START = TOOLS + "\nimport torch\n%load_ext nbaccel\n"


class Kernel:
    """A kernel whose nbaccel is that of a checkout, with two live workers."""

    def __init__(self, checkout: Path) -> None:
        self._manager = KernelManager()
        self._manager.start_kernel(
            env={**os.environ, "PYTHONPATH": str(checkout)}, cwd=tempfile.gettempdir()
        )
        self._client = self._manager.blocking_client()
        self._client.start_channels()
        self._client.wait_for_ready(timeout=60)
        self.run(START)
        self.run("%%accelerate -n 2\n1+1")

    def run(self, code: str) -> str:
        printed: list[str] = []

        def hear(message: dict) -> None:
            content = message["content"]
            if message["msg_type"] == "error":
                raise RuntimeError("\n".join(content["traceback"]))
            if message["msg_type"] == "stream":
                printed.append(content["text"])

        self._client.execute_interactive(code, output_hook=hear, timeout=120)
        return "".join(printed)

    def trips(self, count: int, code: str) -> list[float]:
        """Seconds of each."""
        told = self.run(f"_time_trips({count}, 'accelerate', {code!r})")
        line = next(line for line in told.splitlines() if line.startswith("@@"))
        return json.loads(line[2:])["seconds"]

    def watch_parts(self) -> None:
        """From now on the parts are timed, which costs a little itself."""
        self.run(WATCH)
        for part, places in PARTS.items():
            for module, path in places:
                self.run(f"_watch({part!r}, {module!r}, {path!r})")
        self.run(f"%%accelerate\n{WATCH_IN_WORKER}")

    def part_seconds(self, count: int, code: str) -> dict[str, float]:
        """Seconds of each part in one cell, on average."""
        self.run("_seconds.clear()")
        self.run("%%accelerate\n_runs.clear()")
        self.run("_seconds.clear()")
        self.trips(count, code)
        told = self.run("_report(**_seconds)")
        seconds = json.loads(next(t[2:] for t in told.splitlines() if t.startswith("@@")))
        in_worker = self.run(f"%%accelerate --ranks 0\nprint(sum(_runs[:{count}]))")
        found = {part: value / count for part, value in seconds.items()}
        return {**found, IN_WORKER: float(in_worker.split()[-1]) / count}

    def close(self) -> None:
        self._client.stop_channels()
        self._manager.shutdown_kernel(now=False)


@contextmanager
def echo() -> Iterator[tuple[int, int]]:
    """A process that sends back each byte; the ends of the two pipes to it."""
    there, to_there = os.pipe()
    from_there, back = os.pipe()
    code = f"import os\nwhile byte := os.read({there}, 1): os.write({back}, byte)"
    child = subprocess.Popen([sys.executable, "-c", code], pass_fds=(there, back))
    os.close(there)
    os.close(back)
    try:
        yield to_there, from_there
    finally:
        os.close(to_there)
        child.wait()
        os.close(from_there)


def pipe_trips(to_there: int, from_there: int) -> list[float]:
    seconds = []
    for _ in range(PIPE_TRIPS):
        started = time.perf_counter()
        os.write(to_there, b"x")
        os.read(from_there, 1)
        seconds.append(time.perf_counter() - started)
        time.sleep(0.0005)  # as between cells, so that the other process has to be woken
    return seconds


def undisturbed(seconds: list[float]) -> float:
    """The fastest tenth's limit: the others had to wait for what else the machine was doing."""
    return statistics.quantiles(seconds, n=10)[0]


def measure(results: Results, revision: str, num_rounds: int) -> None:
    results.forget("r")
    num_part_rounds = num_rounds
    with checkout_of(revision) as other, echo() as pipe:
        kernels = {NEW: Kernel(REPOSITORY), OLD: Kernel(other)}
        try:
            for code in CELLS.values():
                for kernel in kernels.values():
                    kernel.trips(WARM_UP, code)
            for number in range(num_rounds):
                for what, code in CELLS.items():
                    names = list(kernels) if number % 2 else list(reversed(kernels))
                    for name in names:
                        trips = kernels[name].trips(TRIPS, code)
                        results.of(f"r {what}", name).values.append(undisturbed(trips))
                    trip = undisturbed(pipe_trips(*pipe))
                    results.of(f"r {what}", PIPE).values.append(trip)
                say(f"round {number + 1} of {num_rounds}")
            kernels[NEW].watch_parts()
            try:
                kernels[OLD].watch_parts()
            except RuntimeError:
                say(f"{revision} has other modules: parts are not timed")
                num_part_rounds = 0
            for number in range(num_part_rounds):
                for name in list(kernels) if number % 2 else list(reversed(kernels)):
                    for part, seconds in kernels[name].part_seconds(TRIPS, "1+1").items():
                        results.of(f"r part: {part}", name).values.append(seconds)
        finally:
            for kernel in kernels.values():
                kernel.close()
    results.note("r", repeats=num_rounds, revision=revision)
    results.save()


def ratio(results: Results, what: str, of: str, to: str) -> float | None:
    """Median over rounds of the ratio within a round."""
    ours, theirs = results.get(f"r {what}", of), results.get(f"r {what}", to)
    if ours is None or theirs is None or not ours.values:
        return None
    return statistics.median(a / b for a, b in zip(ours.values, theirs.values, strict=True))


def parts(results: Results) -> str:
    rows = []
    for part in (*PARTS, IN_WORKER):
        measure = f"part: {part}"
        found = ratio(results, measure, NEW, OLD)
        if found is not None:
            times = [(results.median(f"r {measure}", name) or 0.0) * 1e6 for name in (OLD, NEW)]
            rows.append([part, f"{times[0]:.0f}", f"{times[1]:.0f}", f"{found:.2f}"])
    grid = as_grid(["of a cell with results, microseconds", OLD, NEW, "ratio"], rows)
    return f"{grid}\n\n" if rows else ""


def render(results: Results) -> tuple[str, bool]:
    rows, holds = [], bool(results.sections)
    for what in CELLS:
        paired, to_pipe = ratio(results, what, NEW, OLD), ratio(results, what, NEW, PIPE)
        old_to_pipe = ratio(results, what, OLD, PIPE)
        if paired is None or to_pipe is None or old_to_pipe is None:
            continue
        is_held = paired <= HALF
        holds &= is_held
        times = [(results.median(f"r {what}", name) or 0.0) * 1000 for name in (NEW, OLD, PIPE)]
        rows.append(
            [
                what,
                f"{times[0]:.2f} ({to_pipe:.0f}x)",
                f"{times[1]:.2f} ({old_to_pipe:.0f}x)",
                f"{times[2]:.3f}",
                f"{paired:.2f}",
                "pass" if is_held else "**not held**",
            ]
        )
    header = ["`1+1` on 2 workers and back, ms", NEW, OLD, PIPE, "ratio of the two", "bar"]
    note = results.sections.get("r", {})
    told = (
        f"Bar: at most {HALF}. Parentheses: to a pipe's round trip. Medians of "
        f"{note.get('repeats')} rounds that alternate, with revision {note.get('revision')}; load "
        f"{note.get('load')}."
    )
    return f"{as_grid(header, rows)}\n\n{parts(results)}{told}\n", holds


def main() -> int:
    report = Report("round_trip", render, "round_trip")
    parser = report.parser(__doc__)
    parser.add_argument("revision", nargs="?", default="HEAD~1")
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    return report.run(options, lambda results: measure(results, options.revision, options.rounds))


if __name__ == "__main__":
    sys.exit(main())
