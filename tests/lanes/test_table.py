from __future__ import annotations

import re

from packaging.requirements import Requirement

from tests.house.source import put_into
from tests.isolation import ROOT
from tests.lanes.__main__ import BEGIN, END, PAGE, records, render
from tests.lanes.lanes import LANES, TURNS


def test_the_page_has_what_the_lanes_have_written() -> None:
    page = PAGE.read_text()
    assert put_into(page, render(records()), BEGIN, END) == page


def test_each_lane_ran_with_the_versions_that_its_constraints_name() -> None:
    for name, lane in LANES.items():
        pinned = name if lane.source == "checkout" else "cpu"
        lines = (ROOT / "constraints" / f"{pinned}.txt").read_text().splitlines()
        wanted = [Requirement(line.split("#")[0]) for line in lines if line.split("#")[0].strip()]
        versions = records().get(name, {"versions": {}})["versions"]
        for one in wanted:
            if versions.get(one.name):
                assert one.specifier.contains(versions[one.name]), f"run make lane LANE={name}"
    assert LANES.keys() >= records().keys()


def test_what_the_package_declares_is_what_the_lanes_run() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    oldest = (ROOT / "constraints" / "oldest.txt").read_text()
    assert '"torch>=2.6"' in project
    assert "torch==2.6.0" in oldest
    assert '"deepspeed>=0.18.5"' in project
    assert "deepspeed==0.18.5" in oldest
    assert 'requires-python = ">=3.10"' in project
    tried = {lane.python for lane in LANES.values()}
    declared = re.findall(r"Python :: (3\.\d+)", project)
    assert tried == set(declared)


def test_each_lane_has_its_turn_at_every_seventh_landing() -> None:
    assert sorted(name for turn in TURNS for name in turn) == sorted(LANES.keys() - {"dist"})
    assert len(TURNS) <= 7
