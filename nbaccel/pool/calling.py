"""A call in a pool: what a launch does, in workers that are there already.

The model is handed over and comes home exactly as in a launch, apart from what the workers' own
namespace holds: all or nothing, through staging files.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from nbaccel.launch.edited import tell_of_edits
from nbaccel.launch.outcome import Outcome, conclude
from nbaccel.launch.packing import Packed, pack_for_the_living
from nbaccel.launch.run import job_of
from nbaccel.launch.sharing import arena
from nbaccel.launch.sharing.find import find_modules
from nbaccel.launch.sharing.homecoming import Homecoming
from nbaccel.launch.system import uninterrupted
from nbaccel.launch.template import dispose
from nbaccel.plan import Plan
from nbaccel.pool import messages
from nbaccel.pool.turn import Account

__all__ = ["Call", "prepared"]

_CALLER = 7
"""Frames from a warning up to the cell: this file's one, the pool's two, the façade's three."""


@dataclass(frozen=True, kw_only=True)
class Call:
    """A call made ready for a turn."""

    plan: Plan
    packed: Packed
    homecoming: Homecoming

    def task(self) -> tuple[messages.RunJob, Sequence[int]]:
        """What each rank is given, with its descriptors."""
        job, fds = job_of(self.plan, self.packed, self.homecoming, None)
        return messages.RunJob(job=job), fds

    def conclude(self, account: Account) -> Outcome:
        """Bring the weights home and open the values, or raise what went wrong."""
        stopped = "the call was stopped; the model is as it was, and the workers live on"
        if account.lost:
            stopped = "the call was stopped, and the workers were ended; the model is as it was"
        account.closing = account.closing or (
            "The notebook's model is as it was before the call; all workers have been ended, and "
            "their variables are lost. The next cell starts new ones."
            if account.lost
            else "The notebook's model is as it was before the call; the workers live on."
        )
        return conclude(self.plan, account, self.homecoming, stopped=stopped, stacklevel=_CALLER)


@contextlib.contextmanager
def prepared(plan: Plan, function: Callable[..., Any], args: tuple[Any, ...]) -> Iterator[Call]:
    """Share the modules and pack the call; afterwards everything opened for it is closed.

    Raises:
        ModelNotShareable, NotSendable: Nothing has been sent.
    """
    tell_of_edits()
    sharing = arena.share(find_modules(args))
    with contextlib.ExitStack() as stack:
        packed = pack_for_the_living(function, args, sharing)
        if packed.fd is not None:
            stack.callback(os.close, packed.fd)
        with uninterrupted():  # until somebody is there to close the staging files
            homecoming = Homecoming(packed.sharing, packed.arenas if plan.config.share_back else {})
            stack.callback(homecoming.close, dispose)
        yield Call(plan=plan, packed=packed, homecoming=homecoming)
