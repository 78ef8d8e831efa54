"""(a) From the call to its return: two workers with a gloo group, timed inside the kernel.

In a round every subject has a kernel of its own, and a step is taken by all of them in turn before
the next one begins, so that the machine's noise hits all alike. A step that hangs costs its kernel;
the subject gets a new one for the next step.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass

from harness.namespace import Remote, SessionLostError
from harness.samples import Results, Samples, say
from harness.subjects import Subject, bodies, kernel_for, launcher_cell

HANG_AFTER_S = 20.0
NUM_LATER = 2
GIVE_UP_AFTER = 3


@dataclass(frozen=True)
class Case:
    name: str
    call: str
    before: str = ""
    after: str = ""


CASES = (
    Case("noop", "launch(noop)"),
    Case(
        "model",
        "launch(touch_model, (model,))",
        before="model = build_model()",
        after="model = None",
    ),
    Case("adamw", "launch(adamw_step)"),
    Case("matmul", "launch(matmul)"),
)
TIMED = """
started = time.perf_counter()
{call}
report(seconds=time.perf_counter() - started)
"""


class Bench:
    """One subject's kernel in one round, replaced when it is lost."""

    def __init__(self, subject: Subject, is_used: bool) -> None:
        self.subject = subject
        self.is_used = is_used
        self._stack = ExitStack()
        self.remote: Remote | None = None

    def open(self) -> Remote:
        if self.remote is None:
            kernel = kernel_for(self.subject, is_used=self.is_used)
            self.remote = self._stack.enter_context(kernel)
        return self.remote

    def close(self) -> None:
        self.remote = None
        self._stack.close()

    def prepare(self, case: Case) -> None:
        remote = self.open()
        if case.before:
            remote.must_run(case.before)

    def step(self, case: Case, samples: Samples) -> bool:
        """Time one launch; false when nothing more can be asked of this kernel in this case."""
        if self.remote is None:
            return False
        try:
            take(self.remote, case.call, samples)
        except SessionLostError as lost:
            if str(lost) != "hangs":
                samples.errors.append(str(lost)[-200:])
            self.close()
            return False
        return True

    def clean(self, case: Case) -> None:
        if self.remote is not None and case.after:
            self.remote.must_run(case.after)


def take(
    remote: Remote,
    call: str,
    samples: Samples,
    prelude: str = "",
    hang_after_s: float = HANG_AFTER_S,
) -> None:
    """One timed call in the kernel; what comes before it in the same cell is not timed."""
    answer = remote.run(prelude + TIMED.format(call=call), hang_after_s)
    if answer["ended_at"] is None:
        samples.hangs += 1
        raise SessionLostError("hangs")
    if answer["error"]:
        lines = [line for line in answer["error"].splitlines() if line.strip()]
        samples.errors.append(lines[-1][:200] if lines else answer["error_name"])
        return
    samples.values.append(answer["values"]["seconds"])


def measure(case: str, when: str, state: str) -> str:
    return f"a {case} {when} {state}"


def run(results: Results, subjects: list[Subject], num_repeats: int) -> None:
    for turn in range(num_repeats):
        for state in ("fresh", "used"):
            say(f"(a) round {turn + 1} of {num_repeats}, {state} kernels")
            benches = [Bench(subject, state == "used") for subject in subjects]
            offset = turn % len(benches)
            try:
                _round(results, benches[offset:] + benches[:offset], state)
            finally:
                for bench in benches:
                    bench.close()
        for subject in subjects:
            if subject.is_ours:
                _just_imported(results, subject)


def _round(results: Results, benches: list[Bench], state: str) -> None:
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(Bench.open, benches))
    for case in CASES:
        first = measure(case.name, "first", state)
        later = measure(case.name, "later", state)
        active = [b for b in benches if not _is_hopeless(results.of(first, b.subject.name))]
        for bench in active:
            bench.prepare(case)
        active = [b for b in active if b.step(case, results.of(first, b.subject.name))]
        for _ in range(NUM_LATER):
            active = [b for b in active if b.step(case, results.of(later, b.subject.name))]
        for bench in benches:
            bench.clean(case)


def _is_hopeless(samples: Samples) -> bool:
    return samples.hangs >= GIVE_UP_AFTER and samples.hangs == samples.num_tries


def _just_imported(results: Results, subject: Subject) -> None:
    """The launch comes with the import, while nbaccel still makes itself ready."""
    with Remote() as remote:
        remote.must_run(bodies())
        remote.settle()
        samples = results.of(measure("noop", "first", "just-imported"), subject.name)
        try:
            take(remote, "launch(noop)", samples, prelude=launcher_cell(subject))
        except SessionLostError:
            say(f"{subject.name} hangs right after the import")
