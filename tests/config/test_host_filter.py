"""Filters of hosts and slots: what they mean is what DeepSpeed's own parser says."""

from __future__ import annotations

import pytest

from nbaccel.config import RunConfig
from nbaccel.config.deepspeed_document import kept_slots, slots_by_host
from nbaccel.errors import ConfigError

POOL = {"w1": 4, "w2": 2, "user@w3": 1}


@pytest.mark.parametrize(
    ("filter_text", "hosts"),
    [
        ("w1", {"w1": ()}),
        ("w1:2,0@w2", {"w1": (0, 2), "w2": ()}),
        (" w1 : 0 , 1 @ w2 ", {"w1": (0, 1), "w2": ()}),
        ("w1:0@w1:3", {"w1": (0, 3)}),
    ],
)
def test_the_form_of_a_filter(filter_text: str, hosts: dict) -> None:
    assert slots_by_host(filter_text) == hosts


def test_a_host_with_a_user_is_named_without_it_and_a_filter_needs_a_hostfile() -> None:
    assert kept_slots(POOL, include="w3@w2:1") == {"w2": (1,), "user@w3": (0,)}
    assert kept_slots(POOL, exclude="w3:0@w1") == {"w2": (0, 1)}
    assert kept_slots(POOL) == {"w1": (0, 1, 2, 3), "w2": (0, 1), "user@w3": (0,)}
    with pytest.raises(ConfigError, match=r"exclude='w1' needs hostfile=.*--gpu-ids"):
        RunConfig(exclude="w1")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"include": "w1:a"}, ["include: slot 'a' of host 'w1'", "device", "as in worker-1:0,1"]),
        ({"include": "w1:"}, ["include: slot '' of host 'w1'"]),
        ({"exclude": "w1@@w2"}, ["exclude: 'w1@@w2' names a host without a name"]),
        ({"include": "w1:1,1"}, ["slot 1 of host 'w1' is named twice", "Name it once"]),
        ({"include": "w1:1@w2@w1:1"}, ["slot 1 of host 'w1' is named twice"]),
        ({"include": "w1@w1:1"}, ["host 'w1' is named twice"]),
        ({"include": "", "exclude": 3}, ["include must be", "exclude must be text"]),
        ({"include": "w1", "exclude": "w2"}, ["include='w1' contradicts exclude='w2'"]),
        (
            {"include": "w1:0", "variables": {"CUDA_VISIBLE_DEVICES": "0"}},
            ["CUDA_VISIBLE_DEVICES='0' in variables", "Leave one"],
        ),
    ],
    ids=str,
)
def test_a_wrong_filter_is_refused_with_the_settings(settings: dict, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        RunConfig(hostfile="hosts", **settings)
    assert all(word in str(caught.value) for word in words), str(caught.value)


@pytest.mark.parametrize(
    ("filters", "words"),
    [
        ({"include": "w2@w5"}, ["include names host 'w5'", "not in the hostfile", "'w"]),
        ({"exclude": "w2:2"}, ["exclude names slot 2 of host 'w2'", "slots=2: 0 to 1"]),
        ({"exclude": "w1@w2@w3"}, ["exclude='w1@w2@w3' leaves no slot", "Leave fewer"]),
        ({"include": "w9:0@w2:7"}, ["'w9'", "slot 7"]),
    ],
    ids=str,
)
def test_what_the_hostfile_does_not_have_is_refused(filters: dict, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        kept_slots(POOL, **filters)
    assert all(word in str(caught.value) for word in words), str(caught.value)
