"""(d) Stop, (e) a killed worker, (f) an error in one rank: how long, and what the cell shows.

Each takes a fresh kernel, because some subjects cannot launch again after it.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from harness.namespace import Remote, SessionLostError
from harness.samples import Results, Samples, say
from harness.subjects import Subject, kernel_for

TIMEOUT_S = 75.0
STOPS = {"collective": "stuck_in_collective", "receive": "all_stuck_in_receive", "sleep": "asleep"}
RAISE_LINE = 'raise ValueError("boom")'
ROOT_CAUSE = re.compile(r"Root Cause.*?\brank\s*:\s*(\d+)", re.DOTALL)
BLAMED = re.compile(r"\b(?:rank|process|worker)\s*[:#=]?\s*(\d+)", re.IGNORECASE)


def run(results: Results, subjects: list[Subject], num_repeats: int, sections: str) -> None:
    for turn in range(num_repeats):
        for subject in subjects:
            say(f"({sections}) round {turn + 1} of {num_repeats}: {subject.name}")
            if "d" in sections:
                for where, body in STOPS.items():
                    _guard(_stop, results.of(f"d {where}", subject.name), subject, body)
            for section, body in (("e killed", "killed"), ("f error", "boom")):
                if section[0] in sections:
                    _guard(_mishap, results.of(section, subject.name), subject, body)


def _guard(measure: Any, samples: Samples, subject: Subject, body: str) -> None:
    try:
        with kernel_for(subject) as remote:
            measure(remote, samples, subject, body)
    except SessionLostError as lost:
        samples.errors.append(str(lost)[-300:])
        say(f"{subject.name}, {body}: {str(lost)[-300:]}")


def worker_pids(folder: str) -> list[int]:
    return [int(path.read_text()) for path in Path(folder).glob("pid-*")]


def survivors(remote: Remote, folder: str) -> dict[str, Any]:
    pids = worker_pids(folder)
    return remote.ask("survivors", answer_in_s=30, pids=pids, timeout_s=2.0)


def _stop(remote: Remote, samples: Samples, subject: Subject, body: str) -> None:
    folder = remote.new_folder()
    answer = remote.ask(
        "run_and_interrupt",
        answer_in_s=TIMEOUT_S + 30,
        code=subject.call_of(body, folder),
        timeout_s=TIMEOUT_S,
        expect=["HERE 0", "HERE 1"],
        grace_s=0.7,
    )
    if answer["sent_at"] is None:
        raise SessionLostError("the workers' lines did not appear: " + answer["text"][-300:])
    left = survivors(remote, folder)
    samples.facts.append(
        {
            "num_left": len(left["left"]),
            "num_left_at_once": len(left["at_once"]),
            "processes": left["processes"],
            "error_name": answer["error_name"],
            "num_lines": len(answer["text"].splitlines()),
        }
    )
    if answer["ended_at"] is None:
        samples.hangs += 1
    else:
        samples.values.append(answer["ended_at"] - answer["sent_at"])


def _mishap(remote: Remote, samples: Samples, subject: Subject, body: str) -> None:
    folder = remote.new_folder()
    answer = remote.run(subject.call_of(body, folder), TIMEOUT_S)
    moment = Path(folder, "at")
    if not moment.exists():
        raise SessionLostError("rank 1 did not come to its mishap: " + answer["text"][-300:])
    left = survivors(remote, folder)
    samples.facts.append(
        {
            "num_lines": len(answer["text"].splitlines()),
            "names_signal": "SIGKILL" in answer["text"],
            "has_own_line": RAISE_LINE in answer["text"],
            "blamed_rank": blamed_rank(answer["error"]),
            "error_name": answer["error_name"],
            "num_left": len(left["left"]),
            "text": answer["text"] if not samples.facts else "",
        }
    )
    if answer["ended_at"] is None:
        samples.hangs += 1
    else:
        samples.values.append(answer["ended_at"] - float(moment.read_text()))


def blamed_rank(error: str) -> int | None:
    """The rank that the error names as the cause: in its root cause, or else the first named.

    The lines of source that a traceback quotes are not what it says, so indented ones do not count.
    """
    said = "\n".join(line for line in error.splitlines() if not re.match(r"\s*-*>?\s*\d+ ", line))
    found = ROOT_CAUSE.search(said) or BLAMED.search(said)
    return int(found[1]) if found else None
