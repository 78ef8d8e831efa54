"""DeepSpeed's choices in the pickers."""

from __future__ import annotations

from nbaccel.config import RunConfig
from nbaccel.deepspeed.zero_config import config_fields, section_of
from nbaccel.notebook.picker.choices import by_name, settings
from tests import needs


def test_every_key_is_a_choice():
    fields = {setting.run_field.partition(".")[0] for setting in by_name().values()}
    assert fields == set(RunConfig.model_fields)
    known = ", ".join(s.strategy_key for s in by_name().values())
    assert not [
        name for _, name, entry in config_fields() if not section_of(entry) and name not in known
    ]


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
