"""What the README names as working in a launch does so in one from a real kernel.

A kernel is interactive: it has prompts, a shell, and a `__main__` without a file. Libraries ask for
these when they are imported, be it in the notebook or in a worker.
"""

from __future__ import annotations

import inspect
from typing import Any

import pytest
from torch import nn

from tests.kernel.kernel import Kernel
from tests.peers import test_frameworks as frameworks

pytestmark = pytest.mark.slow

IMPORTS = """
from __future__ import annotations
import tempfile
from typing import Any
import torch
from torch import nn
from nbaccel import Accelerator, Pool, notebook_launcher
"""
LAUNCH = """
for method in ("template", "fork", "template"):
    model = {model}
    before = next(model.parameters()).sum().item()
    results = notebook_launcher({name}, (model,), 2, start_method=method)
    print(method, len(results), next(model.parameters()).sum().item() != before)
"""
IN_LIVE_WORKERS = """
model = {model}
with Pool(2, namespace=dict(model=model, {name}={name})) as pool:
    pool.run("found = {name}(model)")
    print(len(pool.pull("found")["found"]))
"""


def with_lightning(model: nn.Module) -> int:
    import lightning
    import torch

    class Regression(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = model

        def training_step(self, batch: Any, number: int) -> torch.Tensor:
            return self.layer(batch).square().mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_steps=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Regression(), torch.utils.data.DataLoader(torch.randn(32, 8), batch_size=4))
    return trainer.world_size


FUNCTIONS = {
    "accelerate": (frameworks.with_accelerate,),
    "lightning.fabric": (frameworks.with_fabric,),
    "lightning": (with_lightning,),
    "transformers": (frameworks.with_trainer, frameworks.Tokens, frameworks.tiny_llama),
}


@pytest.mark.parametrize(
    ("library", "is_imported"),
    [*((library, True) for library in FUNCTIONS), ("lightning.fabric", False)],
)
def test_a_library_trains_in_workers_of_a_kernel(library, is_imported):
    pytest.importorskip(library.partition(".")[0])
    function, *others = FUNCTIONS[library]
    model = "tiny_llama()" if others else "nn.Linear(8, 4)"
    # In the notebook itself, as users have it.
    code = "\n\n".join(inspect.getsource(part) for part in (*others, function))
    names = {"name": function.__name__, "model": model}
    with Kernel() as kernel:
        kernel.run(IMPORTS + (f"import {library}\n" if is_imported else "") + code).check()
        done = kernel.run(LAUNCH.format(**names)).check().stdout.splitlines()
        # Libraries print, too.
        done = [line for line in done if line.startswith(("template ", "fork "))]
        assert done == ["template 2 True", "fork 2 True", "template 2 True"]
        assert kernel.run(IN_LIVE_WORKERS.format(**names)).check().stdout.splitlines()[-1] == "2"
