from __future__ import annotations

from packaging.requirements import Requirement

from tests.isolation import ROOT
from tests.lanes import table
from tests.lanes.__main__ import PAGE, records
from tests.lanes.lanes import LANES


def test_the_page_has_what_the_lanes_have_written() -> None:
    page = PAGE.read_text()
    assert table.put_into(page, table.render(records())) == page


def test_each_lane_has_constraints_and_ran_with_them() -> None:
    for name in LANES:
        lines = (ROOT / "constraints" / f"{name}.txt").read_text().splitlines()
        wanted = [Requirement(line.split("#")[0]) for line in lines if line.split("#")[0].strip()]
        versions = records().get(name, {"versions": {}})["versions"]
        for one in wanted:
            if one.name in versions:
                assert one.specifier.contains(versions[one.name]), f"run make lane LANE={name}"
    assert LANES.keys() >= records().keys()
