"""Configurations that others have published: the check and the installed DeepSpeed agree on each.

DeepSpeed's package brings a few. `DEEPSPEED_CONFIGS` names a folder with more of them, as they lie
in public repositories: they are other people's, so they are not in this one.
"""

from __future__ import annotations

import json
import os
from importlib import import_module, resources
from pathlib import Path
from typing import Any

import pytest

from nbaccel.deepspeed.checking import check_config
from nbaccel.deepspeed.library import quiet_logger
from nbaccel.deepspeed.zero_config import AUTO
from nbaccel.errors import ConfigError
from tests.deepspeed.advisor.models import machine
from tests.deepspeed.needs import DEEPSPEED

pytestmark = DEEPSPEED
WHERE = "DEEPSPEED_CONFIGS"
# DeepSpeedConfig takes them, and the engine that is made from it does not.
REFUSED_BY_THE_ENGINE = ("is no optimizer of DeepSpeed", "optimizer.params.max_grad_norm=")


def files() -> list[Path]:
    templates = Path(str(resources.files("deepspeed") / "autotuning" / "config_templates"))
    folders = [templates, *(Path(one) for one in [os.environ.get(WHERE)] if one)]
    return sorted(path for folder in folders for path in folder.rglob("*.json"))


def refusal_of_deepspeed(settings: dict[str, Any]) -> str:
    """Why the installed DeepSpeed refuses it, without what is "auto"; empty where it takes it."""
    known = without_auto(settings)
    if not {"train_batch_size", "train_micro_batch_size_per_gpu"} & set(known):
        known["train_micro_batch_size_per_gpu"] = 1
    try:
        with quiet_logger():
            import_module("deepspeed.runtime.config").DeepSpeedConfig(known)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def without_auto(settings: dict[str, Any]) -> dict[str, Any]:
    return {
        key: without_auto(value) if isinstance(value, dict) else value
        for key, value in settings.items()
        if value != AUTO
    }


def refusal_of_the_check(path: Path) -> tuple[str, ...]:
    try:
        check_config(path, inventory=machine(1), allow_auto=True, check_tools=False)
    except ConfigError as error:
        return tuple(error.mistakes)
    return ()


def disagreement(path: Path) -> str | None:
    mistakes = refusal_of_the_check(path)
    try:
        settings = json.loads(path.read_text())
    except ValueError:
        # A template whose values a script fills in, which is no JSON before.
        return None if mistakes else "it is no JSON, and accepted"
    theirs = refusal_of_deepspeed(settings)
    if theirs and not mistakes:
        return f"DeepSpeed refuses it: {theirs}"
    wrong = [text for text in mistakes if not any(one in text for one in REFUSED_BY_THE_ENGINE)]
    return f"DeepSpeed takes it: {wrong}" if wrong and not theirs else None


@pytest.mark.timeout(300)
def test_the_check_refuses_what_deepspeed_refuses_and_nothing_else():
    found = {path.name: disagreement(path) for path in files()}
    assert len(found) >= 4
    assert {name: why for name, why in found.items() if why} == {}
