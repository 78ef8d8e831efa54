"""Launches on TPU workers, through the public door, with the driver that the environment has."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from nbaccel import Pool, RunConfig, WorkerFailed, notebook_launcher
from nbaccel.calls.launch import launch_plan
from nbaccel.plan import Plan
from tests.process import stop_pressed_when
from tests.tpu import bodies
from tests.tpu.bodies import Seen, TiedNet

TYPES = {"torch_tpu": "tpu:0", "torch_xla": "xla:0"}
CLOSE = pytest.approx
EPOCHS = 3


class Trained:
    """One launch, and one replica of CPU training on the same batches before it.

    So what the notebook's process has done before the launch is a matrix product, a backward pass
    and a seed.
    """

    def __init__(self, config: RunConfig, folder: Path) -> None:
        self.expected_net = bodies.make_net()
        self.expected = bodies.train_whole(self.expected_net, EPOCHS)
        self.net = bodies.make_net()
        self.parameters = list(self.net.parameters())
        results = notebook_launcher(bodies.train, (self.net, str(folder)), config=config)
        self.seen: list[Seen] = list(results)
        self.plan = results.plan


@pytest.fixture(scope="module")
def trained(driver: str, config: RunConfig, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return Trained(config, tmp_path_factory.mktemp("state") / "kept")


def weights_of(net: TiedNet) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in net.named_parameters()}


def test_workers_are_forked_from_the_template_and_have_a_chip_each(
    trained: Trained, driver: str
) -> None:
    assert trained.plan.start_method == "template"
    assert [seen.device for seen in trained.seen] == [TYPES[driver]] * bodies.RANKS


def test_losses_are_those_of_one_replica_on_the_whole_batches(trained: Trained) -> None:
    for seen in trained.seen:
        assert seen.losses == CLOSE(trained.expected, abs=1e-5)


def test_the_notebooks_model_is_the_trained_one(trained: Trained) -> None:
    assert all(
        parameter is kept
        for parameter, kept in zip(trained.net.parameters(), trained.parameters, strict=True)
    )
    expected = weights_of(trained.expected_net)
    for name, weight in weights_of(trained.net).items():
        assert weight.device.type == "cpu"
        torch.testing.assert_close(weight, expected[name], atol=1e-5, rtol=1e-4)


def test_tied_weights_stay_tied(trained: Trained) -> None:
    assert all(seen.is_tied for seen in trained.seen)
    assert trained.net.head.weight is trained.net.embedding.weight


def test_a_state_that_was_saved_goes_on_as_before(trained: Trained) -> None:
    for seen in trained.seen:
        assert seen.again == CLOSE(seen.losses[-len(seen.again) :], abs=1e-6)


def test_gather_for_metrics_drops_what_padded_the_last_batch(trained: Trained) -> None:
    _, targets = bodies.make_data(bodies.JUDGED_ROWS)
    for seen in trained.seen:
        assert seen.judged == targets.tolist()


def test_bf16_computes_in_bf16_and_stays_close(trained: Trained, config: RunConfig) -> None:
    net = bodies.make_net()
    results = notebook_launcher(bodies.train_in_bf16, (net,), config=config)
    for losses, computed_in, kept_in in results:
        assert losses == CLOSE(trained.expected[: len(losses)], rel=0.02)
        assert losses != CLOSE(trained.expected[: len(losses)], abs=1e-7)
        assert (computed_in, kept_in) == ("torch.bfloat16", "torch.float32")


def test_an_error_names_its_rank_and_line_and_the_model_is_as_it_was(
    driver: str, config: RunConfig
) -> None:
    net = bodies.make_net()
    before = weights_of(net)
    with pytest.raises(WorkerFailed, match="no page 7 in this book") as caught:
        notebook_launcher(bodies.fail_on_rank_1, (net,), config=config)
    assert isinstance(caught.value, LookupError)
    text = str(caught.value)
    assert "rank 1" in text.lower()
    assert 'raise LookupError("no page 7 in this book")' in text
    assert all(torch.equal(weight, before[name]) for name, weight in weights_of(net).items())


def test_stop_ends_a_launch_and_the_model_is_as_it_was(
    driver: str, config: RunConfig, tmp_path: Path
) -> None:
    net = bodies.make_net()
    before = weights_of(net)
    with pytest.raises(KeyboardInterrupt, match="workers have been stopped"):
        with stop_pressed_when(lambda: len(list(tmp_path.iterdir())) == bodies.RANKS):
            notebook_launcher(bodies.wait_to_be_stopped, (net, str(tmp_path)), config=config)
    assert len(list(tmp_path.iterdir())) == bodies.RANKS
    assert all(torch.equal(weight, before[name]) for name, weight in weights_of(net).items())


def test_live_workers_go_on_where_the_last_cell_ended(trained: Trained, config: RunConfig) -> None:
    names: dict[str, Any] = {"net": bodies.make_net(), "bodies": bodies}
    first_cell = """
        import torch
        from torch.utils.data import DataLoader, TensorDataset
        from nbaccel import Accelerator
        accelerator = Accelerator(gradient_accumulation_steps=bodies.ACCUMULATED)
        rows = TensorDataset(*bodies.make_data(bodies.TRAINED_ROWS))
        loader = DataLoader(rows, batch_size=bodies.BATCH)
        live, optimizer, loader = accelerator.prepare(net, bodies.make_optimizer(net), loader)
        losses = bodies.train_epoch(accelerator, live, optimizer, loader)
    """
    second_cell = "losses += bodies.train_epoch(accelerator, live, optimizer, loader)"
    with Pool(config=config, namespace=names) as pool:
        pool.run("\n".join(line.strip() for line in first_cell.splitlines()))
        after_first = weights_of(names["net"])
        pool.run(second_cell)
        (losses, _) = pool.pull("losses")["losses"]
    assert losses == CLOSE(trained.expected[: len(losses)], abs=1e-5)
    expected_net = bodies.make_net()
    assert bodies.train_whole(expected_net, 1) == CLOSE(losses[: len(losses) // 2], abs=1e-5)
    for name, weight in weights_of(expected_net).items():
        torch.testing.assert_close(after_first[name], weight, atol=1e-5, rtol=1e-4)
    assert not torch.equal(names["net"].body.weight, after_first["body.weight"])


# ---------------------------------------------------- models on their way to chips, and collectives


def test_a_moved_model_keeps_its_objects_and_what_hangs_on_them(
    driver: str, config: RunConfig
) -> None:
    (moved,) = notebook_launcher(
        bodies.move_with_all_that_hangs_on_it, (), config=config.changed(num_processes=1)
    )
    assert moved == dict.fromkeys(moved, True)


def test_where_memory_is_short_workers_copy_one_after_another(
    driver: str, config: RunConfig, tmp_path: Path
) -> None:
    times = notebook_launcher(bodies.place_in_turn, (str(tmp_path),), config=config)
    (_, first_ended), (second_began, _) = sorted(times)
    assert first_ended <= second_began


def test_the_plan_says_how_much_host_memory_the_model_takes_at_most(
    plan: Plan, capsys: pytest.CaptureFixture[str]
) -> None:
    net = bodies.make_net()
    num_bytes = sum(one.nbytes for one in net.parameters())
    plenty = launch_plan(plan, bodies.where_it_is, (net,)).plan
    (choice,) = (choice for choice in plenty.choices if choice.name == "host_memory")
    assert "at once" in choice.reason
    assert "host memory" not in capsys.readouterr().err
    # Less is free than one worker's copy takes.
    short = dataclasses.replace(plan.inventory, host_available_bytes=num_bytes // 2)
    tight = launch_plan(dataclasses.replace(plan, inventory=short), bodies.where_it_is, (net,)).plan
    (choice,) = (choice for choice in tight.choices if choice.name == "host_memory")
    assert "one worker after another" in choice.reason
    assert "a worker may be killed (SIGSEGV, SIGKILL)" in tight.warnings[-1]
    assert tight.warnings[-1] in capsys.readouterr().err


def test_no_collective_is_left_to_gloo_which_would_change_nothing(
    driver: str, config: RunConfig
) -> None:
    given = (torch.distributed.all_reduce,)  # as imported in a cell, before the driver is bound
    for answers in notebook_launcher(bodies.try_collectives_of_torch, given, config=config):
        refused = {name for name, answer in answers.items() if "Error: " in answer}
        assert refused == set(answers), answers
        if driver == "torch_xla":
            said = answers["from the notebook"]
            assert said.startswith("ConfigError: torch.distributed.all_reduce got a tensor on xla")
            assert "accelerator.reduce(tensor)" in said
            assert "accelerator.gather(tensor)" in answers["all_gather_into_tensor"]
            assert "tensor.cpu()" in answers["all_to_all_single"]
