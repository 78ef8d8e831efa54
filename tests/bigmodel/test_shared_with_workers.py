"""Models loaded in a notebook, in launches and live workers: shared, trained, and brought home."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from nbaccel import Pool, notebook_launcher
from nbaccel.bigmodel.checkpoint_loading import load_checkpoint_in_model
from nbaccel.transfer import arena
from tests.bigmodel.launched import add_one, figures, only_look, sums, tower
from tests.isolation import isolated

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="workers share memory files of Linux"),
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
]

MIB = 1 << 20
METHODS = ["template", "fork"]


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    path = tmp_path / "model.safetensors"
    save_file(tower(3, 64, "cpu").state_dict(), path)
    return path


@pytest.fixture
def model(checkpoint: Path) -> Iterator[nn.Module]:
    found = tower(3, 64)
    before = digest(checkpoint)
    load_checkpoint_in_model(found, checkpoint)
    yield found
    assert digest(checkpoint) == before, "the file was written to"


def lies_in_file(model: nn.Module) -> bool:
    weight = model[0].weight
    home = arena.find_arena(weight.data_ptr(), weight.nbytes)
    return home is not None and bool(getattr(home, "is_checkpoint", False))


@pytest.mark.parametrize("method", METHODS)
def test_weights_arrive_as_the_notebook_changed_them_and_come_home_trained(model, method):
    weights = dict(model.named_parameters())
    for number in range(3):
        if number:
            with torch.no_grad():
                model[number].weight[3, 5] = 1234.0
                model[3].running_mean.fill_(9)
        before = sums(model)
        seen = notebook_launcher(add_one, (model,), num_processes=2, start_method=method)
        assert list(seen) == [before, before], number
        assert sums(model)[0] == pytest.approx(before[0] + 64 * 64, rel=1e-6)
    assert model[2].weight[3, 5] == 1235
    assert dict(model.named_parameters()) == weights, "the same objects"


@pytest.mark.parametrize("method", METHODS)
def test_a_model_in_a_closure_is_seen_and_brought_home(model, method):
    def trains() -> list[float]:
        from tests.bigmodel.launched import add_one

        return add_one(model)

    for _ in range(2):
        before = sums(model)
        seen = notebook_launcher(trains, num_processes=2, start_method=method)
        assert list(seen) == [before, before]
        assert sums(model)[0] == pytest.approx(before[0] + 64 * 64, rel=1e-6)


def test_weights_of_torch_files_and_converted_ones_come_home_too(tmp_path):
    source = tower(2, 16, "cpu")
    torch.save(source.state_dict(), tmp_path / "pytorch_model.bin")
    before = digest(tmp_path / "pytorch_model.bin")
    for dtype in (None, torch.bfloat16):
        model = tower(2, 16)
        load_checkpoint_in_model(model, tmp_path, dtype=dtype)
        seen = sums(model)
        results = notebook_launcher(add_one, (model,), num_processes=2, start_method="template")
        assert list(results) == [seen, seen]
        expected = source[0].weight.to(model[0].weight.dtype) + 1
        assert torch.equal(model[0].weight, expected)
    assert digest(tmp_path / "pytorch_model.bin") == before


# ------------------------------------------------------------------------------ live workers

TRAIN_IN_CELL = """
import torch
seen = [float(t.detach().double().sum()) for t in model.state_dict().values()]
with torch.no_grad():
    for p in model.parameters(): p.add_(1)
"""


def test_cells_train_the_model_of_the_notebook_again_and_again(model, checkpoint):
    names: dict[str, Any] = {"model": model}
    with Pool(2, namespace=names) as pool:
        for number in range(3):
            before = sums(model)
            pool.run(TRAIN_IN_CELL)
            assert sums(model)[0] == pytest.approx(before[0] + 64 * 64, rel=1e-6), number
            if number == 1:
                with torch.no_grad():
                    model[1].weight[0] = 50
        before = sums(model)
        pool.run(
            "import torch\nseen = [float(t.detach().double().sum()) for t in "
            "model.state_dict().values()]\nassert seen == " + repr(before)
        )
        again = tower(3, 64)
        load_checkpoint_in_model(again, checkpoint)
        names["again"] = again
        before = sums(again)
        pool.run("import torch\nwith torch.no_grad():\n  for p in again.parameters(): p.add_(1)")
        assert sums(again)[0] == pytest.approx(before[0] + 64 * 64, rel=1e-6)
        names.clear()


# ------------------------------------------------------------------------------ memory


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> str:
    """64 MiB of weights."""
    path = tmp_path_factory.mktemp("large") / "model.safetensors"
    save_file(tower(16, 1024, "cpu").state_dict(), path)
    return str(path)


@isolated(timeout_s=200)
def test_a_notebook_does_not_copy_the_model_that_it_launches(large):
    model = tower(16, 1024)
    load_checkpoint_in_model(model, large)
    launch(only_look, tower(1, 8, "cpu"))
    before = figures()
    launch(only_look, model)
    assert figures()["Anon"] - before["Anon"] < 16 * MIB
    assert figures()["Shmem"] - before["Shmem"] < 16 * MIB
    assert lies_in_file(model)
    launch(add_one, model)
    # The trained weights: once in this process, and not beside what was read.
    assert figures()["Anon"] - before["Anon"] < 16 * MIB
    assert not lies_in_file(model)


def launch(function: Callable[..., Any], model: nn.Module) -> None:
    notebook_launcher(function, (model,), num_processes=2, start_method="template")
