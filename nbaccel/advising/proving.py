"""Proof by launching: real steps in worker processes, and what their ends mean."""

from __future__ import annotations

import re
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from nbaccel import env
from nbaccel.advising.trial import Progress, Search, Trial, run_trial
from nbaccel.deepspeed.advisor.advice import Measured, Rung
from nbaccel.deepspeed.advisor.walking import Walk
from nbaccel.deepspeed.decided import nearest_folder
from nbaccel.errors import WorkerFailed
from nbaccel.launchers import notebook_launcher
from nbaccel.plan import Plan
from nbaccel.strategies.gradient_checkpointing import checkpoints_gradients
from nbaccel.units import format_bytes

__all__ = ["Prover", "is_out_of_memory"]

_MOST_TIMES = 2**10
"""How many times the first batch is the largest that is tried."""
_SAMPLES_PER_STEP = 2
"""Forward passes that are accumulated in a trial: the second shows what accumulation keeps."""
_OUT_OF_MEMORY = re.compile(
    r"out of memory|(can't|cannot|unable to|could not) allocate|not enough memory"
    r"|CUBLAS_STATUS_ALLOC_FAILED|std::bad_alloc|can't start new thread",
    re.IGNORECASE,
)


def is_out_of_memory(error: WorkerFailed) -> bool:
    """Whether a launch failed for want of memory: on a device, on the host, or by a kill.

    Args:
        error: What the launch raised.

    Returns:
        True where any rank says so: the others only lost their connection to it.
    """
    return any(_is_want_of_memory(record) for record in error.failures)


def _is_want_of_memory(record: Any) -> bool:
    if record.exit_status is not None:
        killed = record.exit_status == -signal.SIGKILL
        return killed or bool(_OUT_OF_MEMORY.search(record.evidence))
    raised = record.raised
    while raised is not None:
        if raised.type_name.endswith("MemoryError") or _OUT_OF_MEMORY.search(raised.message):
            return True
        raised = raised.cause
    return False


@dataclass(kw_only=True, slots=True)
class Prover:
    """Tries rungs with real steps, as often as it may.

    Args:
        walk: The walk whose rungs are tried.
        plan: Which processes there will be.
        max_trials: How many launches are left.
        timeout_s: How long one of them may take.
    """

    walk: Walk
    plan: Plan
    max_trials: int
    timeout_s: float

    def prove(self, rung: Rung) -> Rung:
        """Try a rung with one step.

        Args:
            rung: One that fits by estimate.

        Returns:
            The rung with what was measured: ``works``, or ``out of memory`` with the reason.

        Raises:
            WorkerFailed: It failed for another reason, which would meet every rung.
        """
        if self.max_trials < 1:
            reason = f"{rung.reason} It was not tried: no launch of max_trials was left."
            return replace(rung, verdict="not tried", reason=reason)
        progress, error = self._launch(rung, None)
        measured = Measured(device_bytes=progress.device_bytes, host_bytes=progress.host_bytes)
        if error is None:
            reason = f"A real step worked. {rung.reason}"
            return replace(rung, verdict="works", reason=reason, measured=measured)
        where = "in its first step" if progress.trying else "while the engine was made"
        reason = f"Memory ran out {where}: {_told(error)}. {rung.reason}"
        return replace(rung, verdict="out of memory", reason=reason, measured=measured)

    def largest(self, rung: Rung) -> tuple[Rung, Search]:
        """Find the largest batch with which a rung works: doubling, then the middle.

        Args:
            rung: One that works.

        Returns:
            The rung, with fewer accumulated passes where a larger batch allows that, and what the
            search ended with.
        """
        search = Search(works=rung.batch_size, most=rung.batch_size * _MOST_TIMES)
        while self.max_trials > 0 and (size := search.following()) is not None:
            progress, error = self._launch(rung, search)
            works = max(search.works, progress.works)
            fails = search.fails if error is None else progress.trying or size
            search = replace(search, works=works, fails=fails)
        return self._widened(rung, search.works), search

    def _widened(self, rung: Rung, largest: int) -> Rung:
        size, steps = rung.batch_size, rung.accumulation_steps
        while steps % 2 == 0 and 2 * size <= largest:
            size, steps = 2 * size, steps // 2
        if size == rung.batch_size or rung.config is None:
            return rung
        return replace(
            rung,
            batch_size=size,
            accumulation_steps=steps,
            config=self.walk.with_batch(rung, size, steps),
            reason=f"{rung.reason} Batches of {size} worked, too.",
        )

    def _launch(self, rung: Rung, search: Search | None) -> tuple[Progress, WorkerFailed | None]:
        """One launch: how far it came, and for what want of memory it ended."""
        self.max_trials -= 1
        # The advice tells how a trial went; summaries of failed launches would alarm.
        hidden = env.applied({"NBACCEL_DASHBOARD": "0"})
        with _folder(rung) as (folder, config), hidden:
            trial = self._trial(rung, search, folder, config)
            try:
                notebook_launcher(
                    run_trial,
                    (self.walk.recipe.model, self.walk.sample_batch, trial),
                    config=self.plan.config.changed(
                        num_processes=self.plan.num_processes,
                        start_method="template",
                        share_back=False,
                        timeout=self.timeout_s,
                    ),
                )
            except WorkerFailed as error:
                if not is_out_of_memory(error):
                    raise
                return Progress.read(folder, self.plan.num_processes), error
            return Progress.read(folder, self.plan.num_processes), None

    def _trial(
        self, rung: Rung, search: Search | None, folder: str, config: dict[str, Any]
    ) -> Trial:
        budget, estimate = self.walk.budget, rung.estimate
        on_cpu = self.plan.device == "cpu"
        host = budget.host
        if host is None and on_cpu and estimate is not None:
            host = estimate.host_free
        each = None if host is None else host // self.plan.num_processes
        if each is not None and on_cpu:
            each += budget.device or 0  # what a device is to have is host memory here
        model = self.walk.recipe.model
        return Trial(
            config=config,
            batch_size=(search.following() if search else None) or rung.batch_size,
            gradient_checkpointing=rung.step.gradient_checkpointing
            and not checkpoints_gradients(model),
            folder=folder,
            search=search,
            device_bytes=budget.device,
            host_bytes=each,
        )


@contextmanager
def _folder(rung: Rung) -> Iterator[tuple[str, dict[str, Any]]]:
    """A folder for notes, and the configuration with a folder for swap files; both go again."""
    config = dict(rung.config or {})
    steps = min(rung.accumulation_steps, _SAMPLES_PER_STEP)
    config["gradient_accumulation_steps"] = steps
    zero = {**config.get("zero_optimization", {})}
    places = {
        name: section
        for name in ("offload_optimizer", "offload_param")
        if (section := zero.get(name)) and section.get("nvme_path")
    }
    with tempfile.TemporaryDirectory(prefix="nbaccel-trial-") as notes:
        if not places:
            yield notes, config
            return
        disk = nearest_folder(Path(next(iter(places.values()))["nvme_path"]))
        with tempfile.TemporaryDirectory(prefix="nbaccel-trial-", dir=disk) as swap:
            zero |= {name: {**section, "nvme_path": swap} for name, section in places.items()}
            yield notes, {**config, "zero_optimization": zero}


def _told(error: WorkerFailed) -> str:
    """What the rank that met the end of memory said, in one line."""
    record: Any = next(r for r in error.failures if _is_want_of_memory(r))
    text = " ".join(str(record.headline).split())
    peak = f" after {format_bytes(record.max_rss_bytes)}" if record.max_rss_bytes else ""
    return f"rank {record.rank} {text[:160]}{peak}"
