"""TransformerEngine: recipes by its real classes, layers by stand-ins, because it needs a GPU."""

from __future__ import annotations

import contextlib
import io
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from nbaccel.abc.bundle import Bundle
from nbaccel.abc.precision import PrecisionSettings
from nbaccel.config import Fp8Config
from nbaccel.config.handlers import AutocastKwargs, GradScalerKwargs
from nbaccel.errors import MissingBackend
from nbaccel.precision import transformer_engine as engine
from tests.isolation import ROOT, isolated
from tests.programs import run_program

STAND_INS = Path(__file__).parent / "stand_ins"
# Installed beside the environment by `make`: its import fails without CUDA, and peers would try it.
REAL = Path(sys.prefix) / "transformer-engine"
NEEDS_REAL = pytest.mark.skipif(
    not (REAL / "transformer_engine").is_dir(),
    reason=f"no {REAL}: make writes it with the environment",
)

RECIPES = """
import json, sys, warnings
warnings.simplefilter("ignore")
from transformer_engine.common import recipe as recipes
from nbaccel.config import Fp8Config
from nbaccel.precision.transformer_engine import build_recipe

def built(**settings):
    recipe, ignored = build_recipe(Fp8Config(**settings), recipes)
    return type(recipe).__name__, recipe, ignored

name, recipe, ignored = built(
    recipe="delayed", margin=2, fp8_format="E4M3", amax_history_len=16,
    amax_compute_algo="most_recent", interval=4, override_linear_precision=(True, False, False),
)
assert name == "DelayedScaling", name
assert (recipe.margin, recipe.amax_history_len, recipe.amax_compute_algo) == (2, 16, "most_recent")
assert recipe.fp8_format is recipes.Format.E4M3
# What TransformerEngine itself swallows without a word.
assert ignored == {"interval": 4, "override_linear_precision": (True, False, False)}, ignored
name, recipe, ignored = built(recipe="delayed")
assert recipe.amax_compute_algo == "max" and recipe.amax_history_len == 1024 and not ignored
for word, wanted in {
    "current": "Float8CurrentScaling", "block": "Float8BlockScaling",
    "mxfp8": "MXFP8BlockScaling", "nvfp4": "NVFP4BlockScaling",
}.items():
    name, recipe, ignored = built(recipe=word, amax_history_len=16)
    assert name == wanted and ignored == {"amax_history_len": 16}, (name, ignored)
print("recipes built")
"""


@pytest.mark.slow
@NEEDS_REAL
def test_recipes_are_built_of_its_real_classes():
    # Without the second the package refuses to be imported where there is no CUDA.
    environ = {
        "PYTHONPATH": f"{ROOT}:{REAL}",
        "NVTE_PROJECT_BUILDING": "1",
        "PATH": "/usr/bin:/bin",
    }
    done = run_program([sys.executable, "-c", RECIPES], env=environ, check=False)
    assert "recipes built" in done.stdout, done.stdout + done.stderr


@pytest.mark.slow
@NEEDS_REAL
@isolated(timeout_s=60)
def test_an_installed_one_that_does_not_load_is_told_in_plain_words():
    sys.path.insert(0, str(REAL))
    with pytest.raises(MissingBackend, match=r"installed and does not load: .*native"):
        engine.load_transformer_engine()


def settings_of(fp8: Fp8Config, **more: object) -> PrecisionSettings:
    given = {"autocast": AutocastKwargs(), "scaler": GradScalerKwargs(), "fp8": fp8}
    return PrecisionSettings(device=torch.device("cpu"), **given, **more)


def precision(**fp8: object) -> engine.TransformerEngineFp8:
    config = Fp8Config(backend="te", **{"recipe": "delayed", **fp8})
    return engine.TransformerEngineFp8(settings_of(config))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(32, 64), nn.LayerNorm(64), nn.Linear(64, 10))
        self.plain = nn.LayerNorm((2, 5), elementwise_affine=True)
        self.free = nn.LayerNorm(10, elementwise_affine=False)
        self.unbiased = nn.Linear(32, 32, bias=False)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return self.inner(self.unbiased(values))


@isolated(timeout_s=120)
def test_its_layers_take_the_very_parameters_and_go_again():
    sys.path.insert(0, str(STAND_INS))
    model = Net()
    before = dict(model.named_parameters())
    wanted = model(torch.ones(4, 32)).detach()
    own = precision(margin=2)
    with contextlib.redirect_stderr(io.StringIO()) as told:
        own.convert(Bundle(models=(model,)))
    own.wrap_forward(model)
    assert [type(m).__module__.partition(".")[0] for m in model.inner] == [
        *("transformer_engine", "transformer_engine", "torch")
    ]
    assert engine.has_layers(model)
    assert type(model.plain) is type(model.free) is nn.LayerNorm  # it has no such ones
    after = dict(model.named_parameters())
    assert all(after[name] is parameter for name, parameter in before.items())
    assert "10 outputs are not divisible by 16" in told.getvalue()
    assert torch.allclose(model(torch.ones(4, 32)), wanted, atol=0.05)
    model.eval()
    model(torch.ones(4, 32))
    import transformer_engine.pytorch as stand_in

    assert [seen["enabled"] for seen in stand_in.SEEN] == [True, False]
    assert stand_in.SEEN[0]["recipe"].margin == 2
    own.wrap_forward(model)  # a second time: not nested
    model(torch.ones(4, 32))
    assert len(stand_in.SEEN) == 3
    own.unwrap_forward(model)
    assert not engine.has_layers(model)
    assert "forward" not in vars(model)
    assert {n for n, _ in model.named_parameters()} == set(before)
    assert all(dict(model.named_parameters())[n] is p for n, p in before.items())
    assert torch.equal(model(torch.ones(4, 32)), wanted)


@isolated(timeout_s=60)
def test_settings_that_the_installed_version_does_not_read_are_told():
    sys.path.insert(0, str(STAND_INS))
    with contextlib.redirect_stderr(io.StringIO()) as told:
        precision()
        assert told.getvalue() == ""
        precision(interval=3, override_linear_precision=(False, False, True))
    assert "does not read interval=3, override_linear_precision=(False, False, True)" in (
        told.getvalue()
    )
    with pytest.raises(Exception, match=r"MXFP8BlockScaling, which the installed version does not"):
        precision(recipe="mxfp8")


@pytest.mark.slow
@isolated(timeout_s=60)
def test_accelerates_helpers_do_the_same():
    sys.path.insert(0, str(STAND_INS))
    import transformer_engine.pytorch as stand_in
    from transformer_engine.common.recipe import DelayedScaling

    from nbaccel.utils import TERecipeKwargs
    from nbaccel.utils.transformer_engine import (
        apply_fp8_autowrap,
        contextual_fp8_autocast,
        convert_model,
        has_transformer_engine_layers,
    )

    model = Net()
    convert_model(model)
    assert has_transformer_engine_layers(model)
    apply_fp8_autowrap(model, TERecipeKwargs(margin=1))
    model(torch.ones(2, 32))
    assert stand_in.SEEN[-1]["recipe"] == DelayedScaling(margin=1)
    convert_model(model, to_transformer_engine=False)
    assert not has_transformer_engine_layers(model)
    other = Net().eval()
    forward = contextual_fp8_autocast(other.forward, DelayedScaling(), use_during_eval=True)
    forward(other, torch.ones(2, 32))
    assert stand_in.SEEN[-1]["enabled"] is True
