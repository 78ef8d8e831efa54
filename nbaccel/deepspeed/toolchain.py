"""What DeepSpeed needs to load its C++ operations: ninja on PATH, a compiler, no forgotten lock.

On a CPU every engine loads one, whatever its stage, and torch asks for ninja even where the
operation was built long ago. The errors of all this come late and name something else.
Which operations a configuration needs is told by `ops`.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
import sysconfig
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from nbaccel import env
from nbaccel._optional import is_installed
from nbaccel._origin import install_line
from nbaccel.deepspeed import building, library
from nbaccel.errors import MissingBackend, PlatformUnsupported, UnsafeMoment
from nbaccel.log import get_logger

__all__ = [
    "check_compiler",
    "check_tools",
    "compiler_of",
    "holder_of",
    "is_forgotten",
    "ninja_beside_python",
    "no_compiler",
    "path_with_ninja",
    "remove_forgotten_locks",
]

_log = get_logger(__name__)
_CPU_OPERATION = "deepspeed_shm_comm"
# Where a lock's holder may run on another machine, which no look at processes can tell.
_SHARED_FILE_SYSTEMS = (
    *("nfs", "cifs", "smb", "lustre", "gpfs", "beegfs", "ceph", "glusterfs", "fuse.sshfs"),
)


def check_tools(device: str) -> None:
    """Refuse what would fail in every worker, when it makes its engine.

    Args:
        device: Type of the device.

    Raises:
        MissingBackend: There is no DeepSpeed, it is too old, or there is no ninja.
        PlatformUnsupported: There is no C++ compiler, and one is needed.
    """
    if not is_installed("deepspeed"):
        raise MissingBackend(
            f"zero_stage needs DeepSpeed, which is not installed for {sys.executable}: workers on "
            f"{device} could not shard anything. Install it: {install_line('deepspeed')}",
            name="deepspeed",
        )
    library.check_version()
    path_with_ninja()
    if device == "cpu":
        check_compiler()


def path_with_ninja() -> str | None:
    """What PATH must be for ninja to be found, and always the same one.

    A kernel that was started as ``venv/bin/python`` does not have ``venv/bin`` on its PATH. If it
    took the system's ninja, and a shell with the environment activated its own, each would build
    anew what the other has built: versions of ninja remember commands in different ways.

    Returns:
        The PATH; None where it is unset and not needed.

    Raises:
        MissingBackend: There is no ninja.
    """
    path = env.read("PATH")
    found, first = ninja_beside_python(), shutil.which("ninja", path=path)
    if first is not None and (found is None or Path(first) == found):
        return path
    if found is None:
        raise MissingBackend(
            f"DeepSpeed needs ninja to load its C++ operations, also those already built: none is "
            f"in PATH ({path}) nor beside {sys.executable}. Install it: pip install ninja",
            name="ninja",
        )
    return os.pathsep.join([str(found.parent), *filter(None, [path])])


def ninja_beside_python() -> Path | None:
    """The ninja that pip installed for this Python, wherever PATH leads.

    Returns:
        The program; None where there is none.
    """
    beside = (str(Path(sys.executable).parent), sysconfig.get_path("scripts"))
    found = shutil.which("ninja", path=os.pathsep.join(beside))
    return Path(found) if found else None


def compiler_of(environ: Mapping[str, str]) -> list[str] | None:
    """The C++ compiler that torch takes in this environment.

    Args:
        environ: The environment of the process that builds.

    Returns:
        Its path and the options that `CXX` gives it; None where it is not on PATH.
    """
    name, *options = _compiler_words(environ)
    found = shutil.which(name, path=environ.get("PATH", os.defpath))
    return [found, *options] if found else None


def no_compiler(environ: Mapping[str, str], operations: Sequence[str]) -> str:
    """What to say where there is no compiler.

    Args:
        environ: The environment of the process that builds.
        operations: What it would build.

    Returns:
        What is wrong, why it matters, what to do.
    """
    return (
        f"The C++ compiler {_compiler_words(environ)[0]!r} is not on PATH. DeepSpeed builds "
        f"{', '.join(operations)} on first use and needs one. Install it: apt-get install g++ (or "
        "conda install gxx_linux-64); or set CXX to the one you have."
    )


def _compiler_words(environ: Mapping[str, str]) -> list[str]:
    return shlex.split(environ.get("CXX", "")) or ["c++"]


def check_compiler() -> None:
    """Refuse to go on where the operation that every engine on a CPU needs cannot be built.

    Raises:
        PlatformUnsupported: There is no C++ compiler, and the operation was not built before.
    """
    environ = env.snapshot()
    if compiler_of(environ) is None and not building.is_built(_CPU_OPERATION, environ):
        raise PlatformUnsupported(no_compiler(environ, [_CPU_OPERATION]))


def remove_forgotten_locks() -> tuple[Path, ...]:
    """Remove locks that a killed process left in the folders of half-built operations.

    Whoever builds keeps the lock open until it is through; whoever comes second waits until the
    file is gone, silently and for ever.

    Returns:
        The locks removed.

    Raises:
        UnsafeMoment: Nobody here holds a lock, but somebody elsewhere may.
    """
    return tuple(lock for lock in _locks() if is_forgotten(lock) and _removed(lock))


def is_forgotten(lock: Path) -> bool:
    """Whether whoever made a lock is gone.

    Operations that were built long ago are locked for a moment, too, by each process that loads
    them, so one look is not enough: the lock must be the same one, and nobody's, all the while.

    Args:
        lock: The file.

    Raises:
        UnsafeMoment: Nobody here holds it, but somebody elsewhere may.
    """
    seen = _identity(lock)
    for _ in range(3):
        if seen is None:
            return False  # the build ended while we looked
        if (holder := holder_of(lock)) is not None:
            _log.info("%s is being built by process %s: DeepSpeed waits", lock.parent, holder)
            return False
        time.sleep(0.05)  # a build that ends closes its lock first and removes it then
        if _identity(lock) != seen:
            return False
    if not _would_be_seen(lock):
        raise UnsafeMoment(
            f"{lock} says that somebody builds the operation {lock.parent.name}, and no process "
            "that can be seen from here does. DeepSpeed would wait for ever. If none does on "
            f"another machine or as another user, remove it: rm {shlex.quote(str(lock))}"
        )
    return True


def _identity(lock: Path) -> tuple[int, int] | None:
    """Tells a file from another one of the same name, made later; None where there is none."""
    try:
        found = lock.stat()
    except OSError:
        return None
    return found.st_ino, found.st_ctime_ns


def _removed(lock: Path) -> bool:
    _log.warning("removing %s: whoever was building %s is gone", lock, lock.parent.name)
    lock.unlink(missing_ok=True)
    return True


def holder_of(lock: Path) -> int | None:
    """The process that has a lock open: who builds keeps it so until it is through.

    Args:
        lock: The file.

    Returns:
        Its process id; None where no process that can be seen from here has.
    """
    wanted = str(lock.resolve())
    for process in psutil.process_iter():
        try:
            if any(file.path == wanted for file in process.open_files()):
                return process.pid
        except (psutil.Error, OSError):  # gone meanwhile, or not ours to look into
            continue
    return None


def _would_be_seen(lock: Path) -> bool:
    """Whether a holder of this file must be a process that we can look into."""
    if hasattr(os, "geteuid") and os.geteuid() not in (0, lock.stat().st_uid):
        return False
    mounts = [
        part
        for part in psutil.disk_partitions(all=True)
        if lock.resolve().is_relative_to(part.mountpoint)
    ]
    kind = max(mounts, key=lambda part: len(part.mountpoint)).fstype if mounts else ""
    return not kind.startswith(_SHARED_FILE_SYSTEMS)


def _locks() -> list[Path]:
    return sorted(building.folder(env.snapshot()).glob("*/lock"))
