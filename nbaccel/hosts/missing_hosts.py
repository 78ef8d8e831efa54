"""The error that says which hosts did not come to a launch, and why."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from nbaccel.base.errors import StartupFailed
from nbaccel.base.units import count_noun, first_few

__all__ = ["missing_hosts"]


def missing_hosts(
    missing: Sequence[str],
    num_hosts: int,
    problems: Mapping[str, str],
    waited_s: float,
    silence: str,
) -> StartupFailed:
    """The error about hosts that did not join, to be raised.

    `problems` is what is known of them, by name; `silence` what it may mean where nothing is known
    and nothing was heard for so long.
    """
    lines = [
        f"{count_noun(len(missing), 'host')} of {num_hosts} did not join the launch: "
        f"{first_few(missing, 5)}. No worker was started."
    ]
    lines += [f"  {name}: {problem}" for name, problem in problems.items()]
    if not problems:
        lines.append(f"  Nothing was heard for {waited_s:.0f} s. {silence}")
    return StartupFailed("\n".join(lines))
