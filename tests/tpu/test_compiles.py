"""Programs that a launch compiles: counted, told while it waits, and explained when they go on."""

from __future__ import annotations

import contextlib
import io

from nbaccel import notebook_launcher
from nbaccel.base.training_metrics import Metrics
from nbaccel.output.panel.facts import RunBoard
from nbaccel.train.gradient import WARM_UP_STEPS
from tests.tpu import bodies

EPOCH = 5  # 18 rows in batches of 4: the last has 2
PHASES = [f"compiling, step {number} of about {WARM_UP_STEPS}" for number in (1, 2)]


def test_programs_are_counted_told_while_they_compile_and_explained(driver, config, monkeypatch):
    messages: list[Metrics] = []
    hear = RunBoard.receive

    def note(board: RunBoard, rank: int, message: Metrics) -> None:
        messages.append(message)
        hear(board, rank, message)

    monkeypatch.setattr(RunBoard, "receive", note)
    with contextlib.redirect_stderr(io.StringIO()) as told:
        one_worker = config.changed(num_processes=1)
        (programs,) = notebook_launcher(
            bodies.compile_often, (bodies.make_net(),), config=one_worker
        )
    said = told.getvalue()

    # The first steps compile, and the next do not.
    before = programs.before_steps
    assert before[0] < before[1] <= before[2] == before[3] == before[4]
    if driver == "torch_xla":
        # A step is one program there, and the second one's has the optimizer's state in it.
        assert before[1] < before[2]
    assert len(set(before[EPOCH : 2 * EPOCH])) == 1, "an epoch of known shapes compiles nothing"
    # The last batch of an epoch has shapes of its own.
    assert programs.phases[:EPOCH] == [*PHASES, "", "", PHASES[0]]

    # Other shapes are told once, with the remedy.
    in_training, _, after = said.partition("now larger")
    assert in_training.count("this batch has other shapes") == 1
    assert "int64 [2, 6]" in in_training
    assert "int64 [4, 6]" in in_training
    assert "drop_last=True" in in_training
    assert "in evaluation, use the batch size of training" in in_training
    assert "other shapes" not in after, "another batch size in evaluation has the same remedy"
    first, _, after = said.partition("now numbers")
    assert "A Python number" not in first
    assert after.count("A Python number that changes from step to step") == 1
    assert "tensor on the device" in after

    # The dashboard is told.
    assert set(PHASES) <= {message.phase for message in messages}
    counts = [message.programs for message in messages if message.programs is not None]
    assert counts == sorted(counts)
    assert counts[-1] >= before[-1]
    assert messages[-1].compile_s > 0
