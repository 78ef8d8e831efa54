"""The police are proven by tests that leak for real, each in a pytest of its own."""

from __future__ import annotations

import os
from pathlib import Path

import psutil
import pytest

from tests import hardware, leak_police

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def judged(pytester, monkeypatch):
    """Run a test file under this project's conftest; return pytest's verdict on it."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    pytester.makeini(
        "[pytest]\nmarkers =\n  no_memfd_growth: police the memfds\n  gpu: a gpu\n"
        "addopts = -p no:cacheprovider"
    )

    def run(source: str, grace_s: float = 0.3):
        pytester.makeconftest(
            'pytest_plugins = ["tests.conftest"]\n'
            f"from tests import leak_police\nleak_police.GRACE_S = {grace_s}\n"
        )
        pytester.makepyfile(source)
        return pytester.runpytest_subprocess("-q", "-rs")

    return run


LEAKS = {
    "a child": (
        (
            "import subprocess, sys\n"
            "def test():\n"
            "    subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        ),
        "*process * (*time.sleep(60)*",
    ),
    "a fork that was never waited for": (
        "import os\ndef test():\n    if os.fork() == 0:\n        os._exit(0)\n",
        "*process * zombie*",
    ),
    "a grandchild whose parent is gone": (
        (
            "import subprocess, sys\n"
            "def test():\n"
            "    subprocess.run(['sh', '-c', 'sleep 61 >/dev/null 2>&1 &'], check=True)\n"
        ),
        "*process * (sleep 61)*",
    ),
    "a bare fork whose parent is gone": (
        (
            "import os, time\n"
            "def test():\n"
            "    child = os.fork()\n"
            "    if child == 0:\n"
            "        if os.fork() == 0:\n"
            "            time.sleep(62)\n"
            "        os._exit(0)\n"
            "    os.waitpid(child, 0)\n"
        ),
        "*process * sleeping*",
    ),
    "a thread": (
        (
            "import threading, time\n"
            "def test():\n"
            "    args = dict(args=(4,), name='dawdler', daemon=True)\n"
            "    threading.Thread(target=time.sleep, **args).start()\n"
        ),
        "*thread 'dawdler'*",
    ),
    "a variable": (
        "import os\ndef test():\n    os.environ['NEW'] = 'x'\n",
        "*variable NEW added: 'x'*",
    ),
    "a changed variable": (
        "import os\ndef test():\n    os.environ['PATH'] += ':/nowhere'\n",
        "*variable PATH changed*",
    ),
    "a removed variable": (
        "import os\ndef test():\n    del os.environ['PATH']\n",
        "*variable PATH removed*",
    ),
    "a port": (
        (
            "import socket\n"
            "kept = []\n"
            "def test():\n"
            "    kept.append(socket.create_server(('127.0.0.1', 0)))\n"
        ),
        "*listening port 127.0.0.1:*",
    ),
    "a segment": (
        (
            "import os, pathlib\n"
            "def test():\n"
            "    pathlib.Path(f'/dev/shm/police-{os.getpid()}').write_text('x')\n"
        ),
        "*shared memory /dev/shm/police-*",
    ),
    "a memfd": (
        (
            "import os, pytest\n"
            "@pytest.mark.no_memfd_growth\n"
            "def test():\n"
            "    os.memfd_create('nbaccel-test')\n"
        ),
        "*1 open memfd of nbaccel*",
    ),
    "a folder": ("import os\ndef test():\n    os.chdir('/')\n", "*working folder / instead of*"),
    "a handler": (
        "import signal\ndef test():\n    signal.signal(signal.SIGTERM, signal.SIG_IGN)\n",
        "*handler of SIGTERM*",
    ),
    "a process group": (
        (
            "import torch.distributed as dist\n"
            "def test(tmp_path):\n"
            "    dist.init_process_group(\n"
            "        'gloo', store=dist.HashStore(), rank=0, world_size=1)\n"
        ),
        "*torch.distributed process group*",
    ),
}


@pytest.mark.parametrize("leak", LEAKS)
def test_a_leak_is_found_and_cleaned_up_for_the_next_test(judged, leak):
    source, complaint = LEAKS[leak]
    verdict = judged(source + "\ndef test_next():\n    pass\n")
    verdict.stdout.fnmatch_lines(["*the test left behind:*", complaint])
    verdict.assert_outcomes(passed=2, errors=1)


def test_nothing_of_a_leaked_process_survives_the_session(judged):
    judged("import subprocess\ndef test():\n    subprocess.Popen(['sleep', '63'])\n")
    assert not [p for p in psutil.process_iter(["cmdline"]) if p.info["cmdline"] == ["sleep", "63"]]


def test_what_is_just_ending_is_given_time(judged):
    verdict = judged(
        "import subprocess, threading, time\n"
        "def test_thread():\n"
        "    threading.Thread(target=time.sleep, args=(0.5,)).start()\n"
        "def test_orphan():\n"
        "    subprocess.run(['sh', '-c', 'sleep 0.5 >/dev/null 2>&1 &'], check=True)\n",
        grace_s=leak_police.GRACE_S,
    )
    verdict.assert_outcomes(passed=2)


def test_what_fixtures_clean_up_or_hold_on_purpose_is_no_leak(judged):
    judged(
        "import os, subprocess, pytest\n"
        "@pytest.fixture(scope='module')\n"
        "def server():\n"
        "    child = subprocess.Popen(['sleep', '64'])\n"
        "    yield child\n"
        "    child.kill(); child.wait()\n"
        "def test_held(server):\n"
        "    assert server.poll() is None\n"
        "def test_restored(monkeypatch, tmp_path):\n"
        "    monkeypatch.setenv('NEW', 'x'); monkeypatch.chdir(tmp_path)\n"
    ).assert_outcomes(passed=2)


def test_memfds_are_counted_only_where_asked(judged):
    judged("import os\ndef test():\n    os.memfd_create('nbaccel-test')\n").assert_outcomes(
        passed=1
    )


FAKE_TEMPLATE = """
import subprocess, sys, types

def install(child_too):
    # Stands in for nbaccel.launch.warmup: a server that is kept, with or without a worker.
    command = 'sleep 65 & echo; wait' if child_too else 'echo; exec sleep 65'
    server = subprocess.Popen(['sh', '-c', command], stdout=subprocess.PIPE)
    server.stdout.readline()
    server.stdout.close()
    module = types.ModuleType('nbaccel.launch.warmup')
    module.current_pid = lambda: server.pid
    module.stop = lambda: (server.kill(), server.wait(), print('template: shut down'))
    sys.modules['nbaccel.launch.warmup'] = module
"""


def test_the_template_may_stay_until_the_session_ends(judged):
    verdict = judged(FAKE_TEMPLATE + "\ndef test():\n    install(child_too=False)\n")
    verdict.assert_outcomes(passed=1)
    assert "template: shut down" in verdict.stdout.str()


def test_a_worker_of_the_template_may_not(judged):
    verdict = judged(FAKE_TEMPLATE + "\ndef test():\n    install(child_too=True)\n")
    verdict.assert_outcomes(passed=1, errors=1)
    verdict.stdout.fnmatch_lines(["*process * (sleep 65)*"])


def test_a_stranger_s_segment_is_his(judged):
    """Another process of the same user makes a segment while our test runs, and keeps it open."""
    name = f"police-stranger-{os.getpid()}"
    verdict = judged(
        "import subprocess, sys, pathlib\n"
        "def test():\n"
        "    # setsid and an emptied environment: nothing ties the process to this session\n"
        f"    subprocess.run(['sh', '-c', 'env -i setsid sh -c \"exec 9>/dev/shm/{name}; "
        "exec sleep 4\" >/dev/null 2>&1 &'], check=True)\n"
        f"    while not pathlib.Path('/dev/shm/{name}').exists(): pass\n"
    )
    try:
        verdict.assert_outcomes(passed=1)
    finally:
        (Path("/dev/shm") / name).unlink(missing_ok=True)


def test_gpu_tests_are_skipped_with_the_reason_where_there_is_none(judged):
    if hardware.missing_gpu() is None:
        pytest.skip("this machine has a GPU: nothing is skipped")
    verdict = judged("import pytest\n@pytest.mark.gpu\ndef test():\n    pass\n")
    verdict.assert_outcomes(skipped=1)
    verdict.stdout.fnmatch_lines(["SKIPPED * needs an NVIDIA GPU: *"])
