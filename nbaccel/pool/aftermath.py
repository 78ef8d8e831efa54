"""What follows a turn, well ended or not: ranks in step again, and weights at home."""

from __future__ import annotations

import sys

from nbaccel.launch.system import uninterrupted
from nbaccel.pool import ending, messages
from nbaccel.pool.crew import Crew
from nbaccel.pool.flow import Flow
from nbaccel.pool.turn import Account

__all__ = ["Aftermath"]


class Aftermath:
    """Puts a crew in order after each turn. One per crew.

    Args:
        crew: The workers.
        flow: What they have of the notebook.
        share_back: Whether weights come home.
    """

    def __init__(self, crew: Crew, flow: Flow, *, share_back: bool) -> None:
        self._crew = crew
        self._flow = flow
        self._share_back = share_back
        self._generation = 0
        self._stranded: set[tuple[str, str]] = set()

    def keep_in_step(self, account: Account) -> None:
        """Let all ranks leave process groups that are of no more use, and say so if nothing has."""
        if account.lost or not account.out_of_step:
            return
        ended_well = all(m.returned is not None for m in account.members)
        self._generation += 1
        reason = "a cell was ended while ranks were waiting for each other"
        self._crew.everyone(messages.LeaveGroups(generation=self._generation, reason=reason))
        if ended_well:
            sys.stderr.write(f"nbaccel: {ending.UNEVEN}\n")

    def bring_home(self, account: Account) -> Account | None:
        """Let the notebook's modules have the weights, if a rank has changed some.

        Returns:
            What became of the turn that wrote them; None if there was nothing to write.
        """
        if not self._share_back or not any(idle.dirty for idle in account.idle.values()):
            return None
        with uninterrupted():  # half of a model is worse than either
            written = self._crew.everyone(messages.GoHome())
            reports = [m.returned.home for m in written.members if m.returned and m.returned.home]
            if not written.lost:
                self._crew.everyone(messages.Settle())
            stranded = {path: why for report in reports for path, why in report.stranded.items()}
            self._flow.came_home(stranded)
        for path, why in stranded.items() - self._stranded:
            sys.stderr.write(ending.stays_behind(path, why))
        self._stranded |= stranded.items()
        return written
