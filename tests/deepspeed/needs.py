"""What tests of DeepSpeed need to be there; where it is missing they are skipped, and say why."""

from __future__ import annotations

import shutil

import pytest

from nbaccel._optional import is_installed

DEEPSPEED = pytest.mark.skipif(not is_installed("deepspeed"), reason="deepspeed is not installed")
ENGINE = [
    DEEPSPEED,
    pytest.mark.skipif(
        not (shutil.which("c++") or shutil.which("g++")),
        reason="there is no C++ compiler, which DeepSpeed needs for its first engine",
    ),
]
