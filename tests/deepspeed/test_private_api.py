"""A DeepSpeed without a private attribute that is used here: its name, and what is lost."""

from __future__ import annotations

from importlib import import_module
from types import SimpleNamespace

import pytest

from nbaccel.deepspeed import library, private_api
from nbaccel.errors import MissingBackend
from tests.deepspeed import needs

pytestmark = needs.DEEPSPEED
STAGE_3 = "deepspeed.runtime.zero.stage3"
SWAPPABLE = "_swappable_optimizer_subgroup"


@pytest.fixture(autouse=True)
def loaded():
    library.load_module("deepspeed", why="A test")
    yield
    private_api.warn_of_missing.cache_clear()


def test_the_installed_deepspeed_has_them_all():
    assert not list(private_api.missing_parts())
    private_api.refuse_missing()


def test_a_method_that_is_gone_is_named_with_what_is_lost(monkeypatch):
    monkeypatch.delattr(import_module(STAGE_3).DeepSpeedZeroOptimizer_Stage3, SWAPPABLE)
    private_api.warn_of_missing.cache_clear()
    with pytest.warns(UserWarning, match=SWAPPABLE) as told:
        library.load_module("deepspeed", why="A test")
    (text,) = [str(one.message) for one in told]
    version = import_module("deepspeed").__version__
    assert text.startswith(f"DeepSpeed {version} has no private attribute {SWAPPABLE} ({STAGE_3}.")
    assert "cannot reach float32 copies on disk" in text
    assert 'pip install "deepspeed>=0.18.5,<=0.19.8"' in text
    private_api.refuse_missing()  # an error says it where it is used


def test_its_use_says_the_same_and_raises_no_attribute_error():
    optimizer = SimpleNamespace(grad_position={0: (0, 0, 1)}, get_param_id=lambda _: 0)
    parameter = SimpleNamespace(_z3_optimizer=optimizer, requires_grad=True)
    with pytest.raises(MissingBackend, match=f"no private attribute {SWAPPABLE}"):
        private_api.is_swapped_out(parameter)
    with pytest.raises(MissingBackend, match="clip_grad_norm_"):
        private_api.engine_settings(object())


@pytest.mark.parametrize("name", ["_hp_mapping", "_z3_optimizer"])
def test_what_would_lose_weights_without_a_word_is_refused_before_training(monkeypatch, name):
    fragments = import_module("deepspeed.utils.tensor_fragment")
    source = {"_hp_mapping": lambda p: p._z3_optimizer, "_z3_optimizer": lambda p: p._hp_mapping}
    monkeypatch.setattr(fragments, "safe_get_full_fp32_param", source[name])
    (part,) = private_api.missing_parts()
    assert part.name == name
    with pytest.raises(MissingBackend, match=f"no private attribute {name}.*cannot be read back"):
        private_api.refuse_missing()
