"""The template process: clean, single-threaded, everything imported; workers are forked from it.

    notebook ── channel ──► template ── fork ──► worker, worker, …
             ◄── Importing, Ready, Forked, Ended ──

It has never touched a GPU, an autograd engine or an OpenMP pool, whatever the notebook has done, so
a fork of it is safe. It exits when the notebook is gone or hangs up, and takes its workers along.

A package after whose import the process could not be forked any more (a fork takes no threads
along, and shares connections and devices) is left out: the program begins anew without it (exec).
"""

from __future__ import annotations

import contextlib
import contextvars
import gc
import importlib
import importlib.metadata
import json
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from nbaccel.base import env

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


TEMPLATE_NAME = "nbaccel-tmpl"
"""As `ps` and `top` show it."""
_LOWEST_PRIORITY = 19
# Imports are deeply nested, and a thread's stack may be small (ulimit -s unlimited: 2 MiB).
_IMPORT_STACK_BYTES = 16 * 2**20
_LOOK_S = 0.25
_PROGRESS_S = 0.05
_REASON_CHARS = 200


def serve(channel_fd: int) -> NoReturn:
    """Import, report ready, then fork on request until the notebook is gone."""
    request = json.load(sys.stdin)
    parent = _open_process(request["parent_id"])
    if os.getppid() != request["parent_id"]:
        sys.exit("the notebook process ended before its template process started")
    # Not by `reaping.take_name`, which comes with torch.
    Path("/proc/self/comm").write_text(TEMPLATE_NAME)
    environment = env.snapshot()
    # To look for garbage takes a tenth of the imports' time, and modules leave none worth it.
    gc.disable()
    imports = _Imports(request, channel_fd)
    imports.run(parent)
    if imports.unclean:
        request["left_out"] |= imports.unclean
        _begin_anew(request, channel_fd, environment)
    _freeze_memory()
    from nbaccel.workers.fork_server import ForkServer

    # In the same context: decimal's, and how NumPy treats errors, as packages have set them.
    imports.context.run(ForkServer(channel_fd, parent).serve, imports.left_out)


@dataclass
class _Imports:
    """What this process imports, in a thread of the lowest priority if no launch waits for it.

    In a thread, because a process that has lowered its priority may not raise it again, and its
    workers would inherit it.

    Attributes:
        request: What to import.
        channel_fd: To the notebook.
        context: The thread's.
        importing: The package that is imported now.
        unclean: A package after which no worker may be forked from this process, and why.
    """

    request: dict[str, Any]
    channel_fd: int
    context: contextvars.Context = field(default_factory=contextvars.copy_context)
    importing: str = ""
    unclean: dict[str, str] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    errors: list[BaseException] = field(default_factory=list)
    local_values: list[tuple[threading.local, dict[str, Any]]] = field(default_factory=list)

    def run(self, parent: Sequence[int]) -> None:
        """Import everything, or up to what makes this process unclean; leaves with the notebook."""
        former_size = threading.stack_size(_IMPORT_STACK_BYTES)
        # Not to be waited for at the end: it may hang.
        thread = threading.Thread(target=self.context.run, args=(self._import_all,), daemon=True)
        thread.start()
        threading.stack_size(former_size)
        limit_s = self.request["import_limit_s"]
        seen = ("", 0.0)
        seen_at = time.monotonic()
        while thread.is_alive() and not self.unclean:
            thread.join(_LOOK_S)
            if select.select(parent, [], [], 0.0)[0]:
                os._exit(0)
            # Processor time counts as getting on: at the lowest priority an import may take minutes
            # beside a cell that computes.
            used_s = time.process_time()
            if self.importing != seen[0] or used_s > seen[1] + _PROGRESS_S:
                seen = (self.importing, used_s)
                seen_at = time.monotonic()
            elif self.importing and time.monotonic() - seen_at > limit_s:
                self.unclean[self.importing] = f"its import does nothing for {limit_s:.0f} s"
        if self.errors:
            raise self.errors[0]
        for thread_local, values in self.local_values:
            # Code of other packages, as the class may be theirs.
            with contextlib.suppress(Exception):
                vars(thread_local).update(values)

    def _import_all(self) -> None:
        if self.request["in_background"]:
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST_PRIORITY)
        try:
            _import_for_workers(self.request)
            self._import_packages()
        except BaseException as error:  # raised in the main thread, which ends the process
            self.errors.append(error)
        # What imports keep for this thread is for the one that workers use. Other classes than the
        # plain one set themselves up when a thread asks first.
        self.local_values = [
            (found, dict(vars(found)))
            for found in gc.get_objects()
            if type(found) is threading.local
        ]

    def _import_packages(self) -> None:
        from nbaccel.transfer import sharded_tensors
        from nbaccel.workers import messaging
        from nbaccel.workers.fork_safety import ProcessState

        self.left_out = dict(self.request["left_out"])
        failed: dict[str, list[str]] = {}
        channel = messaging.Channel.from_fd(os.dup(self.channel_fd))
        state = ProcessState.now()
        for package, modules in self.request["packages"].items():
            missing = [name for name in modules if name not in sys.modules]
            if package in self.left_out or not missing:
                continue
            with messaging.unless_gone():
                channel.send(messaging.Importing(package))
            self.importing = package
            error = _first_error(missing)
            before, state = state, ProcessState.now()
            if changes := state.changes_since(before):
                self.unclean[package] = " and ".join(changes)
                return
            if error is not None and package not in sys.modules:
                failed[package] = missing
                reason = f"its import fails ({type(error).__name__}: {error})"
                self.left_out[package] = reason[:_REASON_CHARS]
        self.importing = ""
        for package, names in failed.items():
            # One of two that import each other may fail first, and succeed with the other.
            if all(name in sys.modules for name in names):
                del self.left_out[package]
        channel.close()
        sharded_tensors.load_readers()


def _first_error(modules: Sequence[str]) -> BaseException | None:
    """Import modules; returns the first error, if there was one."""
    first_error: BaseException | None = None
    for name in modules:
        try:
            importlib.import_module(name)
        # Workers that need the module meet the same error, with its traceback.
        except BaseException as error:  # code of other packages, which may call sys.exit()
            if first_error is None:
                first_error = error
    return first_error


def _begin_anew(request: dict[str, Any], channel_fd: int, environment: dict[str, str]) -> NoReturn:
    """Run this program again in this process, which keeps its channel and nothing else."""
    from nbaccel.workers.fork_safety import open_descriptors
    from nbaccel.workers.reaping import end_descendants

    end_descendants()
    for descriptor, _ in tuple(open_descriptors()):
        # The descriptor of the listing is gone already.
        with contextlib.suppress(OSError):
            os.set_inheritable(descriptor, descriptor in (0, 1, 2, channel_fd))
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    # The others are reset by exec.
    for number in signal.valid_signals():
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    file = os.memfd_create("nbaccel-template-request")
    os.write(file, json.dumps(request).encode())
    os.lseek(file, 0, os.SEEK_SET)
    os.dup2(file, 0)
    os.execve(sys.executable, sys.orig_argv, environment)  # noqa: S606 - this very program


def _import_for_workers(request: dict[str, Any]) -> None:
    """Import what workers will need, and run the code once that all of them run first."""
    for name in _PREIMPORTED_MODULES + (_FOR_NOTEBOOKS if request["in_notebook"] else ()):
        importlib.import_module(name)
    from nbaccel.plan import registry
    from nbaccel.workers.reaping import adopt_orphans

    # Imports the devices once, for all workers.
    devices = registry.known_devices()
    if request["device"]:
        registry.known_device(request["device"]).prepare_template()
    if request["extends_torch"]:
        _load_extensions({device.extension for device in devices})
    adopt_orphans()
    _rehearse_transfer()


def _freeze_memory() -> None:
    """Take what there is out of the garbage collector's sight, before workers are forked.

    A collection in a worker would write to every page shared with this process. Collected before,
    so that no garbage is kept for ever.
    """
    gc.collect()
    gc.freeze()
    gc.enable()


def _load_extensions(paths: set[str]) -> None:
    """Import packages that extend torch, but those that a device has imported if it needs them."""
    for entry in importlib.metadata.entry_points(group="torch.backends"):
        if entry.value in paths:
            continue
        try:
            entry.load()()
        except Exception as error:  # another package's code: torch is only not extended then
            sys.stderr.write(f"nbaccel: {entry.value} could not extend torch: {error}\n")


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
    for manifest, module in modules:
        received_modules.add(manifest.path, manifest, module)
    received_modules.write_all()


def _open_process(process_id: int) -> list[int]:
    """A descriptor that becomes readable when the process ends, where the system has them."""
    # Without it the closed channel tells; a fork of the notebook could hold that open.
    try:
        return [os.pidfd_open(process_id)]
    except (OSError, AttributeError):
        return []
