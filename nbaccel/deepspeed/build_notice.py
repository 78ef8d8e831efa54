"""Where DeepSpeed's C++ operations are built, and a line that says when one is.

DeepSpeed compiles an operation when it is first used, silently, for a minute or two.
"""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import Any

from nbaccel.base import env
from nbaccel.base.log import write_notice
from nbaccel.base.optional_packages import require

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


def announce() -> None:
    """Let the DeepSpeed of this process say what it compiles, if it has been imported."""
    if BUILDER in sys.modules:
        change_builder(sys.modules[BUILDER])


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
