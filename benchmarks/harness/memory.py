"""(b) What a launch adds to the memory of a kernel that holds a 1 GiB model.

PSS of the kernel and of every process that descends from it, while all workers wait after they
have read the whole model; less the PSS of the kernel with PyTorch and the model alone, taken
before the subject's package is imported. So its imports and a template process count too.
"""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from harness.namespace import Remote, SessionLostError
from harness.samples import Results, Samples, say
from harness.subjects import Subject, bodies, bring_in

WORLD_SIZES = (2, 4)
TIMEOUT_S = 90.0
MIB = 2**20


def measure(num_processes: int) -> str:
    return f"b {num_processes} workers"


def run(results: Results, subjects: list[Subject], num_repeats: int) -> None:
    for turn in range(num_repeats):
        say(f"(b) round {turn + 1} of {num_repeats}")
        for subject in subjects:
            try:
                _weigh(results, subject)
            except SessionLostError as lost:
                results.of(measure(2), subject.name).errors.append(str(lost)[-300:])
                say(f"{subject.name}: {str(lost)[-300:]}")


def _weigh(results: Results, subject: Subject) -> None:
    with Remote() as remote:
        remote.must_run(bodies() + "\nmodel = build_model()")
        remote.settle()
        before = total(_now(remote))
        bring_in(remote, subject)
        remote.settle()
        ready = total(_now(remote))
        for num_processes in WORLD_SIZES:
            samples = results.of(measure(num_processes), subject.name)
            _weigh_launch(remote, num_processes, samples, before, ready)


def _now(remote: Remote) -> list[dict[str, Any]]:
    sample: list[dict[str, Any]] = remote.ask("memory", answer_in_s=30)["samples"][0]
    return sample


def _weigh_launch(
    remote: Remote, num_processes: int, samples: Samples, before: float, ready: float
) -> None:
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
    totals = [total(sample) for sample in answer["samples"]]
    samples.values.append(statistics.median(totals) - before)
    samples.facts.append(
        {
            "kernel_and_model_mib": before,
            "with_the_package_mib": ready,
            "parts": parts(answer["samples"][-1], folder),
        }
    )


def total(sample: list[dict[str, Any]], field: str = "Pss") -> float:
    return round(sum(int(row[field]) for row in sample) / MIB, 1)


def parts(sample: list[dict[str, Any]], folder: str) -> dict[str, Any]:
    """Who holds it: the workers (by the pids they left), the kernel, and everything else."""
    workers = {int(path.read_text()) for path in Path(folder).glob("pid-*")}
    groups: dict[str, list[dict[str, Any]]] = {"workers": [], "kernel": [], "others": []}
    for row in sample:
        is_kernel = "ipykernel_launcher" in row["command"] and row["pid"] not in workers
        name = "workers" if row["pid"] in workers else "kernel" if is_kernel else "others"
        groups[name].append(row)
    sizes: dict[str, Any] = {f"{name}_mib": total(rows) for name, rows in groups.items()}
    sizes |= {f"{kind}_mib": total(sample, kind) for kind in ("Pss_Anon", "Pss_File", "Pss_Shmem")}
    return {**sizes, "other_processes": [row["command"][:80] for row in groups["others"]]}
