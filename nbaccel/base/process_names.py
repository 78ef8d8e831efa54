"""Other processes, as messages name them."""

from __future__ import annotations

import psutil

_LONGEST_COMMAND = 80  # characters: what fits beside the rest of a message


def describe_process(process_id: int) -> str:
    """Name a process so that a user finds it."""
    try:
        facts = psutil.Process(process_id).as_dict(["cmdline", "name"])
    except psutil.NoSuchProcess:
        return f"process {process_id}"
    # A process has no command line for a moment after it was started, and as a zombie; that of
    # another user may be hidden.
    command = " ".join(facts["cmdline"] or ())[:_LONGEST_COMMAND] or facts["name"]
    return f"process {process_id} ({command})" if command else f"process {process_id}"
