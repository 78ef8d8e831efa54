"""Other processes, as messages name them."""

from __future__ import annotations

from pathlib import Path

import psutil

__all__ = ["describe_process", "start_ticks"]

_LONGEST_COMMAND = 80  # characters: what fits beside the rest of a message


def describe_process(process_id: int) -> str:
    """Name a process so that a user finds it.

    Args:
        process_id: Its number.

    Returns:
        ``"process 123 (python train.py)"``; without a command where the process has ended, or
        belongs to a user whose command this one may not read.
    """
    try:
        facts = psutil.Process(process_id).as_dict(["cmdline", "name"])
    except psutil.NoSuchProcess:
        return f"process {process_id}"
    # A process has no command line for a moment after it was started, and as a zombie; that of
    # another user may be hidden.
    command = " ".join(facts["cmdline"] or ())[:_LONGEST_COMMAND] or facts["name"]
    return f"process {process_id} ({command})" if command else f"process {process_id}"


def start_ticks(process_id: int) -> int | None:
    """When a process was started, which tells it from a later one that got the same number.

    Args:
        process_id: Its number.

    Returns:
        Clock ticks since the system was started; None if it has ended, or cannot be seen.
    """
    try:
        status = Path(f"/proc/{process_id}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    # The command comes before, in parentheses, and may hold any character (proc_pid_stat(5)).
    fields = status.rpartition(")")[2].split()
    has_ended = fields[0] in "ZXx"  # a zombie: only its parent has not asked for it yet
    return None if has_ended else int(fields[19])
