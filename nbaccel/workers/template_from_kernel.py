"""A template forked from the notebook's own process, while that is as clean as a fresh one.

It has what the notebook has imported, in the same pages of memory, and is ready in milliseconds. A
kernel has threads of its own (ipykernel's, zmq's), which a fork does not take along and a worker
does not need. Everything else that a fork could not live with is looked for first: then a fresh
interpreter is started instead.

What the fork takes along of the notebook, and what it does not:

    sockets, the history database, logs          not: replaced by the null device at once
    other files that are open                     with such files there is no fork
    the kernel's shell, streams, magics, hooks    not reachable by their names: replaced
    variables of the notebook (`__main__`)        not reachable by name; their values are in memory,
                                                  as in a fork of start_method="fork"
    modules from the user's own files             with such modules there is no fork
    what libraries were set to (options, patches) as it was at that moment
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import signal
import socket
import sys
import threading
import types
import warnings
from asyncio import AbstractEventLoop
from collections.abc import Callable, Iterator, Mapping
from selectors import BaseSelector
from typing import Any, NoReturn

import psutil

from nbaccel.workers import fork_safety, forkable_state, installed_modules, worker_output
from nbaccel.workers.installed_modules import FileStamp
from nbaccel.workers.reaping import TEMPLATE_NAME, take_name

__all__ = ["fork_notebook", "imported_stamps", "why_not"]


_MOST_ANONYMOUS_BYTES = 2**30
_MOST_VARIABLE_BYTES = 64 * 2**20
"""The fork would keep the memory of variables that the notebook gives up later."""
_OF_A_KERNEL = "ZMQbg"
_HISTORY_FILE = "history.sqlite"
_SHARED_MEMORY_FILE = "/memfd:nbaccel-"


def why_not(namespace: Mapping[str, Any]) -> str:
    """Why this process should not be forked for a template; empty if it can be.

    Args:
        namespace: The notebook's variables.
    """
    if threading.current_thread() is not threading.main_thread():
        return "nbaccel was not imported by the main thread"
    if sys.gettrace() is not None or sys.getprofile() is not None:
        return "a debugger or a profiler is at work"
    if hazards := fork_safety.hazards():
        return str(hazards[0])
    if installed_modules.local_modules():
        # Workers import them anew, for they may have been edited: what they have registered with
        # libraries would be registered twice.
        return "modules of your own are imported"
    if opened_files := _files_of_others():
        return f"{min(opened_files)} is open"
    if holder := _holder_of_descriptors():
        return f"{holder} has an event loop or a socket"
    if _tracker_runs():
        return "multiprocessing's resource tracker runs"
    if _variable_bytes(namespace) > _MOST_VARIABLE_BYTES:
        return "the notebook holds data"
    memory_info = psutil.Process().memory_info()
    if memory_info.rss - memory_info.shared > _MOST_ANONYMOUS_BYTES:
        return "the notebook has taken much memory"
    if _maps_shared_memory():
        return "the notebook shares memory with workers"
    return ""


def fork_notebook(
    serve: Callable[[], NoReturn], *, kept_descriptors: tuple[int, ...], error_file: int
) -> int | None:
    """Fork this process for a template.

    Args:
        serve: Called in the fork; never returns.
        kept_descriptors: What the fork needs of this process's descriptors.
        error_file: What becomes its stderr.

    Returns:
        Its process id; None where native threads have turned out to run that it would miss.
    """
    fork_safety.end_bar_monitors()
    for output_stream in (sys.stdout, sys.stderr):
        # What is still buffered would be printed by the fork as well.
        output_stream.flush()
    parent_id = os.getpid()
    with warnings.catch_warnings():
        # Python 3.12 warns of every fork with threads.
        warnings.simplefilter("ignore", DeprecationWarning)
        process_id = os.fork()
    if process_id == 0:
        _serve_in_fork(serve, parent_id, kept_descriptors, error_file)
    # Only now: OpenBLAS ends its threads before a fork, and those of others are still there.
    if _foreign_threads():
        with contextlib.suppress(ProcessLookupError):
            os.kill(process_id, signal.SIGKILL)
        os.waitpid(process_id, 0)
        return None
    return process_id


def imported_stamps() -> dict[str, FileStamp] | None:
    """The versions of all installed modules that this process has imported.

    Returns:
        Name → version; None where a file may have been changed since it was imported.
    """
    files = installed_modules.installed_modules()
    started_at = psutil.Process().create_time()
    stamps = {}
    for module_name, stamp in installed_modules.stamps_of(files).items():
        # What is new is looked at once: a worker may write a new bytecode file later.
        if stamp is None or (
            module_name not in _FIRST_STAMPS
            and not installed_modules.is_as_imported(
                module_name, files[module_name], stamp, started_at
            )
        ):
            return None
        if _FIRST_STAMPS.setdefault(module_name, stamp) != stamp:
            return None
        stamps[module_name] = stamp
    return stamps


_FIRST_STAMPS: dict[str, FileStamp] = {}
"""Module → the version of its file that this process has imported."""


def _tracker_runs() -> bool:
    module = sys.modules.get("multiprocessing.resource_tracker")
    tracker = getattr(module, "_resource_tracker", None)
    return getattr(tracker, "_fd", None) is not None


def _files_of_others() -> frozenset[str]:
    """Files that are neither the kernel's own nor a log: a package may read on in one."""
    inherited_files = set()
    for name in ("self", os.getppid()):
        for file_descriptor in (1, 2):
            with contextlib.suppress(OSError):
                inherited_files.add(os.readlink(f"/proc/{name}/fd/{file_descriptor}"))
    # Workers open logs anew.
    log_files = {getattr(log_handler, "baseFilename", "") for log_handler in _log_handlers()}
    return frozenset(
        path
        for path in forkable_state.open_files() - inherited_files - log_files
        if _HISTORY_FILE not in path
    )


def _holder_of_descriptors() -> str:
    """A module of a package with what the fork would lose with its descriptors; empty for none."""
    for name in installed_modules.installed_modules():
        # A copy: a thread may import meanwhile. Not isinstance, which asks lazy objects.
        for value in tuple(vars(sys.modules.get(name, signal)).values()):
            if issubclass(type(value), (AbstractEventLoop, BaseSelector, socket.socket)):
                return name
    return ""


def _log_handlers() -> Iterator[logging.Handler]:
    for python_logger in (logging.root, *logging.root.manager.loggerDict.values()):
        yield from getattr(python_logger, "handlers", ())


def _variable_bytes(namespace: Mapping[str, Any]) -> int:
    """What the notebook's variables hold, as far as they say so themselves."""
    num_bytes = 0
    for value in tuple(namespace.values()):
        if isinstance(value, (type, types.ModuleType)):
            continue
        for held_object in (value, *_weights_in(value)):
            # Any object of the user's: asking it may raise anything.
            with contextlib.suppress(Exception):
                held_bytes = held_object.nbytes
                num_bytes += held_bytes if isinstance(held_bytes, int) else 0
        if isinstance(value, (str, bytes, bytearray, list, tuple, dict, set)):
            num_bytes += sys.getsizeof(value)
    return num_bytes


def _weights_in(value: Any) -> tuple[Any, ...]:
    module = sys.modules.get("torch")
    if module is not None and isinstance(value, module.nn.Module):
        return tuple(value.parameters())
    return ()


def _maps_shared_memory() -> bool:
    with open("/proc/self/maps") as memory_maps:
        return any(_SHARED_MEMORY_FILE in line for line in memory_maps)


def _foreign_threads() -> list[int]:
    """Native threads that are neither Python's nor a kernel's own."""
    python_threads = {live_thread.native_id for live_thread in threading.enumerate()}
    return [
        thread_id
        for thread_id in forkable_state.native_threads()
        if thread_id not in python_threads
        # Empty: it has ended meanwhile.
        and not (forkable_state.name_of_thread(thread_id) or _OF_A_KERNEL).startswith(_OF_A_KERNEL)
    ]


# ---- in the fork


def _serve_in_fork(
    serve: Callable[[], NoReturn],
    parent_id: int,
    kept_descriptors: tuple[int, ...],
    error_file: int,
) -> NoReturn:
    try:
        # First, so that nothing of the notebook's is ever freed here: its finalizers are not ours.
        gc.disable()
        gc.freeze()
        os.setsid()
        take_name(TEMPLATE_NAME)
        if os.getppid() != parent_id:
            os._exit(1)
        _leave_signals()
        _leave_descriptors(kept_descriptors, error_file)
        _leave_streams()
        _leave_shell()
        _leave_modules()
        gc.freeze()
        gc.enable()
        serve()
    except BaseException:  # there is no caller to raise to
        sys.__excepthook__(*sys.exc_info())
    finally:
        os._exit(1)


def _leave_signals() -> None:
    signal.set_wakeup_fd(-1)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    for number in signal.valid_signals():
        # Those of C code are None, and stay: they were there before any user code, or the process
        # would not have been forked.
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _leave_descriptors(kept_descriptors: tuple[int, ...], error_file: int) -> None:
    device = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    os.dup2(device, 0)
    os.dup2(device, 1)
    os.dup2(error_file, 2)
    for name in os.listdir("/proc/self/fd"):
        file_descriptor = int(name)
        if file_descriptor > 2 and file_descriptor not in (*kept_descriptors, device):
            # Replaced and not closed: its owner may still be asked to close it, when the number
            # would be another file's. The descriptor of the folder itself is gone.
            with contextlib.suppress(OSError):
                os.fstat(file_descriptor)
                os.dup2(device, file_descriptor, inheritable=False)
    os.close(device)


def _leave_streams() -> None:
    old_streams = [sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__]
    sys.stdin = open(0, closefd=False)
    sys.stdout = open(1, "w", buffering=1, encoding="utf-8", closefd=False)
    sys.stderr = open(2, "w", buffering=1, encoding="utf-8", closefd=False)
    sys.__stdin__ = sys.stdin  # type: ignore[misc]
    sys.__stdout__ = sys.stdout  # type: ignore[misc]
    sys.__stderr__ = sys.stderr  # type: ignore[misc]
    sys.excepthook = sys.__excepthook__
    sys.displayhook = sys.__displayhook__
    # Libraries' handlers hold the kernel's streams, which write to the browser.
    for log_handler in _log_handlers():
        if isinstance(log_handler, logging.StreamHandler) and log_handler.stream in old_streams:
            is_output = log_handler.stream in old_streams[::2]
            # Not by setStream, which flushes the old stream.
            log_handler.stream = sys.stdout if is_output else sys.stderr
            # transformers gives its handler the stream's own method.
            vars(log_handler).pop("flush", None)
    # Other packages have kept a stream when they were imported (`from sys import stdout`).
    for old_stream, new_stream in zip(old_streams, (sys.stdout, sys.stderr) * 2, strict=True):
        for method_name in ("write", "writelines", "flush"):
            with contextlib.suppress(AttributeError):  # one that takes no attributes is no kernel's
                setattr(old_stream, method_name, getattr(new_stream, method_name))


def _leave_shell() -> None:
    shell_module = sys.modules.get("IPython.core.interactiveshell")
    if shell_module is not None and shell_module.InteractiveShell.initialized():
        kernel_shell = shell_module.InteractiveShell.instance()
        # Puts back what a running cell has in `builtins`, `get_ipython` for example.
        for active_trap in ("builtin_trap", "display_trap"):
            trap = getattr(kernel_shell, active_trap, None)
            for name in ("deactivate", "unset"):
                with contextlib.suppress(Exception):  # a trap that is not set
                    getattr(trap, name)()
    _forget_singletons()
    # Before this template imports libraries that ask for them.
    worker_output.forget_prompts()
    main_module = types.ModuleType("__main__")
    vars(main_module)["__builtins__"] = sys.modules["builtins"]
    sys.modules["__main__"] = main_module


def _forget_singletons() -> None:
    """Let no class of the kernel's application know its object: shell, kernel, application."""
    module = sys.modules.get("traitlets.config.configurable")
    if module is None:
        return
    pending_classes = [module.SingletonConfigurable]
    while pending_classes:
        singleton_class = pending_classes.pop()
        pending_classes += singleton_class.__subclasses__()
        if vars(singleton_class).get("_instance") is not None:
            singleton_class.clear_instance()


def _leave_modules() -> None:
    """Forget modules that are being imported right now, and those that make this a kernel."""
    for name, module in tuple(sys.modules.items()):
        module_spec = getattr(module, "__dict__", {}).get("__spec__")
        is_half_imported = getattr(module_spec, "_initializing", False)
        if is_half_imported or name.partition(".")[0] == "ipykernel":
            _KEPT_ALIVE.append(sys.modules.pop(name))


_KEPT_ALIVE: list[Any] = []
"""Modules that no longer have a name: their objects' finalizers must not run here."""
