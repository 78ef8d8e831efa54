"""What the notebook has set in installed packages, and changed of them, is so in its workers."""

from __future__ import annotations

import textwrap

import pytest

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


LOCKED = """
import threading
lock = threading.Lock()
def locked(*_):
    with lock:
        return "f"
"""


def test_a_launch_has_the_settings_of_the_notebook_and_what_cannot_be_sent_is_told_once(
    fresh_kernel,
):
    fresh_kernel.run(SETTINGS).check()
    fresh_kernel.run("notebook_launcher(lambda: 1, (), 2);").check()
    fresh_kernel.run(
        """
        before = words(settings())
        change()
        here = words(settings())
        assert [name for name in here if here[name] == before[name]] == ["locale"], (before, here)
        for method in ("template", "fork"):
            there = notebook_launcher(lambda: words(settings()), (), 2, start_method=method)
            assert there[0] == there[1] == here, (here, there[0])
        """
    ).check()
    fresh_kernel.run(LOCKED).check()
    launch = "notebook_launcher(lambda: 1, (), 2, start_method='template');"
    for change, told in (
        ("np.set_printoptions(formatter={'float': locked})", "numpy.set_printoptions"),
        ("torch.nn.Identity.forward = locked", "torch.nn.modules.linear.Identity.forward"),
    ):
        fresh_kernel.run(change).check()
        said = fresh_kernel.run(launch).check().text
        assert told in said
        assert 'start_method="fork"' in said
        assert fresh_kernel.run(launch).check().text == ""


def test_cells_follow_settings_and_keep_their_own(fresh_kernel):
    fresh_kernel.run(SETTINGS).check()
    fresh_kernel.run("live = Pool(num_processes=2)\nlive.run('import numpy as np');").check()
    same = """
    live.run('there = words(settings())')
    for there in live.pull("there")["there"]:
        assert there == words(settings()), (there, words(settings()))
    """
    try:
        fresh_kernel.run("change()" + same.replace("\n    ", "\n")).check()
        fresh_kernel.run("live.run('np.set_printoptions(precision=5)');").check()
        shown = "live.run('print(np.array([1 / 3]))');"
        fresh_kernel.run("torch.set_printoptions(precision=3)").check()
        assert fresh_kernel.run(shown).check().stdout == "[0-1] [0.33333]\n"
        fresh_kernel.run("np.set_printoptions(precision=3)").check()
        assert fresh_kernel.run(shown).check().stdout == "[0-1] [0.333]\n"
        fresh_kernel.run("np.set_printoptions(precision=2); live.call(len, [])").check()
        fresh_kernel.run("np.set_printoptions(precision=3)").check()
        assert fresh_kernel.run(shown).check().stdout == "[0-1] [0.333]\n"
    finally:
        fresh_kernel.run("live.stop()").check()


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


def test_launches_and_live_workers_follow_what_is_changed(fresh_kernel):
    fresh_kernel.run(CHANGES + "live = Pool(num_processes=2)\nlive.start()").check()
    try:
        fresh_kernel.run("change()").check()
        fresh_kernel.run("live.run('there = changed()')\nhere = changed()").check()
        fresh_kernel.run("assert live.pull('there')['there'] == [here, here]").check()
        fresh_kernel.run("assert live.call(changed) == [here, here]").check()
        told = "print(here['method'], here['wrapped'], here['registered'], here['callbacks'][-1])"
        assert fresh_kernel.run(told).check().stdout == "7 True True MyCallback\n"
        for method in ("template", "fork"):
            launched = f"notebook_launcher(changed, (), 2, start_method={method!r})"
            fresh_kernel.run(f"assert list({launched}) == [here, here]").check()
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
    fresh_kernel, tmp_path
):
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
