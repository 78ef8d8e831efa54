"""(g) Launches of functions that use the libraries people train with.

    kernel:  bodies │ import of library and launcher │ (use) │ first launch │ pause │ later │ later

Each library, state of the kernel and subject has a kernel of its own, and the subjects take turns
with each library. The first launch is in the cell right after the imports; the pause stands for
what a user reads and writes between cells, in which nbaccel may get ready in the background.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from harness.latency import take
from harness.memory import MIB, parts
from harness.namespace import Remote, SessionLostError
from harness.processes import num_foreign_torch
from harness.samples import Results, say
from harness.subjects import CELLS, PEER, Subject, bodies, launcher_cell

BARE_FORK = "mp-fork"
"""torch's own fork with a group of gloo and nothing else: the least that a launch can take."""
SUBJECT_NAMES = ("nbaccel-template", "nbaccel-fork", PEER, BARE_FORK)
STATES = ("fresh", "used")
NUM_LATER = 2
NUM_WEIGHED = 4
PAUSE_S = 10.0
HANG_AFTER_S = 60.0
IMPORT_S = 180.0


@dataclass(frozen=True)
class Library:
    """One library in use.

    Attributes:
        name: In the rows.
        cell: The file below `cells/libraries` that imports it and defines `use(rank)`.
        modules: What must be importable.
        label: As in the table.
    """

    name: str
    cell: str
    modules: tuple[str, ...]
    label: str


LIBRARIES = (
    Library("trainer", "trainer.py", ("transformers",), "transformers' `Trainer`, three steps"),
    Library("lora", "lora.py", ("peft", "transformers"), "peft, LoRA, three steps"),
    Library("tables", "tables.py", ("datasets",), "datasets, `map` with functions"),
    Library("sklearn", "sklearn_fit.py", ("sklearn",), "scikit-learn, a fit"),
    Library("images", "images.py", ("PIL", "numpy"), "PIL, pictures for torch"),
    Library("fabric", "fabric_steps.py", ("lightning",), "Lightning Fabric, three steps"),
)
# A pool of OpenMP's threads, a backward pass, and threads of Python that stay.
USED = """
work_in_kernel()
from concurrent.futures import ThreadPoolExecutor
threads = ThreadPoolExecutor(2)
assert list(threads.map(abs, range(-8, 0)))[0] == 8
"""
WEIGHED = "g 4 workers"
JUST_IMPORTED = "g noop first just-imported"


def measure(library: str, when: str, state: str) -> str:
    return f"g {library} {when} {state}"


def installed(names: list[str]) -> list[Library]:
    """Those of these names that can be imported; the others are told."""
    found = []
    for library in (library for library in LIBRARIES if library.name in names):
        missing = [module for module in library.modules if find_spec(module) is None]
        if missing:
            say(f"(g) {library.label} is left out: {', '.join(missing)} cannot be imported here")
        else:
            found.append(library)
    return found


def run(results: Results, subjects: list[Subject], num_repeats: int, names: list[str]) -> None:
    chosen = [subject for subject in subjects if subject.name in SUBJECT_NAMES]
    libraries = installed(names)
    for turn in range(num_repeats):
        offset = turn % max(1, len(chosen))
        turns = chosen[offset:] + chosen[:offset]
        for state in STATES:
            for library in libraries:
                say(f"(g) round {turn + 1} of {num_repeats}, {state} kernels: {library.label}")
                for subject in turns:
                    _try(results, subject, library, state)
        for subject in turns:
            if subject.is_ours:
                _just_imported(results, subject)
                _weigh(results, subject)


def _try(results: Results, subject: Subject, library: Library, state: str) -> None:
    first = results.of(measure(library.name, "first", state), subject.name)
    later = results.of(measure(library.name, "later", state), subject.name)
    call = "launch(use)"
    try:
        with _kernel(subject, library.cell, is_used=state == "used") as remote:
            take(remote, call, first, hang_after_s=HANG_AFTER_S)
            time.sleep(PAUSE_S)
            for _ in range(NUM_LATER):
                take(remote, call, later, hang_after_s=HANG_AFTER_S)
    except SessionLostError as lost:
        if str(lost) != "hangs":
            first.errors.append(str(lost)[-200:])
        say(f"{subject.name}: {str(lost)[-300:]}")


def _kernel(subject: Subject, cell: str, *, is_used: bool = False) -> Remote:
    """A kernel with library and launcher imported, and perhaps used: not waited for."""
    remote = Remote()
    try:
        remote.must_run(bodies())
        remote.settle()
        imports = (CELLS / "libraries" / cell).read_text()
        remote.must_run(imports, timeout_s=IMPORT_S)
        remote.must_run(launcher_cell(subject))
        if is_used:
            # After the imports, which notebooks have in their first cell.
            remote.must_run(USED)
    except BaseException:
        remote.close()
        raise
    return remote


def _just_imported(results: Results, subject: Subject) -> None:
    """The launch is in the cell that imports nbaccel, in a kernel that has torch."""
    samples = results.of(JUST_IMPORTED, subject.name)
    try:
        with Remote() as remote:
            remote.must_run(bodies())
            remote.settle()
            take(remote, "launch(noop)", samples, prelude=launcher_cell(subject))
    except SessionLostError as lost:
        say(f"{subject.name}, right after the import: {str(lost)[-300:]}")


def _weigh(results: Results, subject: Subject) -> None:
    """The memory of four workers that use transformers, in the second launch of a kernel."""
    samples = results.of(WEIGHED, subject.name)
    try:
        with _kernel(subject, "weighed.py") as remote:
            for is_counted in (False, True):
                folder = remote.new_folder()
                strangers = num_foreign_torch(remote.tag)
                answer = remote.ask(
                    "run_and_weigh",
                    answer_in_s=2 * HANG_AFTER_S,
                    code=f"launch(use_and_wait, ({folder!r},), {NUM_WEIGHED})",
                    timeout_s=1.5 * HANG_AFTER_S,
                    folder=folder,
                    num_processes=NUM_WEIGHED,
                )
                if not answer["samples"]:
                    raise SessionLostError(answer["error"] or "the workers did not come to wait")
                if is_counted:
                    fact = _weight(answer["samples"][-1], folder, strangers)
                    samples.values.append(fact["parts"]["workers_mib"])
                    samples.facts.append(fact)
                else:
                    time.sleep(PAUSE_S)
    except SessionLostError as lost:
        samples.errors.append(str(lost)[-200:])
        say(f"{subject.name}: {str(lost)[-300:]}")


def _weight(sample: list[dict[str, Any]], folder: str, num_strangers: int) -> dict[str, Any]:
    """Who holds what; and how much a worker shares with nobody."""
    workers = {int(path.read_text()) for path in Path(folder).glob("pid-*")}
    own = [row["Private_Clean"] + row["Private_Dirty"] for row in sample if row["pid"] in workers]
    split = parts(sample, folder)
    return {
        "parts": split,
        "own_mib": round(sum(own) / len(own) / MIB, 1),
        "num_others": len(split["other_processes"]),
        "num_strangers": num_strangers,
    }
