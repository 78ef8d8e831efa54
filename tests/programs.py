"""Other programs, run to their end."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from typing import Any


def run_program(
    words: Sequence[str], *, check: bool = True, **more: Any
) -> subprocess.CompletedProcess[str]:
    """A program's status and what it has printed, as text."""
    settings = {"timeout": 300, **more}
    return subprocess.run(words, check=check, capture_output=True, text=True, **settings)
