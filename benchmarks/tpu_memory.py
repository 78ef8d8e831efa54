"""Host memory while workers move a 1 GiB model to their devices: nbaccel, and torch_xla's wrapper.

    python3 -m tests.lanes torch_xla --keep       an environment that has torch_xla
    .lanes/torch_xla/environment/bin/python benchmarks/tpu_memory.py
    python benchmarks/tpu_memory.py --render      the table again, from the stored result
    python benchmarks/tpu_memory.py --check       exit status 1 when a bar does not hold

It runs without a TPU (PJRT_DEVICE=CPU). Read docs/pages/figures.md for what each row means.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
import uuid
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent)]

from harness.processes import TAG, measure_memory  # noqa: E402
from harness.report import Report, verdict, versions  # noqa: E402
from harness.samples import Results, say  # noqa: E402

OURS, PEER = "nbaccel", "MpModelWrapper"
SUBJECTS = (OURS, PEER)
WORKERS, LAYERS, WIDTH = 4, 16, 4096
MODEL_BYTES = LAYERS * WIDTH * WIDTH * 4
ROUNDS = 2
WITHIN = 1.05
TIMEOUT_S = 900.0
REST_S = 3.0
PAUSE_S = 0.1
MIB = 2**20


# ---------------------------------------------------------------- what is measured
def build_model() -> Any:
    from torch import nn

    with_bias = False
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=with_bias) for _ in range(LAYERS)))


def move_by_nbaccel(model: Any) -> None:
    """What a worker of nbaccel does, told that memory is short."""
    from nbaccel import Accelerator
    from nbaccel.devices.tpu import device as device_module

    # As on a small host, on which workers have to wait for each other.
    device_module.free_host_bytes = lambda: 0
    accelerator = Accelerator()
    accelerator.prepare(model)
    accelerator.wait_for_everyone()
    time.sleep(REST_S)  # all have the model: a moment that is weighed


def launch_by_nbaccel(model: Any) -> None:
    import nbaccel

    config = nbaccel.RunConfig(device="tpu", num_processes=WORKERS)
    # As with the wrapper, no weights come home: that takes a tensor more for a moment, which some
    # of the samples would catch and some not.
    nbaccel.notebook_launcher(move_by_nbaccel, (model,), config=config, share_back=False)


def move_by_wrapper(wrapper: Any, barrier: Any) -> None:
    import torch_xla

    wrapper.to(torch_xla.device())
    torch_xla.sync(wait=True)
    barrier.wait(TIMEOUT_S)
    time.sleep(REST_S)  # as above
    os._exit(0)


def launch_by_wrapper(model: Any) -> None:
    """Forks as those of xmp.spawn, which starts one process alone where there is no TPU."""
    import multiprocessing

    from torch_xla.distributed.xla_multiprocessing import MpModelWrapper

    forking = multiprocessing.get_context("fork")
    wrapper, barrier = MpModelWrapper(model), forking.Barrier(WORKERS)
    workers = [
        forking.Process(target=move_by_wrapper, args=(wrapper, barrier)) for _ in range(WORKERS)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    if any(worker.exitcode for worker in workers):
        raise RuntimeError(f"workers ended with {[worker.exitcode for worker in workers]}")


def subject(name: str) -> None:
    """The notebook's process: tells where it is, and goes on when it is told to."""
    import torch
    import torch_xla

    if name == OURS:
        import nbaccel
        from nbaccel.workers.template import template_for

        template_for("tpu").start()
        nbaccel.notebook_launcher  # noqa: B018 - its imports are a part of what is idle
    assert torch_xla is not None
    _tell("idle")
    torch.set_num_threads(1)
    model = build_model()
    _tell("has the model")
    (launch_by_nbaccel if name == OURS else launch_by_wrapper)(model)
    _tell("done")


def _tell(what: str) -> None:
    print(f"subject: {what}", flush=True)
    sys.stdin.readline()


# ---------------------------------------------------------------- how it is measured
class Peak(threading.Thread):
    """The most memory of a session that was seen: PSS of all of its processes."""

    def __init__(self, tag: str) -> None:
        super().__init__(daemon=True)
        self.tag, self.most, self.over = tag, 0, False

    def run(self) -> None:
        while not self.over:
            self.most = max(self.most, weigh(self.tag))
            time.sleep(PAUSE_S)  # weighing takes processor time from what is weighed


def weigh(tag: str) -> int:
    return sum(int(str(row["Pss"])) for row in measure_memory(tag))


def weigh_at_rest(tag: str) -> int:
    """Bytes of a session that has done all its imports, those of a template included."""
    before = 0
    while True:
        time.sleep(REST_S)
        now = weigh(tag)
        if abs(now - before) < MIB:
            return now
        before = now


def take(name: str) -> dict[str, int]:
    """Bytes of a fresh session: idle, with the model, and at most."""
    tag = uuid.uuid4().hex
    environ = {**os.environ, TAG: tag, "PJRT_DEVICE": "CPU", "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        [sys.executable, __file__, "--subject", name],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=environ,
        text=True,
    ) as process:
        killer = threading.Timer(TIMEOUT_S, process.kill)
        killer.start()
        try:
            _wait(process, "idle")
            idle = weigh_at_rest(tag)
            _go_on(process)
            _wait(process, "has the model")
            with_model = weigh(tag)
            peak = Peak(tag)
            peak.start()
            _go_on(process)
            _wait(process, "done")
            peak.over = True
            peak.join()
            _go_on(process)
        finally:
            killer.cancel()
    return {"idle": idle, "with the model": with_model, "peak": peak.most}


def _wait(process: subprocess.Popen[str], what: str) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        if line == f"subject: {what}\n":
            return
    raise RuntimeError(f"the session ended before it was: {what}")


def _go_on(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def measure(results: Results) -> None:
    results.forget("tpu")
    for number in range(ROUNDS):
        for name in SUBJECTS[:: 1 if number % 2 == 0 else -1]:
            say(f"round {number + 1} of {ROUNDS}: {name}")
            found = take(name)
            over = found["peak"] - found["idle"] - MODEL_BYTES
            results.of("tpu peak over idle and model", name).values.append(over)
            for moment, size in found.items():
                results.of(f"tpu {moment}", name).values.append(size)
    results.note("tpu", workers=WORKERS, model_bytes=MODEL_BYTES, rounds=ROUNDS)
    results.save()


# ---------------------------------------------------------------- the table
def render(results: Results) -> tuple[str, bool]:
    rows = {
        "peak over idle and model": "peak, over the idle session and the model",
        "peak": "peak, the whole session",
        "idle": "the idle session",
    }
    lines = [f"| PSS, MiB | {OURS} | {PEER} | ratio | bar |", "| --- | --: | --: | --: | --- |"]
    holds = True
    for moment, title in rows.items():
        ours, theirs = (results.median(f"tpu {moment}", name) or 0.0 for name in SUBJECTS)
        ratio = ours / (theirs or 1.0)
        is_judged = moment == "peak over idle and model"
        holds &= not is_judged or 0 < ratio <= WITHIN
        told = verdict(ratio <= WITHIN) if is_judged else ""
        lines.append(
            f"| {title} | {ours / MIB:,.0f} | {theirs / MIB:,.0f} | {ratio:.2f} | {told} |"
        )
    facts = results.sections["tpu"]
    lines += [
        "",
        f"Bar: at most {WITHIN:.2f}. Medians of {facts['rounds']} rounds, {facts['workers']} "
        f"workers. Taken {facts['taken']}, load {facts['load']}; "
        + versions(facts, ("python", "torch", "torch_xla"))
        + ".",
    ]
    return "\n".join(lines), holds


REPORT = Report("tpu_memory", render, mark="tpu_memory")


def main() -> int:
    if sys.argv[1:2] == ["--subject"]:
        subject(sys.argv[2])
        return 0
    return REPORT.run(REPORT.parser(__doc__).parse_args(), measure)


if __name__ == "__main__":
    sys.exit(main())
