"""What the notebook has set in installed packages, and changed of them, is so in its workers."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from tests.kernel.kernel import Kernel

pytestmark = pytest.mark.slow

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


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ("np.set_printoptions(formatter={'float': locked})", "numpy.set_printoptions"),
        ("torch.nn.Identity.forward = locked", "torch.nn.modules.linear.Identity.forward"),
    ],
    ids=["a setting", "a change"],
)
def test_what_cannot_be_sent_is_told_once(kernel: Kernel, change: str, told: str) -> None:
    code = f"""
    import threading
    lock = threading.Lock()
    def locked(*_):
        with lock:
            return "f"
    {change}
    """
    kernel.run(code).check()
    launch = "notebook_launcher(lambda: 1, (), 2, start_method='template');"
    said = kernel.run(launch).check().text
    assert told in said
    assert 'start_method="fork"' in said
    assert kernel.run(launch).check().text == ""


CHANGES = """
import torch, transformers
from transformers import AutoConfig, AutoModel, GPT2Config
from transformers.models.gpt2 import modeling_gpt2
from transformers.models.gpt2.modeling_gpt2 import GPT2MLP
from nbaccel import Pool, notebook_launcher

class TinyConfig(transformers.PretrainedConfig):
    model_type = "my-tiny"

class TinyModel(transformers.PreTrainedModel):
    config_class = TinyConfig
    def __init__(self, config):
        super().__init__(config)
        self.layer = torch.nn.Linear(1, 1)
        self.post_init()

def seven(self, x):
    return number_of_patch()

def number_of_patch():
    return 7

class MyCallback(transformers.TrainerCallback):
    pass

original_forward = torch.nn.Linear.forward

def changed():
    linear, ones = torch.nn.Linear(1, 1), torch.ones(1)
    return {
        "method": GPT2MLP.forward(None, 1),
        "wrapped": linear(ones).item() == 2 * original_forward(linear, ones).item(),
        "registered": type(AutoConfig.for_model("my-tiny")) is TinyConfig,
        "model": type(AutoModel.from_config(TinyConfig())) is TinyModel,
        "static": torch.nn.Identity.make(),
        "function": modeling_gpt2.eager_attention_forward(),
        "callbacks": [x.__name__ for x in transformers.trainer.DEFAULT_CALLBACKS],
    }

def change():
    GPT2MLP.forward = seven
    torch.nn.Linear.forward = lambda self, x: 2 * original_forward(self, x)
    AutoConfig.register("my-tiny", TinyConfig)
    AutoModel.register(TinyConfig, TinyModel)
    torch.nn.Identity.make = staticmethod(lambda: "made")
    modeling_gpt2.eager_attention_forward = lambda: "attended"
    transformers.trainer.DEFAULT_CALLBACKS.append(MyCallback)
"""


@pytest.mark.parametrize("start_method", ["template", "fork"])
def test_a_launch_has_what_was_changed_of_packages(fresh_kernel: Kernel, start_method: str) -> None:
    launch = f"""
    notebook_launcher(lambda: 1, (), 2)
    change()
    here = changed()
    there = notebook_launcher(changed, (), 2, start_method={start_method!r})
    assert there[0] == there[1] == here, (here, there)
    print(here["method"], here["wrapped"], here["registered"], here["callbacks"][-1])
    """
    fresh_kernel.run(CHANGES).check()
    assert fresh_kernel.run(launch).check().stdout == "7 True True MyCallback\n"


def test_live_workers_follow_what_is_changed(fresh_kernel: Kernel) -> None:
    fresh_kernel.run(CHANGES + "live = Pool(num_processes=2)\nlive.start()").check()
    try:
        fresh_kernel.run("change()").check()
        fresh_kernel.run("live.run('there = changed()')\nhere = changed()").check()
        fresh_kernel.run("assert live.pull('there')['there'] == [here, here]").check()
        fresh_kernel.run("assert live.call(changed) == [here, here]").check()
        fresh_kernel.run("def seven(self, x):\n    return 8\nGPT2MLP.forward = seven").check()
        shown = fresh_kernel.run("live.run('print(GPT2MLP.forward(None, 1))');").check().stdout
        assert shown == "[0-1] 8\n"
        # What is taken back in the notebook is taken back there.
        fresh_kernel.run("torch.nn.Linear.forward = original_forward").check()
        doubled = "torch.nn.Linear.forward.__module__"
        shown = fresh_kernel.run(f"live.run('print({doubled})');").check().stdout
        assert shown == "[0-1] torch.nn.modules.linear\n"
    finally:
        fresh_kernel.run("live.stop()").check()


def test_a_class_of_the_users_own_module_is_registered_when_a_worker_imports_that(
    fresh_kernel: Kernel, tmp_path: Path
) -> None:
    module = """
    from dataclasses import dataclass
    import torch
    from transformers.utils import ModelOutput

    @dataclass
    class Output(ModelOutput):
        loss: torch.Tensor | None = None

    class Pair(list):
        pass
    """
    (tmp_path / "my_outputs.py").write_text(textwrap.dedent(module))
    code = f"""
    import sys
    sys.path.insert(0, {str(tmp_path)!r})
    import my_outputs, torch
    from torch.utils import _pytree
    from nbaccel import Pool, notebook_launcher
    _pytree.register_pytree_node(my_outputs.Pair, lambda x: (list(x), None), lambda x, _: x)

    def without():
        return "my_outputs" in sys.modules

    def with_it():
        import my_outputs
        leaves = _pytree.tree_leaves([my_outputs.Output(loss=1), my_outputs.Pair([2, 3])])
        return "my_outputs" in sys.modules, leaves

    for found in (without, with_it):
        print(*notebook_launcher(found, (), 2, start_method="template"), end=" ")
    print()
    with Pool(2) as live:
        print(*live.call(without), *live.call(with_it), *live.call(with_it))
    """
    told = [line.strip() for line in fresh_kernel.run(code).check().stdout.splitlines()]
    there = "(True, [1, 2, 3])"
    assert told == [f"False False {there} {there}", f"False False {' '.join([there] * 4)}"]
