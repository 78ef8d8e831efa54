"""fp32 weights out of a ZeRO checkpoint: peak memory and time, beside DeepSpeed's own script.

    python benchmarks/zero_to_fp32.py              5 rounds, about half an hour
    python benchmarks/zero_to_fp32.py --repeats 1 --no-page --output /tmp/quick.json
    python benchmarks/zero_to_fp32.py --render     the table again, from the stored result
    python benchmarks/zero_to_fp32.py --check      exit status 1 when a bar does not hold

Read docs/pages/figures.md for what each row means.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness.report import Report, verdict, versions
from harness.samples import Results, say

HERE = Path(__file__).resolve().parent
WIDTH, LAYERS = 4096, 32  # 2 GiB of parameters, counted as fp32
STAGES = (3, 2)
NBACCEL = "nbaccel"
PEER = "DeepSpeed, safetensors"  # the peer of the ratios: it writes what nbaccel writes
SUBJECTS: dict[str, tuple[str, ...]] = {
    NBACCEL: (),
    PEER: ("--safe_serialization",),
    "DeepSpeed, .bin (its default)": (),
    "nbaccel, 200 MB": ("--max-shard-size", "200MB"),
    "DeepSpeed, safetensors, 200 MB": ("--safe_serialization", "--max_shard_size", "200MB"),
}
FLOOR = "importing torch, and writing as many bytes"  # less than that no converter can do
MEMORY_BAR, TIME_BAR = 0.25, 1.0
MIB = 2**20


# ------------------------------------------------------------------------- the checkpoints


def train_and_save(folder: str, stage: int) -> None:
    """One step of AdamW in bf16, so that the optimizer has all its state; called on every rank."""
    import deepspeed
    import torch
    from torch import nn

    torch.set_num_threads(1)
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage, "sub_group_size": 2 * WIDTH * WIDTH},
    }
    torch.manual_seed(0)
    deepspeed.init_distributed(dist_backend="gloo")
    with deepspeed.zero.Init(config_dict_or_path=config, enabled=stage == 3):
        layers = [nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.bfloat16) for _ in range(LAYERS)]
        model = nn.Sequential(*layers)
    engine, *_ = deepspeed.initialize(model=model, config=config)
    loss = engine(torch.randn(1, WIDTH, dtype=torch.bfloat16)).float().square().mean()
    engine.backward(loss)
    engine.step()
    engine.save_checkpoint(folder)


def make(folder: Path, stage: int) -> None:
    """By two processes, launched from one that ends with them."""
    code = (
        f"import sys; sys.path[:0] = [{str(HERE)!r}]; import zero_to_fp32 as z; "
        "from nbaccel import RunConfig, notebook_launcher; "
        f"notebook_launcher(z.train_and_save, ({str(folder)!r}, {stage}), "
        "config=RunConfig(num_processes=2, device='cpu'))"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, capture_output=True)


# ------------------------------------------------------------------------- taking the figures


def run(command: list[str]) -> tuple[float, float]:
    """Seconds that a command takes, and the peak of its resident memory in MiB.

    A child begins with the peak of the process that forks it: this one stays smaller than any
    subject, so it imports neither torch nor numpy.
    """
    begin = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as child:
        _, status, usage = os.wait4(child.pid, 0)
        seconds = time.perf_counter() - begin
        child.returncode = os.waitstatus_to_exitcode(status)
        errors = child.stderr.read().decode() if child.stderr else ""
    if child.returncode:
        raise RuntimeError(f"{command} ended with {child.returncode}:\n{errors[-2000:]}")
    return seconds, usage.ru_maxrss / 1024


def command(subject: str, checkpoint: Path, out: Path) -> list[str]:
    if subject == FLOOR:
        count = WIDTH * WIDTH * LAYERS * 4 // MIB
        code = f"import torch; f = open({str(out)!r}, 'wb'); b = bytes({MIB})\n"
        return [sys.executable, "-c", f"{code}for _ in range({count}): f.write(b)"]
    options = [str(checkpoint), str(out), *SUBJECTS[subject]]
    if subject.startswith(NBACCEL):
        return [sys.executable, "-m", "nbaccel", "to-fp32", *options]
    return [sys.executable, "-W", "ignore", str(checkpoint / "zero_to_fp32.py"), *options]


def baselines(checkpoint: Path) -> dict[str, list[str]]:
    """The same interpreters with all that a conversion imports, and nothing converted."""
    ours = "import nbaccel.cli, nbaccel.deepspeed.converting"
    return {
        NBACCEL: [sys.executable, "-c", ours],
        PEER: [sys.executable, "-W", "ignore", str(checkpoint / "zero_to_fp32.py"), "--help"],
    }


def measure_one(results: Results, stage: int, subject: str, checkpoint: Path, out: Path) -> None:
    os.sync()  # what others left to be written is not written during this run
    seconds, peak_mib = run(command(subject, checkpoint, out))
    begin = time.perf_counter()
    os.sync()
    lasting = seconds + time.perf_counter() - begin
    for name, value in (("time", seconds), ("on disk", lasting), ("peak", peak_mib)):
        results.of(f"zero{stage} {name}", subject).values.append(value)


def remove(out: Path) -> None:
    out.unlink() if out.is_file() else shutil.rmtree(out, ignore_errors=True)


def measure(results: Results, repeats: int, stages: Sequence[int], place: Path) -> None:
    for stage in stages:
        results.forget(f"zero{stage}")
        checkpoint = place / f"zero-{stage}"
        say(f"training two ranks for a checkpoint of ZeRO-{stage}")
        make(checkpoint, stage)
        size = sum(path.stat().st_size for path in checkpoint.rglob("*.pt"))
        for subject, baseline in baselines(checkpoint).items():
            peaks = [run(baseline)[1] for _ in range(3)]
            results.of(f"zero{stage} baseline", subject).values += peaks
        for turn in range(repeats):
            names = [*SUBJECTS, FLOOR]
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                say(f"ZeRO-{stage}, round {turn + 1} of {repeats}: {name}")
                out = place / name.replace(" ", "-")
                remove(out)
                measure_one(results, stage, name, checkpoint, out)
                if turn or name == FLOOR:  # those of the first round are compared
                    remove(out)
            if turn == 0:
                results.of(f"zero{stage} equal", NBACCEL).facts.append(compared(place))
                results.of(f"zero{stage} size", PEER).values.append(size / MIB)
                for name in names:
                    remove(place / name.replace(" ", "-"))
            results.note(f"zero{stage}", parameters=WIDTH * WIDTH * LAYERS)
            results.save()
        shutil.rmtree(checkpoint)


def compared(place: Path) -> dict[str, Any]:
    """`check_equal` in a process of its own: this one must stay small."""
    code = (
        f"import json, pathlib, sys; sys.path[:0] = [{str(HERE)!r}]; import zero_to_fp32 as z; "
        f"print(json.dumps(z.check_equal(pathlib.Path({str(place)!r}))))"
    )
    command = [sys.executable, "-W", "ignore", "-c", code]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def check_equal(place: Path) -> dict[str, Any]:
    """Every tensor of nbaccel's files beside that of DeepSpeed's, bit by bit."""
    import torch
    from safetensors import safe_open

    def opened(subject: str) -> dict[str, Any]:
        paths = (place / subject.replace(" ", "-")).glob("*.safetensors")
        files = [safe_open(path, "pt") for path in sorted(paths)]
        return {name: file for file in files for name in file.keys()}  # noqa: SIM118 - no dict

    theirs = opened(PEER)
    for subject in (NBACCEL, "nbaccel, 200 MB"):
        mine = opened(subject)
        if mine.keys() != theirs.keys():
            raise AssertionError(f"{subject} has other names: {mine.keys() ^ theirs.keys()}")
        for name, file in mine.items():
            a, b = file.get_tensor(name), theirs[name].get_tensor(name)
            if a.dtype != b.dtype or not torch.equal(a.view(torch.int32), b.view(torch.int32)):
                raise AssertionError(f"{subject} has other numbers in {name}")
    return {"tensors": len(theirs), "files": len(set(opened("nbaccel, 200 MB").values()))}


# ------------------------------------------------------------------------- showing them


def cell(results: Results, measure_name: str, subject: str, digits: int) -> str:
    mine, peer = (results.median(measure_name, name) or math.nan for name in (subject, PEER))
    return f"{mine:,.{digits}f} ({mine / peer:.2f}x)"


def net(results: Results, stage: int, subject: str) -> float:
    baseline = NBACCEL if subject.startswith(NBACCEL) else PEER
    peak = results.median(f"zero{stage} peak", subject) or math.nan
    return peak - (results.median(f"zero{stage} baseline", baseline) or math.nan)


def paired(results: Results, measure_name: str) -> float:
    """Median over rounds of nbaccel's share of the peer's figure in the same round."""
    both = (results.of(measure_name, name).values for name in (NBACCEL, PEER))
    return statistics.median(mine / theirs for mine, theirs in zip(*both, strict=True))


def render(results: Results) -> tuple[str, bool]:
    lines = [
        "| ZeRO, subject | peak, MiB | less imports, MiB | time, s | until on the disk, s |",
        "| --- | --: | --: | --: | --: |",
    ]
    bars: list[str] = []
    taken: list[str] = []
    holds = True
    for stage in STAGES:
        facts = results.sections.get(f"zero{stage}")
        if facts is None:
            continue
        for subject in SUBJECTS:
            over = net(results, stage, subject)
            lines.append(
                f"| {stage}, {subject} | {cell(results, f'zero{stage} peak', subject, 0)} "
                f"| {over:,.0f} ({over / net(results, stage, PEER):.3f}x) "
                f"| {cell(results, f'zero{stage} time', subject, 1)} "
                f"| {cell(results, f'zero{stage} on disk', subject, 1)} |"
            )
        if results.median(f"zero{stage} time", FLOOR):
            lines.append(
                f"| {stage}, {FLOOR} | | | {cell(results, f'zero{stage} time', FLOOR, 1)} "
                f"| {cell(results, f'zero{stage} on disk', FLOOR, 1)} |"
            )
        for what, bar in (("peak", MEMORY_BAR), ("time", TIME_BAR)):
            found = paired(results, f"zero{stage} {what}")
            holds &= found <= bar
            bars.append(
                f"- {verdict(found <= bar)} ZeRO-{stage}: {what} at most {bar} of "
                f"DeepSpeed's, found {found:.3f}"
            )
        equal = results.of(f"zero{stage} equal", NBACCEL).facts[-1]
        size = results.median(f"zero{stage} size", PEER) or math.nan
        bars.append(
            f"- pass ZeRO-{stage}: {equal['tensors']} tensors bit by bit as DeepSpeed's, out of a "
            f"checkpoint of {size / 1024:.1f} GiB"
        )
        taken.append(provenance(results, stage, facts))
    return "\n".join([*lines, "", *bars, "", *taken]), holds


def provenance(results: Results, stage: int, facts: dict[str, Any]) -> str:
    rounds = len(results.of(f"zero{stage} peak", NBACCEL).values)
    return (
        f"ZeRO-{stage}: taken {facts['taken']}, {rounds} rounds, {facts['parameters']:,} "
        f"parameters; load {facts['load']}; {facts['num_cores']} cores, {facts['memory_gib']} GiB; "
        + versions(facts)
        + ".\n"
    )


REPORT = Report("zero_to_fp32", render, mark="zero")


def main() -> int:
    parser = REPORT.parser(__doc__)
    parser.add_argument("--repeats", type=int, default=5, metavar="N")
    parser.add_argument("--stages", type=int, nargs="+", default=STAGES, choices=STAGES)
    parser.add_argument("--place", type=Path, help="folder on a disk with 20 GiB free")
    options = parser.parse_args()

    def measured(results: Results) -> None:
        with tempfile.TemporaryDirectory(dir=options.place) as place:
            measure(results, options.repeats, options.stages, Path(place))

    return REPORT.run(options, measured)


if __name__ == "__main__":
    sys.exit(main())
