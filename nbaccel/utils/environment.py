"""Environment variables, and what a process can find out about its machine without torch."""

from __future__ import annotations

import functools
import inspect
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from nbaccel.base import env
from nbaccel.base.errors import ConfigError
from nbaccel.base.log import get_logger
from nbaccel.base.public_names import name_own
from nbaccel.devices.cuda import CudaDevice, find_cards
from nbaccel.utils import imports

_log = get_logger(__name__)
_PURGED_MARK = "_accelerate_is_purged_environment_wrapped"  # Accelerate's
_ENDS_A_VARIABLE = frozenset(";\n<> ")


@contextmanager
def patch_environment(**kwargs: Any) -> Iterator[None]:
    """Set environment variables, by their names in capitals, for the length of a block."""
    with env.applied({name.upper(): str(value) for name, value in kwargs.items()}):
        yield


@contextmanager
def clear_environment() -> Iterator[None]:
    """Leave no environment variable set for the length of a block."""
    before = env.snapshot()
    env.replace_all({})
    try:
        yield
    finally:
        env.replace_all(before)


def purge_accelerate_environment(func_or_cls: Any) -> Any:
    """Let a test's function, or all of a test's class, leave no variable ``ACCELERATE_...``."""
    if not inspect.isclass(func_or_cls):
        return _purged(func_or_cls)
    _purge_methods(func_or_cls)
    method = vars(func_or_cls).get("__init_subclass__")

    def purge_subclass(subclass: type[Any], /, **kwargs: Any) -> None:
        if method is None:
            super(func_or_cls, subclass).__init_subclass__(**kwargs)
        else:
            method.__func__(subclass, **kwargs)
        _purge_methods(subclass)

    tested: Any = func_or_cls
    tested.__init_subclass__ = classmethod(purge_subclass)
    return tested


def _purge_methods(test_class: type[Any]) -> None:
    for name in dir(test_class):  # what it inherits, too
        method = getattr(test_class, name)
        if name.startswith("test") and callable(method) and not hasattr(method, _PURGED_MARK):
            setattr(test_class, name, _purged(method))


def _purged(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        before = _accelerates()
        try:
            return function(*args, **kwargs)
        finally:
            # None removes a variable, so those that the function added are gone.
            env.update({**dict.fromkeys(_accelerates()), **before})

    setattr(call, _PURGED_MARK, True)
    return call


def _accelerates() -> dict[str, str]:
    return {k: v for k, v in env.snapshot().items() if k.startswith("ACCELERATE_")}


def str_to_bool(value: str, to_bool: bool = False) -> int | bool:
    """Read ``yes``, ``true``, ``on``, ``1`` and their like, or the opposite, as 1 or 0 or bool."""
    word = value.lower()
    if word not in env.YES_WORDS | env.NO_WORDS:
        raise ConfigError(
            f"str_to_bool({value!r}) is neither yes nor no. Guessing could turn on what was meant "
            "to be off. Give true or false, 1 or 0."
        )
    is_yes = word in env.YES_WORDS
    return is_yes if to_bool else int(is_yes)


def parse_flag_from_env(key: str, default: bool = False) -> bool:
    """An environment variable read as yes or no; `default` where it is not set."""
    return bool(str_to_bool(env.read(key, str(default)) or str(default)))


def parse_choice_from_env(key: str, default: str = "no") -> str:
    """An environment variable, or `default`."""
    return env.read(key) or str(default)


def get_int_from_env(env_keys: Iterable[str], default: int) -> int:
    """The first of some environment variables that is set to a number of at least 0."""
    found = (int(env.read(key) or -1) for key in env_keys)
    return next((number for number in found if number >= 0), default)


def convert_dict_to_env_variables(current_env: Mapping[str, str]) -> list[str]:
    """Lines ``NAME=value`` of a file; what would break such a file is left out, with a warning."""
    lines = []
    for name, value in current_env.items():
        if name and value and not _ENDS_A_VARIABLE.intersection(name + value):
            lines.append(f"{name}={value}\n")
        else:
            _log.warning("%s=%r is left out: it cannot stand in a line of its own", name, value)
    return lines


def are_libraries_initialized(*library_names: str) -> list[str]:
    """Which of these modules have been imported."""
    return [name for name in library_names if name in sys.modules]


def get_current_device_type() -> tuple[str, str]:
    """This machine's devices, such as ``("cuda", "MULTI_GPU")``, also where there are none."""
    for kind in ("mlu", "sdaa", "musa", "npu", "hpu", "xpu", "neuron"):
        if getattr(imports, f"is_{kind}_available")():
            return kind, f"MULTI_{kind.upper()}"
    return "cuda", "MULTI_GPU"


def get_gpu_info() -> tuple[list[str], int]:
    """Names of the NVIDIA GPUs of this machine, and how many; no CUDA context is made."""
    names = [card.gpu.name for card in find_cards()[0]]
    return names, len(names)


def check_cuda_p2p_ib_support() -> bool:
    """Whether the GPUs may talk to each other directly; those of the RTX 40 series may not."""
    names, count = get_gpu_info()
    return count < 2 or not any("RTX 40" in name for name in names)


def check_cuda_fp8_capability() -> bool:
    """Whether the first GPU computes in fp8."""
    device = CudaDevice()
    return device.is_available() and device.capability(device.torch_device(0)) >= (8, 9)


@dataclass
class CPUInformation:
    """This process among others, as launchers describe it in environment variables."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1


def get_cpu_distributed_information() -> CPUInformation:
    """This process among others, from the variables of torchrun, MPI or a launcher of nbaccel."""
    # Open MPI and MVAPICH2; the names without prefix below are torchrun's and Intel MPI's.
    mpi = "OMPI_COMM_WORLD_"
    mva = "MV2_COMM_WORLD_"
    return CPUInformation(
        rank=get_int_from_env(["RANK", "PMI_RANK", f"{mpi}RANK", f"{mva}RANK"], 0),
        world_size=get_int_from_env(["WORLD_SIZE", "PMI_SIZE", f"{mpi}SIZE", f"{mva}SIZE"], 1),
        local_rank=get_int_from_env(
            ["LOCAL_RANK", "MPI_LOCALRANKID", f"{mpi}LOCAL_RANK", f"{mva}LOCAL_RANK"], 0
        ),
        local_world_size=get_int_from_env(
            ["LOCAL_WORLD_SIZE", "MPI_LOCALNRANKS", f"{mpi}LOCAL_SIZE", f"{mva}LOCAL_SIZE"], 1
        ),
    )


def override_numa_affinity(local_process_index: int, verbose: bool | None = None) -> None:
    """Let this process run only on the cores next to its NVIDIA GPU, if there is one."""
    if not imports.is_cuda_available() or not imports.is_pynvml_available():
        return
    import pynvml

    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByIndex(local_process_index)
    # NVML returns a bit per core, in as many 64-bit words as are asked for.
    words = pynvml.nvmlDeviceGetCpuAffinity(handle, -(-(os.cpu_count() or 1) // 64))
    cores = [64 * i + bit for i, word in enumerate(words) for bit in range(64) if word >> bit & 1]
    os.sched_setaffinity(0, cores)
    if verbose or (verbose is None and parse_flag_from_env("ACCELERATE_DEBUG_MODE")):
        _log.info("process %s runs on cores %s", local_process_index, cores)


@functools.cache
def set_numa_affinity(local_process_index: int, verbose: bool | None = None) -> None:
    """As :func:`override_numa_affinity`, once per process."""
    override_numa_affinity(local_process_index, verbose)


name_own(globals())
