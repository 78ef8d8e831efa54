"""What the notebook has set in installed packages, and changed of them, is so in its workers."""

from __future__ import annotations

import pytest

from tests.kernel.kernel import Kernel

SETTINGS = """
import decimal, locale, sys, warnings
import numpy as np, torch
from nbaccel import Pool, notebook_launcher

def settings():
    return {
        "digits": decimal.getcontext().prec,
        "locale": locale.setlocale(locale.LC_TIME),
        "recursion": sys.getrecursionlimit(),
        "warnings": warnings.filters[0],
        "array": str(np.array([1 / 3])),
        "division": np.geterr()["divide"],
        "tensor": str(torch.tensor([1 / 3])),
        "dtype": torch.get_default_dtype(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "warn_only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "anomaly": torch.is_anomaly_enabled(),
        "gradients": torch.is_grad_enabled(),
        "matmul": torch.get_float32_matmul_precision(),
        "cudnn": torch.backends.cudnn.benchmark,
        "flash": torch.backends.cuda.flash_sdp_enabled(),
        "safe": Safe in torch.serialization.get_safe_globals(),
        "sharing": torch.multiprocessing.get_sharing_strategy(),
    }

class Safe:
    pass

class Mine(UserWarning):
    pass

def change():
    decimal.getcontext().prec = 7
    locale.setlocale(locale.LC_TIME, "C")
    sys.setrecursionlimit(2345)
    np.set_printoptions(precision=2, formatter={"int": lambda x: "n"})
    np.seterr(divide="raise")
    torch.set_printoptions(precision=1)
    torch.set_default_dtype(torch.float64)
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.autograd.set_detect_anomaly(True)
    torch.set_grad_enabled(False)
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.benchmark = True
    torch.backends.cuda.enable_flash_sdp(False)
    torch.serialization.add_safe_globals([Safe])
    torch.multiprocessing.set_sharing_strategy("file_system")
    warnings.simplefilter("error", Mine)

def words(of):
    return {name: repr(value) for name, value in of.items()}
"""


@pytest.fixture
def kernel(fresh_kernel: Kernel) -> Kernel:
    fresh_kernel.run(SETTINGS).check()
    return fresh_kernel


@pytest.mark.parametrize("start_method", ["template", "fork"])
def test_a_launch_has_the_settings_of_the_notebook(kernel: Kernel, start_method: str) -> None:
    launch = f"""
    before = words(settings())
    change()
    here = words(settings())
    assert [name for name in here if here[name] == before[name]] == ["locale"], (before, here)
    there = notebook_launcher(lambda: words(settings()), (), 2, start_method={start_method!r})
    assert there[0] == there[1] == here, [x for x in here.items() if x not in there[0].items()]
    """
    kernel.run("notebook_launcher(lambda: 1, (), 2);").check()
    kernel.run(launch).check()


def test_cells_follow_settings_and_keep_their_own(kernel: Kernel) -> None:
    kernel.run("live = Pool(num_processes=2)\nlive.run('import numpy as np');").check()
    same = """
    live.run('there = words(settings())')
    for there in live.pull("there")["there"]:
        assert there == words(settings()), (there, words(settings()))
    """
    try:
        kernel.run("change()" + same.replace("\n    ", "\n")).check()
        kernel.run("live.run('np.set_printoptions(precision=5)');").check()
        shown = "live.run('print(np.array([1 / 3]))');"
        kernel.run("torch.set_printoptions(precision=3)").check()
        assert kernel.run(shown).check().stdout == "[0-1] [0.33333]\n"
        kernel.run("np.set_printoptions(precision=3)").check()
        assert kernel.run(shown).check().stdout == "[0-1] [0.333]\n"
    finally:
        kernel.run("live.stop()").check()


def test_a_setting_that_cannot_be_sent_is_told_once(kernel: Kernel) -> None:
    code = """
    import threading
    lock = threading.Lock()
    def formatted(number):
        with lock:
            return "f"
    np.set_printoptions(formatter={"float": formatted})
    """
    kernel.run(code).check()
    launch = "notebook_launcher(lambda: 1, (), 2);"
    said = kernel.run(launch).check().text
    assert "numpy.set_printoptions" in said
    assert 'start_method="fork"' in said
    assert kernel.run(launch).check().text == ""
