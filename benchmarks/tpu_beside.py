"""What torch_tpu costs a CPU run that is installed beside it: the first launch and first backward.

    python3 -m tests.lanes torch_tpu --keep       an environment that has torch_tpu
    .lanes/torch_tpu/environment/bin/python benchmarks/tpu_beside.py
    python benchmarks/tpu_beside.py --render      the table again, from the stored result
    python benchmarks/tpu_beside.py --check       exit status 1 when a bar does not hold

Two environments are made of links to this one's packages, and torch_tpu is left out of one of them.
Read docs/pages/figures.md for what each row means.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import tempfile
import time
import venv
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent)]

from harness.report import Report, verdict, versions  # noqa: E402
from harness.samples import Results, say  # noqa: E402

WITH, WITHOUT = "with torch_tpu", "without"
SUBJECTS = (WITH, WITHOUT)
HIDDEN = ("torch_tpu", "torch-tpu")
MEASURES = {
    "start": "kernel's first cell → first launch returned",
    "launch": "first launch, 2 CPU workers",
    "backward": "first backward in a worker",
    "here": "first backward in the notebook's process",
}
ROUNDS = 5
WITHIN = 1.10
TIMEOUT_S = 300.0


# ---------------------------------------------------------------- what is measured
def timed_backward() -> float:
    import time

    import torch

    layer = torch.nn.Linear(8, 8)
    began = time.monotonic()
    layer(torch.ones(2, 8)).sum().backward()
    return time.monotonic() - began


def subject(began: float) -> None:
    """The first cells of a notebook; `ipykernel` is what nbaccel knows a notebook by."""
    import ipykernel

    assert ipykernel is not None
    import nbaccel

    launcher = nbaccel.notebook_launcher
    import torch

    config = nbaccel.RunConfig(device="cpu", num_processes=2)
    launching = time.monotonic()
    in_workers = launcher(timed_backward, (), config=config)
    launched = time.monotonic()
    found = {
        "start": launched - began,
        "launch": launched - launching,
        "backward": max(in_workers),
        "here": timed_backward(),
    }
    has_tpu = "torch_tpu" in sys.modules or hasattr(torch, "tpu")
    print(json.dumps({"seconds": found, "was_loaded": has_tpu}), flush=True)


# ---------------------------------------------------------------- how it is measured
def linked_environment(folder: Path, *, hides: bool) -> Path:
    """An environment with links to the packages of this one; returns its Python."""
    venv.create(folder, symlinks=True, with_pip=False)
    (site_packages,) = folder.glob("lib/python*/site-packages")
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        if not (hides and entry.name.startswith(HIDDEN)):
            (site_packages / entry.name).symlink_to(entry)
    return folder / "bin" / "python"


def take(python: Path) -> dict[str, float]:
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    environ.pop("TORCH_DEVICE_BACKEND_AUTOLOAD", None)
    began = str(time.monotonic())
    done = subprocess.run(
        [python, __file__, "--subject", began],
        env=environ,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=True,
    )
    told = json.loads(done.stdout.splitlines()[-1])
    assert not told["was_loaded"], "nbaccel was to keep torch_tpu out of a CPU run"
    seconds: dict[str, float] = told["seconds"]
    return seconds


def measure(results: Results) -> None:
    results.forget("beside")
    with tempfile.TemporaryDirectory() as name:
        pythons = {
            WITH: linked_environment(Path(name) / "with", hides=False),
            WITHOUT: linked_environment(Path(name) / "without", hides=True),
        }
        for python in pythons.values():
            take(python)  # files into memory
        for number in range(ROUNDS):
            say(f"round {number + 1} of {ROUNDS}")
            for who in SUBJECTS[:: 1 if number % 2 == 0 else -1]:
                for measure_name, seconds in take(pythons[who]).items():
                    results.of(f"beside {measure_name}", who).values.append(seconds)
    results.note("beside", rounds=ROUNDS)
    results.save()


# ---------------------------------------------------------------- the table
def render(results: Results) -> tuple[str, bool]:
    lines = ["| median | ratio: with torch_tpu / without | bar |", "| --- | --: | --- |"]
    holds = True
    for measure_name, title in MEASURES.items():
        ours, theirs = (results.median(f"beside {measure_name}", who) or 0.0 for who in SUBJECTS)
        ratio = ours / (theirs or 1.0)
        good = 0 < ratio <= WITHIN
        holds &= good
        lines.append(f"| {title} | {ratio:.2f} | {verdict(good)} |")
    facts = results.sections["beside"]
    lines += [
        "",
        f"Bar: at most {WITHIN:.2f}. Medians of {facts['rounds']} rounds that alternate. Taken "
        f"{facts['taken']}, load {facts['load']}; "
        + versions(facts, ("python", "torch", "torch_tpu"))
        + ".",
    ]
    return "\n".join(lines), holds


REPORT = Report("tpu_beside", render, mark="tpu_beside")


def main() -> int:
    if sys.argv[1:2] == ["--subject"]:
        subject(float(sys.argv[2]))
        return 0
    return REPORT.run(REPORT.parser(__doc__).parse_args(), measure)


if __name__ == "__main__":
    sys.exit(main())
