from __future__ import annotations

import dataclasses

import pytest

from nbaccel.config import RunConfig
from nbaccel.errors import ConfigError
from nbaccel.plan import Choice, Inventory, resolve

MACHINE = Inventory(cpu_cores=8, host_total_bytes=2**35, host_available_bytes=2**34)


def plan_of(**settings):
    return resolve(RunConfig(device="cpu", **settings), MACHINE)


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({}, "1 CPU worker, 8 threads, in this process"),
        ({"num_processes": 2}, "2 CPU workers, 4 threads each, started from the template"),
        ({"num_processes": 8}, "8 CPU workers, 1 thread each, started from the template"),
        (
            {"num_processes": 2, "start_method": "fork", "mixed_precision": "bf16"},
            "2 CPU workers, 4 threads each, bf16, forked from this process",
        ),
        (
            {"num_processes": 1, "num_nodes": 3, "node_rank": 2, "master_addr": "10.0.0.1"},
            "1 CPU worker, 8 threads, started from the template, node 2 of 3",
        ),
    ],
)
def test_the_headline(settings, line):
    plan = plan_of(**settings)
    assert plan.headline() == line
    assert plan.explain().splitlines()[0] == line
    assert str(plan) == plan.explain()


def test_the_table_is_aligned_and_complete():
    plan = plan_of(num_processes=16, mixed_precision="fp16")
    lines = plan.explain().splitlines()

    head = lines[2]
    column = head.index("why")
    body = lines[3 : 3 + len(plan.choices)]
    for line, choice in zip(body, plan.choices, strict=True):
        assert line.startswith(choice.name)
        assert line[head.index("value") :].startswith(str(choice.value))
        assert line[column:].startswith(choice.reason[:20])
    assert "Warnings:" in lines
    assert len(plan.warnings) == 2
    assert all(len(line) <= 100 for line in lines)
    assert all(line == line.rstrip() for line in lines)


def test_a_long_reason_goes_on_under_itself():
    plan = plan_of(num_processes=2)
    long = dataclasses.replace(plan, choices=(Choice("device", "cpu", "because " * 30),))
    lines = long.explain().splitlines()[2:]
    column = lines[0].index("why")
    assert len(lines) > 3
    assert all(line[:column].strip() == "" for line in lines[2:])


def test_without_warnings_nothing_is_said_of_them():
    assert "Warnings" not in plan_of(num_processes=2).explain()


def test_another_start_method_replaces_the_choice():
    plan = plan_of(num_processes=2)
    other = plan.with_start_method("fork", "a lock in args cannot be pickled")

    assert other.start_method == "fork"
    assert "a lock in args cannot be pickled" in other.explain()
    assert "forked from this process" in other.headline()
    assert [choice.name for choice in other.choices] == [choice.name for choice in plan.choices]
    assert plan.start_method == "template"


@pytest.mark.parametrize("method", ["spawn", "auto", "inline"])
def test_a_start_method_that_cannot_serve_is_refused(method):
    with pytest.raises(ConfigError, match=f"start_method.*{method}"):
        plan_of(num_processes=2).with_start_method(method, "because")
