"""What Hugging Face Accelerate keeps for a whole process, looked at where it has been imported.

Its state is set up by the first ``Accelerator`` and then believed by all that come: in a worker
forked from a notebook that has used it, each would take itself for a process alone.
"""

from __future__ import annotations

import sys

__all__ = ["forget", "is_set_up"]


def is_set_up() -> bool:
    """Whether this process has such a state."""
    module = sys.modules.get("accelerate.state")
    return module is not None and bool(module.PartialState._shared_state)  # noqa: SLF001 - its only mark


def forget() -> None:
    """Let the next ``Accelerator`` find out anew what this process is."""
    if is_set_up():
        state = sys.modules["accelerate.state"]
        state.AcceleratorState._reset_state(True)  # noqa: SLF001 - Accelerate's own tests do it so
        state.GradientState._reset_state()  # noqa: SLF001 - the same
