"""Kernels in odd places: beside files that hide modules, under a parent without interrupts."""

from __future__ import annotations

import signal
import time

import pytest

from tests.kernel.kernel import Kernel

pytestmark = pytest.mark.slow

HIDING = ("torch", "numpy", "random", "queue", "timeit", "IPython")
BOUND_S = 60.0

SETUP = """
import os, sys, time
import torch, numpy
from nbaccel import Pool, notebook_launcher
from tests import worker_functions as workers
os.chdir({folder!r})
sys.path.insert(0, "")

def train(net):
    import random
    import helper
    with torch.no_grad():
        net.bias.fill_(helper.VALUE)
    return os.path.isfile(random.__file__) and torch.__file__, sys.path[0]

net = torch.nn.Linear(2, 2)
"""


def test_files_beside_the_notebook_hide_nothing_from_workers(fresh_kernel, tmp_path):
    for name in HIDING:
        (tmp_path / f"{name}.py").write_text(f"raise RuntimeError('this is no {name}')\n")
    (tmp_path / "helper.py").write_text("VALUE = 7\n")
    fresh_kernel.run(SETUP.format(folder=str(tmp_path))).check()
    check = f"assert found == [(torch.__file__, {str(tmp_path)!r})] * 2, found; print(net.bias)"
    launched = fresh_kernel.run(f"found = notebook_launcher(train, (net,), 2); {check}").check()
    assert "[7., 7.]" in launched.stdout
    live = f"""
        with Pool(num_processes=2) as pool:
            found = pool.launch(train, (net,)).values
        {check}
        """
    fresh_kernel.run(live).check()


def test_stop_works_in_a_kernel_whose_parent_ignores_interrupts():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        kernel = Kernel()
    finally:
        signal.signal(signal.SIGINT, before)
    with kernel:
        kernel.run("%load_ext nbaccel\nfrom nbaccel import notebook_launcher").check()
        for cell in (
            "def stuck():\n    import time\n    print('stuck now')\n    time.sleep(600)\n"
            "notebook_launcher(stuck, (), 2)",
            "%%accelerate -n 2\nimport time\nprint('stuck now')\ntime.sleep(600)",
        ):
            running = kernel.begin(cell)
            kernel.until(running, "stuck now")
            pressed = time.monotonic()
            kernel.interrupt()
            assert kernel.finish(running).error == "KeyboardInterrupt"
            assert time.monotonic() - pressed < BOUND_S
        assert "[0, 1]" in kernel.run("%%accelerate\nprint([0, 1])").check().text
