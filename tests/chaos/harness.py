"""Kills parties of a running notebook at random moments, and compares what is left bit by bit.

    harness ── a real ipykernel ── template ── workers
       └── KILL, TERM, SEGV, STOP, Stop (an interrupt), no disk, no memory ──► one of them

A *moment* is one such blow while a scene runs. It is **torn** if weights or a checkpoint are
neither those from before nor the new ones; **silent** if the cell says that all went well and they
are not the new ones. A cell that is stopped in the middle of a training step leaves the notebook
with what rank 0 has then, as if it had run in the notebook itself: that is **half done**.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import queue
import random
import resource
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from nbaccel.workers import reaping, template_server
from tests.chaos.scenes import SCENES, SETUP, Scene
from tests.kernel.kernel import Cell, Kernel, wait_for

BLOWS = {
    "KILL": ("kernel", "template", "rank 0", "rank 1"),
    "TERM": ("template", "rank 0", "rank 1"),
    "SEGV": ("template", "rank 0", "rank 1"),
    "STOP": ("template", "rank 0", "rank 1"),
    "interrupt": ("kernel",),
    "no disk": ("rank 0", "rank 1"),
    "no memory": ("rank 0", "rank 1"),
}
"""What is done → to whom."""

LAYERS = 16
"""Of 4 MiB each: large enough for writing them to take a while."""
PATIENCE_S = 60.0
"""A cell that has not ended by then is stopped, as a user would stop it."""
PRESS_S = 0.3
"""After a process was stopped: when the user presses Stop."""
REPLY_S = 10.0
"""How long the reply of a cell that has ended is waited for."""
RAW = ("BrokenPipeError", "ProcessLookupError", "ConnectionResetError", "AssertionError")
"""Errors of internals that no user should see."""


@dataclass
class Moment:
    """One blow, and what came of it."""

    scene: str
    blow: str
    party: str
    after_s: float
    state: str = ""  # `old`, `new`, `half done`, `torn`, or `gone` with the kernel
    error: str = ""  # what the cell raised; empty if it said that all went well
    prompt_s: float = 0.0  # from the blow until the cell had ended
    hung: bool = False  # whether the cell ended only when Stop was pressed
    faults: list[str] = field(default_factory=list)


class Chaos:
    """A notebook that is treated badly, with checkpoints in a folder, at random moments."""

    def __init__(self, folder: Path, *, seed: int) -> None:
        self._folder = folder / "checkpoint"
        self._random = random.Random(seed)
        self._kernel: Kernel | None = None
        self._lasts: dict[str, float] = {}
        self._mark = 1
        self._saved = 0
        """The mark of the checkpoint that is known to be whole."""
        self._wounded: list[psutil.Process] = []
        self.moments: list[Moment] = []

    # ---- moments

    def run(self, count: int) -> None:
        """Live through so many moments, the same number in each scene."""
        scenes = list(SCENES)
        for i, scene in enumerate(scenes):
            share = count * (i + 1) // len(scenes) - count * i // len(scenes)
            blows = self._blows(share)
            self._get_ready(scene)
            while blows:
                blow, party = blows[-1]
                moment = self._moment(scene, blow, party)
                if moment is not None:
                    self.moments.append(moment)
                    blows.pop()

    def _blows(self, count: int) -> list[tuple[str, str]]:
        """Each kind as often as any other, in random order."""
        every = [(blow, party) for blow, parties in BLOWS.items() for party in parties]
        first = self._random.randrange(len(every))
        chosen = [every[(first + i) % len(every)] for i in range(count)]
        self._random.shuffle(chosen)
        return chosen

    def _get_ready(self, scene: Scene) -> None:
        """Run the scene undisturbed, for how long it takes."""
        kernel = self._alive()
        lasted = []
        for _ in range(3):  # the first one starts things, and the second may wait for a template
            _surely(kernel, scene.prepare)
            began = time.monotonic()
            cell = kernel.run(self._code(scene))
            assert not cell.error, "\n".join(cell.traceback)
            lasted.append(time.monotonic() - began)
            self._lasts[scene.name] = min(lasted)
            self._note_saved(scene)

    def _moment(self, scene: Scene, blow: str, party: str) -> Moment | None:
        """One moment; None if the cell had ended before the blow."""
        kernel = self._alive()
        _surely(kernel, scene.prepare)
        earliest = self._random.choice((0.0, 0.5))  # the way home is at the end, and short
        after_s = self._random.uniform(earliest, 1.0) * self._lasts[scene.name]
        moment = Moment(scene=scene.name, blow=blow, party=party, after_s=after_s)
        running = kernel.begin(self._code(scene))
        time.sleep(after_s)
        target = self._find(kernel, party)
        if target is None or not self._strike(kernel, target, blow):
            kernel.finish(running)
            self._note_saved(scene)
            return None
        struck = time.monotonic()
        if target.pid == kernel.pid and blow == "KILL":
            self._judge_death(moment, scene, kernel)
        else:
            cell = self._finish(kernel, running, moment, struck)
            moment.error = cell.error
            self._judge(moment, scene, kernel, cell)
        return moment

    def _code(self, scene: Scene) -> str:
        self._mark += scene.changes == "checkpoint"
        return scene.code.replace("{mark}", f"{float(self._mark)}")

    def _finish(
        self, kernel: Kernel, running: tuple[str, Cell], moment: Moment, struck: float
    ) -> Cell:
        if moment.blow == "STOP":
            time.sleep(PRESS_S)
            kernel.interrupt()
        try:
            kernel.wait_idle(running, timeout_s=PATIENCE_S)
        except AssertionError:  # a process without memory may wait for itself
            moment.hung = True
            kernel.interrupt()
            kernel.wait_idle(running)
        moment.prompt_s = time.monotonic() - struck
        # ipykernel drops the reply of a cell that has ended if an interrupt meets it just then.
        with contextlib.suppress(queue.Empty):
            kernel.take_reply(running[0], timeout_s=REPLY_S)
        return running[1]

    # ---- blows

    def _find(self, kernel: Kernel, party: str) -> psutil.Process | None:
        with contextlib.suppress(psutil.Error):
            own = psutil.Process(kernel.pid)
            if party == "kernel":
                return own
            # The one that is to take the place of the other has begun later.
            named = {
                name: sorted(
                    (p for p in own.children(recursive=True) if p.name() == name),
                    key=lambda p: p.pid,
                )
                for name in (template_server.TEMPLATE_NAME, reaping.WORKER_NAME)
            }
            templates, workers = named[template_server.TEMPLATE_NAME], named[reaping.WORKER_NAME]
            if not templates:
                return None
            if party == "template":
                return templates[0]
            number = int(party.split()[1])
            return workers[number] if number < len(workers) else None
        return None

    def _strike(self, kernel: Kernel, target: psutil.Process, blow: str) -> bool:
        try:
            if blow == "interrupt":
                kernel.interrupt()
            elif blow == "no disk":
                target.rlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
                self._wounded.append(target)
            elif blow == "no memory":
                used = target.memory_info().vms
                target.rlimit(resource.RLIMIT_AS, (used, resource.RLIM_INFINITY))
                self._wounded.append(target)
            else:
                target.send_signal(signal.Signals[f"SIG{blow}"])
                if blow == "STOP":
                    self._wounded.append(target)
        except (psutil.Error, ProcessLookupError, PermissionError):
            return False
        return True

    def _heal(self) -> None:
        """Let those that live go on without what was done to them."""
        for process in self._wounded:
            with contextlib.suppress(psutil.Error, ProcessLookupError, OSError):
                for limit in (resource.RLIMIT_FSIZE, resource.RLIMIT_AS):
                    process.rlimit(limit, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
                process.send_signal(signal.SIGCONT)
        self._wounded.clear()

    # ---- judging

    def _judge(self, moment: Moment, scene: Scene, kernel: Kernel, cell: Cell) -> None:
        told = self._told(kernel)
        self._heal()
        if told["staging"]:
            moment.faults.append(f"{told['staging']} staging files are left in the kernel")
        if scene.changes == "checkpoint":
            self._judge_checkpoint(moment, told["saved"], said_well=not cell.error)
        else:
            new = float(self._saved) if scene.new is None else scene.new
            moment.state = {(1.0,): "old", (new,): "new"}.get(tuple(told["marks"]), "torn")
            if moment.state == "torn" and scene.in_pool and cell.error:
                moment.state = self._as_rank_0_has_it(kernel, told["digest"])
            if moment.state == "torn":
                moment.faults.append(f"torn: weights {told['marks'][:6]}")
            if not cell.error and moment.state != "new":
                moment.faults.append("silent: the cell said nothing, and the weights are not new")
        if cell.error in RAW:
            moment.faults.append(f"raw: {' | '.join(cell.traceback[-3:])}")
        self._go_on(moment, scene, kernel, cell)

    def _as_rank_0_has_it(self, kernel: Kernel, digest: str) -> str:
        cell = kernel.run("%%accelerate --ranks 0\nprint('THERE ' + digest(model))")
        return "half done" if f"THERE {digest}" in cell.stdout else "torn"

    def _judge_checkpoint(self, moment: Moment, saved: dict[str, Any], *, said_well: bool) -> None:
        found = (tuple(saved.get("weights", ())), saved.get("rate"))
        wholes = {((float(m),), float(m)): m for m in (self._saved, self._mark)}
        if found not in wholes:
            moment.state = "torn"
            moment.faults.append(f"torn: the checkpoint holds {saved}")
            return
        moment.state = "new" if wholes[found] == self._mark else "old"
        self._saved = wholes[found]
        if said_well and moment.state == "old":
            moment.faults.append("silent: the cell said nothing, and the checkpoint is the old one")

    def _judge_death(self, moment: Moment, scene: Scene, kernel: Kernel) -> None:
        """The kernel was killed: its workers end too, and checkpoints are whole."""
        began = time.monotonic()
        moment.error, moment.state = "the kernel died", "gone"
        left = [p for p in psutil.process_iter() if self._belongs(p)]
        if not wait_for(lambda: not any(self._belongs(p) for p in left), timeout_s=60):
            moment.faults.append(f"left behind: {left}")
        moment.prompt_s = time.monotonic() - began
        with contextlib.suppress(Exception):  # whatever is left of a dead kernel's connections
            kernel.close()
        self._kernel = None
        told = self._told(self._alive())
        if scene.changes == "checkpoint":
            self._judge_checkpoint(moment, told["saved"], said_well=False)
        self._get_ready(scene)

    def _belongs(self, process: psutil.Process) -> bool:
        """Whether it is a template or a worker of ours: its environment names the folder."""
        try:
            mine = process.environ().get("NBACCEL_CHAOS") == str(self._folder)
            return mine and process.status() != psutil.STATUS_ZOMBIE and process.is_running()
        except psutil.Error:
            return False

    def _go_on(self, moment: Moment, scene: Scene, kernel: Kernel, cell: Cell) -> None:
        """The next cell works; what a cell in live workers could not bring home comes then."""
        if not scene.in_pool:
            _surely(kernel, "_ = notebook_launcher(os.getpid, (), num_processes=2)")
            return
        kernel.run("%%accelerate -n 2\n1")  # a death that came late is told by the next cell
        again = kernel.run("%%accelerate -n 2\nfine = 1")
        if again.error:
            moment.faults.append(f"the next cell but one fails: {again.traceback[-3:]}")

    def _note_saved(self, scene: Scene) -> None:
        if scene.changes == "checkpoint":
            self._saved = self._mark

    # ---- the notebook

    def _told(self, kernel: Kernel) -> dict[str, Any]:
        cell = _surely(kernel, "tell()")
        line = next(line for line in cell.stdout.splitlines() if line.startswith("TOLD "))
        found: dict[str, Any] = json.loads(line.removeprefix("TOLD "))
        return found

    def _alive(self) -> Kernel:
        if self._kernel is None:
            self._kernel = Kernel(NBACCEL_CHAOS=str(self._folder))
            self._kernel.run(SETUP.format(layers=LAYERS, folder=str(self._folder))).check()
        return self._kernel

    def close(self) -> None:
        """End the notebook."""
        self._heal()
        if self._kernel is not None:
            self._kernel.close()
            self._kernel = None


def faults(moments: list[Moment]) -> list[str]:
    """What should not have happened, one line each."""
    return [
        f"{m.scene}, {m.blow} of {m.party} after {m.after_s:.3f} s ({m.error or 'ok'}): {fault}"
        for m in moments
        for fault in m.faults
    ]


def figures(moments: list[Moment]) -> dict[str, dict[str, Any]]:
    """Figures by scene."""
    return {scene.name: _figures([m for m in moments if m.scene == scene.name]) for scene in SCENES}


def _surely(kernel: Kernel, code: str) -> Cell:
    """Run a cell that must succeed; an interrupt that came late for its own cell may hit it."""
    cell = kernel.run(code)
    return kernel.run(code).check() if cell.error == "KeyboardInterrupt" else cell.check()


def _figures(moments: list[Moment]) -> dict[str, Any]:
    states = Counter(m.state for m in moments)
    waits = sorted(m.prompt_s for m in moments)
    return {
        "moments": len(moments),
        **{state: states[state] for state in ("old", "new", "half done", "gone", "torn")},
        "silent": sum(any(f.startswith("silent") for f in m.faults) for m in moments),
        "told": sum(bool(m.error) for m in moments),
        "hung": sum(m.hung for m in moments),
        "prompt_median_s": waits[len(waits) // 2] if waits else 0.0,
        "prompt_worst_s": waits[-1] if waits else 0.0,
    }


@contextlib.contextmanager
def chaos(folder: Path, *, seed: int) -> Iterator[Chaos]:
    """A notebook to be treated badly, which is ended with the block."""
    found = Chaos(folder, seed=seed)
    try:
        yield found
    finally:
        found.close()


def run_notebooks(count: int, seed: int, jobs: int) -> list[Moment]:
    """Live through so many moments, in several notebooks at the same time."""
    shares = [count * (job + 1) // jobs - count * job // jobs for job in range(jobs)]
    # A fork would give one notebook the sockets of another.
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=spawn) as notebooks:
        lived = notebooks.map(_live_through, shares, range(seed, seed + jobs))
        return [moment for moments in lived for moment in moments]


def _live_through(count: int, seed: int) -> list[Moment]:
    with tempfile.TemporaryDirectory() as folder, chaos(Path(folder), seed=seed) as notebook:
        notebook.run(count)
        return notebook.moments
