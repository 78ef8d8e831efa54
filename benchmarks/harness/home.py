"""(c) What it costs that the trained weights come home, in copies of the same bytes.

Peers leave the notebook's model as it was, so only nbaccel is timed: a launch that changes all
weights of a 1 GiB model and brings them home, less the same launch with `share_back=False`.
"""

from __future__ import annotations

from harness.namespace import Remote, SessionLostError
from harness.samples import Results, say
from harness.subjects import Subject, kernel_for

# The first optimizer imports torch._dynamo, in every forked worker anew. That is (a)'s matter:
# here the kernel has it already, so that its seconds do not drown the difference.
PREPARE = """
import torch._dynamo

model = build_model()
source = torch.ones(2**28)
warm = torch.zeros(2**28)
launch(touch_model, (model,))


def first_element():
    return next(model.parameters()).view(-1)[0].item()


def copy(to_warm):
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    if to_warm:
        warm.fill_(0)  # a fork since the last time has made each page pay at its next write
    started = time.perf_counter()
    if to_warm:
        warm.copy_(source)
    else:
        torch.empty_like(source).copy_(source)
    seconds = time.perf_counter() - started
    torch.set_num_threads(num_threads)
    return seconds


def change(body, share_back):
    before = first_element()
    started = time.perf_counter()
    launch(body, (model,), share_back=share_back)
    seconds = time.perf_counter() - started
    came_home = first_element() != before
    if came_home != share_back:
        raise RuntimeError(f"share_back={share_back}, but the weights say otherwise")
    return seconds
"""
STEPS = {
    "sgd kept": "change(change_by_sgd, False)",
    "sgd home": "change(change_by_sgd, True)",
    "hand kept": "change(change_by_hand, False)",
    "hand home": "change(change_by_hand, True)",
    "memcpy warm": "copy(True)",
    "memcpy fresh": "copy(False)",
}


def run(results: Results, subjects: list[Subject], num_repeats: int) -> None:
    for subject in (subject for subject in subjects if subject.is_ours):
        say(f"(c) {subject.name}")
        try:
            with kernel_for(subject) as remote:
                remote.must_run(PREPARE)
                for turn in range(-1, num_repeats):
                    _round(results, remote, subject, turn)
        except SessionLostError as lost:
            results.of("c sgd home", subject.name).errors.append(str(lost)[-300:])
            say(f"{subject.name}: {str(lost)[-500:]}")


def _round(results: Results, remote: Remote, subject: Subject, turn: int) -> None:
    """All steps once, every other time backwards. Turn -1 only warms up."""
    steps = list(STEPS.items())
    for step, call in reversed(steps) if turn % 2 else steps:
        answer = remote.must_run(f"report(seconds={call})", timeout_s=60)
        if turn >= 0:
            results.of(f"c {step}", subject.name).values.append(answer["values"]["seconds"])


def in_copies(results: Results, subject: str, how: str, copy: str = "warm") -> float | None:
    """How many memcpys the way home takes: difference of the medians, by the median copy."""
    home = results.median(f"c {how} home", subject)
    kept = results.median(f"c {how} kept", subject)
    one = results.median(f"c memcpy {copy}", subject)
    if home is None or kept is None or not one:
        return None
    return (home - kept) / one
