"""DeepSpeed's C++ operations: which ones a configuration needs, and what it takes to build them.

On a CPU every engine loads one, whatever its stage, and torch needs ninja even where the operation
was built long ago. The errors of all this come late and name something else.

DeepSpeed builds them when they are first used, inside the training process: a missing tool shows
there as a traceback, and the lock of a build that was killed makes it wait for ever.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from nbaccel.base import env
from nbaccel.base.errors import MissingBackend, PlatformUnsupported, UnsafeMoment
from nbaccel.base.log import get_logger
from nbaccel.base.optional_packages import install_line, is_installed, require
from nbaccel.deepspeed import library

if TYPE_CHECKING:
    from nbaccel.deepspeed.zero_config import ZeroConfig

_log = get_logger(__name__)
_CPU_OPERATION = "deepspeed_shm_comm"
# On these a lock's holder may run on another machine, whose processes cannot be seen from here.
_SHARED_FILE_SYSTEMS = (
    *("nfs", "cifs", "smb", "lustre", "gpfs", "beegfs", "ceph", "glusterfs", "fuse.sshfs"),
)


def check_tools(device: str) -> None:
    """Refuse a machine on which every worker would fail when it makes its engine."""
    if not is_installed("deepspeed"):
        raise MissingBackend(
            f"zero_stage needs DeepSpeed, which is not installed for {sys.executable}: workers on "
            f"{device} could not shard anything. Install it: {install_line('deepspeed')}",
            name="deepspeed",
        )
    library.check_version()
    # For its error: the PATH itself is set where an engine is made.
    path_with_ninja()
    if device == "cpu":
        check_compiler()
    # Raw engines in workers would wait for these without end.
    remove_forgotten_locks()


def path_with_ninja() -> str | None:
    """The PATH with which ninja is found, and always the same ninja.

    A kernel that was started as ``venv/bin/python`` does not have ``venv/bin`` on its PATH. If it
    took the system's ninja, and a shell with the environment activated took the environment's, each
    would build again what the other has built: versions of ninja record commands differently.
    """
    search_path = env.read("PATH")
    ninja = ninja_beside_python()
    first_path = shutil.which("ninja", path=search_path)
    if first_path is not None and (ninja is None or Path(first_path) == ninja):
        return search_path
    if ninja is None:
        raise MissingBackend(
            "DeepSpeed needs ninja to load its C++ operations, also those already built: none is "
            f"in PATH ({search_path}) nor beside {sys.executable}. Install it: pip install ninja",
            name="ninja",
        )
    return os.pathsep.join([str(ninja.parent), *filter(None, [search_path])])


def ninja_beside_python() -> Path | None:
    """The ninja that pip installed for this Python, wherever PATH leads."""
    beside_python = (str(Path(sys.executable).parent), sysconfig.get_path("scripts"))
    ninja = shutil.which("ninja", path=os.pathsep.join(beside_python))
    return Path(ninja) if ninja else None


def compiler_of(environ: Mapping[str, str]) -> list[str] | None:
    """The C++ compiler that torch takes in this environment."""
    name, *options = _compiler_words(environ)
    path = shutil.which(name, path=environ.get("PATH", os.defpath))
    return [path, *options] if path else None


def no_compiler(environ: Mapping[str, str], missing_operations: Sequence[str]) -> str:
    """The message where there is no compiler."""
    return (
        f"The C++ compiler {_compiler_words(environ)[0]!r} is not on PATH. DeepSpeed builds "
        f"{', '.join(missing_operations)} on first use and needs one. Install it: apt-get install "
        "g++ (or conda install gxx_linux-64); or set CXX to the one you have."
    )


def _compiler_words(environ: Mapping[str, str]) -> list[str]:
    return shlex.split(environ.get("CXX", "")) or ["c++"]


def check_compiler() -> None:
    """Refuse to go on where the operation that every engine on a CPU needs cannot be built."""
    environ = env.snapshot()
    if compiler_of(environ) is None and not library.is_built(_CPU_OPERATION):
        raise PlatformUnsupported(no_compiler(environ, [_CPU_OPERATION]))


def remove_forgotten_locks() -> tuple[Path, ...]:
    """Remove locks that a killed process left in the folders of half-built operations.

    A process that builds keeps the lock open until it has finished; any other waits until the file
    is gone, silently and without a time limit.
    """
    locks = sorted(library.folder().glob("*/lock"))
    forgotten = tuple(path for path in locks if is_forgotten(path))
    for path in forgotten:
        # A warning, since it changes a folder that other environments of this user share.
        name = path.parent.name
        _log.warning("removing %s: the process that was building %s is gone", path, name)
        path.unlink(missing_ok=True)
    return forgotten


def is_forgotten(lock_path: Path) -> bool:
    """Whether the process that made a lock is gone.

    Operations that were built long ago are locked for a moment, too, by each process that loads
    them, so one look is not enough: the lock must stay the same one, without a holder.
    """
    identity = _file_identity(lock_path)
    for _ in range(3):
        if identity is None:
            return False  # the build has ended meanwhile
        if (process := holder_of(lock_path)) is not None:
            _log.info("%s is being built by process %s: DeepSpeed waits", lock_path.parent, process)
            return False
        time.sleep(0.05)  # a build that ends closes its lock first and removes it then
        if _file_identity(lock_path) != identity:
            return False
    if not _would_be_seen(lock_path):
        raise UnsafeMoment(
            f"{lock_path} says that a process builds the operation {lock_path.parent.name}, and "
            "none that can be seen from here does. DeepSpeed would wait for ever. If none does on "
            f"another machine or as another user, remove it: rm {shlex.quote(str(lock_path))}"
        )
    return True


def _file_identity(path: Path) -> tuple[int, int] | None:
    """Distinguishes a file from a later one of the same name; None where there is none."""
    with contextlib.suppress(OSError):
        status = path.stat()
        # The time, too: a file system may give the number of a removed file to the next one.
        return status.st_ino, status.st_ctime_ns
    return None


def holder_of(lock_path: Path) -> int | None:
    """The process that has a lock open, as the one that builds does until it has finished."""
    path = str(lock_path.resolve())
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):  # gone meanwhile, or of another user
            if any(file.path == path for file in process.open_files()):
                return process.pid
    return None


def _would_be_seen(path: Path) -> bool:
    """Whether a holder of this file must be a process whose files can be listed."""
    # A lock of another user is held by a process of that user, whose files only root can list.
    if hasattr(os, "geteuid") and os.geteuid() not in (0, path.stat().st_uid):
        return False
    # The longest of the mount points that contain the file is the one it is on.
    kinds = {
        partition.mountpoint: partition.fstype
        for partition in psutil.disk_partitions(all=True)
        if path.resolve().is_relative_to(partition.mountpoint)
    }
    return not kinds.get(max(kinds, key=len, default=""), "").startswith(_SHARED_FILE_SYSTEMS)


# It links against a function of the library: headers alone, without the library, are not enough.
_AIO_PROGRAM = "#include <libaio.h>\nint main() { return io_submit(0, 0, 0); }\n"
_COMPILE_S = 60


def offloads_optimizer(zero_config: ZeroConfig) -> bool:
    """Whether the optimizer steps on the host."""
    section = zero_config.offload_optimizer
    return zero_config.zero_stage > 0 and section is not None and section.device in ("cpu", "nvme")


def own_operation(optimizer_type: str, params: Mapping[str, Any], *, is_offloaded: bool) -> str:
    """The operation of DeepSpeed's own optimizer: ``cpu_adam``; empty where it has none."""
    # DeepSpeed compares names of optimizers in lower case.
    kind = {"adamw": "adam"}.get(optimizer_type.lower(), optimizer_type.lower())
    is_own = kind in ("adam", "lion", "lamb") or (kind == "adagrad" and is_offloaded)
    if not is_own or (kind == "adam" and params.get("torch_adam")):
        return ""
    return f"{'cpu' if is_offloaded and kind != 'lamb' else 'fused'}_{kind}"


def needed_ops(zero_config: ZeroConfig, *, device: str) -> tuple[str, ...]:
    """The C++ parts that a run of this configuration loads."""
    operations = [_CPU_OPERATION] if device == "cpu" else []
    section = zero_config.optimizer
    if section is not None and section.type is not None:
        is_offloaded = offloads_optimizer(zero_config)
        operations.append(
            own_operation(section.type, section.params or {}, is_offloaded=is_offloaded)
        )
    offloads = (zero_config.offload_optimizer, zero_config.offload_param)
    if any(offload is not None and offload.device == "nvme" for offload in offloads):
        operations.append("async_io")
    return tuple(filter(None, operations))


def missing_tools(
    zero_config: ZeroConfig, *, device: str, environ: Mapping[str, str] | None = None
) -> Iterator[str]:
    """What is missing here to build the parts that are needed, and how to get it."""
    environ = env.snapshot() if environ is None else environ
    info = library.load_module("deepspeed.git_version_info", why="DeepSpeed's C++ parts")
    # Operations that were built when DeepSpeed was installed need no tools.
    operations = [
        name for name in needed_ops(zero_config, device=device) if not info.installed_ops.get(name)
    ]
    if not operations:
        return
    command = compiler_of(environ)
    text = f"DeepSpeed builds {', '.join(operations)} on first use"
    if command is None:
        yield no_compiler(environ, operations)
    on_path = shutil.which("ninja", path=environ.get("PATH", os.defpath))
    if on_path is None and ninja_beside_python() is None:
        yield (
            f"The program 'ninja' is not on PATH. {text}, or loads them, through it. Install it: "
            "pip install ninja."
        )
    if "async_io" in operations and command is not None and not _links_aio(command, environ):
        yield (
            f"The library libaio cannot be compiled and linked against here. {text} and "
            "reads the disk by it. Install it: apt-get install libaio-dev; where it is somewhere "
            "else, name its folders in CFLAGS (-I) and LDFLAGS (-L)."
        )
    if device == "cuda" and any(name.startswith("fused_") for name in operations):
        # torch has looked for it as the build will, without initialising CUDA.
        extension = require("torch.utils.cpp_extension", extra="", why="DeepSpeed's C++ parts")
        if extension.CUDA_HOME is None:
            yield (
                "The CUDA toolkit with its compiler nvcc is not found: CUDA_HOME is "
                f"{extension.CUDA_HOME}. {text} and needs it. Install the toolkit of torch's CUDA "
                "version and set CUDA_HOME, or set optimizer.params.torch_adam to true."
            )


def _links_aio(command: list[str], environ: Mapping[str, str]) -> bool:
    flags = [*shlex.split(environ.get("CFLAGS", "")), "-x", "c++", "-", "-o", os.devnull]
    flags += [*shlex.split(environ.get("LDFLAGS", "")), "-laio"]
    program = _AIO_PROGRAM.encode()
    # A compiler that cannot be started, or hangs, links nothing either.
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        done = subprocess.run(
            [*command, *flags], input=program, capture_output=True, timeout=_COMPILE_S, check=False
        )
        return done.returncode == 0
    return False
