"""``nbaccel env``: what to paste in a bug report.

Versions come from the packages' metadata, so that no package is imported and no device wakes.
"""

from __future__ import annotations

import json
import platform
import re
import sys
import textwrap
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from nbaccel import __version__
from nbaccel.base import env
from nbaccel.base.optional_packages import installed_version
from nbaccel.base.units import format_bytes
from nbaccel.devices.cuda import driver_versions
from nbaccel.plan.inventory import Inventory

Facts = dict[str, dict[str, Any]]
"""Values by name, in sections."""

_PACKAGES = (
    *("torch", "numpy", "transformers", "accelerate", "deepspeed", "torchao"),
    *("transformer-engine", "torch-xla", "torch-tpu", "triton", "ray", "safetensors"),
    *("pydantic", "typer", "ipykernel", "ipython", "ipywidgets", "jupyterlab", "notebook"),
)
_SHOWN_PREFIXES = (
    *("NBACCEL_", "ACCELERATE_", "FSDP_", "DEEPSPEED_", "DS_", "NCCL_", "GLOO_", "CUDA_"),
    *("TORCH", "PYTORCH_", "OMP_", "MKL_", "KMP_", "HF_", "TRANSFORMERS_", "XLA_", "TPU_"),
    *("PJRT_", "LIBTPU_", "SLURM_", "RAY_", "PARALLELISM_CONFIG_", "MEGATRON_LM_"),
)
_REPORTED_NAMES = frozenset(
    {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
    | {"COLAB_RELEASE_TAG", "KAGGLE_KERNEL_RUN_TYPE", "CONDA_DEFAULT_ENV", "VIRTUAL_ENV"}
)
_SECRET_NAME = re.compile(r"TOKEN|KEY|SECRET|PASSW|CREDENTIAL|AUTH|COOKIE|SIGNATURE", re.IGNORECASE)
_SECRET_IN_URL = re.compile(r"(?<=://)[^/@\s]+(?=@)")
_HIDDEN_VALUE = "(set; not shown)"


def add_to(app: typer.Typer) -> None:
    """Add the subcommand."""
    app.command(
        "env",
        help="Show versions, hardware, variables and the default configuration, to paste in a bug "
        "report. Nothing is initialised for it, and values that may be secret are left out.",
        short_help="what to paste in a bug report",
    )(_show)


def _show(
    config_file: Annotated[
        str | None,
        typer.Option("--config-file", metavar="FILE", help="Show this configuration file."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    from nbaccel.plan.inspecting import inspect_machine

    inventory = inspect_machine()
    total_text = format_bytes(inventory.host_total_bytes)
    shm_text = format_bytes(inventory.shm_bytes) if inventory.shm_bytes else "none"
    facts: Facts = {
        "nbaccel": {
            "version": __version__,
            "folder": str(Path(__file__).parent.parent),
            "Python": f"{platform.python_version()} ({platform.python_implementation()})",
            "executable": sys.executable,
            "front end": inventory.front_end,
        },
        "packages": {name: version for name in _PACKAGES if (version := installed_version(name))},
        "machine": {
            "system": platform.platform(),
            "CPU cores": inventory.cpu_cores,
            "CPU": platform.processor() or platform.machine(),
            "memory": f"{total_text}, {format_bytes(inventory.host_available_bytes)} available",
            "shared memory": shm_text,
            "fork": inventory.fork_supported,
            "memfd": inventory.memfd_supported,
        },
        "devices": _device_facts(inventory),
        "variables": shown_variables(env.snapshot()),
        "configuration file": _config_facts(config_file),
    }
    print(json.dumps(facts, indent=2) if as_json else _report_text(facts))


def _report_text(facts: Facts) -> str:
    """The facts as lines to paste."""
    lines: list[str] = []
    for section, values in facts.items():
        lines.append(f"## {section}")
        lines += [f"- {name}: {_line_of(value)}" for name, value in values.items()] or ["- none"]
    return "\n".join(lines)


def _line_of(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {inner_value}" for name, inner_value in value.items())
    text = str(value)
    return "\n" + textwrap.indent(text.rstrip(), " " * 6) if "\n" in text else text


def _device_facts(inventory: Inventory) -> dict[str, Any]:
    driver_version, cuda_version = driver_versions()
    facts: dict[str, Any] = {
        "NVIDIA driver": driver_version or inventory.gpu_note or "none",
        **({"CUDA of the driver": cuda_version} if cuda_version else {}),
    }
    for unit in (*inventory.gpus, *inventory.accelerators):
        major, minor = unit.compute_capability
        facts[f"{unit.kind}:{unit.index}"] = (
            f"{unit.name}, {format_bytes(unit.total_bytes)}, {format_bytes(unit.free_bytes)} free"
            + (f", compute capability {major}.{minor}" if major else "")
        )
    if inventory.tpu is not None:
        facts["TPU"] = {
            name: value for name, value in asdict(inventory.tpu).items() if value not in ("", 0, ())
        }
    for number, problem in enumerate(inventory.problems):
        facts[f"problem {number}"] = problem
    return facts


def shown_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that may matter, without secrets."""
    return {
        name: _HIDDEN_VALUE if _SECRET_NAME.search(name) else _SECRET_IN_URL.sub("...", value)
        for name, value in sorted(environment.items())
        if name in _REPORTED_NAMES or name.startswith(_SHOWN_PREFIXES)
    }


def _config_facts(config_file: str | None) -> dict[str, Any]:
    from nbaccel.config import default_config_path

    path = Path(config_file).expanduser() if config_file else default_config_path()
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        is_missing = isinstance(error, FileNotFoundError)
        return {"path": str(path), "content": "not there" if is_missing else str(error)}
    return {"path": str(path), "content": _without_secrets(text)}


def _without_secrets(file_text: str) -> str:
    """Lines of a file; what stands behind a name that speaks of a secret is left out."""
    lines = []
    for line in file_text.splitlines():
        name, separator, _ = line.partition(":")
        is_secret = separator and _SECRET_NAME.search(name)
        lines.append(f"{name}: {_HIDDEN_VALUE}" if is_secret else _SECRET_IN_URL.sub("...", line))
    return "\n".join(lines)
