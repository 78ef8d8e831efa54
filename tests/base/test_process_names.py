"""How messages name another process."""

from __future__ import annotations

import os
import subprocess
import sys

from nbaccel.base.processes import describe_process


def test_a_process_is_named_by_its_command():
    assert describe_process(os.getpid()).startswith(f"process {os.getpid()} (")


def test_one_without_a_command_line_is_named_by_its_program():
    # An ended child that nobody has waited for: the system keeps its name and not its command.
    ended = subprocess.Popen([sys.executable, "-c", ""])
    try:
        os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)
        assert describe_process(ended.pid).startswith(f"process {ended.pid} (python")
    finally:
        ended.wait()
    assert describe_process(ended.pid) == f"process {ended.pid}"
