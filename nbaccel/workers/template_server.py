"""The template process: clean, single-threaded, everything imported; workers are forked from it.

    notebook ── channel ──► template ── fork ──► worker, worker, …
             ◄── Ready, Forked, Ended ──

It has never touched a GPU, an autograd engine or an OpenMP pool, whatever the notebook has done, so
a fork of it is safe. It exits when the notebook is gone or hangs up, and takes its workers along.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import importlib.metadata
import os
import select
import signal
import socket
import sys
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from nbaccel.workers import messaging

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


def serve(
    channel_fd: int, parent_id: int, *, device: str, in_notebook: bool, extends_torch: bool
) -> NoReturn:
    """Import, report ready, then fork on request until the notebook is gone.

    Args:
        channel_fd: To the notebook.
        parent_id: Process id of the notebook.
        device: The device whose library is imported, too; empty for none.
        in_notebook: Whether cells will be run, for which IPython is imported.
        extends_torch: Whether packages that extend torch are imported, as torch does by itself.
    """
    _die_with(parent_id)
    # To look for garbage takes a tenth of the imports' time, and modules leave none worth it.
    gc.disable()
    import_for_workers(device, in_notebook=in_notebook, extends_torch=extends_torch)
    freeze_memory()
    serve_forks(channel_fd, parent_id)


def serve_forks(channel_fd: int, parent_id: int) -> NoReturn:
    """Report ready, then fork on request until the notebook is gone.

    Args:
        channel_fd: To the notebook.
        parent_id: Process id of the notebook.
    """
    from nbaccel.workers import messaging
    from nbaccel.workers.reaping import TEMPLATE_NAME, take_name

    take_name(TEMPLATE_NAME)
    channel = messaging.Channel.from_fd(channel_fd)
    fork_server = _ForkServer(channel, parent_id)
    channel.send(messaging.Ready(os.getpid()))
    fork_server.serve()


def serve_notebook_fork(channel_fd: int, parent_id: int) -> NoReturn:
    """Serve in a fork of the notebook's process, which has imported what is needed.

    Args:
        channel_fd: To the notebook.
        parent_id: Process id of the notebook.
    """
    import torch

    from nbaccel.base import accelerate_library
    from nbaccel.transfer import sharded_tensors
    from nbaccel.workers.reaping import adopt_orphans

    # Workers of a fresh interpreter have the usual one; on a GPU, the rehearsal would wake it here.
    torch.set_default_device(None)
    # Its state says that this process is the only one.
    accelerate_library.forget()
    adopt_orphans()
    sharded_tensors.load_readers()
    rehearse_transfer()
    gc.freeze()
    serve_forks(channel_fd, parent_id)


def modules_for_workers(*, in_notebook: bool) -> tuple[str, ...]:
    """Modules that every worker needs, whatever the notebook has imported.

    Args:
        in_notebook: Whether cells will be run, for which IPython is imported.
    """
    return _PREIMPORTED_MODULES + (_FOR_NOTEBOOKS if in_notebook else ())


def import_for_workers(device: str, *, in_notebook: bool, extends_torch: bool) -> None:
    """Import what workers will need, and run the code once that all of them run first.

    Args:
        device: The device whose library is imported, too; empty for none.
        in_notebook: Whether cells will be run, for which IPython is imported.
        extends_torch: Whether packages that extend torch are imported, as torch does by itself.
    """
    for name in modules_for_workers(in_notebook=in_notebook):
        importlib.import_module(name)
    from nbaccel.plan import registry
    from nbaccel.workers.reaping import adopt_orphans

    # Imports the devices once, for all workers.
    devices = registry.known_devices()
    if device:
        registry.known_device(device).prepare_template()
    if extends_torch:
        _load_extensions({known_device.extension for known_device in devices})
    adopt_orphans()
    rehearse_transfer()


def freeze_memory() -> None:
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


def rehearse_transfer() -> None:
    """Transfer a small model once, so that workers inherit what Python and torch set up then."""
    from torch import nn

    from nbaccel.transfer import arena, memfd, pickling, weight_sync

    sample_model = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))
    sample_sharing = arena.share_modules([("model", sample_model)])
    sample_sender = pickling.Sender.create()
    (sample_arena,) = sample_sharing.arenas()
    arena_key = sample_sender.key(sample_arena)
    packed_object, file_descriptor = pickling.pack(
        (sample_model, weight_sync.module_manifests(sample_sharing, sample_sender.keys)),
        sample_sender,
    )
    sample_mappings = {
        arena_key: memfd.Mapping(sample_arena.fd, sample_arena.nbytes, is_private=True)
    }
    with memfd.closing_files(file_descriptor):
        received_copy, (sample_manifest,) = pickling.unpack(
            packed_object, file_descriptor, sample_mappings
        )
    weight_sync.WeightWriter(
        own_rank=0,
        shared_modules=[(sample_manifest, received_copy)],
        arena_mappings=sample_mappings,
        staging_files={},
    ).write()


def _die_with(parent_id: int) -> None:
    if os.getppid() != parent_id:
        sys.exit("the notebook process ended before its template process started")


class _ForkServer:
    def __init__(self, channel: object, parent_id: int) -> None:
        from nbaccel.workers import messaging, template_candidate, thread_limits

        self._wire = messaging
        self._set_threads = thread_limits.set_before_fork
        self._channel: messaging.Channel = channel  # type: ignore[assignment]
        self._workers: set[int] = set()
        self._candidates = template_candidate.CandidateKeeper(
            lambda own_channel, learned: _become_template(own_channel, learned, parent_id),
            self._let_go,
        )
        self._woken, self._waker = socket.socketpair()
        for wakeup_end in (self._woken, self._waker):
            # `set_wakeup_fd` refuses a blocking end, and `_collect` empties the other one.
            wakeup_end.setblocking(False)
        signal.set_wakeup_fd(self._waker.fileno())
        # Any handler: Python writes to the wakeup descriptor only for signals that have one.
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self._parent = _open_process(parent_id)
        thread_limits.find_libraries()

    def serve(self) -> NoReturn:
        """Serve until the notebook hangs up or dies, and leave."""
        try:
            self._loop()
        finally:
            self.end_all()
            os._exit(0)

    def _loop(self) -> None:
        watched_sockets = [self._channel.fileno(), self._woken.fileno(), *self._parent]
        while True:
            readable_sockets, _, _ = select.select(
                watched_sockets, [], [], self._candidates.due_in()
            )
            self._candidates.end_overdue()
            if self._woken.fileno() in readable_sockets:
                self._collect()
            if self._channel.fileno() in readable_sockets and not self._serve_one():
                return
            if any(file_descriptor in readable_sockets for file_descriptor in self._parent):
                return

    def _serve_one(self) -> bool:
        try:
            message, file_descriptors = self._channel.receive()
        except EOFError:
            return False
        if isinstance(message, self._wire.Fork):
            self._set_threads(message.threads)
            process_id = self._fork(file_descriptors)
            self._workers.add(process_id)
            self._channel.send(self._wire.Forked(message.ticket, process_id))
        elif isinstance(message, self._wire.Learn):
            self._candidates.begin(message, file_descriptors)
        elif isinstance(message, self._wire.PauseLearning):
            self._candidates.pause(is_paused=message.is_paused)
        for file_descriptor in file_descriptors:
            os.close(file_descriptor)
        return True

    def _fork(self, file_descriptors: list[int]) -> int:
        template_id = os.getpid()
        process_id = os.fork()
        if process_id:
            return process_id
        from nbaccel.workers import worker

        self._let_go()
        channel, stdout, stderr, file = file_descriptors
        return worker.run_worker(
            worker.WorkerEnds(channel=channel, stdout=stdout, stderr=stderr, stack=file),
            template_id,
        )

    def _let_go(self) -> None:
        """Close, in a child, what is this process's."""
        signal.set_wakeup_fd(-1)
        # A child that held this end would hide the end of the template from the notebook.
        self._channel.close()
        self._woken.close()
        self._waker.close()
        self._candidates.close_copies()
        for file_descriptor in self._parent:
            os.close(file_descriptor)

    def _collect(self) -> None:
        from nbaccel.workers.reaping import end_descendants, reap

        # Emptied before reaping: a child that ends in between writes again and is found next time.
        with contextlib.suppress(BlockingIOError):
            while self._woken.recv(4096):
                continue
        # All are looked at, because several SIGCHLD may be merged into one.
        for process_id in tuple(self._workers | self._candidates.process_ids()):
            exit_status = reap(process_id)
            if exit_status is not None:
                self._workers.discard(process_id)
                self._candidates.ended(process_id, exit_status.status)
                # Before the report: the notebook takes it as the end of all the worker had started.
                end_descendants(kept_ids=self._workers | self._candidates.process_ids())
                # The notebook is gone: the loop is about to return.
                with contextlib.suppress(OSError):
                    self._channel.send(exit_status)

    def end_all(self) -> None:
        """Kill all workers, and whatever they have started."""
        from nbaccel.workers.reaping import end_descendants

        end_descendants()


def _become_template(channel: messaging.Channel, learned: object, parent_id: int) -> NoReturn:
    """Serve as a template of its own; called in a fork of another one."""
    from nbaccel.transfer import sharded_tensors
    from nbaccel.workers.reaping import adopt_orphans

    adopt_orphans()
    sharded_tensors.load_readers()
    fork_server = _ForkServer(channel, parent_id)
    freeze_memory()
    # Not before: the next launch would wait for the collection of what the imports have left.
    channel.send(learned)
    fork_server.serve()


def _open_process(process_id: int) -> list[int]:
    """A descriptor that becomes readable when the process ends, where the system has them."""
    # Without it the closed channel tells; a fork of the notebook could hold that open.
    try:
        return [os.pidfd_open(process_id)]
    except (OSError, AttributeError):
        return []
