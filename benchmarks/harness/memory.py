"""(b) What a launch adds to the memory of a kernel that holds a 1 GiB model.

PSS of the kernel and of every process that descends from it, while all workers wait after they
have read the whole model; less the PSS of the kernel with PyTorch and the model alone, taken
before the subject's package is imported. So its imports and a template process count too.

PSS splits the pages of PyTorch's library with everything else on the machine that maps it: one
such stranger moves the difference by 50 MiB. A sample that had one is taken again.
"""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from harness.namespace import Remote, SessionLostError
from harness.processes import num_foreign_torch
from harness.samples import Results, say
from harness.subjects import Subject, bodies, bring_in

WORLD_SIZES = (2, 4)
TIMEOUT_S = 90.0
NUM_TRIES = 3
MIB = 2**20
TEMPLATE_NAME = "nbaccel-tmpl"  # of the process, as nbaccel.workers.template_server names it


def measure(num_processes: int) -> str:
    return f"b {num_processes} workers"


def run(results: Results, subjects: list[Subject], num_repeats: int) -> None:
    for turn in range(num_repeats):
        say(f"(b) round {turn + 1} of {num_repeats}")
        for subject in subjects:
            _weigh_or_tell(results, subject)


def _weigh_or_tell(results: Results, subject: Subject) -> None:
    try:
        _weigh_alone(results, subject)
    except SessionLostError as lost:
        results.of(measure(2), subject.name).errors.append(str(lost)[-300:])
        say(f"{subject.name}: {str(lost)[-300:]}")


def _weigh_alone(results: Results, subject: Subject) -> None:
    """Weigh until no stranger was there meanwhile; the last try counts in any case."""
    weighed: dict[int, tuple[float, dict[str, Any]]] = {}
    for attempt in range(NUM_TRIES):
        weighed = _weigh(subject)
        num_strangers = max(fact["num_strangers"] for _, fact in weighed.values())
        if not num_strangers:
            break
        say(f"{subject.name}: {num_strangers} other processes map PyTorch (try {attempt + 1})")
    for num_processes, (whole, fact) in weighed.items():
        samples = results.of(measure(num_processes), subject.name)
        samples.values.append(whole - fact["kernel_and_model_mib"])
        samples.facts.append(fact)
        results.of(f"b {num_processes} whole", subject.name).values.append(whole)


def _weigh(subject: Subject) -> dict[int, tuple[float, dict[str, Any]]]:
    with Remote() as remote:
        remote.must_run(bodies() + "\nmodel = build_model()")
        remote.settle()
        strangers = [num_foreign_torch(remote.tag)]
        before = total(_now(remote))
        bring_in(remote, subject)
        remote.settle()
        ready = total(_now(remote))
        weighed = {}
        for num_processes in WORLD_SIZES:
            strangers.append(num_foreign_torch(remote.tag))
            whole, split = _weigh_launch(remote, num_processes)
            strangers.append(num_foreign_torch(remote.tag))
            fact = {
                "kernel_and_model_mib": before,
                "with_the_package_mib": ready,
                "parts": split,
                "num_strangers": max(strangers),
            }
            weighed[num_processes] = (whole, fact)
        return weighed


def _now(remote: Remote) -> list[dict[str, Any]]:
    sample: list[dict[str, Any]] = remote.ask("memory", answer_in_s=30)["samples"][0]
    return sample


def _weigh_launch(remote: Remote, num_processes: int) -> tuple[float, dict[str, Any]]:
    """The whole in MiB (median of the samples), and who holds it."""
    folder = remote.new_folder()
    answer = remote.ask(
        "run_and_weigh",
        answer_in_s=TIMEOUT_S + 30,
        code=f"launch(read_all, (model, {folder!r}), {num_processes})",
        timeout_s=TIMEOUT_S,
        folder=folder,
        num_processes=num_processes,
    )
    if not answer["samples"] or answer["ended_at"] is None:
        raise SessionLostError(answer["error"] or "the workers did not read the model in time")
    whole = statistics.median(total(sample) for sample in answer["samples"])
    return whole, parts(answer["samples"][-1], folder)


def total(sample: list[dict[str, Any]], field: str = "Pss") -> float:
    return round(sum(int(row[field]) for row in sample) / MIB, 1)


def parts(sample: list[dict[str, Any]], folder: str) -> dict[str, Any]:
    """Who holds it: the workers (by the pids they left), the kernel, and everything else."""
    workers = {int(path.read_text()) for path in Path(folder).glob("pid-*")}
    groups: dict[str, list[dict[str, Any]]] = {"workers": [], "kernel": [], "others": []}
    for row in sample:
        is_kernel = "ipykernel_launcher" in row["command"] and row["name"] != TEMPLATE_NAME
        name = "workers" if row["pid"] in workers else "kernel" if is_kernel else "others"
        groups[name].append(row)
    sizes: dict[str, Any] = {f"{name}_mib": total(rows) for name, rows in groups.items()}
    sizes |= {f"{kind}_mib": total(sample, kind) for kind in ("Pss_Anon", "Pss_File", "Pss_Shmem")}
    others = [f"{row['name']}: {row['command'][:80]}" for row in groups["others"]]
    return {**sizes, "other_processes": others}
