"""The order of the ladder, and batches that make the same step."""

from __future__ import annotations

from nbaccel.deepspeed.advisor.ladder import halvings, ladder

PUBLISHED = [
    "as it is",
    "gradient checkpointing",
    "ZeRO-2",
    "ZeRO-2, optimizer on CPU",
    "ZeRO-3",
    "ZeRO-3, parameters on CPU",
    "ZeRO-3, optimizer and parameters on CPU",
    "ZeRO-3, optimizer on NVMe, parameters on CPU",
    "ZeRO-3, optimizer and parameters on NVMe",
]


def test_the_order_is_the_published_one():
    assert [step.name for step in ladder(has_switch=True, is_on=False)] == PUBLISHED


def test_from_the_second_rung_on_gradients_are_checkpointed_where_that_can_be():
    def flags(**how):
        return [step.gradient_checkpointing for step in ladder(**how)]

    assert flags(has_switch=True, is_on=False) == [False, *[True] * 8]
    assert flags(has_switch=True, is_on=True) == [True] * 8, "nothing to turn on"
    assert flags(has_switch=False, is_on=False) == [False, True, *[False] * 7]


def test_half_a_batch_is_accumulated_twice():
    assert list(halvings(12, 1)) == [(12, 1), (6, 2), (3, 4)]
    assert list(halvings(1, 3)) == [(1, 3)]
