"""DeepSpeed's choices in the pickers."""

from __future__ import annotations

from nbaccel.config import RunConfig
from nbaccel.deepspeed.zero_config import ZeroConfig, section_of
from nbaccel.notebook.picker.choices import by_name, settings
from tests import needs


def keys(model=ZeroConfig, path=""):
    for name, entry in model.model_fields.items():
        inner = section_of(entry)
        if inner is not None:
            yield from keys(inner, f"{path}{name}.")
        elif name != "extra":
            yield f"{path}{name}"


def test_every_key_is_a_choice():
    fields = {setting.run_field.partition(".")[0] for setting in by_name().values()}
    assert fields == set(RunConfig.model_fields)
    known = ", ".join(s.strategy_key for s in by_name().values())
    missing = [key for key in keys() if key.rpartition(".")[2] not in known]
    assert not missing


@needs.DEEPSPEED
def test_defaults_are_those_of_the_installed_deepspeed():
    from nbaccel.deepspeed.library import quiet_logger
    from nbaccel.deepspeed.schema import deepspeed_schema

    with quiet_logger():
        models = deepspeed_schema().models
    for setting in settings("zero"):
        section, _, key = setting.name.rpartition(".")
        if setting.default is None or section not in models:
            continue
        theirs = models[section].model_fields.get(key)
        if theirs is not None:
            assert setting.default == theirs.default, setting.name
