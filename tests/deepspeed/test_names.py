"""What `nbaccel.deepspeed` offers is there, and costs nothing until it is used."""

from __future__ import annotations

import subprocess
import sys

import nbaccel.deepspeed
from tests.deepspeed import needs


@needs.DEEPSPEED
def test_every_name_is_where_it_says():
    for name in nbaccel.deepspeed.__all__:
        assert getattr(nbaccel.deepspeed, name).__name__ == name
        assert name in dir(nbaccel.deepspeed)


def test_the_package_alone_wakes_nothing():
    code = "import sys, nbaccel.deepspeed; print({'torch', 'deepspeed'} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
