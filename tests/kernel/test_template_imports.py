"""The template imports what the notebook has: real kernels, real packages in a folder."""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kernel.kernel import Kernel, wait_for
from tests.process import lives

pytestmark = pytest.mark.slow

NOTE = """
import os
with open(os.environ["NB_TEST_IMPORTS"], "a") as notes, open("/proc/self/comm") as name:
    notes.write(f"{__name__} {name.read().strip()}\\n")
VERSION = 1
"""
# Each behaves in the notebook, and does what its name says in a template.
IN_A_TEMPLATE = 'if open("/proc/self/comm").read().strip() == "nbaccel-tmpl":\n    '
BAD = {
    "makes_a_thread": (
        "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()",
        "it starts 1 thread",
    ),
    "needs_the_thread": ("import makes_a_thread", "it starts 1 thread"),
    "hangs": ("import time\ntime.sleep(3600)", "its import takes more than 7 s"),
    "crashes": ("import os\nos.abort()", "its import ended the process"),
    "fails": ("raise RuntimeError('not in here')", "its import fails (RuntimeError: not in here)"),
}
GOOD = {
    "calm_one": "",
    "calm_two": "",
    "calm_three": "",
    "calm_four": "",
    "needs_calm": "import calm_three",
    "sets_context": (
        "import decimal, numpy\ndecimal.getcontext().prec = 50\nnumpy.seterr(all='raise')"
    ),
    "keeps_local": "import threading\nLOCAL = threading.local()\nLOCAL.stack = ['base']",
    "round_first": "ONE = 1\nfrom round_second import TWO",
    "round_second": "from round_first import ONE\nTWO = 2",
}
SLOW = {
    "takes_its_time": "import time\ntime.sleep(1.5)",
    "takes_long": "import time\ntime.sleep(6)",
}
SETUP = """
import os, sys, time
import torch
from nbaccel.workers import time_limits
time_limits.IMPORT_S = 7.0
from nbaccel import Pool, notebook_launcher
from nbaccel.workers import template

def learn():
    while not template.template_for().is_ready():
        template.template_for().wait(lambda _: None, lambda _: True)
"""
# A thread of the user's, beside which no process should be forked.
THREAD = """
import threading
threading.Thread(target=threading.Event().wait, daemon=True, name="mine").start()
"""
LAUNCH = """
def version():
    import {name}
    return {name}.VERSION
results = notebook_launcher(version, (), 2)
print(results[0], results.plan.start_method)
"""


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("installed") / "test-packages"
    folder.mkdir()
    behaviours = dict(GOOD)
    for name, code in ({name: code for name, (code, _) in BAD.items()} | SLOW).items():
        behaviours[name] = IN_A_TEMPLATE + code.replace("\n", "\n    ")
    for name, behaviour in behaviours.items():
        (folder / f"{name}.py").write_text(f"{NOTE}{behaviour}\n")
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
    """A kernel that can be forked."""
    with start(packages) as kernel:
        yield kernel


@pytest.fixture(scope="module")
def used(packages: Path) -> Iterator[Kernel]:
    """A kernel that should not be forked."""
    with start(packages, SETUP + THREAD) as kernel:
        yield kernel


def say(kernel: Kernel, code: str) -> str:
    return kernel.run(textwrap.dedent(code)).check().stdout.strip()


def test_a_launch_in_the_cell_of_the_import_is_a_fork_and_later_ones_the_templates(clean, packages):
    assert say(clean, "import calm_one" + LAUNCH.format(name="calm_one")) == "1 fork"
    assert imported_by(packages, "calm_one") == ["python"], "by the notebook alone"
    said = " ".join(say(clean, "print(results.plan.explain())").split())
    assert "the template is not ready yet, and preflight found nothing against a fork" in said
    say(clean, "learn()")
    for _ in range(2):
        assert say(clean, LAUNCH.format(name="calm_one")) == "1 template"
    assert imported_by(packages, "calm_one") == ["python", "nbaccel-tmpl"]
    # What workers need beside is imported once, in the background.
    assert say(clean, "print(template.template_for().left_out)") == "{}"
    asks = "print(notebook_launcher(lambda: 'torch._dynamo' in sys.modules, (), 2))"
    assert say(clean, asks) == "[True, True]"


def test_the_first_launch_of_a_kernel_finds_the_template_as_it_wants_it(packages):
    with start(packages, "import torch\nfrom nbaccel import notebook_launcher") as kernel:
        assert say(
            kernel,
            """
            from nbaccel.workers import template
            template.template_for().wait(lambda _: None, lambda _: True)
            made = template.running()
            for method in "auto", "fork":
                print(notebook_launcher(lambda: 1, (), 2, start_method=method).plan.start_method)
                print(template.running() == made, template.template_for().is_ready())
            """,
        ).split() == ["template", "True", "True", "fork", "True", "True"], "imports ask for another"


def test_modules_beside_the_notebook_are_imported_anew_by_each_worker(clean, tmp_path):
    (tmp_path / "beside.py").write_text(NOTE)
    say(clean, f"sys.path.insert(0, {str(tmp_path)!r}); import beside")
    say(clean, "learn()")
    assert say(clean, LAUNCH.format(name="beside")) == "1 template"
    (tmp_path / "beside.py").write_text(NOTE.replace("VERSION = 1", "VERSION = 22"))
    say(clean, "import calm_four")  # a fork would be ready sooner, with the old version
    *notice, version = say(clean, LAUNCH.format(name="beside")).splitlines()
    assert version == "22 template"
    assert "has been edited since the notebook imported beside" in "".join(notice)
    say(clean, f"del sys.modules['beside']; sys.path.remove({str(tmp_path)!r})")


def test_packages_that_cannot_be_forked_are_left_out_and_told(packages):
    with start(packages, SETUP + THREAD) as kernel:
        say(kernel, f"import {', '.join(BAD)}\nlearn()")
        left_out = ast.literal_eval(say(kernel, "print(template.template_for().left_out)"))
        assert left_out.keys() == BAD.keys()
        assert [name for name, (_, why) in BAD.items() if why not in left_out[name]] == []
        tries = {name: imported_by(packages, name) for name in BAD}
        assert say(kernel, LAUNCH.format(name="makes_a_thread")) == "1 template"
        assert imported_by(packages, "makes_a_thread")[-2:] == ["nbaccel-worker"] * 2
        told = " ".join(say(kernel, "print(results.plan.explain())").split())
        assert "makes_a_thread is left out: it starts 1 thread" in told
        say(kernel, "%load_ext nbaccel")
        status = kernel.run("%accelerate status").check()
        shown = " ".join([status.stdout, *(data["text/plain"] for data in status.displays)])
        assert "Each worker imports hangs itself, because its import" in " ".join(shown.split())
        say(kernel, "import calm_four\nlearn()")
        assert imported_by(packages, "calm_four")[-1] == "nbaccel-tmpl"
        for name, importers in tries.items():
            tried_again = imported_by(packages, name)[len(importers) :]
            assert "nbaccel-tmpl" not in tried_again, "once and for all"
        assert len(kernel.templates()) == 1
        assert not kernel.workers(), "what they had started has ended"


def test_a_launch_waits_for_what_it_uses_and_says_so(used, packages):
    cell = used.run("import takes_its_time" + LAUNCH.format(name="takes_its_time")).check()
    assert cell.stdout.strip() == "1 template"
    assert imported_by(packages, "takes_its_time") == ["python", "nbaccel-tmpl"]
    told = [data["text/plain"] for data in cell.displays]
    assert "starting 2 workers: importing takes_its_time …" in told
    assert told[-1] == "", "it has gone away"


@pytest.mark.parametrize(
    ("moment", "blow"),
    [
        ("ready", "SIGKILL"),
        ("ready", "SIGSTOP"),
        ("importing", "SIGSEGV"),
        ("importing", "SIGSTOP"),
    ],
)
def test_a_launch_works_whatever_has_happened_to_the_template(used, moment, blow):
    say(used, "template.stop()\ntemplate.template_for().start()")
    if moment == "ready":
        say(used, "learn()")
    say(used, f"import signal; os.kill(template.running()[0].process.pid, signal.{blow})")
    assert say(used, "print(notebook_launcher(lambda: 5, (), 2))") == "[5, 5]"


def test_workers_have_from_their_start_what_imports_did_in_the_template(used, packages):
    say(used, "import needs_calm, sets_context, keeps_local, round_first\nlearn()")
    said = say(
        used,
        """
        with Pool(2, namespace={}) as pool:
            pool.run("import needs_calm, sys; found = needs_calm.VERSION")
            print(pool.pull("found")["found"])
        """,
    )
    assert said == "[1, 1]"
    assert "nbaccel-worker" not in imported_by(packages, "needs_calm")
    said = say(
        used,
        """
        def found():
            import decimal, numpy
            return decimal.getcontext().prec, numpy.geterr()["over"], keeps_local.LOCAL.stack
        print(*notebook_launcher(found, (), 2), sep="\\n")
        """,
    )
    assert [ast.literal_eval(line) for line in said.splitlines()] == [(50, "raise", ["base"])] * 2
    assert say(used, "print('round_second' in template.template_for().left_out)") == "False"


def test_no_package_is_imported_where_that_is_switched_off(packages):
    with start(packages, SETUP + THREAD, NBACCEL_TEMPLATE_IMPORTS="0") as kernel:
        before = imported_by(packages, "calm_three")
        say(kernel, "import calm_three\nlearn()")
        assert say(kernel, LAUNCH.format(name="calm_three")) == "1 template"
        assert imported_by(packages, "calm_three")[len(before) :] == [
            "python",
            "nbaccel-worker",
            "nbaccel-worker",
        ]


def test_a_template_that_imports_ends_with_its_kernel(packages):
    with start(packages, SETUP + THREAD) as kernel:
        before = imported_by(packages, "takes_long").count("nbaccel-tmpl")
        say(kernel, "import takes_long")
        assert wait_for(lambda: imported_by(packages, "takes_long").count("nbaccel-tmpl") > before)
        (template,) = [process.pid for process in kernel.templates()]
        kernel.kill()
        assert wait_for(lambda: not lives(template), timeout_s=3.0)
