"""The processes of one session, and the memory they hold.

They are found by a variable in their environment, which all that descend from the session
inherit: a daemon that left the tree, as a template process may, is counted too.
"""

from __future__ import annotations

import os
import re
import time
from contextlib import suppress
from pathlib import Path

import psutil

TAG = "NBACCEL_BENCH_SESSION"
PSS_FIELDS = ("Pss", "Pss_Anon", "Pss_File", "Pss_Shmem", "Private_Clean", "Private_Dirty")


def tagged(tag: str, *, without: int) -> list[psutil.Process]:
    """All live processes of the session, except the harness's own one (`without`)."""
    needle = f"{TAG}={tag}".encode()
    found = []
    for process in psutil.process_iter():
        with suppress(OSError, psutil.Error):
            environment = Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0")
            if process.pid != without and needle in environment and not is_gone(process):
                found.append(process)
    return found


def num_foreign_torch(tag: str) -> int:
    """Other processes of the machine that map PyTorch: PSS splits the library's pages with them.

    Asked from outside of the namespaces, where all can be seen.
    """
    mine = {process.pid for process in tagged(tag, without=0)}
    found = 0
    for pid in psutil.pids():
        with suppress(OSError):
            maps = Path(f"/proc/{pid}/maps").read_text()
            found += pid not in mine and "libtorch_cpu" in maps
    return found


def is_gone(process: psutil.Process) -> bool:
    try:
        return bool(process.status() == psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return True


def is_alive(pid: int) -> bool:
    try:
        return not is_gone(psutil.Process(pid))
    except psutil.Error:
        return False


def pss_bytes(pid: int) -> dict[str, int]:
    """Proportional set size: a page shared by n processes counts 1/n in each."""
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    values = {}
    for field in PSS_FIELDS:
        found = re.search(rf"^{field}:\s+(\d+) kB", text, re.MULTILINE)
        values[field] = int(found[1]) * 1024 if found else 0
    return values


def measure_memory(tag: str) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    for process in tagged(tag, without=os.getpid()):
        with suppress(OSError, psutil.Error):
            command = " ".join(process.cmdline())[:200]
            # A template and its workers are forks of the kernel: their command is the kernel's.
            row = {"pid": process.pid, "command": command, "name": process.name()}
            rows.append({**row, **pss_bytes(process.pid)})
    return rows


def cpu_ns(tag: str) -> dict[int, int]:
    """Processor time by pid, over all threads: the scheduler's own count, to the nanosecond."""
    found = {}
    for process in tagged(tag, without=os.getpid()):
        with suppress(OSError):
            tasks = [*Path(f"/proc/{process.pid}/task").glob("*/schedstat")]
            found[process.pid] = sum(int(task.read_text().split()[0]) for task in tasks)
    return found


def settle(tag: str, timeout_s: float) -> float:
    """Wait until the session's processes use no more CPU to speak of; return how long it took."""
    started = time.monotonic()
    quiet = 0
    used = _cpu_s(tag)
    while quiet < 3 and time.monotonic() - started < timeout_s:
        time.sleep(0.3)
        now = _cpu_s(tag)
        quiet = quiet + 1 if abs(now - used) < 0.02 else 0
        used = now
    return time.monotonic() - started


def _cpu_s(tag: str) -> float:
    total = 0.0
    for process in tagged(tag, without=os.getpid()):
        with suppress(psutil.Error):
            times = process.cpu_times()
            total += times.user + times.system
    return total
