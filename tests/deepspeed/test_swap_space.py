"""A disk that cannot be swapped to, or is too small, is told before anything is written."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch import nn

from nbaccel import ConfigError
from nbaccel.deepspeed.zero_config import ZeroConfig
from nbaccel.deepspeed.zero_memory import check_disk, estimate_memory

FULL = 12 << 20


def check_room(model: nn.Module, config: ZeroConfig, num_processes: int) -> None:
    check_disk(estimate_memory(model, config, num_processes=num_processes))


def swapped_to(folder: Path | str) -> dict[str, object]:
    part = {"device": "nvme", "nvme_path": str(folder)}
    return {"zero_optimization": {"stage": 3, "offload_optimizer": part}}


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 12 MiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={FULL}", "tmpfs", str(folder)]
    if os.geteuid() or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("a disk of its own needs the right to mount one")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def test_too_little_room_is_told_with_both_numbers(small_disk):
    model = nn.Linear(1024, 1024)  # 12 MiB of weights and states in float32, and gradients
    settings = swapped_to(small_disk / "swap")
    with pytest.raises(ConfigError, match=r"has too little room: .*\(\d+ bytes\).*2 process") as e:
        check_room(model, ZeroConfig.from_dict(settings), 2)
    assert str(small_disk / "swap") in str(e.value)
    settings["zero_optimization"]["offload_optimizer"]["device"] = "cpu"
    check_room(model, ZeroConfig.from_dict(settings), 2)

    # What an earlier run left is overwritten, and counts as room.
    old = small_disk / "zero_stage_3" / "optimizer" / "rank0"
    old.mkdir(parents=True)
    (old / "1.tensor.swp").write_bytes(bytes(8 << 20))
    model = nn.Linear(512, 512)  # 4 MiB, with gradients
    config = ZeroConfig.from_dict(swapped_to(small_disk))

    check_room(model, config, 1)
    (old / "1.tensor.swp").rename(small_disk / "of somebody else")
    with pytest.raises(ConfigError, match="too little room"):
        check_room(model, config, 1)
