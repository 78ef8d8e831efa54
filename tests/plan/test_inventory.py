from __future__ import annotations

import os
import sys

import psutil
import pytest

from nbaccel.plan.inspecting import Limits, inspect_machine, read_limits
from tests.programs import run_program


def run(code, environ=None):
    return run_program([sys.executable, "-c", code], check=False, env=environ)


def test_what_is_found_fits_the_machine():
    found = inspect_machine()

    assert 1 <= found.cpu_cores <= (os.cpu_count() or 1)
    assert 0 < found.host_available_bytes <= found.host_total_bytes
    assert found.host_total_bytes <= psutil.virtual_memory().total
    assert found.platform == sys.platform
    assert found.fork_supported
    assert found.memfd_supported
    assert found.shm_bytes == os.statvfs("/dev/shm").f_blocks * os.statvfs("/dev/shm").f_frsize
    import torch

    assert inspect_machine().torch_version == torch.__version__


LOOK_THEN_FORK = """
import os, sys, threading
from nbaccel.plan import inspect_machine

def num_threads():
    return len(os.listdir("/proc/self/task"))

assert num_threads() == 1
os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:1])
found = inspect_machine()
assert found.cpu_cores == 1
assert num_threads() == threading.active_count() == 1, "inspecting started a thread"
assert "torch" not in sys.modules, "inspecting imported torch"
with open("/proc/self/maps") as maps:
    text = maps.read()
for library in ("libcuda.so", "libgomp", "libtorch", "libtpu"):
    assert library not in text, library
assert not any("nvidia" in os.readlink(f"/proc/self/fd/{fd}")
               for fd in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{fd}"))

child = os.fork()
if child == 0:
    import torch
    torch.set_num_threads(4)
    weight = torch.ones(300, 300, requires_grad=True)
    (torch.ones(300, 300) @ weight).sum().backward()
    os._exit(7 if weight.grad.sum().item() == 300.0 ** 3 else 1)
_, status = os.waitpid(child, 0)
assert os.waitstatus_to_exitcode(status) == 7, status
print("ok")
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_process_that_has_looked_can_be_forked():
    done = run(LOOK_THEN_FORK)
    assert (done.returncode, done.stdout) == (0, "ok\n"), done.stderr


GIB = 2**30
V2_MOUNT = "31 23 0:28 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n"


GROUPS = {
    "version 2": (
        {
            "proc/self/cgroup": "0::/job\n",
            "proc/self/mountinfo": V2_MOUNT,
            "sys/fs/cgroup/job/cpu.max": "150000 100000\n",
            "sys/fs/cgroup/job/memory.max": f"{4 * GIB}\n",
            "sys/fs/cgroup/job/memory.current": f"{3 * GIB}\n",
            "sys/fs/cgroup/job/memory.stat": f"anon {GIB}\nfile {2 * GIB}\ninactive_file {GIB}\n",
        },
        Limits(cpu_cores=1.5, memory_bytes=4 * GIB, memory_free_bytes=2 * GIB),
    ),
    "a group above is tighter": (
        {
            "proc/self/cgroup": "0::/pod/job\n",
            "proc/self/mountinfo": V2_MOUNT,
            "sys/fs/cgroup/pod/job/cpu.max": "max 100000\n",
            "sys/fs/cgroup/pod/job/memory.max": "max\n",
            "sys/fs/cgroup/pod/cpu.max": "200000 100000\n",
            "sys/fs/cgroup/pod/memory.max": f"{GIB}\n",
            "sys/fs/cgroup/pod/memory.current": "0\n",
            "sys/fs/cgroup/cpu.max": "400000 100000\n",
        },
        Limits(cpu_cores=2.0, memory_bytes=GIB, memory_free_bytes=GIB),
    ),
    "version 1": (
        {
            "proc/self/cgroup": "4:memory:/docker/x\n2:cpu,cpuacct:/docker/x\n0::/\n",
            "proc/self/mountinfo": (
                "32 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n"
                "35 31 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
                "41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n"
            ),
            "sys/fs/cgroup/cpu,cpuacct/docker/x/cpu.cfs_quota_us": "300000\n",
            "sys/fs/cgroup/cpu,cpuacct/docker/x/cpu.cfs_period_us": "100000\n",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "-1\n",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
            "sys/fs/cgroup/memory/docker/x/memory.limit_in_bytes": f"{2 * GIB}\n",
            "sys/fs/cgroup/memory/docker/x/memory.usage_in_bytes": f"{GIB}\n",
            "sys/fs/cgroup/memory/docker/x/memory.stat": (
                f"inactive_file 5\ntotal_inactive_file {GIB // 2}\n"
            ),
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
        },
        Limits(cpu_cores=3.0, memory_bytes=2 * GIB, memory_free_bytes=GIB + GIB // 2),
    ),
    "absent": ({}, Limits()),
    "without a mount": ({"proc/self/cgroup": "0::/\n"}, Limits()),
    "empty": ({"proc/self/cgroup": "0::/\n", "proc/self/mountinfo": V2_MOUNT}, Limits()),
    "odd": (
        {"proc/self/cgroup": "nonsense\n::\n", "proc/self/mountinfo": "nonsense\n - \n"},
        Limits(),
    ),
    "odd numbers": (
        {
            "proc/self/cgroup": "0::/\n",
            "proc/self/mountinfo": V2_MOUNT,
            "sys/fs/cgroup/cpu.max": "",
            "sys/fs/cgroup/memory.max": "soon",
        },
        Limits(),
    ),
}


@pytest.mark.parametrize("name", GROUPS)
def test_limits_of_control_groups(tmp_path, name):
    files, limits = GROUPS[name]
    for file, text in files.items():
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(text)
    assert read_limits(tmp_path) == limits
