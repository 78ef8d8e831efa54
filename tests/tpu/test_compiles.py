"""Programs that a launch compiles: counted, told while it waits, and explained when they go on."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator

import pytest

from nbaccel import RunConfig, notebook_launcher
from nbaccel.base.training_metrics import Metrics
from nbaccel.output.panel.facts import RunBoard
from nbaccel.train.gradient import WARM_UP_STEPS
from tests.tpu import bodies
from tests.tpu.bodies import Programs

EPOCH = 5  # 18 rows in batches of 4: the last has 2
PHASES = [f"compiling, step {number} of about {WARM_UP_STEPS}" for number in (1, 2)]


class Heard:
    """One worker that compiles often: what it has seen, said, and sent to the dashboard."""

    def __init__(self, config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
        self.messages: list[Metrics] = []
        hear = RunBoard.receive

        def note(board: RunBoard, rank: int, message: Metrics) -> None:
            self.messages.append(message)
            hear(board, rank, message)

        monkeypatch.setattr(RunBoard, "receive", note)
        said = io.StringIO()
        with contextlib.redirect_stderr(said):
            one_worker = config.changed(num_processes=1)
            (programs,) = notebook_launcher(
                bodies.compile_often, (bodies.make_net(),), config=one_worker
            )
        self.programs: Programs = programs
        self.said = said.getvalue()


@pytest.fixture(scope="module")
def heard(driver: str, config: RunConfig) -> Iterator[Heard]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        yield Heard(config, monkeypatch)


def test_the_first_steps_compile_and_the_next_do_not(heard: Heard, driver: str) -> None:
    before = heard.programs.before_steps
    assert before[0] < before[1] <= before[2] == before[3] == before[4]
    if driver == "torch_xla":
        # A step is one program there, and the second one's has the optimizer's state in it.
        assert before[1] < before[2]


def test_an_epoch_of_known_shapes_compiles_nothing(heard: Heard) -> None:
    second = heard.programs.before_steps[EPOCH : 2 * EPOCH]
    assert len(set(second)) == 1


def test_a_step_that_compiles_is_called_so(heard: Heard) -> None:
    first = heard.programs.phases[:EPOCH]
    # The last batch of an epoch has shapes of its own.
    assert first == [*PHASES, "", "", PHASES[0]]


def test_other_shapes_are_told_once_with_the_remedy(heard: Heard) -> None:
    in_training, _, after = heard.said.partition("now larger")
    assert in_training.count("this batch has other shapes") == 1
    assert "int64 [2, 6]" in in_training
    assert "int64 [4, 6]" in in_training
    assert "drop_last=True" in in_training
    assert "in evaluation, use the batch size of training" in in_training
    assert "other shapes" not in after, "another batch size in evaluation has the same remedy"


def test_numbers_that_change_are_told_once_with_the_remedy(heard: Heard) -> None:
    before, _, after = heard.said.partition("now numbers")
    assert "A Python number" not in before
    assert after.count("A Python number that changes from step to step") == 1
    assert "tensor on the device" in after


def test_the_dashboard_is_told(heard: Heard) -> None:
    assert set(PHASES) <= {message.phase for message in heard.messages}
    counts = [message.programs for message in heard.messages if message.programs is not None]
    assert counts == sorted(counts)
    assert counts[-1] >= heard.programs.before_steps[-1]
    assert heard.messages[-1].compile_s > 0
