"""Modules of these tests run as programs, in a process of their own: DeepSpeed is there for good.

What they have to tell is one line of JSON, the last that they print.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from nbaccel.errors import NbaccelError
from tests.isolation import ROOT
from tests.programs import run_program


def told_by(module: str, *arguments: str, timeout_s: float) -> Any:
    """What a module tells; the test fails if it does not come to its end."""
    words = [sys.executable, "-m", module, *arguments]
    environ = {**os.environ, "DS_ACCELERATOR": "cpu"}
    done = run_program(words, cwd=ROOT, env=environ, timeout=timeout_s, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def refusal(call: Any, *args: Any, **options: Any) -> str:
    """The error of ours that a call raises, as text; empty where it raises none."""
    try:
        call(*args, **options)
    except NbaccelError as error:
        return f"{type(error).__name__}: {error}"
    return ""
