"""How long DDP's exchange of gradients has delayed training, from torch's log of some passes."""

from __future__ import annotations

import gc
from typing import Any

import pytest

from nbaccel.loops.loop_watch import ExchangeDelay


class Logged:
    """What torch logs of passes with these delays, of which it measures some."""

    def __init__(self, device_type: str, overlap_ns: int = 1000) -> None:
        self.device_type = device_type
        self._overlap_ns = overlap_ns
        self._each = 100
        self._num_passes = 0
        self._measured: list[int] = []
        self._last_measured = 0

    def _set_ddp_runtime_logging_sample_rate(self, sample_rate: int) -> None:
        self._each = sample_rate

    def take(self, delay_s: float) -> None:
        self._num_passes += 1
        if self._num_passes <= 10 or self._num_passes % self._each == 0:
            self._measured.append(round(delay_s * 1e9) + self._overlap_ns)
            self._last_measured = self._num_passes

    def _get_ddp_logging_data(self) -> dict[str, Any]:
        if not self._measured:
            return {"module_name": "Linear"}
        return {
            "iteration": self._last_measured,
            "avg_backward_comm_time": sum(self._measured) // len(self._measured),
            "avg_backward_compute_comm_overlap_time": self._overlap_ns,
        }


def test_on_a_cpu_each_pass_counts():
    model: Any = Logged("cpu")
    delay = ExchangeDelay(model)
    assert delay.read() == 0.0
    for number in range(1000):
        model.take(0.001 * (number % 7))
        if number % 13 == 0:
            delay.read()
    assert delay.read() == pytest.approx(sum(0.001 * (n % 7) for n in range(1000)), rel=1e-3)


@pytest.mark.parametrize("read_each", [1, 37, 1000])
def test_elsewhere_a_measured_pass_stands_for_those_around_it(read_each):
    model: Any = Logged("cuda")
    delay = ExchangeDelay(model)
    for number in range(1, 1001):
        # The first ten set up what the others have.
        model.take(0.5 if number <= 10 else 0.002)
        if number % read_each == 0:
            delay.read()
    read_s = delay.read()
    assert read_s is not None
    if read_each == 1000:
        # Nothing tells the first passes from the later ones: their mean counts.
        assert read_s == pytest.approx(1000 * (10 * 0.5 + 10 * 0.002) / 20, rel=0.01)
    else:
        assert 10 * 0.5 + 0.9 * 990 * 0.002 < read_s < 40 * 0.5


def test_a_model_that_is_gone_keeps_its_last_reading_and_a_torch_without_the_log_tells_none():
    model: Any = Logged("cpu")
    delay = ExchangeDelay(model)
    model.take(0.25)
    assert delay.read() == pytest.approx(0.25)
    del model
    gc.collect()
    assert delay.read() == pytest.approx(0.25)
    silent: Any = type("Silent", (), {"device_type": "cpu"})()
    assert ExchangeDelay(silent).read() is None
