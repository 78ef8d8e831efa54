"""What of DeepSpeed runs from a notebook, and whether it trains what DDP and Accelerate train.

    python benchmarks/zero_training.py             every row, about fifteen minutes
    python benchmarks/zero_training.py --render    the table again, from the stored result
    python benchmarks/zero_training.py --check     exit status 1 when a bar does not hold

Read docs/pages/figures.md for what each row means. The table is in the DeepSpeed guide,
docs/pages/guides/deepspeed.md.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent)]  # the operations are those of the tests

from harness.report import Report, verdict, versions  # noqa: E402
from harness.samples import Results, say  # noqa: E402 - the line above must come first
from harness.zero_training import BLOCKS, STEPS, Case, cases, net, ratio, train_all  # noqa: E402

PROCESSES = (1, 2)
TO_DDP, TO_PEER = 1e-5, 0.0
BF16_TO_DDP = 0.1
ROUNDED = (
    "This processor has no float16 arithmetic: there DeepSpeed keeps fp32 weights on NVMe as "
    "bfloat16, of which a check of the configuration warns, and such rows have bf16's bar. "
)


# ------------------------------------------------------------------------- taking the figures


def ours(num_processes: int, rows: list[Case]) -> dict[str, dict[str, Any]]:
    """One launch that trains all rows, and the models that came home of it."""
    from nbaccel import RunConfig, notebook_launcher

    models = {case.name: net() for case in rows}
    config = RunConfig(
        num_processes=num_processes, device="cpu", start_method="template", timeout=1200
    )
    with tempfile.TemporaryDirectory() as swap:
        told: dict[str, dict[str, Any]] = notebook_launcher(
            train_all, (models, rows, Path(swap)), config=config
        )[0]
    for name, row in told.items():
        if "state" in row:
            row["home"] = _is_home(models[name].state_dict(), row.pop("state"))
    return told


def _is_home(home: dict[str, Any], trained: dict[str, Any]) -> bool:
    """Whether the notebook's weights are the trained ones, bit by bit, and not the old ones.

    In bf16 what was trained is the float32 copy; the state dict has it rounded.
    """
    before = net().state_dict()
    same = all((home[name].to(value.dtype) == value).all() for name, value in trained.items())
    return bool(same) and any((home[name] != before[name]).any() for name in before)


def theirs(num_processes: int, *, disk: bool) -> dict[str, dict[str, Any]]:
    """Accelerate's losses, and both libraries' times, in processes that torchrun started."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", str(num_processes)]
        command += [str(HERE / "harness" / "zero_training.py"), str(out)]
        done = subprocess.run(
            [*command, "disk" if disk else "no disk"],
            env={**os.environ, **_environment()},
            capture_output=True,
            text=True,
            check=False,
            timeout=1800,
        )
        if done.returncode:
            raise RuntimeError(f"torchrun failed ({done.returncode}):\n{done.stderr[-3000:]}")
        found: dict[str, dict[str, Any]] = json.loads(out.read_text())
        return found


def _environment() -> dict[str, str]:
    scripts = sysconfig.get_path("scripts")
    return {
        "PATH": os.pathsep.join([scripts, os.environ["PATH"]]),
        "PYTHONPATH": os.pathsep.join([str(HERE.parent), os.environ.get("PYTHONPATH", "")]),
        "OMP_NUM_THREADS": "1",
    }


def measure(results: Results) -> None:
    from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

    from tests.deepspeed import operations

    os.environ["DS_ACCELERATOR"] = "cpu"
    operations.use_those_of_the_environment()
    disk = not operations.not_built(operations.DISK)
    results.forget("zero")
    for count in PROCESSES:
        say(f"{count} process(es), nbaccel")
        mine = ours(count, cases(disk=disk))
        say(f"{count} process(es), Accelerate")
        peer = theirs(count, disk=disk)
        for case in cases(disk=disk):
            _keep(results, f"zero {count}: {case.name}", mine[case.name], peer[case.name])
    float16 = bool(CPU_Accelerator().is_fp16_supported())
    results.note("zero", steps=STEPS, blocks=BLOCKS, disk=disk, float16=float16)
    results.save()


def _keep(results: Results, row: str, mine: dict[str, Any], peer: dict[str, Any]) -> None:
    for library, found in (("nbaccel", mine), ("accelerate", peer)):
        samples = results.of(row, library)
        if "error" in found:
            samples.errors.append(found["error"][:300])
            continue
        samples.values = found["losses"]
        facts = {key: found[key] for key in ("home", "swapped", "times") if key in found}
        samples.facts.append(facts)


# ------------------------------------------------------------------------- showing them


def render(results: Results) -> tuple[str, bool]:
    facts = results.sections["zero"]
    lines = [
        "| Processes | Strategy | Precision | Offloaded to | Runs | Last loss | … off DDP in fp32 "
        "| … off Accelerate | Weights copied back | Time per step to Accelerate's | Bars |",
        "| --: | --- | --- | --- | --- | --: | --: | --: | --- | --: | --- |",
    ]
    holds = True
    for count in PROCESSES:
        for case in cases(disk=facts["disk"]):
            text, good = _row(results, count, case)
            lines.append(text)
            holds &= good
    lines += [
        "",
        f"{facts['steps']} steps on scikit-learn's digits; losses are means over the processes, "
        "*off* is the largest difference of any step's. Bars: every row runs, weights are back bit "
        f"by bit, fp32 is off DDP by at most {TO_DDP:g} and bf16 by {BF16_TO_DDP:g}, and nothing "
        f"is off Accelerate at all. {'' if facts['float16'] else ROUNDED}"
        f"Time: median over {facts['blocks']} pairs of blocks that took turns, on a machine with "
        "other work, so that a single row says little; the median of all rows is "
        f"{_all_times(results):.2f}x.",
        "",
        f"Taken {facts['taken']}; load {facts['load']}; {facts['num_cores']} cores; "
        + versions(facts, ("python", "nbaccel", "torch", "deepspeed", "accelerate"))
        + ".",
    ]
    return "\n".join(lines), holds


def _row(results: Results, count: int, case: Case) -> tuple[str, bool]:
    name = f"zero {count}: {case.name}"
    mine, peer = results.of(name, "nbaccel"), results.of(name, "accelerate")
    ddp = results.of(f"zero {count}: {Case(None).name}", "nbaccel")
    strategy, precision, offload = case.name.split(", ")
    if case.stage is None and count == 1:
        strategy = "one process alone"
    head = [str(count), strategy, precision, "" if offload == "none" else offload]
    if not mine.values or not peer.values:
        told = "; ".join((*mine.errors, *peer.errors)).splitlines()[0][:80]
        return f"| {' | '.join([*head, told, '', '', '', '', '', '**FAIL**'])} |", False
    to_ddp, to_peer = distance(mine.values, ddp.values), distance(mine.values, peer.values)
    home = mine.facts[0]["home"]
    good = home and to_peer <= TO_PEER and to_ddp <= _allowed(results, case)
    cells = [
        *head,
        "yes" + _on_disk(mine.facts[0]["swapped"]),
        f"{mine.values[-1]:.6f}",
        _off(to_ddp),
        _off(to_peer),
        "yes" if home else "**no**",
        f"{ratio(peer.facts[0]['times']):.2f}x",
        verdict(good),
    ]
    return f"| {' | '.join(cells)} |", good


def _all_times(results: Results) -> float:
    found = [
        ratio(samples.facts[0]["times"])
        for (_, library), samples in results.samples.items()
        if library == "accelerate" and samples.facts
    ]
    return statistics.median(found)


def _allowed(results: Results, case: Case) -> float:
    is_rounded = case.offload == "nvme" and not results.sections["zero"]["float16"]
    return BF16_TO_DDP if case.bf16 or is_rounded else TO_DDP


def _off(difference: float) -> str:
    return "0" if difference == 0 else f"{difference:.1e}"


def _on_disk(swapped: int) -> str:
    return f", {swapped / 2**20:.0f} MiB of files" if swapped else ""


def distance(left: list[float], right: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(left, right, strict=True))


REPORT = Report("zero_training", render, mark="zero_training")


def main() -> int:
    return REPORT.run(REPORT.parser(__doc__).parse_args(), measure)


if __name__ == "__main__":
    sys.exit(main())
