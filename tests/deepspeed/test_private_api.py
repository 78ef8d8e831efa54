"""A DeepSpeed without the private attributes by which trained float32 weights are found."""

from __future__ import annotations

from importlib import import_module
from types import SimpleNamespace

import pytest
from torch import nn

from nbaccel.deepspeed import library, private_api
from nbaccel.errors import MissingBackend
from tests.deepspeed import needs

pytestmark = needs.DEEPSPEED

# Where DeepSpeed sets or reads each: a test without NVMe does not reach all of them.
PLACES = {
    "_hp_mapping": ("deepspeed.utils.tensor_fragment", "safe_get_full_fp32_param"),
    "_z3_optimizer": ("deepspeed.utils.tensor_fragment", "safe_get_full_fp32_param"),
    "_config": ("deepspeed.runtime.engine", "DeepSpeedEngine.gradient_clipping"),
}


@pytest.mark.parametrize("name", PLACES)
def test_the_installed_deepspeed_has_them_all(name):
    library.load_module("deepspeed", why="A test")
    module_name, path = PLACES[name]
    holder = import_module(module_name)
    for step in path.split("."):
        holder = getattr(holder, step)
    code = holder.__code__
    assert path.endswith(name) or name in (*code.co_names, *code.co_consts)


@pytest.mark.parametrize(("stage", "name"), [(2, "_hp_mapping"), (3, "_z3_optimizer")])
def test_what_would_lose_weights_without_a_word_is_refused(stage, name):
    library.load_module("deepspeed", why="A test")
    module = nn.Linear(2, 2)
    engine = SimpleNamespace(
        module=module, basic_optimizer=object(), zero_optimization_stage=lambda: stage
    )
    with pytest.raises(MissingBackend, match=f"{name} at stage {stage}.*could not be read back"):
        private_api.check_fp32_copies(engine)
    setattr(module.weight, name, None)
    private_api.check_fp32_copies(engine)
