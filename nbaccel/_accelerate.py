"""What Hugging Face Accelerate keeps for a whole process, looked at where it has been imported.

Its state is set up by the first ``Accelerator`` and then used by all later ones: in a worker forked
from a notebook that has used it, each would take itself for the only process.
"""

from __future__ import annotations

import sys

from nbaccel.errors import PlatformUnsupported

__all__ = ["forget", "is_set_up", "mixed_precision"]


def is_set_up() -> bool:
    """Whether this process has such a state."""
    return _has_shared_state("PartialState")


def mixed_precision() -> str | None:
    """The precision that its ``Accelerator`` trains in; None where there is none yet."""
    if not _has_shared_state("AcceleratorState"):
        return None
    return str(sys.modules["accelerate.state"].AcceleratorState().mixed_precision)


def _has_shared_state(name: str) -> bool:
    """Whether a class is set up. `initialized` is public, and making the object to ask sets it up.

    Seen in Accelerate 1.15. A version without the attribute counts as not set up.
    """
    state = getattr(sys.modules.get("accelerate.state"), name, None)
    return bool(getattr(state, "_shared_state", None))


def forget() -> None:
    """Let the next ``Accelerator`` find out anew what this process is.

    Raises:
        PlatformUnsupported: This version of Accelerate has no way to do so.
    """
    if not is_set_up():
        return
    state = sys.modules["accelerate.state"]
    # The way of Accelerate's own tests, in 1.15.
    for name, arguments in (("AcceleratorState", (True,)), ("GradientState", ())):
        reset = getattr(getattr(state, name, None), "_reset_state", None)
        if reset is None:
            raise PlatformUnsupported(
                f"This version of Accelerate has no {name}._reset_state: workers would take over "
                "what the notebook's Accelerator found, a process alone. Restart the kernel and "
                "create no Accelerator before the launch, or use accelerate 1.15."
            )
        reset(*arguments)
