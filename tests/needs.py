"""What tests of one backend need to be there; where it is missing they are skipped, and say why."""

from __future__ import annotations

import pytest

from nbaccel.base.optional_packages import is_installed
from nbaccel.config.capabilities import STRATEGIES

HAS_DEEPSPEED_ROW = any(row.name == "deepspeed" for row in STRATEGIES)
DEEPSPEED_ROW = pytest.mark.skipif(
    not HAS_DEEPSPEED_ROW, reason="nbaccel's DeepSpeed backend was left out"
)
DEEPSPEED = pytest.mark.skipif(
    not (HAS_DEEPSPEED_ROW and is_installed("deepspeed")), reason="deepspeed is not installed"
)
