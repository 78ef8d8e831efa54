from __future__ import annotations

import pytest

from nbaccel.config import Fp8Config, RunConfig
from nbaccel.errors import ConfigError


def test_names_mappings_words_and_lists_become_plain():
    wanted = Fp8Config(backend="te")
    assert RunConfig(fp8="te").fp8 == wanted
    assert RunConfig(fp8={"backend": "TE"}).fp8 == RunConfig(fp8=wanted).fp8 == wanted
    assert RunConfig(fp8=None).fp8 is None
    config = Fp8Config(
        fp8_format="hybrid",
        opt_level="o1",
        amax_compute_algo="MAX",
        override_linear_precision="true, False,0",
    )
    assert (config.fp8_format, config.opt_level, config.amax_compute_algo) == (
        "HYBRID",
        "O1",
        "max",
    )
    assert config.override_linear_precision == (True, False, False)


def test_all_mistakes_are_told_with_what_to_do():
    with pytest.raises(ConfigError) as caught:
        RunConfig(fp8={"margin": -1, "backend": "torchoa", "intervall": 2}, num_processes=0)

    text = "\n".join(caught.value.mistakes)
    assert "fp8.margin must be a whole number of at least 0: got -1" in text
    assert (
        "Did you mean 'ao'?" in text or "one of auto, msamp, te, ao, native: got 'torchoa'" in text
    )
    assert "Did you mean 'interval'?" in text
    assert "num_processes must be" in text
    assert len(caught.value.mistakes) == 4


def test_te_recipe_variables_are_those_that_accelerate_reads(monkeypatch):
    """Its class wants the library first: told that it is there, it reads them all."""
    from accelerate.utils import dataclasses

    settings = {
        "fp8_format": "E4M3",
        "margin": 2,
        "interval": 3,
        "amax_history_len": 16,
        "amax_compute_algo": "max",
        "override_linear_precision": (False, True, False),
        "use_autocast_during_eval": True,
    }
    for name, value in Fp8Config(backend="te", **settings).variables().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(dataclasses, "is_transformer_engine_available", lambda: True)
    read = dataclasses.TERecipeKwargs()
    assert {name: getattr(read, name) for name in settings} == settings


def test_what_variables_tell_is_read_back(monkeypatch):
    for settings in (
        {"backend": "te", "margin": 2, "fp8_format": "E4M3", "amax_history_len": 16},
        {"override_linear_precision": (True, False, True), "use_autocast_during_eval": True},
        {"backend": "msamp", "opt_level": "O1", "interval": 3},
    ):
        config = Fp8Config(**settings)
        for name, value in config.variables().items():
            monkeypatch.setenv(name, value)
        assert Fp8Config.from_environment() == config
        for name in config.variables():
            monkeypatch.delenv(name)
    assert Fp8Config.from_environment() is None
