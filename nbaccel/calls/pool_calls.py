"""A call in a pool: what a launch does, in workers that are there already.

The model is sent and copied back exactly as in a launch, independently of the workers' namespace:
all or nothing, through staging files.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from nbaccel.base.process_death import uninterrupted
from nbaccel.calls import pool_messages
from nbaccel.calls.edited_sources import tell_of_edits
from nbaccel.calls.launch import job_of
from nbaccel.calls.outcome import CallOutcome, conclude_call
from nbaccel.calls.packing import PackedCall, pack_for_running_workers
from nbaccel.calls.pool_task import TaskResult
from nbaccel.plan import Plan
from nbaccel.transfer import arena
from nbaccel.transfer.find_modules import find_modules
from nbaccel.transfer.weight_receiver import WeightReceiver
from nbaccel.workers.template_starter import dispose

__all__ = ["PoolCall", "prepare_call"]


@dataclass(frozen=True, kw_only=True)
class PoolCall:
    """A call made ready for the workers."""

    plan: Plan
    packed: PackedCall
    weight_receiver: WeightReceiver

    def task(self) -> tuple[pool_messages.RunJob, Sequence[int]]:
        """What each rank is given, with its descriptors."""
        worker_job, file_descriptors = job_of(self.plan, self.packed, self.weight_receiver, None)
        return pool_messages.RunJob(job=worker_job), file_descriptors

    def conclude(self, call_result: TaskResult) -> CallOutcome:
        """Copy the weights back and open the values, or raise what went wrong."""
        was_stopped = "the call was stopped; the model is as it was, and the workers live on"
        lines = "The notebook's model is as it was before the call; the workers live on."
        if call_result.lost:
            was_stopped = "the call was stopped, and the workers were ended; the model is as it was"
            lines = (
                "The notebook's model is as it was before the call; all workers have been ended, "
                "and their variables are lost. The next cell starts new ones."
            )
        return conclude_call(
            self.plan,
            call_result,
            self.weight_receiver,
            was_stopped=was_stopped,
            closing_lines=lines,
        )


@contextlib.contextmanager
def prepare_call(
    plan: Plan, function: Callable[..., Any], args: tuple[Any, ...]
) -> Iterator[PoolCall]:
    """Share the modules and pack the call; afterwards everything opened for it is closed."""
    tell_of_edits()
    sharing = arena.share_modules(find_modules(args))
    with contextlib.ExitStack() as clean_up:
        packed_call = pack_for_running_workers(function, args, sharing)
        if packed_call.fd is not None:
            clean_up.callback(os.close, packed_call.fd)
        # An interrupt before the callback is registered would leak the staging files.
        with uninterrupted():
            weight_receiver = WeightReceiver(
                packed_call.sharing, packed_call.arenas if plan.config.share_back else {}
            )
            # Closed by the template process: freeing gigabytes would delay the notebook.
            clean_up.callback(weight_receiver.close, dispose)
        yield PoolCall(plan=plan, packed=packed_call, weight_receiver=weight_receiver)
