"""What a launch and a pool refuse before any process starts, because it would train otherwise."""

from __future__ import annotations

import pytest

from nbaccel import ConfigError, Pool, notebook_launcher
from nbaccel.config import RunConfig


@pytest.mark.parametrize("num_processes", [1, 2])
def test_fp8_is_refused_where_its_library_is_missing(num_processes, tmp_path):
    def train() -> None:
        (tmp_path / "ran").write_text("")

    config = RunConfig(mixed_precision="fp8", fp8="te", num_processes=num_processes)
    for launch in (
        lambda: notebook_launcher(train, config=config),
        lambda: Pool(config=config),
    ):
        with pytest.raises(ConfigError, match=r"needs transformer_engine, which is not.*bf16"):
            launch()
    assert not (tmp_path / "ran").exists()
