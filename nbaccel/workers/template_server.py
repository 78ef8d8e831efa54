"""The template process: clean, single-threaded, everything imported; workers are forked from it.

    notebook ── channel ──► template ── fork ──► worker, worker, …
             ◄── JSON until it is ready; then, by a channel for each worker, its number and its end

After the import of some packages a process cannot be forked any more (a fork takes no threads
along). It says which one that was and ends; the notebook starts another one without that package.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import importlib
import importlib.metadata
import json
import multiprocessing
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

# The first optimizer of a process imports torch._dynamo (one to two seconds): here it is paid once.
_PREIMPORTED_MODULES = (
    "torch",
    "torch.distributed",
    "torch._dynamo",
    "torch.nn.parallel",
    "numpy.random",
    "nbaccel.workers.worker",
    "nbaccel.calls.pool_worker",
)
_FOR_NOTEBOOKS = (
    "IPython.core.interactiveshell",
    "IPython.core.displaypub",
    "nbaccel.calls.worker_shell",
)

TEMPLATE_NAME = "nbaccel-tmpl"  # as `ps` and `top` show it
_REASON_CHARS = 200


def serve(channel_fd: int) -> NoReturn:
    """Import, report ready, then fork on request until the notebook is gone."""
    request = json.load(sys.stdin)
    # Readable when the notebook's process ends. Without it, where the system has none, the closed
    # channel tells; a fork of the notebook could hold that open.
    parent = []
    with contextlib.suppress(OSError, AttributeError):
        parent.append(os.pidfd_open(request["parent_id"]))
    if os.getppid() != request["parent_id"]:
        sys.exit("the notebook process ended before its template process started")
    # Not by `reaping.take_name`, which comes with torch.
    Path("/proc/self/comm").write_text(TEMPLATE_NAME)
    _end_with_notebook(channel_fd, True)
    # To look for garbage takes a tenth of the imports' time, and modules leave none worth it.
    gc.disable()
    _import_for_workers(request)
    _say(channel_fd, own=list(sys.modules))
    multiprocessing.current_process().authkey = bytes.fromhex(request["authkey"])
    left_out = _import_packages(request, channel_fd)
    # Let no collection in a worker write to every page shared with this process.
    gc.collect()  # no garbage is to be kept for ever
    gc.freeze()
    gc.enable()
    _end_with_notebook(channel_fd, False)
    from nbaccel.workers.fork_server import ForkServer

    server = ForkServer(channel_fd, parent)
    _say(channel_fd, left_out=left_out)
    server.serve()


def _say(channel_fd: int, **facts: Any) -> None:
    """Tell the notebook how far this is; see `Template._read`."""
    os.write(channel_fd, json.dumps(facts).encode())


def _end_with_notebook(channel_fd: int, ends: bool) -> None:
    """Whether SIGIO, which nothing handles, ends this process when the channel is closed."""
    flags = fcntl.fcntl(channel_fd, fcntl.F_GETFL)
    fcntl.fcntl(channel_fd, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(channel_fd, fcntl.F_SETFL, flags | os.O_ASYNC if ends else flags & ~os.O_ASYNC)


def _import_packages(request: dict[str, Any], channel_fd: int) -> dict[str, str]:
    """Import what the notebook has; returns what was left out because it cannot be imported."""
    from nbaccel.base.units import count_noun
    from nbaccel.transfer import sharded_tensors
    from nbaccel.workers import fork_safety
    from nbaccel.workers.reaping import end_descendants

    left_out: dict[str, str] = dict(request["left_out"])
    device_facts = fork_safety.device_facts()
    num_threads = len(fork_safety.lasting_threads({os.getpid()}))
    for package, modules in request["packages"].items():
        missing = [name for name in modules if name not in sys.modules]
        if package in left_out or not missing:
            continue
        _say(channel_fd, importing=package)
        # Nothing handles its signal either, so it ends an import that hangs.
        signal.setitimer(signal.ITIMER_REAL, request["import_limit_s"])
        error = _first_error(missing)
        signal.setitimer(signal.ITIMER_REAL, 0)
        obstacles = sorted(fork_safety.device_facts() - device_facts)
        added = len(fork_safety.lasting_threads({os.getpid()})) - num_threads
        if added > 0:
            obstacles.append(f"it starts {count_noun(added, 'thread')}")
        if obstacles:
            _say(channel_fd, obstacle=" and ".join(obstacles))
            end_descendants()
            os._exit(0)
        if error is not None and package not in sys.modules:
            reason = f"its import fails ({type(error).__name__}: {error})"
            left_out[package] = reason[:_REASON_CHARS]
    sharded_tensors.load_readers()
    # One of two that import each other may fail first, and succeed with the other.
    return {package: why for package, why in left_out.items() if package not in sys.modules}


def _first_error(modules: Sequence[str]) -> BaseException | None:
    first_error: BaseException | None = None
    for name in modules:
        try:
            importlib.import_module(name)
        # Workers that need the module meet the same error, with its traceback.
        except BaseException as error:  # code of other packages, which may call sys.exit()
            if first_error is None:
                first_error = error
    return first_error


def _import_for_workers(request: dict[str, Any]) -> None:
    """Import what workers will need, and run the code once that all of them run first."""
    for name in _PREIMPORTED_MODULES + (_FOR_NOTEBOOKS if request["in_notebook"] else ()):
        importlib.import_module(name)
    from nbaccel.plan import registry
    from nbaccel.workers.reaping import adopt_orphans

    # Imports the devices, and what strategies do first, once for all workers.
    devices = registry.devices()
    registry.worker_preparations()
    if request["device"]:
        registry.device(request["device"]).prepare_template()
    extensions = importlib.metadata.entry_points(group="torch.backends")
    for entry in extensions if request["extends_torch"] else ():
        # A device has imported its own, if it needs it.
        if entry.value in {device.extension for device in devices}:
            continue
        try:
            entry.load()()
        except Exception as error:  # another package's code: torch is only not extended then
            sys.stderr.write(f"nbaccel: {entry.value} could not extend torch: {error}\n")
    adopt_orphans()
    _rehearse_transfer()


def _rehearse_transfer() -> None:
    """Transfer a small model once, so that workers inherit what Python and torch set up then."""
    from torch import nn

    from nbaccel.transfer import arena, memfd, pickling
    from nbaccel.transfer.received_modules import ReceivedModules

    model = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))
    sharing = arena.share_modules([("model", model)])
    packed, fd = pickling.pack(sharing.modules, pickling.Sender())
    received_modules = ReceivedModules(rank=0)
    for key, owner in sharing.arenas.items():
        received_modules.open_arena(key, owner.nbytes, owner.fd)
    with memfd.closing_files(fd):
        modules = pickling.unpack(packed, fd, received_modules.mappings)
    for shared in modules:
        received_modules.add(shared.path, shared)
    received_modules.write_all()
