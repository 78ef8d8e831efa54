"""What speaks against forking this process, found out without waking anything."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass

from nbaccel import _catalog
from nbaccel.launch.openmp import loaded_runtimes, pools_that_stay

_KERNEL_MODULES = ("ipykernel", "IPython", "tornado", "zmq", "debugpy", "pydevd", "_pydevd")
_KERNEL_NAMES = ("IOPub", "Heartbeat", "Control", "Shell channel", "IPythonHistorySavingThread")

_KERNEL_TARGETS = ("(_watch_pipe_fd)",)  # ipykernel gives these two threads no name of their own


@dataclass(frozen=True, kw_only=True, slots=True)
class Hazard:
    """One fact that makes a fork of this process unsafe."""

    fact: str
    consequence: str
    is_fatal: bool
    """Whether workers would certainly hang or crash; otherwise they may."""

    def __str__(self) -> str:
        return f"{self.fact}: {self.consequence}"


def hazards() -> tuple[Hazard, ...]:
    """Everything in this process that a forked worker could not live with.

    An OpenMP pool and tqdm's monitor are not among them: they are ended just before the fork. Only
    a pool that cannot be ended is.
    """
    return tuple(_find())


def _find() -> Iterator[Hazard]:
    for fact in _catalog.device("cuda").hazards():
        yield Hazard(
            fact=fact, consequence="a forked worker could not use the GPU at all", is_fatal=True
        )
    if _xla_is_awake():
        yield Hazard(
            fact="the XLA runtime is initialised in the notebook",
            consequence="a forked worker hangs in its first XLA operation",
            is_fatal=True,
        )
    if _has_process_group():
        yield Hazard(
            fact="a torch.distributed process group is alive in the notebook",
            consequence="a forked worker inherits it without its threads and hangs; end it with "
            "torch.distributed.destroy_process_group()",
            is_fatal=True,
        )
    for path in pools_that_stay():
        yield Hazard(
            fact=f"threads of {os.path.basename(path)}, an OpenMP runtime that cannot give them up",
            consequence="a forked worker hangs in its first parallel operation; a newer torch "
            "brings a runtime that can",
            is_fatal=True,
        )
    names = [t.name for t in threading.enumerate() if _is_foreign(t)]
    if names:
        yield Hazard(
            fact=f"{len(names)} thread(s) of yours are running ({', '.join(names[:4])})",
            consequence="a lock that one of them holds at the fork stays locked for ever in the "
            "worker",
            is_fatal=False,
        )


def end_bar_monitors() -> None:
    """End the thread that tqdm starts with the first bar of a process, and keeps.

    The lock of all bars is taken by it from time to time. The next bar starts a new one.
    """
    for thread in threading.enumerate():
        if _is_bar_monitor(thread):
            thread.exit()  # type: ignore[attr-defined]


def openmp_note() -> str:
    """Which OpenMP runtimes will be paused, for `explain`."""
    found = loaded_runtimes()
    return f"{len(found)} OpenMP runtime(s) loaded; their thread pools are given up before the fork"


def _xla_is_awake() -> bool:
    xla = sys.modules.get("torch_xla")
    core = getattr(xla, "_XLAC", None)
    return bool(core is not None and core._xla_runtime_is_initialized())


def _has_process_group() -> bool:
    distributed = sys.modules.get("torch.distributed")
    return bool(distributed and distributed.is_available() and distributed.is_initialized())


def _is_foreign(thread: threading.Thread) -> bool:
    """Whether it is a thread of the user's, not of the kernel or the one that launches."""
    if thread in (threading.main_thread(), threading.current_thread()):
        return False
    if thread.name.startswith(_KERNEL_NAMES) or thread.name.endswith(_KERNEL_TARGETS):
        return False
    if _is_bar_monitor(thread):
        return False
    return not type(thread).__module__.startswith(_KERNEL_MODULES)


def _is_bar_monitor(thread: threading.Thread) -> bool:
    return type(thread).__module__ == "tqdm._monitor"
