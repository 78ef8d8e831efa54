"""The police are proven by tests that leak for real, one after another in a pytest of their own."""

from __future__ import annotations

import fnmatch
import os
import sys
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests import hardware
from tests.isolation import ROOT
from tests.programs import run_program

INI = "[pytest]\nmarkers =\n  no_memfd_growth: police the memfds\n  gpu: a gpu\n"
CONFTEST = """
pytest_plugins = ["tests.conftest"]
from tests import leak_police
leak_police.GRACE_S = 0.3
"""


def run_pytest(folder: Path, sources: list[str]) -> Verdicts:
    """Run files of tests under this project's conftest, in one process, in their order."""
    (folder / "pytest.ini").write_text(INI)
    (folder / "conftest.py").write_text(CONFTEST)
    for number, source in enumerate(sources):
        (folder / f"test_{number:02}.py").write_text(source)
    # nbval imports for seconds, and there is no notebook.
    options = ["-p", "no:cacheprovider", "-p", "no:nbval", "--junitxml=report.xml"]
    command, environ = [sys.executable, "-m", "pytest"], os.environ | {"PYTHONPATH": str(ROOT)}
    done = run_program([*command, *options], cwd=folder, env=environ, timeout=100, check=False)
    return Verdicts(done.stdout, folder / "report.xml")


class Verdicts:
    """What pytest said of each test, and of none."""

    def __init__(self, output: str, report: Path) -> None:
        self.output = output
        self._cases = list(ET.parse(report).iter("testcase"))

    def of(self, number: int) -> dict[str, str]:
        """Of the tests in one file: what was said of it; nothing where it passed."""
        return {
            str(case.get("name")): " ".join(
                f"{said.tag}: {said.get('message')} {said.text}" for said in case
            )
            for case in self._cases
            if f"test_{number:02}" in str(case.get("classname"))
        }


LEAKS = {
    "a child": (
        "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])",
        "*process * (*time.sleep(60)*",
    ),
    "a fork that was never waited for": ("os.fork() or os._exit(0)", "*process * zombie*"),
    "a grandchild whose parent is gone": (
        "subprocess.run(['sh', '-c', 'sleep 61 >/dev/null 2>&1 &'], check=True)",
        "*process * (sleep 61)*",
    ),
    "a thread": (
        "threading.Thread(target=time.sleep, args=(4,), name='dawdler', daemon=True).start()",
        "*thread 'dawdler'*",
    ),
    "a variable": ("os.environ['NEW'] = 'x'", "*variable NEW added: 'x'*"),
    "a port": (
        "kept.append(socket.create_server(('127.0.0.1', 0)))",
        "*listening port 127.0.0.1:*",
    ),
    "a segment": (
        "pathlib.Path(f'/dev/shm/police-{os.getpid()}').write_text('x')",
        "*shared memory /dev/shm/police-*",
    ),
    "a memfd": ("os.memfd_create('nbaccel-test')", "*1 open memfd of nbaccel*"),
    "a folder": ("os.chdir('/')", "*working folder / instead of*"),
    "a handler": ("signal.signal(signal.SIGTERM, signal.SIG_IGN)", "*handler of SIGTERM*"),
    "a process group": (
        "import torch.distributed as dist\n"
        "    dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)",
        "*torch.distributed process group*",
    ),
}
"""What a test does, and what is said of it."""
LEAKING = """
import os, pathlib, signal, socket, subprocess, sys, threading, time, pytest
kept = []
@pytest.mark.no_memfd_growth
def test():
    {body}
def test_next():
    assert True
"""


HELD = (
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
)
UNWATCHED = "import os\ndef test():\n    os.memfd_create('nbaccel-test')\n"
ON_A_GPU = "import pytest\n@pytest.mark.gpu\ndef test():\n    assert True\n"
FAKE_TEMPLATE = """
import subprocess, sys, types

def install(child_too):
    # In place of nbaccel.workers.template: a server that is kept, with a worker or not.
    command = 'sleep 65 & echo; wait' if child_too else 'echo; exec sleep 65'
    server = subprocess.Popen(['sh', '-c', command], stdout=subprocess.PIPE)
    server.stdout.readline()
    server.stdout.close()
    module = types.ModuleType('nbaccel.workers.template')
    module.running = lambda: [types.SimpleNamespace(process=server)]
    module.stop = lambda: (server.kill(), server.wait(), print('template: shut down'))
    sys.modules['nbaccel.workers.template'] = module
"""
TEMPLATE_ALONE = FAKE_TEMPLATE + "\ndef test():\n    install(child_too=False)\n"
STRANGER = f"police-stranger-{os.getpid()}"
# Another process of the same user makes a segment while our test runs, and keeps it open until we
# end it: to the police of the test worker beside us a segment that nobody has open is a leak.
# setsid and an emptied environment: nothing ties it to this session.
STRANGERS_SEGMENT = (
    "import subprocess, sys, pathlib\n"
    "def test():\n"
    f"    subprocess.run(['sh', '-c', 'env -i setsid sh -c \"exec 9>/dev/shm/{STRANGER}; "
    "exec sleep 66\" >/dev/null 2>&1 &'], check=True)\n"
    f"    while not pathlib.Path('/dev/shm/{STRANGER}').exists(): continue\n"
)
BESIDE = [HELD, UNWATCHED, ON_A_GPU, STRANGERS_SEGMENT, TEMPLATE_ALONE]


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Verdicts]:
    """Of one session with all leaks, and with what is none; the template is last, for its end."""
    sources = [LEAKING.replace("{body}", body) for body, _ in LEAKS.values()] + BESIDE
    yield run_pytest(tmp_path_factory.mktemp("police"), sources)
    (Path("/dev/shm") / STRANGER).unlink(missing_ok=True)
    for process in psutil.process_iter(["cmdline"]):
        if process.info["cmdline"] == ["sleep", "66"]:
            process.kill()


@pytest.mark.slow
@pytest.mark.parametrize("leak", LEAKS)
def test_a_leak_is_found_and_cleaned_up_for_the_next_test(verdicts, leak):
    found = verdicts.of(list(LEAKS).index(leak))
    said = found.pop("test")
    assert fnmatch.fnmatch(said, f"error: *the test left behind:{LEAKS[leak][1]}"), said
    assert found == {"test_next": ""}


@pytest.mark.parametrize(
    ("source", "names"),
    [
        pytest.param(HELD, ["test_held", "test_restored"], id="what fixtures clean up or hold"),
        pytest.param(UNWATCHED, ["test"], id="memfds where they are not watched"),
        pytest.param(STRANGERS_SEGMENT, ["test"], id="a segment of a stranger"),
        pytest.param(TEMPLATE_ALONE, ["test"], id="the template"),
    ],
)
def test_what_is_no_leak_is_not_called_one(verdicts, source, names):
    assert verdicts.of(len(LEAKS) + BESIDE.index(source)) == dict.fromkeys(names, "")


def test_nothing_of_a_leaked_process_survives_the_session_nor_the_template(verdicts):
    leaked = [["sleep", seconds] for seconds in ("61", "64", "65")]
    assert verdicts.of(0)["test"], "a child leaked"
    assert not [p for p in psutil.process_iter(["cmdline"]) if p.info["cmdline"] in leaked]
    assert "template: shut down" in verdicts.output


def test_gpu_tests_are_skipped_with_the_reason_where_there_is_none(verdicts):
    if hardware.missing_gpu() is None:
        pytest.skip("this machine has a GPU: nothing is skipped")
    said = verdicts.of(len(LEAKS) + BESIDE.index(ON_A_GPU))["test"]
    assert said.startswith("skipped: needs an NVIDIA GPU: "), said
