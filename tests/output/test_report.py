from __future__ import annotations

import base64
import copy
import dataclasses
import json
import math
import os
import re
from collections.abc import Iterator
from typing import Any

import pytest

from nbaccel import ConfigError
from nbaccel.output.panel.curves import metric_lines
from nbaccel.output.panel.facts import RankTimes, SeenLine, SlowestRank
from nbaccel.output.report import PlannedRun, RankFigures, RunFacts, RunReport, report_document
from tests.html_reader import Html

ODD = "<script>alert(1)</script> & \"'"
PLAN = PlannedRun(
    text=f"2 CPU workers\n\nwhat  value  {ODD}",
    headline="2 CPU workers",
    device="cpu",
    num_processes=2,
    world_size=2,
    warnings=(ODD,),
)


def times(computing_s: float, waiting_s: float, data_s: float = 0.5) -> RankTimes:
    return RankTimes(
        total_s=computing_s + waiting_s + data_s + 1.0,
        computing_s=computing_s,
        communicating_s=1.0,
        data_s=data_s,
        waiting_s=waiting_s,
        is_partial=False,
    )


def facts(**changes: Any) -> RunFacts:
    steps = tuple(float(step) for step in range(0, 200, 2))
    values = tuple(math.exp(-step / 60) + 0.05 * ((step // 2) % 3) for step in steps)
    speeds = {"steps": 200, "steps_per_s": 20.0, "samples": 3200, "samples_per_s": 320.0}
    whole: dict[str, Any] = {
        "nbaccel_version": "0.1.0",
        "began": "2026-11-25T20:00:00+00:00",
        "seconds": 12.5,
        "ending": "",
        "plan": PLAN,
        "ranks": (
            RankFigures(rank=0, **speeds, peak_host_bytes=300 << 20, times=times(3.0, 5.0)),
            RankFigures(
                rank=1,
                **speeds,
                peak_host_bytes=310 << 20,
                peak_device_bytes=2 << 30,
                times=times(8.0, 0.0),
            ),
        ),
        "slowest": SlowestRank(1, 5.0, 0.52),
        "curves": {
            "lr": {0: [(step, 1e-3) for step in steps]},
            f"loss {ODD}": {
                0: [*zip(steps, values, strict=True)],
                1: [*zip(steps, (*values[:-1], math.nan), strict=True)],
            },
        },
        "marks": ((0.0, "epoch 1"), (100.0, f"epoch {ODD}")),
        "warnings": (SeenLine(f"UserWarning: {ODD}", 3, {0, 1}),),
        "notes": ("Memory was looked at once a second.",),
    }
    return RunFacts(**whole | changes)


EMPTY = facts(
    ranks=(RankFigures(rank=0), RankFigures(rank=1)),
    curves={},
    **dict.fromkeys(("marks", "warnings", "notes"), ()),
    slowest=None,
)


def test_texts_are_escaped_and_whole_and_the_json_form_is_the_documented_one():
    document = RunReport(facts()).to_dict()
    assert (document["format"], document["version"]) == ("nbaccel.report", 1)
    assert set(document) == {
        *("format", "version", "nbaccel_version", "began", "seconds", "ending", "plan", "ranks"),
        "title",
        *("advice", "slowest", "curves", "marks", "warnings", "notes"),
    }
    assert document["slowest"] == {"rank": 1, "waited_s": 5.0, "waited_share": 0.52}
    assert document["ranks"][1]["times"] == {
        "total_s": 9.5,
        "computing_s": 8.0,
        "communicating_s": 1.0,
        "data_s": 0.5,
        "waiting_s": 0.0,
        "is_partial": False,
        "starting_s": 0.0,
    }
    assert document["curves"][2]["values"][-1] == "nan"
    assert document["marks"][0] == {"step": 0.0, "text": "epoch 1"}

    part = Html(RunReport(facts())._repr_html_())
    words = "\n".join(part.words)
    # In the plan, a metric's name, a warning; and for screen readers, a metric's name and curve.
    assert words.count(ODD) >= 3
    assert any(name == "alt" and ODD in (value or "") for name, value in part.attributes)
    # In the charts, which are images: a metric's name, a mark.
    images = re.findall(r"image/svg\+xml;base64,([^\"]+)", RunReport(facts())._repr_html_())
    charts = [Html(base64.b64decode(image).decode()) for image in images]
    assert any(ODD in word for chart in charts for word in chart.words)
    assert not any("script" in chart.kinds for chart in charts)


HOSTILE = '</p><script>alert(1)</script>" onload="alert(2)'


def leaves(value: Any, *path: Any) -> Iterator[tuple[Any, ...]]:
    """The place of each value in a document."""
    if isinstance(value, dict | list):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from leaves(inner, *path, key)
    else:
        yield path


PLACES = [
    path for path in leaves(RunReport(facts()).to_dict()) if path[0] not in ("format", "version")
]


@pytest.mark.slow
def test_nothing_of_somebody_elses_report_runs_in_a_page():
    """Whatever of it is no text is refused, and text stays text, inside of images, too."""
    refused = 0
    for path in PLACES:
        document = copy.deepcopy(RunReport(facts()).to_dict())
        held: Any = document
        for key in path[:-1]:
            held = held[key]
        was_text, held[path[-1]] = isinstance(held[path[-1]], str), HOSTILE
        try:
            report = RunReport.from_dict(document)
        except ConfigError:
            refused += 1
            continue
        assert was_text, path
        for page in (report._repr_html_(), report_document(report.facts)):
            reader = Html(page)
            sources = [value for name, value in reader.attributes if name == "src" and value]
            images = [base64.b64decode(one.partition("base64,")[2]).decode() for one in sources]
            for part in (reader, *map(Html, images)):
                assert "script" not in part.kinds, path
                assert not [name for name, _ in part.attributes if name.startswith("on")], path
    assert refused > len(PLACES) / 2


def test_it_is_saved_as_html_and_as_json_and_nothing_else_is_saved_or_read(tmp_path):
    report = RunReport(facts())
    for name in ("run", "run.txt", "run.html.gz"):
        with pytest.raises(ConfigError, match=r"must end with \.html or \.json"):
            report.save(tmp_path / name)
    with pytest.raises(ConfigError, match=r"missing.* does not exist"):
        report.save(tmp_path / "missing" / "run.html")
    page = report.save(tmp_path / "run.html")
    assert page == tmp_path / "run.html"
    assert page.read_text("utf-8").startswith("<!DOCTYPE html>")
    report.save(os.fspath(tmp_path / "run.JSON"))
    assert json.loads((tmp_path / "run.JSON").read_text("utf-8")) == report.to_dict()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run.JSON", "run.html"]
    for form, version in (("nbaccel.report", 2), ("other", 1), ("", 1)):
        with pytest.raises(ConfigError, match="no report that can be read"):
            RunReport.from_dict({"format": form, "version": version} if form else {})


@pytest.mark.parametrize("known", [facts(), EMPTY], ids=["whole", "empty"])
def test_the_page_is_valid_and_needs_nothing_beside_it(known, tmp_path):
    text = RunReport(known).save(tmp_path / "run.html").read_text("utf-8")
    reader = Html(text)
    assert not {"script", "link", "img", "iframe"} & set(reader.kinds)
    assert not {"src", "href", "id"} & {name for name, _ in reader.attributes}
    assert "http" not in text
    assert "url(" not in text
    assert reader.kinds.count("style") == 1
    assert "prefers-color-scheme: dark" in text


def test_who_holds_the_others_up_is_said_and_a_start_is_left_out_of_shares():
    said = "Rank 1 holds the others up: the other waited 5.0 s for it (52 % of the time); it "
    assert f"{said}computes longer than the other." in str(RunReport(facts()))
    slow_data = facts(
        ranks=(
            RankFigures(rank=0, times=times(3.0, 5.0)),
            RankFigures(rank=1, times=times(3.0, 0.0, data_s=5.5)),
        )
    )
    assert f"{said}waits longer for data than the other." in str(RunReport(slow_data))
    assert "No rank holds the others up." in str(RunReport(facts(slowest=None)))
    text = str(RunReport(EMPTY))
    assert "No loop over batches was seen." in text
    assert "Curves" not in text
    assert "No loop over batches was seen." in RunReport(EMPTY)._repr_html_()

    started = [
        dataclasses.replace(one, total_s=one.total_s + start_s, starting_s=start_s)
        for one, start_s in ((times(3.0, 5.0), 4.0), (times(3.0, 0.0), 9.0))
    ]
    ranks = tuple(RankFigures(rank=rank, times=one) for rank, one in enumerate(started))
    report = RunReport(facts(ranks=ranks))
    said = "Left out is the start in the first step, 6.5 s on average"
    assert said in str(report)
    words = Html(report._repr_html_()).words
    assert "5.0 s (53 %)" in words, "as without the start"
    assert any(said in word for word in words)
    assert "it starts longer in its first step than the other." in str(report)
    document = report.to_dict()
    assert str(RunReport.from_dict(document)) == str(report)
    assert "Left out" not in str(RunReport(facts()))


def test_a_noisy_curve_is_smoothed_over_its_raw_values():
    noisy = [(float(place), 1.0 + (-1) ** place * 0.3) for place in range(60)]
    mean, raw = metric_lines({0: noisy})
    assert (raw.is_thick, mean.is_thick, mean.name) == (False, True, "rank 0, smoothed")
    late = [value for _, value in mean.points][30:]
    assert max(late) - min(late) < 0.3
