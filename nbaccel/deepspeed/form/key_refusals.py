"""When a ZeRO stage, an offload or another key cannot be chosen, or has no effect."""

from __future__ import annotations

from nbaccel.base.optional_packages import is_installed
from nbaccel.base.package_origin import install_line
from nbaccel.config import RunConfig, nested_keys
from nbaccel.config.capabilities import fp8_backend, precision_row, strategy_fits
from nbaccel.deepspeed import library
from nbaccel.deepspeed.form.key_settings import OPTIMIZER_PLACE, PARAM_PLACE
from nbaccel.deepspeed.zero_config import ZERO

PLACE_KEYS = (OPTIMIZER_PLACE, PARAM_PLACE)
_STAGE_3_PREFIXES = (f"{ZERO}.stage3_", f"{ZERO}.offload_param.", f"{ZERO}.leaf_module.")


def _stage_of_run(config: RunConfig) -> int | None:
    return config.zero_stage if config.uses_deepspeed else None


def _offload_place(config: RunConfig, place_key: str) -> str | None:
    """Where something is offloaded to; None where it is not."""
    place: str | None = nested_keys.value_at(config.deepspeed, place_key)
    return None if place == "none" else place


def engine_refusal(config: RunConfig) -> str:
    """Why DeepSpeed's engine cannot train a run: a clause; empty where it can."""
    strategy_row = library.row()
    if not is_installed(strategy_row.library):
        return f"DeepSpeed is not installed: {install_line('deepspeed')}"
    if precision_row(config.mixed_precision).has_backends:
        backend = "" if config.fp8 is None else config.fp8.backend
        backend_row = fp8_backend(backend).row
        if backend_row is None or not strategy_fits(strategy_row, backend_row):
            name = "" if backend_row is None else f" by the backend {backend_row.name}"
            return f"DeepSpeed's engine does not train in fp8{name}"
    elif config.mixed_precision not in strategy_row.precisions:
        return f"DeepSpeed's engine does not train in {config.mixed_precision}"
    return ""


def place_refusal(config: RunConfig, key_name: str, place: str | None) -> str:
    """Why something cannot be offloaded: a clause; empty where it can."""
    stage = _stage_of_run(config)
    if place is None:
        return ""
    if stage is None:
        return "choose a ZeRO stage first"
    # DeepSpeed would ignore the setting below stage 3.
    if key_name == PARAM_PLACE and stage < 3:
        return f"needs ZeRO stage 3: the stage is {stage}"
    # Without ZeRO, DeepSpeed offloads no state.
    if stage == 0:
        return "needs ZeRO stage 1 or higher: the stage is 0"
    if place == "nvme" and stage < 3:
        return f"needs ZeRO stage 3: the stage is {stage}"
    return ""


def key_refusal(config: RunConfig, key_name: str) -> str:
    """Why a key cannot be set: a clause; empty where it can."""
    stage = _stage_of_run(config)
    if stage is None:
        return "choose a ZeRO stage first"
    # The place of parameters can be chosen at any stage: its options say what they need.
    if key_name.startswith(_STAGE_3_PREFIXES) and key_name != PARAM_PLACE and stage != 3:
        return f"for stage 3 only: the stage is {stage}"
    if key_name.startswith(f"{ZERO}.offload_optimizer.") and key_name != OPTIMIZER_PLACE:
        return "" if _offload_place(config, OPTIMIZER_PLACE) else "optimizer state is on the device"
    if key_name.startswith(f"{ZERO}.offload_param.") and key_name != PARAM_PLACE:
        return "" if _offload_place(config, PARAM_PLACE) else "parameters are on the device"
    if key_name.startswith("aio.") and "nvme" not in [
        _offload_place(config, place_key) for place_key in PLACE_KEYS
    ]:
        return "nothing is on NVMe"
    return ""


def key_is_shown(config: RunConfig, key_name: str) -> bool:
    """Whether a key has an effect: folders have one where something is on disk."""
    for key in PLACE_KEYS:
        if key_name == key.replace(".device", ".nvme_path"):
            return _offload_place(config, key) == "nvme"
    return True
