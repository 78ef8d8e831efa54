"""What Hugging Face Accelerate keeps for a whole process, looked at where it has been imported.

Its state is set up by the first ``Accelerator`` and then used by all later ones: in a worker forked
from a notebook that has used it, each would take itself for the only process.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable
from types import ModuleType
from typing import Any

from nbaccel.base.errors import PlatformUnsupported
from nbaccel.base.import_patches import patch_module

_MODULE = "accelerate.accelerator"
# Accelerate sets it on what it has prepared, and returns what has it as it is. Seen in 1.15.
_MARK = "_is_accelerate_prepared"


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
    """Let the next ``Accelerator`` find out anew what this process is."""
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


def prepare_anew() -> None:
    """Let models and loaders be prepared in this worker that were prepared in the notebook.

    They carry a mark by which they would stay what a single process needs: each rank would train a
    model of its own. A `Trainer` that has evaluated in the notebook leaves it on its model.
    """
    patch_module(_MODULE, _patch_preparing)


def _patch_preparing(module: ModuleType) -> None:
    for name in ("prepare_model", "prepare_data_loader"):
        method = getattr(module.Accelerator, name, None)
        if method is not None:
            setattr(module.Accelerator, name, _preparing(method))


def _preparing(method: Callable[..., Any]) -> Callable[..., Any]:
    prepared_here: weakref.WeakSet[Any] = weakref.WeakSet()

    @functools.wraps(method)
    def prepare(self: Any, given: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(given, _MARK, False) and given not in prepared_here:
            vars(given).pop(_MARK, None)
        prepared = method(self, given, *args, **kwargs)
        prepared_here.add(prepared)
        return prepared

    return prepare
