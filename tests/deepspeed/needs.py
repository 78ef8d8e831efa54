"""What tests of DeepSpeed need to be there; where it is missing they are skipped, and say why."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest

from nbaccel._optional import is_installed

OPERATIONS = ("deepspeed_shm_comm", "fused_adam", "cpu_adam")


def are_built() -> bool:
    """Whether the C++ operations of engines on a CPU are there; building them takes minutes."""
    default = Path.home() / ".cache" / "torch_extensions" / f"py3{sys.version_info.minor}_cpu"
    folder = Path(os.environ.get("TORCH_EXTENSIONS_DIR", default))
    return all((folder / name / f"{name}.so").exists() for name in OPERATIONS)


DEEPSPEED = pytest.mark.skipif(not is_installed("deepspeed"), reason="deepspeed is not installed")
ENGINE = [
    DEEPSPEED,
    pytest.mark.skipif(
        not (shutil.which("c++") or shutil.which("g++")),
        reason="there is no C++ compiler, which DeepSpeed needs for its first engine",
    ),
    pytest.mark.skipif(
        not are_built(),
        reason="DeepSpeed's C++ operations are not built (minutes): make deepspeed-ops, then again",
    ),
]
