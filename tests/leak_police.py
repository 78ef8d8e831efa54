"""Finds what a test left behind: it compares the world after the test with the world before.

    before = observe()
    ...                                   # the test, its fixtures, their teardown
    find_leaks(before)[0] -> ["process 4711 (sleep 600), running", ...]   # empty: all is well
    clean_up(before)                      # so that one leak fails one test, not all that follow

Processes and threads that are just ending get `GRACE_S` to do so. Exempt is what by design serves
the whole session: nbaccel's template server (not its children), and the singletons listed below.

Processes and their ports are looked at where something can have started one since the last look:
Python's audit events tell of forks, programs, bound sockets, and of the messages by which the
template is asked to fork; and where another process than the template is there, it may have.
All else is asked each time: that takes a fraction of a millisecond.

Orphans: a process whose parent died belongs to nobody, so it is no longer in our tree. It is found
by a session token in the environment it was started with, or, when it was forked without an exec,
by our own command line and folder. Other people's processes on the machine are left alone.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import multiprocessing.resource_tracker
import os
import shutil
import signal
import sys
import threading
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

GRACE_S = 2.0
TOKEN = "NBACCEL_TEST_SESSION"
SHM = Path("/dev/shm")
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)

# Threads that a library starts once and keeps, by the module of their class.
SINGLETONS = {
    "tqdm._monitor": "one monitor serves all bars of a process",
    "zmq.utils.garbage": "one collector serves all zero-copy messages of a process",
    "IPython.core.history": "the shell's history writer lives as long as the shell",
}
# Variables that a library sets once when it is imported, or pytest for its own use.
IMPORT_TIME_VARIABLES = {
    "PYTEST_CURRENT_TEST": "pytest names the running phase in it",
    TOKEN: "ours",
    "KMP_DUPLICATE_LIB_OK": "scikit-learn, at import",
    "KMP_INIT_AT_FORK": "scikit-learn, at import",
    "CUDA_MODULE_LOADING": "torch, when CUDA is first used",
    "PYTORCH_NVML_BASED_CUDA_CHECK": "Lightning, at import",
    "TORCHINDUCTOR_CACHE_DIR": "torch's compiler, when first used",
    "TRITON_CACHE_DIR": "torch's compiler, when first used",
}

# Events of `sys.addaudithook` after which there may be a process that was not there before.
STARTING_EVENTS = frozenset(
    {
        *("os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.system", "pty.spawn"),
        *("socket.bind", "socket.sendmsg", "subprocess.Popen"),
    }
)

TEMPLATE_NAME = "nbaccel-tmpl"  # nbaccel.workers.template_server.TEMPLATE_NAME


@dataclass(frozen=True)
class Identity:
    """A process, told from a later one that got the same number."""

    pid: int
    started: float


@dataclass(frozen=True)
class World:
    """What a test could leave behind, at one moment."""

    processes: frozenset[Identity]
    num_starts: int
    """How many events of `STARTING_EVENTS` there had been."""
    threads: frozenset[threading.Thread]
    environ: dict[str, str]
    ports: frozenset[tuple[str, int]]
    ports_of_processes: frozenset[tuple[str, int]]
    segments: frozenset[str]
    memfds: int
    cwd: str
    handlers: dict[signal.Signals, Any]
    has_process_group: bool


# ---------------------------------------------------------------- the session
def start_session() -> None:
    """Give what this session starts a mark by which it can be known when orphaned."""
    os.environ[TOKEN] = uuid.uuid4().hex
    if not _starts:  # a hook cannot be removed, and one process may run several sessions
        _starts.append(0)
        sys.addaudithook(_count_start)


_starts: list[int] = []


def _count_start(event: str, _arguments: tuple[Any, ...]) -> None:
    if event in STARTING_EVENTS:
        _starts[0] += 1


def end_session() -> None:
    """Send the template server home, and forget the mark."""
    template = sys.modules.get("nbaccel.workers.template")
    if template is not None:
        template.stop()
    os.environ.pop(TOKEN, None)


# ---------------------------------------------------------------- looking
def observe(last: World | None = None) -> World:
    """Look at everything a test could leave behind.

    Args:
        last: What was seen last; where nothing can have started a process since, its processes are
            taken for those of now.
    """
    num_starts = sum(_starts)
    if last is not None and not last.processes and last.num_starts == num_starts:
        processes, ports_of_processes = last.processes, last.ports_of_processes
    else:
        tree = psutil.Process().children(recursive=True)
        processes = frozenset(_our_processes(tree))
        ports_of_processes = frozenset(port for one in tree for port in _listening_ports(one))
    return World(
        processes=processes,
        num_starts=num_starts,
        threads=frozenset(t for t in threading.enumerate() if type(t).__module__ not in SINGLETONS),
        environ={k: v for k, v in os.environ.items() if k not in IMPORT_TIME_VARIABLES},
        ports=frozenset(_listening_ports(psutil.Process())),
        ports_of_processes=ports_of_processes,
        segments=frozenset(_own_segments()),
        memfds=sum(1 for _ in _own_memfds()),
        cwd=_cwd(),
        handlers={s: signal.getsignal(s) for s in SIGNALS},
        has_process_group=_has_process_group(),
    )


def _our_processes(tree: list[psutil.Process]) -> Iterator[Identity]:
    exempt = set(_session_servers()) | set(_templates_of_kernels(tree))
    for process in tree + list(_orphans(tree)):
        if process.pid not in exempt:
            yield Identity(process.pid, process.create_time())


def _templates_of_kernels(tree: list[psutil.Process]) -> Iterator[int]:
    """Templates of kernels that many tests share: each cell may bring a new one."""
    for process in tree:
        with contextlib.suppress(psutil.Error):
            if process.name() == TEMPLATE_NAME and process.ppid() not in (1, os.getpid()):
                yield process.pid


def _siblings() -> list[psutil.Process]:
    """The other processes among which pytest-xdist shares out the tests, and all that is theirs."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return []
    return psutil.Process(os.getppid()).children(recursive=True)


def _session_servers() -> Iterator[int]:
    """Processes that by design outlive a test: the template, and multiprocessing's own helpers."""
    template = sys.modules.get("nbaccel.workers.template")
    for running in [] if template is None else template.running():
        yield running.process.pid
    forkserver = sys.modules.get("multiprocessing.forkserver")
    for helper, attribute in (
        (multiprocessing.resource_tracker._resource_tracker, "_pid"),
        (getattr(forkserver, "_forkserver", None), "_forkserver_pid"),
    ):
        if pid := getattr(helper, attribute, None):
            yield pid


def _orphans(tree: list[psutil.Process]) -> Iterator[psutil.Process]:
    """Live processes that came from here and have lost their parent."""
    known = {os.getpid(), os.getppid()} | {process.pid for process in [*tree, *_siblings()]}
    session_start = psutil.Process().create_time()
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.pid in known or process.create_time() < session_start:
                continue
            dead = process.status() == psutil.STATUS_ZOMBIE  # whoever adopted it will collect it
            if not dead and _came_from_here(Identity(process.pid, process.create_time())):
                yield process


@functools.lru_cache(maxsize=4096)
def _came_from_here(identity: Identity) -> bool:
    """True if the process carries our token, or is a bare fork of this very process."""
    theirs, ours = Path(f"/proc/{identity.pid}"), Path("/proc/self")
    try:
        if f"{TOKEN}={os.environ.get(TOKEN)}".encode() in (theirs / "environ").read_bytes():
            return True
        same = (theirs / "cmdline").read_bytes() == (ours / "cmdline").read_bytes()
        return same and (theirs / "environ").read_bytes() == (ours / "environ").read_bytes()
    except OSError:  # another user's, or gone meanwhile
        return False


def _listening_ports(process: psutil.Process) -> Iterator[tuple[str, int]]:
    with contextlib.suppress(psutil.Error, OSError):  # it ended while we looked
        if sockets := _sockets(process.pid):
            yield from _ports_of(Identity(process.pid, process.create_time()), sockets)


def _sockets(pid: int) -> frozenset[str]:
    """A process's sockets, by the kernel's numbers, which no two have."""
    found = set()
    for entry in os.scandir(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):  # closed meanwhile
            target = os.readlink(entry.path)
            if target.startswith("socket:"):
                found.add(target)
    return frozenset(found)


# The kernel's tables list every connection of the machine: reading them took most of a look's time.
@functools.lru_cache(maxsize=256)
def _ports_of(process: Identity, sockets: frozenset[str]) -> tuple[tuple[str, int], ...]:
    """Where a process listens; asked anew when its sockets have changed."""
    return tuple(
        (connection.laddr.ip, connection.laddr.port)
        for connection in psutil.Process(process.pid).net_connections(kind="tcp")
        if connection.status == psutil.CONN_LISTEN
    )


def _own_segments() -> Iterator[str]:
    with contextlib.suppress(FileNotFoundError):  # a machine without /dev/shm
        for entry in os.scandir(SHM):
            with contextlib.suppress(FileNotFoundError):  # removed while we looked
                if entry.stat(follow_symlinks=False).st_uid == os.getuid():
                    yield entry.name


def _own_memfds() -> Iterator[str]:
    for entry in os.scandir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the descriptor of this very scan
            target = str(Path(entry.path).readlink())
            if target.startswith("/memfd:nbaccel"):
                yield target


def _cwd() -> str:
    try:
        return str(Path.cwd())
    except FileNotFoundError:
        return "(a folder that no longer exists)"


def _has_process_group() -> bool:
    distributed = sys.modules.get("torch.distributed")
    return distributed is not None and distributed.is_available() and distributed.is_initialized()


# ---------------------------------------------------------------- judging
def find_leaks(before: World, *, also: Collection[str] = ()) -> tuple[list[str], World]:
    """Say what is there now and was not before, after giving what is ending time to end.

    Returns the leaks in words, and what was seen last.
    """
    deadline = time.monotonic() + GRACE_S
    if "memfds" in also:
        gc.collect()
    now = observe(before)
    while (found := _compare(before, now, also)) and time.monotonic() < deadline:
        _wait_a_little(now.threads - before.threads, deadline)
        now = observe()
    return found, now


def _wait_a_little(threads: Collection[threading.Thread], deadline: float) -> None:
    """Wait for one ending thread if there is one, else a moment."""
    pause = min(0.05, max(0.0, deadline - time.monotonic()))
    if threads:
        next(iter(threads)).join(pause)
    else:
        time.sleep(pause)


def _compare(before: World, after: World, also: Collection[str]) -> list[str]:
    found = [_describe_process(i) for i in after.processes - before.processes]
    found += [f"thread {t.name!r} ({type(t).__name__})" for t in after.threads - before.threads]
    found += _compare_environ(before.environ, after.environ)
    ports_before = before.ports | before.ports_of_processes
    new_ports = (after.ports | after.ports_of_processes) - ports_before
    found += [f"listening port {ip}:{port}" for ip, port in new_ports]
    found += [
        f"shared memory {SHM / name}"
        for name in after.segments - before.segments
        if not _held_by_a_stranger(name)
    ]
    found += [
        f"handler of {s.name}: {after.handlers[s]!r} instead of {before.handlers[s]!r}"
        for s in SIGNALS
        if after.handlers[s] is not before.handlers[s]
    ]
    if after.cwd != before.cwd:
        found.append(f"working folder {after.cwd} instead of {before.cwd}")
    if after.has_process_group and not before.has_process_group:
        found.append("an initialised torch.distributed process group")
    if "memfds" in also and after.memfds > before.memfds:
        found.append(f"{after.memfds - before.memfds} open memfd of nbaccel")
    return sorted(found)


def _compare_environ(before: dict[str, str], after: dict[str, str]) -> list[str]:
    found = [f"variable {k} added: {after[k]!r}" for k in after.keys() - before.keys()]
    found += [f"variable {k} removed: was {before[k]!r}" for k in before.keys() - after.keys()]
    found += [
        f"variable {k} changed: {before[k]!r} to {after[k]!r}"
        for k in before.keys() & after.keys()
        if before[k] != after[k]
    ]
    return found


def _describe_process(identity: Identity) -> str:
    try:
        process = psutil.Process(identity.pid)
        if process.status() == psutil.STATUS_ZOMBIE:
            return f"process {identity.pid} ({process.name()}), a zombie that nobody waited for"
        command = " ".join(process.cmdline()) or process.name()
        return f"process {identity.pid} ({command[:200]}), {process.status()}"
    except psutil.Error:
        return f"process {identity.pid}, just ended"


def _held_by_a_stranger(segment: str) -> bool:
    """True if a process that is none of ours holds the segment: then it is theirs."""
    ours = {os.getpid()} | {process.pid for process in psutil.Process().children(recursive=True)}
    needle = str(SHM / segment)
    for process in psutil.process_iter():
        if process.pid not in ours and _holds(process.pid, needle):
            return True
    return False


def _holds(pid: int, path: str) -> bool:
    with contextlib.suppress(OSError):  # another user's, or gone meanwhile
        if path in Path(f"/proc/{pid}/maps").read_text(errors="replace"):
            return True
        # Listed at once: an iterator that is left half way warns when it is collected.
        for descriptor in list(Path(f"/proc/{pid}/fd").iterdir()):
            if descriptor.readlink() == Path(path):
                return True
    return False


# ---------------------------------------------------------------- cleaning up
def clean_up(before: World) -> None:
    """Undo what can be undone, so that the next test starts from a clean table."""
    after = observe()
    for identity in after.processes - before.processes:
        _end(identity)
    for name in after.segments - before.segments:
        if not _held_by_a_stranger(name):
            if (SHM / name).is_dir():
                shutil.rmtree(SHM / name)
            else:
                (SHM / name).unlink(missing_ok=True)
    for variable in os.environ.keys() - before.environ.keys() - IMPORT_TIME_VARIABLES.keys():
        del os.environ[variable]
    os.environ.update(before.environ)
    for number in SIGNALS:
        if before.handlers[number] is not None:  # None: set by C code, Python cannot put it back
            signal.signal(number, before.handlers[number])
    if after.cwd != before.cwd:
        os.chdir(before.cwd)
    if after.has_process_group and not before.has_process_group:
        sys.modules["torch.distributed"].destroy_process_group()


def _end(identity: Identity) -> None:
    """Kill the process if it lives, and collect it if it is our child."""
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(identity.pid)
        if process.create_time() == identity.started:
            process.kill()
            process.wait(GRACE_S)
