"""Filters of hosts and slots: what they mean is what DeepSpeed's own parser says."""

from __future__ import annotations

import json
import random
import subprocess
import sys

import pytest

from nbaccel.config import RunConfig
from nbaccel.config.host_filter import kept_slots, slots_by_host
from nbaccel.errors import ConfigError

POOL = {"w1": 4, "w2": 2, "user@w3": 1}
# DeepSpeed cannot write a host with a user in a filter, so it is left out there.
THEIR_POOL = {"w1": 4, "w2": 2, "w3": 1}
THEIR_CODE = """
import contextlib, io, json, sys
from collections import OrderedDict
from deepspeed.launcher.runner import parse_inclusion_exclusion
pool, cases = json.load(sys.stdin)
answers = []
for include, exclude in cases:
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            kept = parse_inclusion_exclusion(OrderedDict(pool), include, exclude)
        answers.append(list(kept.items()))
    except Exception as error:
        answers.append(type(error).__name__)
print("ANSWERS " + json.dumps(answers))
"""


def random_filter(source: random.Random) -> str:
    parts = []
    for _ in range(source.randint(1, 4)):
        host = source.choice(["w1", "w1", "w2", "w2", "w3", "w3", "w4"])
        slots = [str(source.choice([0, 0, 1, 1, 2, 3, 4])) for _ in range(source.randint(0, 3))]
        parts.append(host + (":" + source.choice([",", ", "]).join(slots) if slots else ""))
    return "@".join(parts)


def our_answer(include: str, exclude: str) -> list | str:
    try:
        kept = kept_slots(THEIR_POOL, include=include or None, exclude=exclude or None)
    except ConfigError as error:
        return str(error)
    return [[host, list(slots)] for host, slots in kept.items()]


@pytest.mark.slow
def test_filters_mean_what_deepspeed_says() -> None:
    pytest.importorskip("deepspeed", reason="it is not installed")
    source = random.Random(0)
    texts = [random_filter(source) for _ in range(1500)]
    cases = [(text, "") if place % 2 else ("", text) for place, text in enumerate(texts)]
    done = subprocess.run(
        [sys.executable, "-c", THEIR_CODE],
        input=json.dumps([list(THEIR_POOL.items()), cases]),
        capture_output=True,
        text=True,
        check=True,
    )
    [line] = [line for line in done.stdout.splitlines() if line.startswith("ANSWERS ")]
    agreed, refused_by_both, refused_here = 0, 0, set()
    for case, theirs in zip(cases, json.loads(line.removeprefix("ANSWERS ")), strict=True):
        ours = our_answer(*case)
        if isinstance(ours, list):
            assert ours == theirs, case
            agreed += 1
        elif isinstance(theirs, str):
            refused_by_both += 1
        else:
            refused_here.add("twice" if "named twice" in ours else "none")
            assert "named twice" in ours or (not theirs and "leaves no slot" in ours), (case, ours)
    assert (agreed > 200, refused_by_both > 200, refused_here) == (True, True, {"twice", "none"})


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


def test_a_host_with_a_user_is_named_without_it() -> None:
    assert kept_slots(POOL, include="w3@w2:1") == {"w2": (1,), "user@w3": (0,)}
    assert kept_slots(POOL, exclude="w3:0@w1") == {"w2": (0, 1)}
    assert kept_slots(POOL) == {"w1": (0, 1, 2, 3), "w2": (0, 1), "user@w3": (0,)}


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


def test_a_filter_needs_a_hostfile() -> None:
    with pytest.raises(ConfigError, match=r"exclude='w1' needs hostfile=.*--gpu-ids"):
        RunConfig(exclude="w1")


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
