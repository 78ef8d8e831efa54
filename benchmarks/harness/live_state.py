"""(c) A model of 1 GiB goes to two workers, goes again unchanged, and comes back trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from harness import live
from harness.live import OURS, Live
from harness.namespace import Remote, SessionLostError
from harness.samples import Results

SIZE = 2**30
# 16 layers: ipyparallel sends arrays without a copy into a pickle only in dicts of fewer than 64.
MODEL = """
from torch import nn

_layers = []
for _ in range(16):
    _layers.append(nn.utils.skip_init(nn.Linear, 4096, 4096, bias=False))
    nn.init.constant_(_layers[-1].weight, 1 / 4096)
model = nn.Sequential(*_layers)
del _layers


def _first():
    return next(model.parameters()).detach().view(-1)[0].item()


def _sent():
    for line in open("/proc/net/dev"):
        if line.strip().startswith("lo:"):
            return int(line.split()[9])
    return 0


def _timed(work):
    before, began = _sent(), _time.perf_counter()
    copied = work()
    _report(seconds=_time.perf_counter() - began, copied=copied, sent=_sent() - before)
"""
STEP = """
import time
from pathlib import Path
import torch
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
model(torch.ones(1, 4096)).sum().backward()
optimizer.step()
{keep}
Path({folder!r}, str(time.monotonic_ns())).touch()
"""
BY_HAND = """
import time
from pathlib import Path
import torch
with torch.no_grad():
    for p in model.parameters():
        p.add_(1.0)
Path({folder!r}, str(time.monotonic_ns())).touch()
"""
# To new memory, as what a worker writes and what a launch's price is measured in.
COPY = """
import torch
_threads = torch.get_num_threads()
torch.set_num_threads(1)
_source = torch.ones(2**28)
_began = _time.perf_counter()
torch.empty_like(_source).copy_(_source)
_seconds = _time.perf_counter() - _began
torch.set_num_threads(_threads)
del _source
_report(seconds=_seconds)
"""
SETUP = {
    # The same workers as with the magic, by the name that returns how many bytes were copied.
    OURS: "import nbaccel\npool = nbaccel.Pool(2)\npool.start()",
    "ipyparallel": """
state = {name: value.numpy() for name, value in model.state_dict().items()}


def _take(arrays):
    model.load_state_dict({name: torch.from_numpy(array.copy()) for name, array in arrays.items()})
""",
}
PUSH = {
    OURS: '_timed(lambda: pool.push("model"))',
    "ipyparallel": '_timed(lambda: view.push({"state": state}, block=True) and None)',
}
READ = "next(model.parameters()).view(-1)[0].item()"
# What the pool itself finds to send for a cell.
COUNT = """
_prepare = pool._namespace_sync.prepare


def _counted(code):
    copied = []

    def prepare(*args, **options):
        shipment = _prepare(*args, **options)
        copied.append(shipment.nbytes if shipment is not None else 0)
        return shipment

    pool._namespace_sync.prepare = prepare
    try:
        pool.run(code)
    finally:
        pool._namespace_sync.prepare = _prepare
    (found,) = copied
    return found
"""
# The engine's copy is read-only: what is trained there has to be built from it.
BUILD = """
import torch
from torch import nn
layers = [nn.utils.skip_init(nn.Linear, 4096, 4096, bias=False) for _ in range(16)]
model = nn.Sequential(*layers)
model.load_state_dict({name: torch.from_numpy(a.copy()) for name, a in state.items()}, assign=True)
del state
"""
KEEP = {
    OURS: "",
    "ipyparallel": "trained = {n: value.numpy() for n, value in model.state_dict().items()}",
}


def measure(results: Results, subject: Live, _measure: str) -> None:
    with live.kernel_for(subject, prepare=live.WITH_TORCH + MODEL) as remote:
        for code in (*subject.start, SETUP[subject.name]):
            remote.must_run(code)
        remote.settle()
        for name in ("c push", "c again"):
            _note(results, name, subject, remote.must_run(PUSH[subject.name]))
        if subject.name == OURS:
            _ours(results, subject, remote)
        else:
            _theirs(results, subject, remote)


def _note(results: Results, name: str, subject: Live, answer: dict[str, Any]) -> None:
    values = answer["values"]
    samples = results.of(name, subject.name)
    samples.values.append(values["seconds"])
    copied = values["copied"]
    samples.facts.append({"nbytes": values["sent"] if copied is None else copied})


def _ours(results: Results, subject: Live, remote: Remote) -> None:
    """Cells that name the model send it by themselves; its weights come home by themselves."""
    remote.must_run(f"_ = pool.run({READ!r})")
    remote.must_run(COUNT)
    _note(results, "c read", subject, remote.must_run(f"_timed(lambda: _counted({READ!r}))"))
    for measure, body in (("c home", STEP), ("c hand", BY_HAND)):
        _home(results, subject, remote, measure, body)


def _home(results: Results, subject: Live, remote: Remote, measure: str, body: str) -> None:
    """From the workers' last line to the end of the cell, and a copy of as many bytes."""
    folder = remote.new_folder()
    step = body.format(keep="", folder=folder)
    cell = f"_was = _first()\npool.run({step!r})\n_ended = _time.monotonic_ns()\n"
    answer = remote.must_run(cell + "_report(ended=_ended, trained=_first() != _was)")
    took_ns = answer["values"]["ended"] - _last(folder)
    _note_home(results, subject, answer, took_ns, measure)
    remote.settle()
    copied = remote.must_run(COPY)["values"]["seconds"]
    results.of(f"{measure}, copies", subject.name).values.append(took_ns / 1e9 / copied)


def _theirs(results: Results, subject: Live, remote: Remote) -> None:
    remote.must_run(subject.cell(BUILD))
    folder = remote.new_folder()
    step = STEP.format(keep=KEEP[subject.name], folder=folder)
    remote.must_run(subject.cell(step))
    cell = (
        '_was, _began = _first(), _time.monotonic_ns()\n_take(rc[0].pull("trained", block=True))\n'
    )
    cell += "_took = _time.monotonic_ns() - _began\n_report(took=_took, trained=_first() != _was)"
    answer = remote.must_run(cell)
    _note_home(results, subject, answer, answer["values"]["took"])


def _note_home(
    results: Results, subject: Live, answer: dict[str, Any], took_ns: int, measure: str = "c home"
) -> None:
    if not answer["values"]["trained"]:
        raise SessionLostError("the weights did not come home")
    results.of(measure, subject.name).values.append(took_ns / 1e9)


def _last(folder: str) -> int:
    """When the last worker was through with its step."""
    moments = [int(path.name) for path in Path(folder).iterdir()]
    if len(moments) != live.NUM_WORKERS:
        raise SessionLostError(f"{len(moments)} workers have trained, not {live.NUM_WORKERS}")
    return max(moments)
