"""DeepSpeed itself, imported when first needed, and where its C++ operations are built.

Its greeting to machines without a GPU is left out. It compiles an operation when it is first used,
silently, for a minute or two, which is said.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
from collections.abc import Iterator
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.version import InvalidVersion, Version

from nbaccel.base import env
from nbaccel.base.errors import MissingBackend
from nbaccel.base.log import write_notice
from nbaccel.base.optional_packages import require

OLDEST = "0.18.5"
"""The oldest release that the tests have been run with; `pyproject.toml` declares the same."""

_GREETING_TEXT = "Setting accelerator to CPU."


@contextlib.contextmanager
def quiet_logger(level: int = logging.CRITICAL + 1) -> Iterator[None]:
    """A block in which DeepSpeed's logger is silent: it logs every configuration it reads."""
    logger = logging.getLogger("DeepSpeed")
    level_before = logger.level
    logger.setLevel(level)
    try:
        yield
    finally:
        logger.setLevel(level_before)


def _is_no_greeting(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith(_GREETING_TEXT)


def load_module(module: str, *, why: str) -> Any:
    """A module of DeepSpeed."""
    check_version()
    # nbaccel's plan says which device is chosen, with the reason.
    logging.getLogger("DeepSpeed").addFilter(_is_no_greeting)
    loaded_module = require(module, extra="deepspeed", why=why)
    # Only after the import, when the module that compiles operations may have been loaded.
    if BUILDER in sys.modules:
        change_builder(sys.modules[BUILDER])
    return loaded_module


def check_version() -> None:
    """Refuse a DeepSpeed that would fail in the middle of a training, without importing it."""
    if version := older_than(OLDEST):
        raise MissingBackend(
            f"DeepSpeed {version} is installed, and nbaccel works with {OLDEST} and newer. Older "
            "ones leave the optimizer's state and float32 weights out of checkpoints of stage 0 in "
            "bf16, and the oldest cannot be shut down in a running process. Install a newer one: "
            f'pip install "deepspeed>={OLDEST}"',
            name="deepspeed",
        )


def older_than(release: str) -> str:
    """The version that is installed, where it is older than this one; empty elsewhere."""
    version = _installed_version()
    try:
        return version if version and Version(version) < Version(release) else ""
    except InvalidVersion:  # of a build from source
        return ""


# Cached: each launch and each plugin asks, and reading metadata takes milliseconds.
@lru_cache(maxsize=1)
def _installed_version() -> str | None:
    """The version that would be imported; None where no metadata says it."""
    try:
        return metadata.version("deepspeed")
    except metadata.PackageNotFoundError:
        return None


# ------------------------------------------------------------------------------ building

BUILDER = "deepspeed.ops.op_builder.builder"
"""The module whose class compiles every operation, however it is used."""


def folder() -> Path:
    """Where torch builds operations, a folder each, by torch's rule (Python and CUDA versions)."""
    if chosen_folder := env.read("TORCH_EXTENSIONS_DIR"):
        return Path(chosen_folder)
    extension = require("torch.utils.cpp_extension", extra="", why="DeepSpeed's C++ parts")
    version = require("torch.version", extra="", why="DeepSpeed's C++ parts")
    device_kind = "cpu"
    if version.hip is not None:
        device_kind = f"rocm{version.hip.replace('.', '')}"
    elif version.cuda is not None:
        device_kind = f"cu{version.cuda.replace('.', '')}"
    python_tag = f"py{sys.version_info.major}{sys.version_info.minor}{getattr(sys, 'abiflags', '')}"
    return Path(extension.get_default_build_root()) / f"{python_tag}_{device_kind}"


def is_built(operation_name: str) -> bool:
    """Whether an operation is there, from an earlier use or from DeepSpeed's installation."""
    # Not imported for it: without DeepSpeed loaded only the file tells.
    version_module = sys.modules.get("deepspeed.git_version_info")
    installed_operations = getattr(version_module, "installed_ops", {})
    built_operation = folder() / operation_name / f"{operation_name}.so"
    return bool(installed_operations.get(operation_name)) or built_operation.exists()


def change_builder(builder_module: Any) -> None:
    """Let DeepSpeed's builder print a line before it compiles; changing it again does nothing."""
    builder_class = builder_module.OpBuilder
    operation = builder_class.jit_load
    # `functools.wraps` leaves this mark, which a forked worker inherits with the changed class.
    if hasattr(operation, "__wrapped__"):
        return

    @functools.wraps(operation)
    def built(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not is_built(self.name):
            # Flushed at once, since compiling prints nothing for minutes.
            write_notice(f"nbaccel: DeepSpeed compiles {self.name} now, once: a minute or two\n")
            sys.stderr.flush()
        return operation(self, *args, **kwargs)

    builder_class.jit_load = built
