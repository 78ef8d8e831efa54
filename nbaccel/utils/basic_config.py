"""``write_basic_config``: a file with this machine's defaults, for launchers on a command line.

A launch from a notebook looks at the machine itself and reads no such file.
"""

from __future__ import annotations

from pathlib import Path

import yaml

from nbaccel.base import atomic, env
from nbaccel.base.errors import ConfigError
from nbaccel.config.enumerations import PrecisionType
from nbaccel.plan.inspecting import inspect_machine

__all__ = ["default_json_config_file", "write_basic_config"]


def _default_file() -> Path:
    cache = env.read("XDG_CACHE_HOME") or "~/.cache"
    home = env.read("HF_HOME") or f"{cache}/huggingface"
    return Path(home).expanduser() / "accelerate" / "default_config.yaml"


default_json_config_file = str(_default_file())


def write_basic_config(
    mixed_precision: str = "no", save_location: str | Path = default_json_config_file
) -> Path | bool:
    """Write down how scripts are to be launched on this machine: processes, device, precision.

    The file is the one that `accelerate launch` reads. `notebook_launcher` needs none: give it
    `num_processes` and `mixed_precision`.

    Args:
        mixed_precision: ``no``, ``fp16``, ``bf16`` or ``fp8``.
        save_location: The file.

    Returns:
        The file; False where there is one already, which stays as it is.

    Raises:
        ConfigError: The precision is unknown.
    """
    path = Path(save_location)
    precision = mixed_precision.lower()
    if precision not in PrecisionType:
        raise ConfigError(
            f"write_basic_config(mixed_precision={mixed_precision!r}) is unknown: scripts would "
            f"fail when they start. Give one of {', '.join(PrecisionType.list())}."
        )
    if path.exists():
        print(  # noqa: T201 - called in a cell, whose output is the answer
            f"{path} is there already and stays as it is. Delete it, or give another save_location."
        )
        return False
    num_gpus = len(inspect_machine().gpus)
    content = {
        "compute_environment": "LOCAL_MACHINE",
        "debug": False,
        "distributed_type": "MULTI_GPU" if num_gpus > 1 else "NO",
        "enable_cpu_affinity": False,
        "machine_rank": 0,
        "main_training_function": "main",
        "mixed_precision": precision,
        "num_machines": 1,
        "num_processes": num_gpus or 1,
        "use_cpu": num_gpus == 0,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic.write_text(path, yaml.safe_dump(content, sort_keys=True))
    return path
