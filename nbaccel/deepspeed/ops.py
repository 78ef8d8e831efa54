"""Whether this machine can build the C++ parts that a DeepSpeed configuration needs.

DeepSpeed builds them when they are first used, inside the training process: a missing tool shows
there as a traceback, and the lock of a build that was killed as an endless silence.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from collections.abc import Iterator, Mapping

from nbaccel import env
from nbaccel._optional import require
from nbaccel.deepspeed import building, library, toolchain
from nbaccel.deepspeed.config import ZeroConfig
from nbaccel.errors import UnsafeMoment

__all__ = ["missing_tools", "needed_ops", "offloads_optimizer"]

_AIO_PROGRAM = "#include <libaio.h>\nint main() { return io_submit(0, 0, 0); }\n"
_COMPILE_S = 60


def offloads_optimizer(config: ZeroConfig) -> bool:
    """Whether the optimizer steps on the host.

    Args:
        config: The configuration.

    Returns:
        True where its state is on the host or on disk.
    """
    section = config.offload_optimizer
    return config.zero_stage > 0 and section is not None and section.device in ("cpu", "nvme")


def needed_ops(config: ZeroConfig, *, device: str) -> tuple[str, ...]:
    """The C++ parts that a run of this configuration loads.

    Args:
        config: The configuration.
        device: What the processes compute on: ``cpu``, ``cuda``.

    Returns:
        Names, as DeepSpeed's.
    """
    ops = ["deepspeed_shm_comm"] if device == "cpu" else []
    section = config.optimizer
    name = (section.type or "").lower() if section else ""
    host = offloads_optimizer(config)
    if name in ("adam", "adamw") and not ((section and section.params) or {}).get("torch_adam"):
        ops.append("cpu_adam" if host else "fused_adam")
    elif name == "lion":
        ops.append("cpu_lion" if host else "fused_lion")
    elif name == "adagrad" and host:
        ops.append("cpu_adagrad")
    elif name == "lamb":
        ops.append("fused_lamb")
    places = (config.offload_optimizer, config.offload_param)
    if any(place is not None and place.device == "nvme" for place in places):
        ops.append("async_io")
    return tuple(ops)


def missing_tools(
    config: ZeroConfig, *, device: str, environ: Mapping[str, str] | None = None
) -> Iterator[str]:
    """What is missing here to build the parts that are needed, and how to get it.

    Args:
        config: The configuration.
        device: What the processes compute on.
        environ: The environment they will have; this process's where left out.

    Yields:
        A message for each thing that is missing.
    """
    environ = _as_it_will_be() if environ is None else environ
    ready = library.load("deepspeed.git_version_info", why="DeepSpeed's C++ parts")
    built = {name for name, there in ready.installed_ops.items() if there}
    ops = [name for name in needed_ops(config, device=device) if name not in built]
    if not ops:
        return
    compiler = toolchain.compiler_of(environ)
    what = f"DeepSpeed builds {', '.join(ops)} on first use"
    if compiler is None:
        yield toolchain.no_compiler(environ, ops)
    if shutil.which("ninja", path=environ.get("PATH", os.defpath)) is None:
        yield _no_ninja(what)
    if "async_io" in ops and compiler is not None and not _links_aio(compiler, environ):
        yield (
            "The library libaio cannot be compiled and linked against here. "
            f"{what} and reads the disk by it. Install it: apt-get install libaio-dev; where it "
            "is somewhere else, name its folders in CFLAGS (-I) and LDFLAGS (-L)."
        )
    if device == "cuda" and any(name.startswith("fused_") for name in ops):
        yield from _no_toolkit(what)
    yield from _stale_locks(ops, environ)


def _as_it_will_be() -> Mapping[str, str]:
    """This process's environment, with the ninja that our own environments put on PATH."""
    environ = env.snapshot()
    ninja = toolchain.ninja_beside_python()
    if ninja is None:
        return environ
    path = environ.get("PATH", os.defpath)
    return {**environ, "PATH": os.pathsep.join([path, str(ninja.parent)])}


def _no_toolkit(what: str) -> Iterator[str]:
    # torch has looked for it as the build will; that wakes no CUDA context.
    extensions = require("torch.utils.cpp_extension", extra="", why="DeepSpeed's C++ parts")
    if extensions.CUDA_HOME is None:
        yield (
            f"The CUDA toolkit with its compiler nvcc is not found: CUDA_HOME is "
            f"{extensions.CUDA_HOME}. {what} and needs it. Install the toolkit of torch's CUDA "
            "version and set CUDA_HOME, or set optimizer.params.torch_adam to true."
        )


def _no_ninja(what: str) -> str:
    beside = toolchain.ninja_beside_python()
    remedy = "Install it: pip install ninja."
    if beside is not None:
        remedy = f"It is installed beside this Python: add {str(beside.parent)!r} to PATH."
    return f"The program 'ninja' is not on PATH. {what}, or loads them, through it. {remedy}"


def _links_aio(compiler: list[str], environ: Mapping[str, str]) -> bool:
    flags = [*shlex.split(environ.get("CFLAGS", "")), "-x", "c++", "-", "-o", os.devnull]
    flags += [*shlex.split(environ.get("LDFLAGS", "")), "-laio"]
    try:
        done = subprocess.run(
            [*compiler, *flags],
            input=_AIO_PROGRAM.encode(),
            capture_output=True,
            timeout=_COMPILE_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


def _stale_locks(ops: list[str], environ: Mapping[str, str]) -> Iterator[str]:
    for name in ops:
        lock = building.folder(environ) / name / "lock"
        try:
            forgotten = toolchain.is_forgotten(lock)
        except UnsafeMoment as error:
            yield str(error)
            continue
        if forgotten:
            yield (
                f"A build of {name} was cut short and left its lock {str(lock)!r}. "
                "The next process that needs it would wait there for ever, without a word. "
                "Delete that file."
            )
