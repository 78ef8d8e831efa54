"""`save_state(exclude_frozen_parameters=True)` of DeepSpeed's engines, at every stage."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from nbaccel import Accelerator, load_fp32_state_dict, notebook_launcher
from tests.deepspeed import needs
from tests.deepspeed.programs import refusal
from tests.deepspeed.strategy.test_training import Row
from tests.train.checkpoint.test_left_out import TRAINED, Adapted, goes_on

pytestmark = [pytest.mark.slow, *needs.ENGINE, pytest.mark.filterwarnings("ignore")]

KINDS = [(0, "bf16"), (1, "no"), (2, "bf16"), (3, "no"), (3, "bf16")]


def tell(folder: Path) -> dict[Any, Any]:
    found: dict[Any, Any] = {}
    for stage, precision in KINDS:

        def make(stage: int = stage, precision: str = precision) -> Accelerator:
            return Accelerator(
                deepspeed_plugin=Row(stage=stage).plugin(), mixed_precision=precision, cpu=True
            )

        found[stage, precision] = goes_on(folder / f"{stage} {precision}", make)(make())
    accelerator = make()
    model = Adapted(1).requires_grad_(True)
    accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    found["refused"] = refusal(accelerator.load_state, folder / "3 bf16")
    found["teachers"] = {
        whole: teacher(make, folder / f"teacher {whole}", whole) for whole in (0, 1)
    }
    return found


def teacher(make: Any, folder: Path, whole: int) -> dict[str, float]:
    """A model that nobody trains: saved, and read into one with another adapter."""
    first = make()
    first.prepare(Adapted(0).requires_grad_(False))
    first.save_state(folder, exclude_frozen_parameters=not whole)
    second = make()
    other = second.prepare(Adapted(1).requires_grad_(False))
    second.load_state(folder)
    return {name: value.sum().item() for name, value in second.get_state_dict(other).items()}


def test_training_goes_on_where_it_was_saved_without_frozen_parameters(tmp_path: Path) -> None:
    told = list(notebook_launcher(tell, (tmp_path,), num_processes=2, timeout=300))
    for kind in KINDS:
        for rank in told:
            expected, found = rank[kind]
            assert found == expected
        saved_folder = tmp_path / f"{kind[0]} {kind[1]}"
        for path in (saved_folder / "pytorch_model").glob("*model_states.pt"):
            states = torch.load(path, weights_only=False)
            assert not {name for name in states["module"] or () if name.startswith("base.")}
            assert not states.get("frozen_param_fragments")
        if kind != (0, "bf16"):  # which is not converted
            assert set(load_fp32_state_dict(saved_folder)) == TRAINED | {"seen"}
    # A model that trains them now, and one without an engine.
    for rank in told:
        assert "ConfigError" in rank["refused"]
        assert re.search(r"no values for .* now trains .*: base\.bias, ", rank["refused"])
    for whole, seed in ((1, 0), (0, 1)):
        weights = Adapted(seed).bfloat16().state_dict()
        expected = {name: value.sum().item() for name, value in weights.items()}
        assert told[0]["teachers"][whole] == expected
