from __future__ import annotations

import base64
import math
import re
from xml.etree import ElementTree as ET

import pytest

from nbaccel.base.units import format_number
from nbaccel.output.panel.curves import ChartLine, chart_of, metric_chart, smoothed


def drawn(*lines: ChartLine, **settings: object) -> ET.Element:
    return ET.fromstring(chart_of(lines, "loss", **settings))  # type: ignore[arg-type]


def line(*values: float, role: str = "mean", name: str = "loss") -> ChartLine:
    return ChartLine(name, [*enumerate(values)], is_thick=role == "mean")


CROSS = "\u00d7"


def texts(svg: ET.Element) -> list[str]:
    return [element.text or "" for element in svg.iter("text")]


def accent_paths(svg: ET.Element) -> list[ET.Element]:
    return [path for path in svg.iter("path") if (path.get("stroke") or "").startswith("#")]


def coordinates(path: ET.Element) -> list[tuple[float, float]]:
    pairs = re.findall(r"[ML]([-\d.]+) ([-\d.]+)", path.get("d") or "")
    return [(float(x), float(y)) for x, y in pairs]


def test_an_image_says_and_draws_the_same_in_a_grey_that_both_themes_show():
    lines = [line(4.0, 2.0, 1.0), line(3.0, 2.0, 1.5, role="rank", name="<rank> 1")]
    image = ET.fromstring(chart_of(lines, "loss", as_image=True) + "</img>")
    kind, _, content = image.attrib["src"].partition(",")
    assert kind == "data:image/svg+xml;base64"
    inside = re.sub(r' xmlns="[^"]+"', "", base64.b64decode(content).decode())
    svg, as_element = ET.fromstring(inside), drawn(*lines)
    assert image.attrib["alt"] == as_element.attrib["aria-label"]
    assert [image.attrib[side] for side in ("width", "height")] == ["480", "160"]
    assert texts(svg) == texts(as_element)
    grey = int(svg.attrib["color"].removeprefix("#")[:2], 16) / 255
    light = ((grey + 0.055) / 1.055) ** 2.4
    assert 1.05 / (light + 0.05) > 4
    assert (light + 0.05) / (((0x11 / 255 + 0.055) / 1.055) ** 2.4 + 0.05) > 4


@pytest.mark.parametrize("missing", [math.nan, math.inf, -math.inf])
def test_a_mean_is_around_each_point_and_what_is_no_number_stays_in_its_place(missing):
    points = [(float(place), missing if place == 50 else 1.0) for place in range(100)]
    for place, (_, value) in enumerate(smoothed(points)):
        assert value == (points[50][1] if place == 50 else 1.0) or math.isnan(missing)
    slope = [3.0 * place for place in range(200)]
    found = [value for _, value in smoothed([*enumerate(slope)])]
    assert found[1:-1] == pytest.approx(slope[1:-1])
    assert [value for _, value in smoothed([(0.0, 0.3)] * 200)] == pytest.approx([0.3] * 200)


def test_a_screen_reader_says_the_first_and_the_last_value_and_texts_are_escaped():
    svg = drawn(line(0.69, 0.5, 0.3), line(0.7, 0.5, 0.25, role="raw"))
    spoken = "loss: from 0.69 at step 0 to 0.3 at step 2"
    assert svg.get("role") == "img"
    assert svg.get("aria-label") == svg.findtext("title") == spoken

    odd = '<b a="1">&\''
    svg = ET.fromstring(
        chart_of([line(1, 2, name=odd), line(1, 2, role="rank", name=odd)], odd, [(0, odd)])
    )
    assert texts(svg).count(odd) == 3
    assert (svg.get("aria-label") or "").startswith(odd)


@pytest.mark.parametrize(
    ("values", "labels"),
    [
        ([0.0, 1.0], ["0", "0.2", "0.4", "0.6", "0.8", "1"]),
        ([-3.0, 4.0], ["-2", "0", "2", "4"]),
        ([2.0, 3.0], ["2", "2.2", "2.4", "2.6", "2.8", "3"]),
        ([1000.0, 4000.0], ["1,000", "2,000", "3,000", "4,000"]),
        ([0.0, 3e-6], ["0", "1e-6", "2e-6", "3e-6"]),
        ([1e7, 1e7 + 150], ["10,000,000", "10,000,050", "10,000,100", "10,000,150"]),
        ([0.04, 0.7, "log"], ["0.05", "0.1", "0.2", "0.5"]),
        ([1.0, 1e3, "log"], ["1", "10", "100", "1,000"]),
        ([1e-12, 1.0, "log"], ["1e-12", "1e-9", "1e-6", "0.001", "1"]),
    ],
)
def test_ticks_are_round(values, labels):
    texts = drawn(line(*values[:2]), log_y="log" in values).iter("text")
    found = [text.text for text in texts if text.get("text-anchor") == "end"]
    assert found[:-1] == labels  # the last one is the name of the x axis
    assert [*map(format_number, (0.09123, 1904.2, 1e-7, 0.0))] == ["0.09123", "1,904", "1e-7", "0"]


@pytest.mark.parametrize(
    ("values", "is_log"),
    [
        ([7.9, 1.5, 1.0], False),
        ([8.0, 1.5, 1.0], True),
        ([100.0, 1.0, 0.0], False),
        ([100.0, 50.0, 1.0], False),  # as a learning rate that falls evenly
    ],
)
def test_the_scale_is_logarithmic_where_that_shows_more(values, is_log):
    high, middle, low = values
    (path,) = accent_paths(drawn(line(*values)))
    (_, high_y), (_, middle_y), (_, low_y) = coordinates(path)
    place = (low_y - middle_y) / (low_y - high_y)
    assert (place == pytest.approx((middle - low) / (high - low), abs=0.01)) is not is_log


@pytest.mark.parametrize(
    "values",
    [
        [5e-324, 0.0, 1e-310],
        [-1.7e308, 1.7e308, 1.0],
        [1e-299, 1e299],
        [1e300, 1.0],
        [1e16, 1e16 + 2],
        [0.1, 0.1 + 1e-12],
    ],
)
@pytest.mark.parametrize("log_y", [None, True, False])
def test_extreme_values_are_drawn_or_marked(values, log_y):
    svg = drawn(line(*values), log_y=log_y)
    assert "nan" not in ET.tostring(svg, encoding="unicode")
    # A single point is drawn as a line without a length.
    points = sum(len({*coordinates(path)}) for path in accent_paths(svg))
    assert texts(svg).count(CROSS) + points == len(values) or texts(svg) == ["no numbers"]


def test_roles_differ_in_more_than_colour():
    svg = drawn(line(1, 2), *(line(1, 2, role="rank", name=f"rank {rank}") for rank in range(3)))
    looks = {(path.get("stroke-width"), path.get("stroke-dasharray")) for path in accent_paths(svg)}
    assert len(looks) == 4
    # The legend's lines come last; before them the mean, which covers the ranks.
    assert accent_paths(svg)[3].get("stroke-width") == "2.2"


def test_many_points_are_thinned_within_the_picture_and_a_spike_and_a_gap_stay():
    values = [1.0] * 100_000
    values[54_321] = 5.0
    values[77_777] = math.nan
    svg = drawn(line(*values))
    paths = accent_paths(svg)
    assert sum(len(coordinates(path)) for path in paths) <= 240
    assert len(paths) == 2, "the gap is gone"
    heights = sorted({y for path in paths for _, y in coordinates(path)})
    assert len(heights) == 2, "the spike is gone"
    assert len(chart_of([line(*values)], "loss")) < 8000
    for x, y in (place for path in paths for place in coordinates(path)):
        assert 0 <= x <= 480
        assert 0 <= y <= 160
    svg = drawn(line(1, 2, math.nan, 3, 2))
    assert [len(coordinates(path)) for path in accent_paths(svg)] == [2, 2]
    assert texts(svg).count(CROSS) == 1
    assert texts(drawn(line(math.nan, math.inf))) == ["no numbers"]
    assert metric_chart({0: [(1.0, 2.0)]}, "loss") == metric_chart({}, "loss") == ""


def test_marks_have_their_text_where_there_is_room_and_legends_say_what_they_leave_out():
    marks = [(0.0, "epoch 1"), (50.0, "epoch 2"), (51.0, "epoch 3"), (500.0, "beyond")]
    svg = drawn(line(*map(float, range(101))), marks=marks)
    dashed = [path for path in svg.iter("path") if path.get("stroke-dasharray") == "2 3"]
    assert len(dashed) == 3
    assert [text for text in texts(svg) if text.startswith("epoch")] == ["epoch 1", "epoch 2"]
    ranks = [line(1, 2, role="rank", name=f"rank {rank}") for rank in range(6)]
    svg = drawn(line(1, 2, name="mean"), *ranks)
    assert texts(svg)[-5:] == ["mean", "rank 0", "rank 1", "rank 2", "and 3 more"]
    for element in svg.iter():  # nothing that could clash with another or run
        assert element.tag in {"svg", "title", "path", "text"}
        assert not {"id", "class", "href"} & set(element.attrib)


def test_ranks_without_points_and_steps_that_are_no_numbers_are_left_out():
    curves = {0: [(1.0, 3.0), (math.inf, 2.0), (2.0, 1.0)], 1: []}
    svg = ET.fromstring(metric_chart(curves, "loss"))
    assert sum(len(coordinates(path)) for path in accent_paths(svg)) > 2
    assert "rank 1" not in texts(svg)
    assert metric_chart({0: [(math.nan, 1.0), (math.inf, 2.0)]}, "loss") == ""
