from __future__ import annotations

import os

import pytest

from nbaccel.errors import ConfigError
from nbaccel.utils import (
    clear_environment,
    convert_dict_to_env_variables,
    get_cpu_distributed_information,
    get_int_from_env,
    parse_choice_from_env,
    parse_flag_from_env,
    patch_environment,
    purge_accelerate_environment,
    str_to_bool,
)
from nbaccel.utils.launch import PrepareForLaunch


def test_variables_are_set_or_cleared_for_a_block_and_put_back(monkeypatch) -> None:
    monkeypatch.setenv("NB_TEST_A", "before")
    seen = []

    def fail() -> None:
        with patch_environment(nb_test_a=1, NB_TEST_B="new"):
            seen.append((os.environ["NB_TEST_A"], os.environ["NB_TEST_B"]))
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert seen == [("1", "new")]
    assert os.environ["NB_TEST_A"] == "before"
    assert "NB_TEST_B" not in os.environ
    before = dict(os.environ)
    with clear_environment():
        assert not os.environ
        os.environ["NB_TEST"] = "1"
    assert dict(os.environ) == before


def test_accelerates_variables_do_not_outlive_a_test(monkeypatch) -> None:
    monkeypatch.setenv("ACCELERATE_KEPT", "1")

    @purge_accelerate_environment
    class TestIt:
        def test_it(self) -> str:
            os.environ["ACCELERATE_MADE"] = os.environ["ACCELERATE_KEPT"] = "2"
            return "result"

    assert TestIt().test_it() == "result"
    assert "ACCELERATE_MADE" not in os.environ
    assert os.environ["ACCELERATE_KEPT"] == "1"


def test_yes_no_numbers_and_what_would_break_a_file_of_variables(monkeypatch) -> None:
    assert (str_to_bool("Yes"), str_to_bool("off", to_bool=True)) == (1, False)
    with pytest.raises(ConfigError, match=r"'maybe'\) is neither yes nor no"):
        str_to_bool("maybe")
    monkeypatch.setenv("NB_TEST", "7")
    monkeypatch.setenv("NB_FLAG", "true")
    assert get_int_from_env(["NB_NONE", "NB_TEST"], 3) == 7
    assert get_int_from_env(["NB_NONE"], 3) == 3
    assert parse_flag_from_env("NB_FLAG") is True
    assert parse_flag_from_env("NB_NONE", True) is True
    assert parse_choice_from_env("NB_NONE") == "no"
    lines = convert_dict_to_env_variables({"A": "1", "B": "x;rm", "C": "", "D": "two words"})
    assert lines == ["A=1\n"]


def test_the_place_of_this_process_is_that_which_launchers_tell(monkeypatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "3")
    monkeypatch.setenv("PMI_SIZE", "4")
    found = get_cpu_distributed_information()
    assert (found.rank, found.world_size, found.local_rank) == (3, 4, 0)
    for name in ("RANK", "LOCAL_RANK", "FORK_LAUNCHED"):
        monkeypatch.delenv(name, raising=False)
    with patch_environment(nproc=2, node_rank=1, rank="", local_rank="", fork_launched=""):
        told = []
        launch = PrepareForLaunch(
            lambda word: told.append((word, os.environ["RANK"], os.environ["LOCAL_RANK"])),
            distributed_type="MULTI_CPU",
        )
        launch(1, "go")
    assert told == [("go", "3", "1")]
