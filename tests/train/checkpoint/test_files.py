"""Single files: whole or absent, readable by others, and free of what does not belong in them."""

from __future__ import annotations

import io
import json
import pickle
import resource
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load, load_file

from nbaccel.errors import CheckpointFailed, ConfigError
from nbaccel.train.checkpoint import save, save_model
from nbaccel.train.checkpoint.files import read_torch_file
from tests.isolation import isolated
from tests.train.checkpoint.training import Tied


class Unwilling:
    def __reduce__(self):
        raise OSError(28, "No space left on device")


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def four_layers(value: float = 1.0) -> dict[str, torch.Tensor]:
    return {f"layer{n}.weight": torch.full((250,), value) for n in range(4)}  # 1000 bytes each


# ------------------------------------------------------------------------- one object


def rewritten(path: Path, state: bytes):
    """What is read from a file of torch's whose pickle is another one."""
    import zipfile

    torch.save(0, path)
    with zipfile.ZipFile(path) as archive:
        kept = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        for name, content in kept.items():
            archive.writestr(name, state if name.endswith("data.pkl") else content)
    return read_torch_file(path)


def test_a_failed_save_leaves_the_old_file_and_names_of_numpy_1_are_understood(tmp_path):
    save("old", tmp_path / "x.pt")
    with pytest.raises(OSError, match=r"No space left"):
        save([torch.ones(3), Unwilling()], tmp_path / "x.pt")
    assert read_torch_file(tmp_path / "x.pt") == "old"
    assert names(tmp_path) == ["x.pt"]
    torch.save(np.random.get_state(), tmp_path / "new.pt")
    content = (tmp_path / "new.pt").read_bytes()
    assert b"numpy._core.multiarray" in content or b"numpy.core.multiarray" in content
    for old, new in ((b"cnumpy._core.", b"cnumpy.core."), (b"cnumpy.core.", b"cnumpy._core.")):
        state = pickle.dumps(np.random.get_state(), protocol=2).replace(old, new)
        assert rewritten(tmp_path / "other.pt", state)[0] == "MT19937"


def test_safetensors_can_be_asked_for_and_an_open_file_is_written_to(tmp_path):
    model = Tied()
    save(model.state_dict(), tmp_path / "x.safetensors", safe_serialization=True)
    state = load_file(tmp_path / "x.safetensors")
    assert state["first.weight"].equal(model.first.weight)
    for odd in ([1], {"a": 1, "b": torch.ones(1)}):
        with pytest.raises(ConfigError, match=r"safe_serialization=False"):
            save(odd, tmp_path / "y.safetensors", safe_serialization=True)
    assert names(tmp_path) == ["x.safetensors"]
    plain, safe = io.BytesIO(), io.BytesIO()
    save({"a": torch.ones(2)}, plain)
    save({"a": torch.ones(2, 2).T}, safe, safe_serialization=True)
    plain.seek(0)
    assert torch.load(plain)["a"].tolist() == [1, 1]
    assert load(safe.getvalue())["a"].shape == (2, 2)


# ------------------------------------------------------------------------- a model


def test_a_large_model_is_cut_into_files_and_those_of_an_earlier_save_go(tmp_path):
    for name in ("model-backup.safetensors", "model_1.safetensors", "config.json"):
        (tmp_path / name).touch()
    others = names(tmp_path)
    for limit, count in ((1100, 5), (2100, 3), ("10GB", 1), (1100, 5)):
        save_model(four_layers(), tmp_path, max_shard_size=limit)
        assert len(names(tmp_path)) == count + len(others)
        assert set(others) < set(names(tmp_path))
    save_model(four_layers(), tmp_path, max_shard_size=2100)
    first, second = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    assert set(names(tmp_path)) == {first, second, "model.safetensors.index.json", *others}
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 4000
    assert set(index["weight_map"]) == set(four_layers())
    for name, file in index["weight_map"].items():
        assert load_file(tmp_path / file)[name].equal(torch.ones(250))


@isolated
@pytest.mark.parametrize("safe", [True, False])
def test_a_full_disk_leaves_the_old_weights_and_says_what_to_do(tmp_path, monkeypatch, safe):
    save_model(four_layers(1.0), tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr("nbaccel.base.weight_files.free_bytes", lambda _: 3000)
        with pytest.raises(ConfigError, match=r"3.9 KiB of weights.*2.9 KiB free. Make room"):
            save_model(four_layers(2.0), tmp_path / "new", safe_serialization=safe)
    # The system refuses files above a size, as a full disk would.
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, resource.RLIM_INFINITY))
    for folder in (tmp_path, tmp_path / "new"):
        with pytest.raises(CheckpointFailed, match=r"failed: .* are free. Remove the cause"):
            save_model(four_layers(2.0), folder, safe_serialization=safe)
    assert names(tmp_path) == ["model.safetensors"]
    assert load_file(tmp_path / "model.safetensors")["layer0.weight"].equal(torch.ones(250))


def test_a_model_that_cannot_be_saved_leaves_the_old_one_and_a_file_is_no_folder(tmp_path):
    save_model(four_layers(1.0), tmp_path)
    with pytest.raises(ConfigError, match=r"'extra' cannot be saved.*a dict is no tensor"):
        save_model({**four_layers(2.0), "extra": {}}, tmp_path)
    with pytest.raises(ValueError, match=r"ten"):
        save_model(four_layers(2.0), tmp_path, max_shard_size="ten")
    assert names(tmp_path) == ["model.safetensors"]
    assert load_file(tmp_path / "model.safetensors")["layer0.weight"].equal(torch.ones(250))
    with pytest.raises(ConfigError, match=r"is a file"):
        save_model(four_layers(), tmp_path / "model.safetensors")
