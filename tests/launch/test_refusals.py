"""What a launch and a pool refuse before any process starts, because it would train otherwise."""

from __future__ import annotations

import pytest

from nbaccel import ConfigError, Pool, notebook_launcher
from nbaccel.config import RunConfig


@pytest.mark.parametrize("num_processes", [1, 2])
def test_fp8_is_refused_while_nothing_computes_in_it(num_processes, tmp_path):
    def train() -> None:
        (tmp_path / "ran").write_text("")

    for launch in (
        lambda: notebook_launcher(train, num_processes=num_processes, mixed_precision="fp8"),
        lambda: notebook_launcher(train, config=RunConfig(mixed_precision="fp8", fp8="te")),
        lambda: Pool(num_processes=num_processes, mixed_precision="fp8"),
    ):
        with pytest.raises(ConfigError, match=r'fp8" is not supported in this version.*"bf16"'):
            launch()
    assert not (tmp_path / "ran").exists()
