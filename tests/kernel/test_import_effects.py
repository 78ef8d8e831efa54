"""What packages do when they are imported reaches workers, whoever has imported them."""

from __future__ import annotations

import ast
import os
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.kernel.kernel import Kernel

pytestmark = pytest.mark.slow

FILE_LINES = 5000
PACKAGES = {
    "reads_home": "import os\nHOME = os.environ.get('NB_TEST_HOME', 'none')",
    "copies_all": "import os\nHOME = dict(os.environ).get('NB_TEST_HOME', 'none')",
    "writes_variable": "import os\nos.environ.setdefault('NB_TEST_WRITTEN', '1')",
    "adds_path": (
        "import os, sys\nsys.path.append(os.path.join(os.path.dirname(__file__), 'vendored'))"
    ),
    "looks_for_another": (
        "try:\n    import installed_later\n    HAS = True\nexcept ImportError:\n    HAS = False"
    ),
    "sets_context": (
        "import decimal, numpy\ndecimal.getcontext().prec = 50\nnumpy.seterr(all='raise')"
    ),
    "sets_no_gradients": "import torch\ntorch.set_grad_enabled(False)",
    "keeps_local": "import threading\nLOCAL = threading.local()\nLOCAL.stack = ['base']",
    "sets_seeds": "import numpy, torch\nnumpy.random.seed(1)\ntorch.manual_seed(1)",
    "sets_dtype": "import torch\ntorch.set_default_dtype(torch.float64)",
    "sets_logging": "import logging\nlogging.basicConfig(level=logging.INFO)",
    "changes_folder": "import os\nos.chdir('/')",
    "keeps_stream": "from sys import stdout\ndef say(text):\n    stdout.write(text)",
    "opens_file": "import os\nFILE = open(os.environ['NB_TEST_FILE'])\nFIRST = FILE.readline()",
    "makes_loop": "import asyncio\nLOOP = asyncio.new_event_loop()",
    "round_first": "ONE = 1\nfrom round_second import TWO",
    "round_second": "from round_first import ONE\nTWO = 2",
}
SETUP = """
import os, sys, time
import torch
from nbaccel import notebook_launcher
from nbaccel.workers import template_prestart
from nbaccel.workers.template_learning import learner

def learn(timeout_s=100):
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        template_prestart.start("")
        learner().after_cell()
        if learner()._candidate is None:
            return
        time.sleep(0.05)
    raise TimeoutError(learner()._candidate)

def found():
    import importlib, decimal, logging, numpy, torch
    modules = {name: importlib.import_module(name) for name in NAMES}
    try:
        import vendored_module
    except ImportError:
        vendored_module = None
    return {
        "home": [modules[name].HOME for name in modules if hasattr(modules[name], "HOME")],
        "variable": os.environ.get("NB_TEST_WRITTEN"),
        "vendored": vendored_module is not None,
        "has": getattr(modules.get("looks_for_another"), "HAS", None),
        "decimal": decimal.getcontext().prec,
        "numpy": numpy.geterr()["over"],
        "gradients": torch.is_grad_enabled(),
        "stack": [getattr(m.LOCAL, "stack", None) for m in modules.values() if hasattr(m, "LOCAL")],
        "draws": (numpy.random.rand(), float(torch.rand(1))),
        "dtype": str(torch.get_default_dtype()),
        "log_level": logging.root.level,
        "folder": os.getcwd(),
        "lines": [len(m.FILE.readlines()) for m in modules.values() if hasattr(m, "FILE")],
    }
"""
# Such a process is not forked for a template.
USED = """
x = torch.randn(1500, 1500)
torch.set_num_threads(2); (x @ x).sum()
torch.ones(2, requires_grad=True).sum().backward()
"""


@pytest.fixture
def packages(tmp_path: Path) -> Path:
    folder = tmp_path / "test-packages"
    (folder / "vendored").mkdir(parents=True)
    for name, code in {**PACKAGES, "vendored/vendored_module": ""}.items():
        write(folder, name, code)
    (tmp_path / "lines").write_text("a line\n" * FILE_LINES)
    return folder


def write(folder: Path, name: str, code: str) -> None:
    source = folder / f"{name}.py"
    source.write_text(f"{code}\n")
    # Before any kernel began.
    os.utime(source, (0, 0))


@pytest.fixture
def kernel(packages: Path) -> Iterator[Kernel]:
    started = Kernel(PYTHONPATH=str(packages), NB_TEST_FILE=str(packages.parent / "lines"))
    try:
        yield started
    finally:
        started.close()


def say(kernel: Kernel, code: str) -> str:
    return kernel.run(textwrap.dedent(code)).check().stdout.strip()


def find(kernel: Kernel) -> list[dict[str, Any]]:
    results: list[dict[str, Any]] = ast.literal_eval(
        say(kernel, "print(notebook_launcher(found, (), 2))")
    )
    return results


def test_a_later_launch_finds_what_the_first_one_did(kernel: Kernel, packages: Path) -> None:
    of_workers = [name for name in PACKAGES if name not in {"keeps_stream", "sets_no_gradients"}]
    say(kernel, SETUP + f"NAMES = {of_workers}")
    first = find(kernel)
    say(kernel, "learn()")
    left_out = ast.literal_eval(say(kernel, "print(learner().left_out)"))
    assert find(kernel) == first
    reasons = {name.removeprefix("more of "): why for name, why in left_out.items()}
    assert reasons["adds_path"] == "it changes sys.path"
    assert reasons["changes_folder"] == "it changes the working folder"
    assert reasons["sets_seeds"] == "it draws random numbers or sets a seed"
    assert reasons["opens_file"] == f"it keeps {packages.parent / 'lines'} open"
    # All the rest is learned: whoever imports the other first is no mistake of a package.
    assert "event loop" in reasons["makes_loop"]
    assert reasons["sets_dtype"] == "it changes torch's default dtype"
    assert reasons["sets_logging"] == "it configures logging"
    assert reasons.keys() == {
        *("sets_dtype", "sets_logging", "makes_loop"),
        *("adds_path", "changes_folder", "sets_seeds", "opens_file"),
        *("copies_all", "vendored_module"),
    }


def test_a_variable_that_is_set_later_reaches_what_only_workers_import(kernel: Kernel) -> None:
    say(kernel, SETUP + "NAMES = ['reads_home']")
    find(kernel)
    say(kernel, "learn()")
    say(kernel, "os.environ['NB_TEST_HOME'] = '/new'")
    assert [result["home"] for result in find(kernel)] == [["/new"]] * 2
    say(kernel, "learn()")
    assert [result["home"] for result in find(kernel)] == [["/new"]] * 2
    # With the new value it is learned like any other.
    is_there = "print(notebook_launcher(lambda: 'reads_home' in sys.modules, (), 2))"
    assert say(kernel, is_there) == "[True, True]"


def test_a_package_that_is_installed_later_is_found_by_what_only_workers_import(
    kernel: Kernel, packages: Path
) -> None:
    say(kernel, SETUP + "NAMES = ['looks_for_another']")
    assert [result["has"] for result in find(kernel)] == [False] * 2
    say(kernel, "learn()")
    write(packages, "installed_later", "")
    assert [result["has"] for result in find(kernel)] == [True] * 2


OF_NOTEBOOK = ["sets_context", "sets_no_gradients", "keeps_local", "round_first", "round_second"]


def test_workers_main_thread_has_what_imports_did_in_the_template(kernel: Kernel) -> None:
    say(kernel, SETUP + USED + f"NAMES = {[*OF_NOTEBOOK, 'opens_file']}")
    say(kernel, "import opens_file, " + ", ".join(OF_NOTEBOOK))
    say(kernel, "learn()")
    for result in find(kernel):
        assert result["decimal"] == 50
        assert result["numpy"] == "raise"
        assert result["gradients"] is False
        assert result["stack"] == [["base"]]
        assert result["lines"] == [FILE_LINES - 1]
    assert list(ast.literal_eval(say(kernel, "print(learner().left_out)"))) == ["opens_file"]


def test_what_a_package_prints_to_the_kernels_stream_is_shown(kernel: Kernel) -> None:
    say(kernel, SETUP + "import keeps_stream")
    say(kernel, "learn()")
    assert say(kernel, "print(template_prestart.base('').is_of_this_process)") == "True"
    said = say(kernel, "notebook_launcher(lambda: keeps_stream.say('said\\n'), (), 2);")
    assert said == "[0-1] said"


def test_a_kernel_in_which_a_package_reads_a_file_is_not_forked_for_a_template(
    kernel: Kernel,
) -> None:
    say(kernel, SETUP + "NAMES = ['opens_file']\nimport opens_file")
    say(kernel, "learn()")
    # A fork of it would find nothing behind what had been read already.
    assert [result["lines"] for result in find(kernel)] == [[FILE_LINES - 1]] * 2


def test_a_default_device_of_the_notebook_ends_no_template(kernel: Kernel) -> None:
    say(kernel, "import torch\ntorch.set_default_device('meta')")
    # On a GPU, a template that makes a tensor there would wake it.
    say(kernel, SETUP)
    launched = say(kernel, "print(notebook_launcher(lambda: str(torch.ones(1).device), (), 2))")
    assert launched.splitlines()[-1] == "['cpu', 'cpu']"
    assert "torch.set_default_device was given in the notebook" in launched
    assert say(kernel, "print(template_prestart.base('').is_of_this_process)") == "True"


@pytest.mark.parametrize("is_used", [False, True])
def test_each_worker_has_an_event_loop_of_its_own(kernel: Kernel, *, is_used: bool) -> None:
    say(kernel, SETUP + (USED if is_used else "") + "import makes_loop")
    say(kernel, "learn()")
    sleeps = "notebook_launcher(lambda: makes_loop.LOOP.run_until_complete(nap()), (), 2)"
    say(kernel, "import asyncio\nasync def nap():\n    await asyncio.sleep(0.05)\n    return 1")
    assert say(kernel, f"print({sleeps})") == "[1, 1]"
