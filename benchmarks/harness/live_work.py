"""(a) start, (b) round trip, (c) 1 GiB there and back, (d) at rest, (e) an error, (f) a kill.

Subjects take turns. (a), (d) and (b) need a kernel whose workers do nothing else, and share one.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness import live, live_state
from harness.live import Live
from harness.namespace import Remote, SessionLostError, can_isolate
from harness.samples import Results, Samples, say

NUM_WARM_UP, NUM_TRIPS, NUM_CELLS = 20, 60, 25
IDLE_S = 8.0
# What took this long each of these times is not tried again: a limit of the subject, or a hang.
SLOW_S, MANY = 20.0, 3
ENDINGS = {"e": "e error", "f": "f kill"}
BODIES = {"e error": 'raise ValueError("boom")', "f kill": "os.kill(os.getpid(), 9)"}
SAYS = {"e error": "ValueError: boom", "f kill": "SIGKILL"}
GROUP = """import os, time
from pathlib import Path
import torch
import torch.distributed as dist
{join}
dist.all_reduce(torch.ones(1))
print(f"joined {{rank}}")"""
MISHAP = """if rank == 1:
    time.sleep(0.5)
    Path({folder!r}, "at").write_text(str(time.monotonic()))
    {body}
dist.all_reduce(torch.ones(1))"""


def run(results: Results, subjects: list[Live], num_repeats: int, sections: str) -> None:
    for turn in range(num_repeats):
        for subject in subjects:
            say(f"round {turn + 1} of {num_repeats}: {subject.name}")
            _round(results, subject, sections)
            for section in sections:
                results.note(section, repeats=turn + 1, isolated=can_isolate())
            results.save()  # a run that is broken off keeps what it has


def _round(results: Results, subject: Live, sections: str) -> None:
    is_ours = subject.name == live.OURS
    if set(sections) & set("adb"):
        # One that is slow to start is no longer asked to be fast: the other two go on.
        asks = "a" in sections and not _is_hopeless(results.of("a warm", subject.name))
        _guard(_standing, results, subject, "a warm", sections=sections, asks=asks)
    if "a" in sections and is_ours:
        _guard(_start, results, subject, "a cold", load=False)
        _guard(_start, results, subject, "a bare", prepare=live.TOOLS)
    if "c" in sections and subject.offers_state:
        _guard(live_state.measure, results, subject, "c push")
    for section, measure in ENDINGS.items():
        if section in sections and not _is_hopeless(results.of(measure, subject.name)):
            _guard(_ending, results, subject, measure)


def _guard(
    work: Callable[..., None], results: Results, subject: Live, measure: str, **options: Any
) -> None:
    """Failures are results, too."""
    try:
        work(results, subject, measure, **options)
    except SessionLostError as lost:
        results.of(measure, subject.name).errors.append(str(lost)[-300:])
        say(f"{subject.name}, ({measure}): {str(lost)[-500:]}")


def _is_hopeless(samples: Samples) -> bool:
    return samples.hangs + sum(seconds > SLOW_S for seconds in samples.values) >= MANY


# ---- (a), (d), (b)


def _standing(results: Results, subject: Live, measure: str, *, sections: str, asks: bool) -> None:
    """The start, then what the workers take at rest, then trips to them: one kernel."""
    with (live.kernel_for if asks else live.workers_of)(subject) as remote:
        if asks:
            results.of(measure, subject.name).values.append(live.ask_for_workers(remote, subject))
            for code in subject.local:
                remote.must_run(code)
            remote.settle()
        if "d" in sections:
            _rest(results, subject, remote)
        if "b" in sections:
            _trips(results, subject, remote)


def _start(
    results: Results,
    subject: Live,
    measure: str,
    *,
    prepare: str = live.WITH_TORCH,
    load: bool = True,
) -> None:
    with live.kernel_for(subject, prepare=prepare, load=load) as remote:
        # Without a load before, the extension comes with the request: no template has a head start.
        cells = subject.request() if load else [subject.load, *subject.request()]
        seconds = live.ask_for_workers(remote, subject, cells)
    results.of(measure, subject.name).values.append(seconds)


def _rest(results: Results, subject: Live, remote: Remote) -> None:
    used = remote.ask("idle_cpu", answer_in_s=IDLE_S + 30, seconds=IDLE_S)
    others = results.of("d others", subject.name)
    others.values.append(used["others_s_per_min"])
    others.facts.append({"num_processes": used["num_others"]})
    results.of("d kernel", subject.name).values.append(used["kernel_s_per_min"])


def _trips(results: Results, subject: Live, remote: Remote) -> None:
    _cells(results.of("b cell", subject.name), remote, subject.cell("1+1"))
    if subject.magic is None:
        return
    answer: dict[str, Any] = {}
    for measure, code in (("b trip", "_ = 1+1"), ("b shown", "1+1")):
        for count in (NUM_WARM_UP, NUM_TRIPS):
            answer = remote.must_run(f"_time_trips({count}, {subject.magic!r}, {code!r})", 60)
        results.of(measure, subject.name).values += answer["values"]["seconds"]
    _cells(results.of("b plain", subject.name), remote, "1+1")


def _cells(samples: Samples, remote: Remote, code: str) -> None:
    """Whole cells, as who sent them sees it; the first ones warm up."""
    for number in range(-5, NUM_CELLS):
        answer = remote.must_run(code, 40)
        if number >= 0:
            samples.values.append(answer["ended_at"] - answer["started_at"])


# ---- (e), (f)


def _ending(results: Results, subject: Live, measure: str) -> None:
    samples = results.of(measure, subject.name)
    with live.workers_of(subject) as remote:
        for cell in subject.group:
            remote.must_run(cell)
        joined = remote.must_run(subject.cell(GROUP.format(join=subject.join)), 40)
        if "joined" not in joined["text"]:
            raise SessionLostError("no process group: " + joined["text"][-300:])
        folder = remote.new_folder()
        code = MISHAP.format(folder=folder, body=BODIES[measure])
        answer = remote.run(subject.cell(code), subject.limit_s)
        moment = Path(folder, "at")
        if not moment.exists():
            raise SessionLostError("rank 1 did not come to its mishap: " + answer["text"][-300:])
        samples.facts.append(_told(subject, measure, answer))
        if answer["ended_at"] is None:
            samples.hangs += 1
            return
        samples.values.append(answer["ended_at"] - float(moment.read_text()))
        samples.facts[-1]["next"] = _answers(remote, subject)


def _told(subject: Live, measure: str, answer: dict[str, Any]) -> dict[str, Any]:
    text = answer["text"]
    found = re.search(subject.culprit, text)
    blamed = next((group for group in found.groups() if group), None) if found else None
    return {
        "text": text,
        "blamed_rank": int(blamed) if blamed is not None else None,
        "says_why": SAYS[measure] in text,
        "num_lines": len(text.splitlines()),
    }


def _answers(remote: Remote, subject: Live) -> bool:
    """Whether the next cell is answered by two workers, the old ones or new ones."""
    return live.did_answer(remote.run(subject.cell(live.FIRST), subject.limit_s)["text"])
