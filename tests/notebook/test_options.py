"""No list of settings is kept: they are read off `RunConfig`."""

from __future__ import annotations

import pytest

from nbaccel.config import RunConfig
from nbaccel.notebook.magic_line import cell_manual, line_manual, subcommand_manual
from nbaccel.notebook.options import SUBCOMMANDS, find_option, options_of, setting_options


def test_every_setting_is_an_option_with_its_description():
    assert [option.name for option in setting_options()] == list(RunConfig.model_fields)
    for option in setting_options():
        assert option.flag == "--" + option.name.replace("_", "-")
        assert option.meaning == RunConfig.model_fields[option.name].description


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_processes", "N"),
        ("device", "auto|cpu|cuda|xpu|mps|tpu"),
        ("zero_stage", "0|1|2|3"),
        ("monitor_interval", "SECONDS"),
        ("timeout", "SECONDS"),
        ("master_addr", "TEXT"),
        ("rdzv_conf", "JSON"),
        ("share_back", ""),
    ],
)
def test_help_says_what_a_value_is(name, value):
    (option,) = [option for option in setting_options() if option.name == name]
    assert option.value == value


@pytest.mark.parametrize(
    ("flag", "name"),
    [
        ("-n", "num_processes"),
        ("--num_processes", "num_processes"),
        ("--precision", "mixed_precision"),
        ("--zero", "zero_stage"),
        ("--no-share-back", "share_back"),
        ("-h", "help"),
    ],
)
def test_short_and_usual_names_are_found(flag, name):
    assert find_option(options_of(), flag).name == name


def test_no_flag_means_two_things():
    for sub in ("", *(sub.name for sub in SUBCOMMANDS)):
        flags = [flag for option in options_of(sub) for flag in (*option.flags, option.negative)]
        flags = [flag for flag in flags if flag]
        assert len(flags) == len(set(flags))


def test_the_manual_tells_all_and_fits_a_notebook():
    for option in options_of():
        assert all(flag in cell_manual() for flag in (*option.flags, option.negative))
    for sub in SUBCOMMANDS:
        assert f"\n  {sub.name} " in line_manual()
        assert all(option.flag in subcommand_manual(sub.name) for option in options_of(sub.name))
    for text in (cell_manual(), line_manual()):
        assert max(map(len, text.splitlines())) <= 100
