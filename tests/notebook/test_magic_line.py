"""A line is read as a whole: what is right arrives, what is wrong is all named at once."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from nbaccel.calls.pool_planning import ranks_of
from nbaccel.config import RunConfig
from nbaccel.errors import ConfigError
from nbaccel.notebook.magic_line import (
    SUBCOMMANDS,
    cell_manual,
    line_manual,
    missing_names,
    options_of,
    read_magic_line,
    setting_options,
    subcommand_manual,
)
from nbaccel.plan import resolve

BASE = RunConfig(num_processes=3)


def line(text, subcommand="", *, base=BASE, **namespace):
    return read_magic_line(text, base_config=base, namespace=namespace, subcommand=subcommand)


def mistakes(text, subcommand="", **namespace):
    with pytest.raises(ConfigError) as caught:
        line(text, subcommand, **namespace)
    return caught.value.mistakes


@pytest.mark.parametrize(
    ("text", "settings"),
    [
        ("-n 2", {"num_processes": 2}),
        ("-n2", {"num_processes": 2}),
        ("-n=2", {"num_processes": 2}),
        ("--num-processes=2", {"num_processes": 2}),
        ("--num_processes 2", {"num_processes": 2}),
        ("-n none", {"num_processes": None}),
        ("--precision bf16", {"mixed_precision": "bf16"}),
        ("--zero 2", {"zero_stage": 2}),
        ("--zero none", {"zero_stage": None}),
        ("--no-share-back", {"share_back": False}),
        ("--share-back", {"share_back": True}),
        ("--share-back=off", {"share_back": False}),
        ("--timeout 1.5", {"timeout": 1.5}),
        ("--rdzv-id none", {"rdzv_id": "none"}),
        ("""--rdzv-conf '{"timeout":60}'""", {"rdzv_conf": {"timeout": 60}}),
        ("--log-line-prefix-template '[${rank}] '", {"log_line_prefix_template": "[${rank}] "}),
        ("-n 2 --device cpu # a remark", {"num_processes": 2, "device": "cpu"}),
    ],
)
def test_settings_go_over_those_there_are(text, settings):
    # Names that a replacement of $name and {expression} could find where it must not look.
    found = line(text, rank=7, timeout=8)
    assert found.wanted == BASE.changed(**settings)
    assert found.given == tuple(settings)


def test_the_cells_own_options_and_settings_with_their_descriptions():
    found = line("--ranks 0,2-3 --out loss,acc --dist")
    assert found.ranks == (0, 2, 3)
    assert found.out == ("loss", "acc")
    assert line("a b, c --ranks 1", "pull").names == ("a", "b", "c")
    assert found.dist
    assert line("--help -n two").help

    assert [option.name for option in setting_options()] == list(RunConfig.model_fields)
    for option in setting_options():
        assert option.flag == "--" + option.name.replace("_", "-")
        assert option.meaning == RunConfig.model_fields[option.name].description


@pytest.mark.parametrize("text", ["-n $n", "-n {n}", "-n '{m + 1}'", "--num-processes={n}"])
def test_values_of_the_notebook_are_put_in(text):
    assert line(text, n=2, m=1).wanted.num_processes == 2
    (message,) = mistakes("-n {unknown}")
    assert "got '{unknown}'" in message


def test_a_config_of_the_notebook():
    config = RunConfig(num_processes=2, mixed_precision="bf16")
    plan = resolve(config)
    for name in ("config", "plan", "holder"):
        holder = SimpleNamespace(config=config)
        found = line(f"--config {name}", config=config, plan=plan, holder=holder)
        assert found.wanted == config
        assert found.given == tuple(RunConfig.model_fields)
    assert line("--config config -n 2", config=config).wanted == config
    (message,) = mistakes("--config mine -n 2", mine=BASE)
    assert "num_processes is 3 in mine and 2 on the line" in message
    assert "mine = mine.changed(num_processes=2)" in message


@pytest.mark.parametrize(
    ("text", "subcommand", "said"),
    [
        ("--on 0", "", ("'--on'", "Did you mean '--ranks'?")),
        ("--precison bf16", "", ("'--precison'", "Did you mean '--precision'?")),
        ("--frobnicate 3", "", ("'--frobnicate'", "%%accelerate --help")),
        ("-n", "", ("-n needs a value: got nothing", "-n N")),
        ("-n --dist", "", ("-n needs a value: got '--dist'",)),
        ("-n 0", "", ("num_processes must be", "got '0'")),
        ("-n -1", "", ("num_processes must be", "got '-1'")),
        ("-n two", "", ("num_processes must be", "got 'two'")),
        ("--precision bf61", "", ("mixed_precision must be", "Did you mean 'bf16'?")),
        ("--zero 5", "", ("zero_stage must be one of 0, 1, 2, 3",)),
        ("--rdzv-conf {", "", ("rdzv_conf must be a dictionary", "got '{'")),
        ("--start-method inline", "", ('start_method="inline" cannot run num_processes=3',)),
        ("-n 2 -n 3", "", ("given twice", "'2'", "'3'")),
        ("--dist=1", "", ("--dist takes no value", "'1'")),
        ("--no-share-back=1", "", ("--no-share-back takes no value",)),
        ("--ranks 3-1", "", ("--ranks must be", "'3-1'", "--ranks 0,2-3")),
        ("--ranks a", "", ("--ranks must be", "'a'")),
        ("--ranks ,", "", ("--ranks must be", "','")),
        ("--out 1a", "", ("--out must be", "'1a'")),
        ("--out ,", "", ("--out must be", "','")),
        ("--config cgf", "", ("no such variable", "Did you mean 'cfg'?")),
        ("--config number", "", ("number is a int", "RunConfig")),
        ("num_processes=2", "", ("Write --num-processes 2",)),
        ("x = 3", "", ("takes options only", "'x'")),
        ("--ranks 'a", "", ("quotation", "--ranks 'a")),
        ("--out a", "restart", ("%accelerate restart has no option", "--out is for %%accelerate")),
        ("-n 3 a", "pull", ("%accelerate pull has no option '-n'",)),
        ("a.b", "pull", ("'a.b' is no name",)),
        ("a", "stop", ("%accelerate stop takes options only",)),
    ],
)
def test_a_mistake_is_named_with_its_remedy(text, subcommand, said):
    message = "\n".join(mistakes(text, subcommand, cfg=BASE, number=3))
    for part in said:
        assert part in message


def test_ranks_beyond_the_last_and_names_that_the_notebook_lacks_are_refused():
    assert ranks_of((0, 3), 4) == (0, 3)
    assert ranks_of(None, 1) == (0,)
    with pytest.raises(ConfigError, match="ranks are 0-3: got 0,4-5") as caught:
        ranks_of((0, 4, 5), 4)
    assert "%accelerate restart -n 6" in str(caught.value)
    with pytest.raises(ConfigError, match="ranks are 0: got 1"):
        ranks_of((1,), 1)
    assert ranks_of(line("--ranks 1").ranks, 2) == (1,)
    with pytest.raises(ConfigError, match="1000000000"):
        ranks_of(line("--ranks 0-1000000000").ranks, 2)
    missing_names(["mymodel"], {"mymodel": 1})
    with pytest.raises(ConfigError, match=r"'mymodl'.* Did you mean 'mymodel'"):
        missing_names(["mymodl"], {"mymodel": 1})
    found = mistakes("-n 0 --precison bf16 --ranks x --out 1 foo --dist=3 --device gpuu")
    assert len(found) == 7, "all mistakes come at once"


def test_the_manual_tells_all_and_fits_a_notebook_and_no_flag_means_two_things():
    for option in options_of():
        assert all(flag in cell_manual() for flag in (*option.flags, option.negative))
    for sub in SUBCOMMANDS:
        assert f"\n  {sub.name} " in line_manual()
        assert all(option.flag in subcommand_manual(sub.name) for option in options_of(sub.name))
    for text in (cell_manual(), line_manual()):
        assert max(map(len, text.splitlines())) <= 100
    for name in ("", *(sub.name for sub in SUBCOMMANDS)):
        flags = [flag for option in options_of(name) for flag in (*option.flags, option.negative)]
        flags = [flag for flag in flags if flag]
        assert len(flags) == len(set(flags))
