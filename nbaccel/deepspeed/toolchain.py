"""What DeepSpeed needs to load its C++ operations: ninja on PATH, a compiler, no forgotten lock.

On a CPU every engine loads one, whatever its stage, and torch asks for ninja even where the
operation was built long ago. The errors of all this come late and name something else.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from nbaccel import env
from nbaccel.errors import MissingBackend, PlatformUnsupported, UnsafeMoment
from nbaccel.log import get_logger

__all__ = ["check_compiler", "holder_of", "path_with_ninja", "remove_forgotten_locks"]

_log = get_logger(__name__)
_CPU_OPERATION = "deepspeed_shm_comm"
# Where a lock's holder may run on another machine, which no look at processes can tell.
_SHARED_FILE_SYSTEMS = (
    *("nfs", "cifs", "smb", "lustre", "gpfs", "beegfs", "ceph", "glusterfs", "fuse.sshfs"),
)


def path_with_ninja() -> str | None:
    """What PATH must be for ninja to be found.

    A kernel that was started as ``venv/bin/python`` does not have ``venv/bin`` on its PATH.

    Returns:
        The PATH; None where it is unset and not needed.

    Raises:
        MissingBackend: There is no ninja.
    """
    path = env.read("PATH")
    if shutil.which("ninja", path=path):
        return path
    beside = (str(Path(sys.executable).parent), sysconfig.get_path("scripts"))
    found = shutil.which("ninja", path=os.pathsep.join(beside))
    if found is None:
        raise MissingBackend(
            f"DeepSpeed needs ninja to load its C++ operations, also those already built: none is "
            f"in PATH ({path}) nor beside {sys.executable}. Install it: pip install ninja",
            name="ninja",
        )
    return os.pathsep.join([str(Path(found).parent), *filter(None, [path])])


def check_compiler() -> None:
    """Refuse to go on where the operation that every engine on a CPU needs cannot be built.

    Raises:
        PlatformUnsupported: There is no C++ compiler, and the operation was not built before.
    """
    name = env.read("CXX") or "c++"
    words = shlex.split(name) or [name]
    if shutil.which(words[0], path=env.read("PATH")) or _is_built(_CPU_OPERATION):
        return
    raise PlatformUnsupported(
        f"DeepSpeed on a CPU compiles its operation {_CPU_OPERATION} when the first engine is "
        f"made, and the C++ compiler {name!r} is not on PATH. Install one (apt-get install g++, or "
        "conda install gxx), or set CXX to the one you have."
    )


def remove_forgotten_locks() -> tuple[Path, ...]:
    """Remove locks that a killed process left in the folders of half-built operations.

    Whoever builds keeps the lock open until it is through; whoever comes second waits until the
    file is gone, silently and for ever.

    Returns:
        The locks removed.

    Raises:
        UnsafeMoment: Nobody here holds a lock, but somebody elsewhere may.
    """
    return tuple(lock for lock in _locks() if _is_forgotten(lock) and _removed(lock))


def _is_forgotten(lock: Path) -> bool:
    if not lock.exists():
        return False  # the build ended while we looked
    holder = holder_of(lock)
    if holder is not None:
        _log.info("%s is being built by process %s: DeepSpeed waits for it", lock.parent, holder)
        return False
    time.sleep(0.05)  # a build that ends closes its lock first and removes it then
    if not lock.exists():
        return False
    if not _would_be_seen(lock):
        raise UnsafeMoment(
            f"{lock} says that somebody builds the operation {lock.parent.name}, and no process "
            "that can be seen from here does. DeepSpeed would wait for ever. If none does on "
            f"another machine or as another user, remove it: rm {shlex.quote(str(lock))}"
        )
    return True


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


def _roots() -> Iterator[Path]:
    """Folders with one folder per operation, as torch chooses them."""
    asked = env.read("TORCH_EXTENSIONS_DIR")
    if asked is not None:
        yield Path(asked)
        return
    from torch.utils.cpp_extension import get_default_build_root

    # One for each pair of Python and CUDA versions.
    yield from (path for path in Path(get_default_build_root()).glob("py*") if path.is_dir())


def _locks() -> list[Path]:
    return [lock for root in _roots() for lock in root.glob("*/lock")]


def _is_built(operation: str) -> bool:
    installed = getattr(sys.modules.get("deepspeed.git_version_info"), "installed_ops", {})
    return bool(installed.get(operation)) or any(
        (root / operation / f"{operation}.so").exists() for root in _roots()
    )
