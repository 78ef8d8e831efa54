"""Places that lack what several workers need: refused by name, or done without.

What Linux cannot be without is taken away from a process of its own; the rest is really missing,
in namespaces of their own.
"""

from __future__ import annotations

import importlib
import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Sequence

import pytest

from tests.house.source import ROOT
from tests.isolation import isolated
from tests.programs import run_program

pytestmark = pytest.mark.slow

LIMIT_S = 400.0  # ends a hang

PLACE = """
import os, signal, sys
import torch
import torch.distributed as dist
from torch import nn
from nbaccel import Pool, notebook_launcher

def train(net):
    dist.init_process_group("gloo")
    rank = torch.ones(1) * dist.get_rank()
    dist.all_reduce(rank)
    with torch.no_grad():
        net.bias.fill_(7)
    return rank.item(), os.environ["MASTER_ADDR"]

def one(net):
    net(torch.ones(1, 2)).sum().backward()
    return os.environ["WORLD_SIZE"]

net = nn.Linear(2, 2)

def tried(do):
    try:
        return do()
    except Exception as error:
        return f"{type(error).__name__}: {error}"

def launched():
    return list(notebook_launcher(train, (net,), num_processes=2))

def called_in_a_pool():
    with Pool(num_processes=2) as pool:
        return pool.launch(train, (net,)).values
"""


def run(body: str, command: Sequence[str] = ()) -> list[str]:
    """The lines that a program prints, in a process that a command prepares the place for."""
    program = PLACE + textwrap.dedent(body)
    words = [*command, sys.executable, "-c", program]
    done = run_program(words, cwd=ROOT, check=False, timeout=LIMIT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


def after(*commands: str) -> list[str]:
    """The command that runs a program after others of the shell."""
    return ["sh", "-ec", "; ".join([*commands, 'exec "$@"']), "sh"]


def unshared(kinds: Sequence[str], *before: str) -> list[str]:
    """The command that runs a program in namespaces of its own, after others there."""
    if not shutil.which("unshare"):
        pytest.skip("namespaces need unshare, which is not installed")
    enter = ["unshare", *kinds]
    if subprocess.run([*enter, "true"], check=False, capture_output=True).returncode:
        pytest.skip(f"this process may not make namespaces ({' '.join(enter)})")
    return [*enter, *after(*before)]


REMEDY = "memfd_create.*(num_processes=1|ordinary cell)"

LINUX_ALONE = {
    "os": "memfd_create pidfd_open sched_getaffinity MFD_CLOEXEC posix_fallocate eventfd",
    "signal": "SIGRTMAX SIGRTMIN SIGPWR sigwaitinfo sigtimedwait",
    "select": "epoll",
    "mmap": "MAP_POPULATE MAP_STACK MADV_DONTFORK MADV_HUGEPAGE MADV_REMOVE",
    "socket": "SO_PEERCRED SOCK_CLOEXEC SOCK_NONBLOCK",
    "fcntl": "F_SETPIPE_SZ F_ADD_SEALS",
}
NOT_IN_WINDOWS = {
    "os": "fork getuid geteuid setsid killpg getpgid WNOHANG waitid wait4 O_CLOEXEC pread pwrite "
    "register_at_fork sysconf uname fchmod statvfs getloadavg",
    "signal": "SIGKILL SIGSTOP SIGCONT SIGCHLD SIGUSR1 SIGUSR2 SIGHUP SIGQUIT SIGBUS SIGALRM "
    "SIGPIPE pthread_sigmask pthread_kill setitimer alarm",
    "select": "poll",
    "mmap": "PROT_READ PROT_WRITE MAP_SHARED MAP_PRIVATE MAP_ANONYMOUS MADV_DONTNEED",
    "socket": "AF_UNIX send_fds recv_fds",
}


def become(system: str) -> None:
    """Let this process, which is a test's own, look like one of another operating system."""
    import ctypes
    import sysconfig

    import ipywidgets
    import psutil
    import safetensors.torch
    import torch._dynamo

    def no_such_path(path: os.PathLike[str]) -> None:
        raise FileNotFoundError(path)  # as Windows, whose call is another one, does of /dev/shm

    # They choose their own parts by the system when they are imported.
    assert all((ipywidgets, psutil, safetensors, torch._dynamo, sysconfig.get_config_vars()))
    for lacking in [LINUX_ALONE, NOT_IN_WINDOWS][: 2 if system == "win32" else 1]:
        for module, names in lacking.items():
            for name in names.split():
                vars(importlib.import_module(module)).pop(name, None)
    if system == "win32":
        sys.modules.update(dict.fromkeys(("fcntl", "resource", "termios", "pwd", "pty"), None))
        ctypes.CDLL = None  # None as its argument, for the C library, is an error in Windows
        shutil.disk_usage = no_such_path
    sys.platform = system


def take_memory_files_away(how: str) -> None:
    """From this process, which is a test's own: Linux cannot be had without them."""

    def refuse(*_: object) -> int:
        raise OSError(38, os.strerror(38))

    if how == "refused":
        os.memfd_create = refuse
    elif how == "absent":
        del os.memfd_create
    else:
        become(how)


@pytest.mark.parametrize("how", ["absent", "refused", "darwin", "win32"])
@isolated
def test_without_memory_files_one_worker_trains_and_several_are_refused(how):
    import ipykernel.kernelapp  # where a template is started as soon as nbaccel is imported
    import torch
    from IPython.core.interactiveshell import InteractiveShell

    assert ipykernel.kernelapp
    take_memory_files_away(how)

    import nbaccel
    from nbaccel.errors import PlatformUnsupported

    assert [getattr(nbaccel, name) for name in nbaccel.__all__]
    shell = InteractiveShell.instance()
    shell.run_line_magic("load_ext", "nbaccel")
    net = torch.nn.Linear(2, 2)

    def train():
        engine, optimizer = nbaccel.Accelerator().prepare(net, torch.optim.SGD(net.parameters()))
        engine(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        return os.environ["WORLD_SIZE"]

    before = net.bias.tolist()
    assert nbaccel.notebook_launcher(train, num_processes=1) == ["1"]
    assert net.bias.tolist() != before
    with pytest.raises(PlatformUnsupported, match=REMEDY) as caught:
        nbaccel.notebook_launcher(train, num_processes=2)
    assert (repr(how) in str(caught.value)) == (how in ("darwin", "win32"))
    with pytest.raises(PlatformUnsupported, match=REMEDY):
        nbaccel.Pool(num_processes=2).run("1")
    ran = shell.run_cell("%%accelerate -n 2\nprint(1)")
    assert isinstance(ran.error_in_exec, PlatformUnsupported)


def test_without_proc_several_workers_are_refused_and_one_runs():
    place = unshared(["--mount", "--pid", "--fork"], "umount -l /proc")
    said = run("print(tried(launched)); print(tried(called_in_a_pool))", place)
    assert len(said) == 2
    for line in said:
        assert line.startswith("PlatformUnsupported: Several workers need /proc, which is not")
    assert run("print(notebook_launcher(one, (net,), num_processes=1))", place) == ["['1']"]


def test_where_loopback_is_down_several_workers_are_refused_and_one_runs():
    place = unshared(["--net"])
    body = """
    print(tried(launched)); print(tried(called_in_a_pool))
    print(notebook_launcher(one, (net,), num_processes=1))
    """
    *said, ran = run(body, place)
    assert ran == "['1']"
    assert len(said) == 2
    for line in said:
        assert "PlatformUnsupported: Several workers meet at 127.0.0.1, and nothing" in line
        assert "ip link set lo up" in line


def test_where_there_is_ipv6_alone_workers_meet_there():
    if not shutil.which("ip"):
        pytest.skip("taking an address away needs ip (Debian: iproute2), which is not installed")
    place = unshared(["--net"], "ip link set lo up", "ip addr del 127.0.0.1/8 dev lo")
    if subprocess.run([*place, "ip", "addr", "show", "to", "::1"], check=False).returncode:
        pytest.skip("this system has no IPv6")
    body = "print(launched(), net.bias.tolist()); print(called_in_a_pool())"
    met = "[(1.0, '::1'), (1.0, '::1')]"
    assert [line for line in run(body, place) if "c10d" not in line] == [f"{met} [7.0, 7.0]", met]


def test_where_pidfds_are_forbidden_launches_and_live_workers_run():
    body = """
    def refuse(*_): raise OSError(38, os.strerror(38))
    os.pidfd_open = refuse
    print(launched()); print(tried(called_in_a_pool))
    """
    assert run(body) == ["[(1.0, '127.0.0.1'), (1.0, '127.0.0.1')]"] * 2


def test_a_small_dev_shm_is_enough_for_models_and_told_where_it_is_not():
    place = unshared(["--mount"], "mount -t tmpfs -o size=1m tmpfs /dev/shm")
    body = """
    from torch.utils.data import DataLoader

    class Samples:
        def __len__(self): return 4
        def __getitem__(self, index): return torch.zeros(1_000_000)

    def load():
        for batch in DataLoader(Samples(), batch_size=4, num_workers=1): pass

    net = nn.Linear(1000, 1000)
    print(launched(), net.bias.sum().item())
    print(tried(lambda: notebook_launcher(load, num_processes=2)))
    """
    trained, *told = run(body, place)
    assert trained == "[(1.0, '127.0.0.1'), (1.0, '127.0.0.1')] 7000.0"
    assert "No space left on device" in told[0]
    assert "It was raised in DataLoader worker process 0." in told[1]


STUCK = """
assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
print(launched(), net.bias.tolist())

def fail(stuck_in):
    dist.init_process_group("gloo")
    dist.barrier()
    if dist.get_rank() == 1:
        raise KeyError("on purpose")
    if stuck_in == "collective":
        dist.all_reduce(torch.ones(1))
    import time
    time.sleep(10_000)

print(tried(lambda: notebook_launcher(fail, ("sleep",), num_processes=2)).splitlines()[0])
with Pool(num_processes=2) as pool:
    for stuck_in in ("sleep", "collective"):
        print(tried(lambda: pool.launch(fail, (stuck_in,))).splitlines()[0])
    print(pool.launch(train, (net,)).values)
"""


def test_under_nohup_workers_can_be_interrupted():
    said = run(STUCK, after("trap '' INT"))
    met = "[(1.0, '127.0.0.1'), (1.0, '127.0.0.1')]"
    assert (said[0], said[-1]) == (f"{met} [7.0, 7.0]", met)
    for line in said[1:-1]:
        assert "rank 1 of 2 raised KeyError: 'on purpose'" in line


def test_a_limit_of_descriptors_is_told_before_anything_is_started():
    said = run("print(tried(launched)); print(tried(called_in_a_pool))", after("ulimit -n 20"))
    assert len(said) == 2
    for line in said:
        assert "PlatformUnsupported: Several workers need 20 free file descriptors" in line
        assert "ulimit -n" in line
