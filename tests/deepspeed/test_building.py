"""Before DeepSpeed compiles, that is said; a killed build is not waited for."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from torch import nn

from nbaccel import Accelerator, DeepSpeedPlugin, notebook_launcher
from tests.deepspeed import needs
from tests.isolation import isolated

pytestmark = [pytest.mark.slow, *needs.ENGINE]

LINE = "nbaccel: DeepSpeed compiles deepspeed_shm_comm now, once: a minute or two\n"
CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
    "zero_optimization": {"stage": 1},
}


def raw() -> None:
    import deepspeed

    deepspeed.initialize(model=nn.Linear(2, 2), config=CONFIG)


def raw_in_workers() -> None:
    notebook_launcher(raw, num_processes=2, start_method="template")


def by_the_accelerator() -> None:
    Accelerator(cpu=True, deepspeed_plugin=DeepSpeedPlugin(CONFIG)).prepare(nn.Linear(2, 2))


@pytest.mark.parametrize("way", [raw_in_workers, by_the_accelerator])
@isolated
def test_it_is_told_and_the_compiler_is_called_in_spite_of_a_forgotten_lock(
    way: Callable[[], None], tmp_path: Path
) -> None:
    # A compiler that fails at once: what is looked at comes before a minute of compiling.
    (tmp_path / "c++").write_text(
        f'#!/bin/sh\ncase "$*" in *" -c "*) touch {tmp_path}/called; exit 1;; esac\n'
        f'exec {shutil.which("c++")} "$@"\n'
    )
    (tmp_path / "c++").chmod(0o755)
    os.environ["PATH"] = os.pathsep.join([str(tmp_path), os.environ["PATH"]])
    os.environ["TORCH_EXTENSIONS_DIR"] = str(tmp_path / "extensions")
    os.environ.pop("CXX", None)
    # Of a build that was killed: torch would wait for its end for ever.
    lock = tmp_path / "extensions" / "deepspeed_shm_comm" / "lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    with (tmp_path / "stderr").open("w") as file, contextlib.redirect_stderr(file):
        with pytest.raises(Exception, match="deepspeed_shm_comm"):
            way()
    said = (tmp_path / "stderr").read_text()
    assert (tmp_path / "called").exists()
    lines = [line for line in said.splitlines(keepends=True) if line.endswith(LINE)]
    assert 1 <= len(lines) <= 2, said  # ranks that say it at different moments have a line each
