from __future__ import annotations

import pytest

from nbaccel.plan.inspecting import Limits, read_limits

GIB = 2**30
V2_MOUNT = "31 23 0:28 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n"


@pytest.fixture
def machine(tmp_path):
    """Writes files under a made-up root and reads the limits there."""

    def build(files):
        for name, text in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return read_limits(tmp_path)

    return build


def test_version_2(machine):
    limits = machine(
        {
            "proc/self/cgroup": "0::/job\n",
            "proc/self/mountinfo": V2_MOUNT,
            "sys/fs/cgroup/job/cpu.max": "150000 100000\n",
            "sys/fs/cgroup/job/memory.max": f"{4 * GIB}\n",
            "sys/fs/cgroup/job/memory.current": f"{3 * GIB}\n",
            "sys/fs/cgroup/job/memory.stat": f"anon {GIB}\nfile {2 * GIB}\ninactive_file {GIB}\n",
        }
    )
    assert limits == Limits(cpu_cores=1.5, memory_bytes=4 * GIB, memory_free_bytes=2 * GIB)


def test_a_group_above_may_be_tighter(machine):
    limits = machine(
        {
            "proc/self/cgroup": "0::/pod/job\n",
            "proc/self/mountinfo": V2_MOUNT,
            "sys/fs/cgroup/pod/job/cpu.max": "max 100000\n",
            "sys/fs/cgroup/pod/job/memory.max": "max\n",
            "sys/fs/cgroup/pod/cpu.max": "200000 100000\n",
            "sys/fs/cgroup/pod/memory.max": f"{GIB}\n",
            "sys/fs/cgroup/pod/memory.current": "0\n",
            "sys/fs/cgroup/cpu.max": "400000 100000\n",
        }
    )
    assert limits == Limits(cpu_cores=2.0, memory_bytes=GIB, memory_free_bytes=GIB)


def test_a_container_without_a_namespace_of_its_own(machine):
    # The process sees its path on the host, and only that part of the tree is mounted.
    limits = machine(
        {
            "proc/self/cgroup": "0::/docker/abc/inner\n",
            "proc/self/mountinfo": V2_MOUNT.replace(" / /sys", " /docker/abc /sys"),
            "sys/fs/cgroup/inner/memory.max": f"{2 * GIB}\n",
            "sys/fs/cgroup/memory.max": f"{GIB}\n",
        }
    )
    assert limits.memory_bytes == GIB


def test_a_path_outside_the_mount_falls_back_to_the_mount(machine):
    limits = machine(
        {
            "proc/self/cgroup": "0::/somewhere/else\n",
            "proc/self/mountinfo": V2_MOUNT.replace(" / /sys", " /docker/abc /sys"),
            "sys/fs/cgroup/memory.max": f"{GIB}\n",
        }
    )
    assert limits.memory_bytes == GIB


def test_version_1(machine):
    limits = machine(
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
        }
    )
    assert limits == Limits(cpu_cores=3.0, memory_bytes=2 * GIB, memory_free_bytes=GIB + GIB // 2)


@pytest.mark.parametrize(
    "files",
    [
        {},
        {"proc/self/cgroup": "0::/\n"},
        {"proc/self/cgroup": "0::/\n", "proc/self/mountinfo": V2_MOUNT},
        {"proc/self/cgroup": "nonsense\n::\n", "proc/self/mountinfo": "nonsense\n - \n"},
        {
            "proc/self/cgroup": "0::/\n",
            "proc/self/mountinfo": V2_MOUNT,
            "sys/fs/cgroup/cpu.max": "",
            "sys/fs/cgroup/memory.max": "soon",
        },
    ],
)
def test_what_is_absent_or_odd_limits_nothing(machine, files):
    assert machine(files) == Limits()


def test_used_beyond_the_limit_leaves_nothing(machine):
    limits = machine(
        {
            "proc/self/cgroup": "0::/\n",
            "proc/self/mountinfo": V2_MOUNT,
            "sys/fs/cgroup/memory.max": f"{GIB}\n",
            "sys/fs/cgroup/memory.current": f"{GIB + 4096}\n",
        }
    )
    assert limits.memory_free_bytes == 0


def test_this_very_process_can_be_read():
    limits = read_limits()
    assert limits.cpu_cores is None or limits.cpu_cores > 0
    if limits.memory_bytes is not None:
        assert 0 <= limits.memory_free_bytes <= limits.memory_bytes
