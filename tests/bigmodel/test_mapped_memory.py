"""What mapped checkpoints cost in memory, and that letting go of pages takes nobody's values."""

from __future__ import annotations

import gc
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from safetensors.torch import save_file
from torch import nn

from nbaccel.base import mapped_files
from nbaccel.bigmodel.checkpoint_files import StoredWeights, WeightFiles, read_checkpoint
from nbaccel.bigmodel.checkpoint_loading import load_checkpoint_in_model
from nbaccel.transfer import arena, memfd
from nbaccel.transfer.arena import Arena
from tests.bigmodel.launched import Peak
from tests.isolation import isolated
from tests.process import descriptors, memory_files

pytestmark = [
    pytest.mark.no_memfd_growth,
    pytest.mark.skipif(sys.platform != "linux", reason="the figures are those of Linux"),
]

MIB = 1 << 20
LAYERS, LAYER_BYTES = 12, 4 * MIB
PAGE = memfd.PAGE_BYTES


def tower(dtype: torch.dtype = torch.float32, device: str = "meta") -> nn.Sequential:
    """Layers of 4 MiB each in float32."""
    layers = (nn.Linear(1024, 1024, bias=False, device=device) for _ in range(LAYERS))
    return nn.Sequential(*layers).to(dtype)


def warm_up() -> None:
    """Start torch's threads, and read the code of the operations."""
    layer = torch.randn(1024, 1024)
    layer.to(torch.bfloat16).copy_(layer).max()
    layer.max()


@pytest.fixture(scope="module")
def saved_tower(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tower")
    state = {f"{n}.weight": torch.randn(1024, 1024) for n in range(LAYERS)}
    save_file(state, folder / "model.safetensors")
    return folder


# ------------------------------------------------------------------------------ peaks


@isolated(timeout_s=120)
def test_a_mapped_model_costs_no_anonymous_memory_and_is_usable(saved_tower):
    model = tower()
    warm_up()
    with Peak("Anon", "Shmem") as loading:
        load_checkpoint_in_model(model, saved_tower)
    with Peak("Anon", "Shmem") as using:
        total = sum(float(p.detach().max()) for p in model.parameters())
    assert total > 0
    assert loading.bytes < LAYER_BYTES
    assert using.bytes < LAYER_BYTES
    with Peak("Anon") as mapped:
        load_checkpoint_in_model(tower(), saved_tower, {"": "cpu"})
    assert mapped.bytes < LAYER_BYTES


@isolated(timeout_s=120)
def test_a_conversion_needs_the_new_format_and_one_tensor(saved_tower):
    model = tower()
    warm_up()
    with Peak("Anon", "Shmem", "File") as peak:
        load_checkpoint_in_model(model, saved_tower, dtype=torch.bfloat16)
    assert peak.bytes < LAYERS * LAYER_BYTES // 2 + 2 * LAYER_BYTES
    assert peak.bytes > LAYERS * LAYER_BYTES // 2 - LAYER_BYTES


@isolated(timeout_s=120)
def test_a_load_into_a_real_model_needs_one_tensor_beside_it(saved_tower):
    model = tower(device="cpu")
    warm_up()
    with Peak("Anon", "Shmem", "File") as peak:
        load_checkpoint_in_model(model, saved_tower)
    assert peak.bytes < 3 * LAYER_BYTES


@isolated(timeout_s=120)
def test_weights_by_name_stay_in_the_file_between_uses(saved_tower):
    stored = read_checkpoint(saved_tower)
    weights = StoredWeights(WeightFiles(), stored, {"held": torch.ones(3)})
    assert len(weights) == LAYERS + 1
    assert set(weights) == {*stored, "held"}
    warm_up()
    with Peak("Anon", "File") as peak:
        for name in stored:
            weights.prefetch([name, "held"])
            assert float(weights[name].max()) > 0
            weights.release([name, "held"])
    assert peak.bytes < 4 * LAYER_BYTES, peak.bytes / LAYER_BYTES
    with pytest.raises(KeyError):
        weights["nowhere"]


# ------------------------------------------------------------------------------ pages let go


@contextmanager
def file_of(content: bytes) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "file")
        path.write_bytes(content)
        yield path


def bytes_of(mapping: memfd.Mapping) -> bytes:
    return bytes(mapping.view(0, mapping.nbytes))


NUM_BYTES = 5 * PAGE + 123
PLACES = st.integers(0, NUM_BYTES)


@given(st.lists(PLACES, max_size=6), PLACES, PLACES, st.booleans())
def test_only_whole_pages_inside_are_dropped_and_no_written_byte_outside(written, one, other, keep):
    start, end = sorted((one, other))
    content = bytes(range(251)) * (NUM_BYTES // 251 + 1)
    with file_of(content[:NUM_BYTES]) as path:
        mapping = Arena.of_file(path)
        expected = bytearray(content[:NUM_BYTES])
        for place in written:
            if place < NUM_BYTES:
                mapping.view(place, place + 1)[0] = expected[place] = 0xFF
        mapped_files.drop_pages(mapping.address + start, end - start, keep_written=keep)
        if not keep:
            first_page, last_page = -(-start // PAGE) * PAGE, end // PAGE * PAGE
            if first_page < last_page:
                expected[first_page:last_page] = content[first_page:last_page]
        assert bytes_of(mapping) == bytes(expected)
        assert path.read_bytes() == content[:NUM_BYTES]


# ------------------------------------------------------------------------------ arenas


def checkpoint_arena(tmp_path: Path) -> tuple[Arena, torch.Tensor, Path]:
    path = tmp_path / "file"
    path.write_bytes(torch.arange(4 * PAGE // 4, dtype=torch.float32).numpy().tobytes())
    mapping = Arena.of_file(path)
    storage = arena.storage_at(mapping, 0, mapping.nbytes)
    return mapping, torch.empty(0).set_(storage), path


def is_file(mapping: arena.Arena) -> bool:
    return "memfd" not in os.readlink(f"/proc/self/fd/{mapping.fd}")


@pytest.mark.parametrize("how", ["sync", "leave_file"])
def test_an_arena_that_leaves_its_file_keeps_addresses_and_values(tmp_path, how):
    mapping, tensor, path = checkpoint_arena(tmp_path)
    before, address = path.read_bytes(), tensor.data_ptr()
    tensor[5] = -1
    expected = tensor.clone()
    getattr(mapping, how)()
    assert not is_file(mapping)
    assert tensor.data_ptr() == address == mapping.address
    assert torch.equal(tensor, expected)
    tensor[6] = -2
    assert os.pread(mapping.fd, 4, 24) == torch.tensor(-2.0).numpy().tobytes()
    mapping.leave_file()
    mapping.sync()
    assert tensor[5:7].tolist() == [-1, -2]
    assert path.read_bytes() == before
    assert mapped_files.find_mapping(address, 8) is None
    assert arena.find_arena(address, 8) is mapping
    del tensor, mapping


def test_an_arena_costs_one_descriptor_which_no_other_program_inherits(tmp_path):
    before, memfds = len(descriptors()), memory_files()
    mapping, tensor, path = checkpoint_arena(tmp_path)
    for moves in (False, True):
        if moves:
            mapping.leave_file()
        assert len(descriptors()) == before + 1
        assert not os.get_inheritable(mapping.fd)
    del mapping
    gc.collect()
    assert tensor[3] == 3, "the tensor keeps it"
    del tensor
    gc.collect()
    assert len(descriptors()) == before
    assert memory_files() == memfds
    for missing in (tmp_path / "nowhere", tmp_path):
        with pytest.raises(OSError, match=r"."):
            Arena.of_file(missing)
    (tmp_path / "empty").touch()
    with pytest.raises(OSError, match=r"."):
        Arena.of_file(tmp_path / "empty")
    gc.collect()
    assert len(descriptors()) == before
    assert path.exists()


def test_a_converted_model_is_handed_to_workers_without_a_copy(tmp_path):
    save_file({"weight": torch.randn(64, 64), "bias": torch.randn(64)}, tmp_path / "m.safetensors")
    for options in ({"dtype": torch.bfloat16}, {}):
        model: Any = nn.Linear(64, 64, device="meta")
        load_checkpoint_in_model(model, tmp_path / "m.safetensors", **options)
        address, memfds = model.weight.data_ptr(), memory_files()
        sharing = arena.share_modules([("model", model)])
        assert model.weight.data_ptr() == address
        assert memory_files() == memfds
        assert len(sharing.arenas) == 1
        del model, sharing
