"""How messages name another process."""

from __future__ import annotations

import os
import subprocess
import sys

from nbaccel.base.process_names import describe_process, start_ticks


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


def test_a_process_is_known_by_its_start_until_it_has_ended():
    own_ticks = start_ticks(os.getpid())
    assert own_ticks is not None
    assert own_ticks == start_ticks(os.getpid())
    child = subprocess.Popen(["sleep", "60"])
    assert (start_ticks(child.pid) or 0) >= own_ticks
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert start_ticks(child.pid) is None  # a zombie
    child.wait()
    assert start_ticks(child.pid) is None
