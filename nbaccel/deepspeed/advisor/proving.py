"""Proof by launching: real steps in worker processes, and what their exits mean."""

from __future__ import annotations

import re
import signal
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from nbaccel.base import env
from nbaccel.base.disk import nearest_folder
from nbaccel.base.errors import WorkerFailed
from nbaccel.base.units import format_bytes
from nbaccel.config.capabilities import device_row
from nbaccel.deepspeed.advisor.advice import Measured, Rung
from nbaccel.deepspeed.advisor.search import Walk
from nbaccel.deepspeed.advisor.trial import Search, StepTrial, TrialProgress, run_trial
from nbaccel.plan import Plan
from nbaccel.strategies.gradient_checkpointing import checkpoints_gradients

__all__ = ["Prover", "is_out_of_memory"]

_MOST_TIMES = 2**10
"""How many times the first batch is the largest that is tried."""
_PASSES_PER_STEP = 2
"""Forward passes that are accumulated in a trial: the second shows what accumulation keeps."""
_OUT_OF_MEMORY_WORDS = re.compile(
    r"out of memory|(can't|cannot|unable to|could not) allocate|not enough memory"
    r"|CUBLAS_STATUS_ALLOC_FAILED|std::bad_alloc|can't start new thread",
    re.IGNORECASE,
)


def is_out_of_memory(error: WorkerFailed) -> bool:
    """Whether a launch failed because memory ran out: on a device, on the host, or by a kill."""
    return any(_is_want_of_memory(record) for record in error.failures)


def _is_want_of_memory(record: Any) -> bool:
    if record.exit_status is not None:
        # The system's out-of-memory killer leaves no other trace.
        was_killed = record.exit_status == -signal.SIGKILL
        return was_killed or bool(_OUT_OF_MEMORY_WORDS.search(record.evidence))
    error = record.raised
    # Along the chain of causes, since the error may have been wrapped in another.
    while error is not None:
        if error.type_name.endswith("MemoryError") or _OUT_OF_MEMORY_WORDS.search(error.message):
            return True
        error = error.cause
    return False


@dataclass(kw_only=True, slots=True)
class Prover:
    """Tries rungs with real steps, in at most `max_trials` launches."""

    walk: Walk
    plan: Plan
    max_trials: int
    timeout_s: float
    launch: Callable[..., Any]

    def prove(self, rung: Rung) -> Rung:
        """Try a rung with one step."""
        if self.max_trials < 1:
            reason = f"{rung.reason} It was not tried: no launch of max_trials was left."
            return replace(rung, verdict="not tried", reason=reason)
        progress, error = self._launch(rung, None)
        step = Measured(device_bytes=progress.device_bytes, host_bytes=progress.host_bytes)
        if error is None:
            reason = f"A real step worked. {rung.reason}"
            return replace(rung, verdict="works", reason=reason, measured=step)
        step_place = "in its first step" if progress.trying else "while the engine was made"
        reason = f"Memory ran out {step_place}: {_failure_text(error)}. {rung.reason}"
        return replace(rung, verdict="out of memory", reason=reason, measured=step)

    def largest(self, rung: Rung) -> tuple[Rung, Search]:
        """Find the largest batch with which a rung works: doubling, then the middle."""
        batch_search = Search(works=rung.batch_size, most=rung.batch_size * _MOST_TIMES)
        while self.max_trials > 0 and (batch_size := batch_search.following()) is not None:
            progress, error = self._launch(rung, batch_search)
            working_batch = max(batch_search.works, progress.works)
            failing_batch = batch_search.fails if error is None else progress.trying or batch_size
            batch_search = replace(batch_search, works=working_batch, fails=failing_batch)
        return self._widened(rung, batch_search.works), batch_search

    def _widened(self, rung: Rung, batch: int) -> Rung:
        batch_size = rung.batch_size
        steps = rung.accumulation_steps
        while steps % 2 == 0 and 2 * batch_size <= batch:
            batch_size = 2 * batch_size
            steps = steps // 2
        if batch_size == rung.batch_size or rung.config is None:
            return rung
        return replace(
            rung,
            batch_size=batch_size,
            accumulation_steps=steps,
            config=self.walk.with_batch(rung, batch_size, steps),
            reason=f"{rung.reason} Batches of {batch_size} worked, too.",
        )

    def _launch(
        self, rung: Rung, batch_search: Search | None
    ) -> tuple[TrialProgress, WorkerFailed | None]:
        """One launch: its progress, and the error where memory ran out."""
        self.max_trials -= 1
        # The advice reports how a trial ended; a dashboard of failed launches would look like
        # errors.
        dashboard = env.applied({"NBACCEL_DASHBOARD": "0"})
        with _trial_folder(rung) as (trial_folder, trial_config), dashboard:
            step_trial = self._trial(rung, batch_search, trial_folder, trial_config)
            try:
                self.launch(
                    run_trial,
                    (self.walk.recipe.model, self.walk.sample_batch, step_trial),
                    config=self.plan.config.changed(
                        num_processes=self.plan.num_processes,
                        start_method="template",
                        # A trial must not change the weights of the user's model.
                        share_back=False,
                        timeout=self.timeout_s,
                    ),
                )
            except WorkerFailed as error:
                if not is_out_of_memory(error):
                    raise
                return TrialProgress.read(trial_folder, self.plan.num_processes), error
            return TrialProgress.read(trial_folder, self.plan.num_processes), None

    def _trial(
        self,
        rung: Rung,
        batch_search: Search | None,
        trial_folder: str,
        trial_config: dict[str, Any],
    ) -> StepTrial:
        memory_budget = self.walk.budget
        estimate = rung.estimate
        on_cpu = device_row(self.plan.device).in_host_memory
        host_bytes = memory_budget.host
        if host_bytes is None and on_cpu and estimate is not None:
            host_bytes = estimate.host_free
        host_share = None if host_bytes is None else host_bytes // self.plan.num_processes
        if host_share is not None and on_cpu:
            host_share += memory_budget.device or 0  # the device's budget is host memory here
        model = self.walk.recipe.model
        return StepTrial(
            config=trial_config,
            batch_size=(batch_search.following() if batch_search else None) or rung.batch_size,
            gradient_checkpointing=rung.step.gradient_checkpointing
            and not checkpoints_gradients(model),
            folder=trial_folder,
            device=self.plan.device,
            search=batch_search,
            device_bytes=memory_budget.device,
            host_bytes=host_share,
        )


@contextmanager
def _trial_folder(rung: Rung) -> Iterator[tuple[str, dict[str, Any]]]:
    """A folder for notes, and the configuration with a folder for swap files; both are removed."""
    config = dict(rung.config or {})
    steps = min(rung.accumulation_steps, _PASSES_PER_STEP)
    config["gradient_accumulation_steps"] = steps
    zero_section = {**config.get("zero_optimization", {})}
    offload_sections = {
        section_name: offload_section
        for section_name in ("offload_optimizer", "offload_param")
        if (offload_section := zero_section.get(section_name)) and offload_section.get("nvme_path")
    }
    with tempfile.TemporaryDirectory(prefix="nbaccel-trial-") as notes_folder:
        if not offload_sections:
            yield notes_folder, config
            return
        # On the user's disk, since the trial is of that disk, but not among files of other runs.
        disk_folder = nearest_folder(Path(next(iter(offload_sections.values()))["nvme_path"]))
        with tempfile.TemporaryDirectory(prefix="nbaccel-trial-", dir=disk_folder) as swap_folder:
            zero_section |= {
                section_name: {**offload_section, "nvme_path": swap_folder}
                for section_name, offload_section in offload_sections.items()
            }
            yield notes_folder, {**config, "zero_optimization": zero_section}


def _failure_text(error: WorkerFailed) -> str:
    """The failure of the rank that ran out of memory, in one line."""
    record: Any = next(record for record in error.failures if _is_want_of_memory(record))
    error_text = " ".join(str(record.headline).split())
    peak_text = f" after {format_bytes(record.max_rss_bytes)}" if record.max_rss_bytes else ""
    return f"rank {record.rank} {error_text[:160]}{peak_text}"
