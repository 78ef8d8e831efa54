"""The template knows what the notebook has imported: real kernels, real packages in a folder."""

from __future__ import annotations

import ast
import os
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import leak_police
from tests.kernel.kernel import Kernel, wait_for

pytestmark = pytest.mark.slow

NOTE = """
import os
import threading
with open(os.environ["NB_TEST_IMPORTS"], "a") as notes, open("/proc/self/comm") as name:
    priority = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    notes.write(f"{__name__} {name.read().strip()} {priority}\\n")
VERSION = 1
"""
# Each behaves in the notebook, and does what its name says in a template.
IN_A_TEMPLATE = 'if open("/proc/self/comm").read().strip() == "nbaccel-tmpl":\n    '
PACKAGES = {
    "calm_one": "",
    "calm_two": "",
    "calm_three": "",
    "calm_four": "",
    "needs_calm": "import calm_three",
    "makes_a_thread": (
        "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()"
    ),
    "needs_the_thread": "import makes_a_thread",
    "takes_signals": "import faulthandler, signal\nfaulthandler.register(signal.SIGUSR2)",
    "goes_online": "import socket\nS = socket.create_server(('127.0.0.1', 0))",
    "starts_a_program": "import subprocess\nP = subprocess.Popen(['sleep', '100'])",
    "takes_its_time": "import time\ntime.sleep(1.5)",
    "takes_long": "import time\ntime.sleep(6)",
    "takes_memory": "X = bytearray(300 * 2**20)",
    "hangs": "import time\ntime.sleep(3600)",
    "crashes": "import os\nos.abort()",
    "fails": "raise RuntimeError('not in here')",
}
# What only workers import: each says what it found there.
OF_WORKERS = {
    "plain_there": "FOUND = 'nothing'",
    "reads_rank": "import os\nFOUND = os.environ.get('RANK', 'none')",
    "reads_switch": "import os\nFOUND = os.getenv('NB_TEST_SWITCH', 'off')",
    "copies_all": "import os\nFOUND = dict(os.environ).get('RANK', 'none')",
    "sets_its_own": "import os\nFOUND = os.environ.setdefault('NB_TEST_OWN', 'set')",
    "comes_from_elsewhere": "FOUND = 'here'",
    "breaks_there": "FOUND = 'nothing'\n" + IN_A_TEMPLATE + "raise RuntimeError('not in here')",
}
BAD = [
    name
    for name in PACKAGES
    if not name.startswith(("calm", "needs_calm", "takes_its_time", "takes_long"))
]
PACKAGES |= {f"calm_after_{name}": "" for name in BAD}
SETUP = """
import os, sys, time
import torch
from nbaccel.workers import time_limits
from nbaccel.workers import template_candidate
time_limits.IMPORT_S, time_limits.LEARN_S = 7.0, 8.0  # a fork of this process has them, too
template_candidate._MOST_BYTES = 2**28
from nbaccel import Pool, notebook_launcher
from nbaccel.workers import template_prestart
from nbaccel.workers.template_learning import learner

def learn(timeout_s=100):
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        template_prestart.start("")  # unless there is one
        learner().after_cell()
        if learner()._candidate is None:
            return
        time.sleep(0.05)
    raise TimeoutError(learner()._candidate)
"""
USED = """
x = torch.randn(1500, 1500)
torch.set_num_threads(2); (x @ x).sum()
torch.ones(2, requires_grad=True).sum().backward()
"""


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("installed") / "test-packages"
    folder.mkdir()
    for name, code in PACKAGES.items():
        is_calm = name.startswith(("calm", "needs"))
        behaviour = code if is_calm else IN_A_TEMPLATE + code.replace("\n", "\n    ")
        source = folder / f"{name}.py"
        source.write_text(f"{NOTE}{behaviour}\n")
        # Installed before any kernel began: the system tells its start to a second only.
        os.utime(source, (0, 0))
    for name, code in OF_WORKERS.items():
        source = folder / f"{name}.py"
        source.write_text(f"{NOTE}{code}\n")
        os.utime(source, (0, 0))
    elsewhere = folder / "imports-other-packages"
    elsewhere.mkdir()
    source = elsewhere / "comes_from_elsewhere.py"
    source.write_text(f"{NOTE}FOUND = 'there'\n")
    os.utime(source, (0, 0))
    (folder / "imports").touch()
    return folder


def imported_by(packages: Path, name: str) -> list[str]:
    lines = (packages / "imports").read_text().splitlines()
    return [line.split()[1] for line in lines if line.split()[0] == name]


def start(packages: Path, code: str = SETUP, **variables: str) -> Kernel:
    notes = str(packages / "imports")
    kernel = Kernel(NB_TEST_IMPORTS=notes, PYTHONPATH=str(packages), **variables)
    kernel.run(code).check()
    return kernel


@pytest.fixture(scope="module")
def clean(packages: Path) -> Iterator[Kernel]:
    kernel = start(packages)
    try:
        yield kernel
    finally:
        kernel.close()


@pytest.fixture(scope="module")
def used(packages: Path) -> Iterator[Kernel]:
    """A kernel that has run an OpenMP pool and autograd, and cannot be forked any more."""
    kernel = start(packages)
    kernel.run(USED).check()
    try:
        yield kernel
    finally:
        kernel.close()


def say(kernel: Kernel, code: str) -> str:
    return kernel.run(textwrap.dedent(code)).check().stdout.strip()


LAUNCH = """
def names():
    import {name}
    return {name}.VERSION, os.getppid()
print(notebook_launcher(names, (), 2)[0][0])
"""


# ------------------------------------------------------------------------- a clean kernel


def test_the_template_of_a_clean_kernel_is_a_fork_of_it(clean: Kernel, packages: Path) -> None:
    assert say(clean, "print(template_prestart.base('').is_of_this_process)") == "True"
    say(clean, "import calm_one")
    assert say(clean, LAUNCH.format(name="calm_one")) == "1"
    assert imported_by(packages, "calm_one") == ["python"], "by the notebook alone"


def test_in_the_cell_of_the_import_the_launch_has_it_too(clean: Kernel, packages: Path) -> None:
    say(clean, "import calm_two" + LAUNCH.format(name="calm_two"))
    assert imported_by(packages, "calm_two") == ["python"]


def test_what_workers_need_beside_is_imported_once_in_the_background(clean: Kernel) -> None:
    say(clean, "learn()")
    assert say(clean, "print(template_prestart.learned('') is not None)") == "True"
    assert say(clean, "print(sorted(learner().left_out))") == "[]"
    asks = "print(notebook_launcher(lambda: 'torch._dynamo' in sys.modules, (), 2))"
    assert say(clean, asks) == "[True, True]"


def test_a_worker_reaches_nothing_of_the_notebook_by_name(clean: Kernel) -> None:
    said = say(
        clean,
        """
        secret = "of the notebook"
        import calm_three  # a new fork of this process, which has the secret
        def look():
            import builtins, os, sys, zmq
            from IPython import get_ipython
            from ipykernel.kernelapp import IPKernelApp
            files = [os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")]
            main = vars(sys.modules["__main__"])
            return (
                "secret" in main, "In" in main, "secret" in get_ipython().user_ns,
                IPKernelApp.initialized(), any("history" in name for name in files),
                sorted({name.partition(":")[0] for name in files} & {"anon_inode"}),
            )
        print(notebook_launcher(look, (), 2)[0], template_prestart.base('').is_of_this_process)
        """,
    )
    assert said == "(False, False, False, False, False, []) True"
    say(clean, "learn()")  # none of them ends while it is looked at
    for process in clean.templates():
        # Its channels and the pairs that wake it, of its candidates too; a kernel has dozens.
        assert len(leak_police._sockets(process.pid)) <= 8


def test_modules_beside_the_notebook_are_imported_anew_by_each_worker(
    clean: Kernel, tmp_path: Path
) -> None:
    (tmp_path / "beside.py").write_text(NOTE)
    say(clean, f"sys.path.insert(0, {str(tmp_path)!r}); import beside")
    say(clean, "learn()")
    assert say(clean, LAUNCH.format(name="beside")) == "1"
    (tmp_path / "beside.py").write_text(NOTE.replace("VERSION = 1", "VERSION = 22"))
    *notice, version = say(clean, LAUNCH.format(name="beside")).splitlines()
    assert version == "22"
    assert "has been edited since the notebook imported beside" in "".join(notice)
    say(clean, f"del sys.modules['beside']; sys.path.remove({str(tmp_path)!r})")


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("makes_a_thread", "it starts 1 thread"),
        ("needs_the_thread", "it starts 1 thread"),
        ("takes_signals", "it changes how signals are handled"),
        ("goes_online", "it opens 1 network connection"),
        ("starts_a_program", "it starts other programs (1)"),
        ("hangs", "its import does nothing for 7 s"),
        ("crashes", "its import ended the process"),
        ("takes_memory", "it needs more than 256.0 MiB"),
        ("fails", "its import fails (RuntimeError: not in here)"),
    ],
)
def test_a_package_that_cannot_be_forked_is_left_out_and_told(
    used: Kernel, packages: Path, name: str, why: str
) -> None:
    say(used, f"import {name}")
    say(used, "learn()")
    assert why in say(used, f"print(learner().left_out[{name!r}])")
    assert say(used, LAUNCH.format(name=name)) == "1"
    assert imported_by(packages, name)[-2:] == ["nbaccel-worker"] * 2
    told = say(used, "print(notebook_launcher(os.getpid, (), 2).plan.explain())")
    assert f"{name} is left out: " in " ".join(told.split())
    say(used, "%load_ext nbaccel")
    status = used.run("%accelerate status").check()
    shown = " ".join([status.stdout, *(data["text/plain"] for data in status.displays)])
    assert f"Each worker imports {name} itself, because {why}" in " ".join(shown.split())
    before = imported_by(packages, name).count("nbaccel-tmpl")
    say(used, f"import calm_after_{name}")
    say(used, "learn()")
    assert imported_by(packages, f"calm_after_{name}") == ["python", "nbaccel-tmpl"]
    assert imported_by(packages, name).count("nbaccel-tmpl") == before, "once and for all"


# ------------------------------------------------------------------------- a used kernel


def test_a_used_kernel_is_not_forked_and_its_template_learns(packages: Path) -> None:
    kernel = start(packages, f"import torch\n{USED}\n{SETUP}")
    try:
        assert say(kernel, "print(template_prestart.base('').is_of_this_process)") == "False"
        say(kernel, "import needs_calm")
        for _ in range(2):
            assert say(kernel, LAUNCH.format(name="needs_calm")) == "1"
        assert imported_by(packages, "needs_calm") == ["python", "nbaccel-tmpl"]
    finally:
        kernel.close()


def test_a_launch_waits_for_what_it_uses_and_says_so(used: Kernel, packages: Path) -> None:
    cell = used.run("import takes_its_time" + LAUNCH.format(name="takes_its_time")).check()
    assert cell.stdout.strip() == "1"
    assert imported_by(packages, "takes_its_time") == ["python", "nbaccel-tmpl"]
    told = [data["text/plain"] for data in cell.displays]
    assert "starting 2 workers: importing takes_its_time …" in told
    assert told[-1] == "", "it has gone away"


def test_it_is_imported_at_the_lowest_priority_and_workers_have_their_own(
    used: Kernel, packages: Path
) -> None:
    say(used, "import calm_four")
    say(used, "learn()")
    lines = [line.split() for line in (packages / "imports").read_text().splitlines()]
    assert [priority for name, _, priority in lines if name == "calm_four"] == ["0", "19"]
    assert say(used, "print(notebook_launcher(lambda: os.nice(0), (), 2))") == "[0, 0]"


def test_nothing_is_imported_while_a_launch_runs(used: Kernel, packages: Path) -> None:
    say(used, "import takes_long")
    states = say(
        used,
        """
        def look():
            import psutil
            time.sleep(0.5)
            return [p.status() for p in psutil.process_iter() if p.name() == "nbaccel-tmpl"]
        print(notebook_launcher(look, (), 2)[0])
        """,
    )
    assert "stopped" in states
    assert "takes_long" not in say(used, "print(learner().learned_packages())")
    say(used, "learn()")
    assert "takes_long" in say(used, "print(learner().learned_packages())")


def test_a_changed_file_is_noticed_and_the_new_version_learned(
    used: Kernel, packages: Path
) -> None:
    say(used, "import calm_two")
    say(used, "learn()")
    assert say(used, LAUNCH.format(name="calm_two")) == "1"
    source = packages / "calm_two.py"
    source.write_text(source.read_text().replace("VERSION = 1", "VERSION = 333"))
    try:
        assert say(used, LAUNCH.format(name="calm_two")) == "333"
        say(used, "learn()")
        before = imported_by(packages, "calm_two")
        assert say(used, LAUNCH.format(name="calm_two")) == "333"
        assert imported_by(packages, "calm_two") == before, "it has been learned"
    finally:
        source.write_text(source.read_text().replace("VERSION = 333", "VERSION = 1"))


@pytest.mark.parametrize("blow", ["SIGKILL", "SIGSTOP", "SIGSEGV"])
@pytest.mark.parametrize("which", ["learned", "base"])
def test_a_launch_works_whatever_has_happened_to_the_template(
    used: Kernel, which: str, blow: str
) -> None:
    say(used, "learn()")
    say(used, f"import signal; os.kill(template_prestart.{which}('').process.pid, signal.{blow})")
    assert say(used, "print(notebook_launcher(lambda: 5, (), 2))") == "[5, 5]"
    say(used, "template_prestart.stop()\nlearn()")


def test_live_workers_have_it_from_their_start(used: Kernel, packages: Path) -> None:
    say(used, "import calm_three\nlearn()")
    before = imported_by(packages, "calm_three")
    said = say(
        used,
        """
        with Pool(2, namespace={}) as pool:
            pool.run("import calm_three, sys; found = calm_three.VERSION")
            print(pool.pull("found")["found"])
        """,
    )
    assert said == "[1, 1]"
    assert "nbaccel-worker" not in imported_by(packages, "calm_three")[len(before) :]


FIND = """
def found():
    import importlib
    os.environ["NB_TEST_SWITCH"] = "on"
    sys.path.insert(0, os.environ["NB_TEST_IMPORTS"] + "-other-packages")
    return {name: importlib.import_module(name).FOUND for name in %r}
print(*notebook_launcher(found, (), 2), sep="\\n")
"""
FOUND_THERE = {
    "plain_there": "nothing",
    "reads_rank": "1",
    "reads_switch": "on",
    "copies_all": "1",
    "sets_its_own": "set",
    "comes_from_elsewhere": "there",
    "breaks_there": "nothing",
}


@pytest.fixture
def forgetful(packages: Path) -> Iterator[Kernel]:
    """A kernel whose template has learned nothing yet."""
    (packages / "imports").write_text("")
    kernel = start(packages)
    try:
        yield kernel
    finally:
        kernel.close()


def test_what_workers_import_is_learned_but_what_it_finds_otherwise_there(
    forgetful: Kernel, packages: Path
) -> None:
    find = FIND % (tuple(OF_WORKERS),)
    first = say(forgetful, find).splitlines()
    say(forgetful, "learn()")
    later = say(forgetful, find).splitlines()

    assert ast.literal_eval(later[1]) == ast.literal_eval(first[1]) == FOUND_THERE
    learned = {"plain_there", "sets_its_own"}
    for name in OF_WORKERS:
        importers = imported_by(packages, name)
        # Twice in workers, and each time that the template tried; or once there and once in it.
        assert importers.count("nbaccel-worker") == (2 if name in learned else 4), name
    reasons = ast.literal_eval(say(forgetful, "print(learner().left_out)"))
    assert set(reasons) == {f"more of {name}" for name in OF_WORKERS.keys() - learned}
    assert "reads RANK when it is imported" in reasons["more of reads_rank"]
    assert "reads NB_TEST_SWITCH" in reasons["more of reads_switch"]
    assert "other-packages" in reasons["more of comes_from_elsewhere"]
    # The notebook has none of it: to it, it is not there before it is asked for.
    assert say(forgetful, "print('plain_there' in sys.modules)") == "False"


def test_what_was_left_out_of_workers_modules_is_tried_again_when_it_has_changed(
    forgetful: Kernel, packages: Path
) -> None:
    find, source = FIND % (("reads_rank",),), packages / "reads_rank.py"
    say(forgetful, find)
    say(forgetful, "learn()")
    assert say(forgetful, "print(*learner().left_out)") == "more of reads_rank"
    text = source.read_text()
    try:
        source.write_text(f"{NOTE}FOUND = 'whatever the rank'\n")
        assert "whatever the rank" in say(forgetful, find)
        say(forgetful, "learn()")
        assert say(forgetful, "print(*learner().left_out)") == ""
    finally:
        source.write_text(text)
        os.utime(source, (0, 0))


def test_what_cells_of_live_workers_import_is_learned(forgetful: Kernel, packages: Path) -> None:
    cells = "with Pool(2) as pool:\n    pool.run('import plain_there')"
    say(forgetful, cells)
    say(forgetful, "learn()")
    say(forgetful, cells)
    assert imported_by(packages, "plain_there").count("nbaccel-worker") == 2


def test_nothing_is_imported_by_templates_where_that_is_switched_off(packages: Path) -> None:
    kernel = start(packages, NBACCEL_TEMPLATE_IMPORTS="0")
    try:
        before = imported_by(packages, "calm_one")
        say(kernel, "import calm_one")
        say(kernel, "learner().after_cell()")
        assert say(kernel, LAUNCH.format(name="calm_one")) == "1"
        assert imported_by(packages, "calm_one")[len(before) :] == [
            "python",
            "nbaccel-worker",
            "nbaccel-worker",
        ]
        assert say(kernel, "print(template_prestart.base('').is_of_this_process)") == "False"
    finally:
        kernel.close()


def test_a_hundred_launches_with_imports_between_them_leave_one_template(
    packages: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "more-packages"
    folder.mkdir()
    for number in range(20):
        (folder / f"one_of_{number}.py").write_text("VERSION = 1\n")
    for use in ("", USED):
        kernel = start(packages)
        try:
            say(kernel, f"sys.path.insert(0, {str(folder)!r})\n{use}")
            for number in range(100):
                if number % 5 == 0:
                    say(kernel, f"import one_of_{number // 5}")
                name = f"one_of_{number // 5}"
                assert say(kernel, LAUNCH.format(name=name)) == "1"
            say(kernel, "learn()")
            assert wait_for(lambda kernel=kernel: len(kernel.templates()) == 2), "base and learned"
            assert not kernel.workers()
        finally:
            kernel.close()
