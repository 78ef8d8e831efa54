"""Every private part of DeepSpeed and of transformers that nbaccel uses: one function each.

Private parts may change with any release. What stands here was seen in DeepSpeed 0.18.5 to 0.19.8
unless its function says otherwise. Where DeepSpeed has a public function, that one is used and is
not listed here.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from typing import Any

from nbaccel.base.errors import MissingBackend

_HP_MAPPING = "_hp_mapping"
_Z3_OPTIMIZER = "_z3_optimizer"


def check_fp32_copies(engine: Any) -> None:
    """Refuse an engine that keeps its float32 weights elsewhere than the DeepSpeed known here.

    Without these attributes a tensor looks as if ZeRO did not have it in parts: training would end
    without an error, and without its float32 weights.
    """
    stage = engine.zero_optimization_stage()
    name = _Z3_OPTIMIZER if stage == 3 else _HP_MAPPING
    trained = [parameter for parameter in engine.module.parameters() if parameter.requires_grad]
    if not stage or engine.basic_optimizer is None or not trained:
        return
    if not any(hasattr(parameter, name) for parameter in trained):
        version = sys.modules["deepspeed"].__version__
        raise MissingBackend(
            f"DeepSpeed {version} gives parameters no private attribute {name} at stage {stage}: "
            "float32 weights that were trained could not be read back. It was there from 0.18.5 to "
            '0.19.8. Install one of these: pip install "deepspeed>=0.18.5,<=0.19.8"',
            name="deepspeed",
        )


# ------------------------------------------------------------------------------ parameters


def has_fp32_fragment(tensor: Any) -> bool:
    """Whether ZeRO 1 or 2 keeps a float32 copy of a parameter, in parts.

    It has on every rank; `fp32_fragment` is None on those that hold none of it.
    """
    return hasattr(tensor, _HP_MAPPING)


def fp32_fragment(tensor: Any) -> Any:
    """This rank's part of a parameter's float32 copy under ZeRO 1 and 2."""
    return getattr(tensor, _HP_MAPPING, None)


def zero3_optimizer(tensor: Any) -> Any:
    """The ZeRO 3 optimizer that trains a parameter; None where there is only inference."""
    return getattr(tensor, _Z3_OPTIMIZER, None)


# ------------------------------------------------------------------------------ modules, engines

ZERO3_MODULE_ATTRIBUTES = frozenset(
    {
        "_external_params",
        "_original_parameters",
        "applied_pre_backward_ref_cnt",
        "ds_grads_remaining",
        "ds_id",
        "ds_recompute_parameters",
    }
)
"""Attributes of plain types that ZeRO 3 gives each module; others are of its own types."""


def engine_settings(engine: Any) -> Any:
    """The ``DeepSpeedConfig`` that an engine reads; changes in it take effect."""
    return engine._config


def forget_group_references(module: Any) -> None:
    """Empty the lists of groups in ``deepspeed.utils.groups``, which have no public function."""
    # DeepSpeed's own function is there from 0.19.8 on. In earlier ones nothing but these lists is
    # made when the module is executed, and other modules look them up in it.
    release = getattr(module, "_release_process_group_references", None)
    if release is not None:
        release()
    else:
        importlib.reload(module)


# ------------------------------------------------------------------------------ configuration


def removed_keys(reader: Any) -> Mapping[str, str]:
    """Keys that DeepSpeed had, and its sentence on each; from 0.19.7 on, empty before."""
    zero_keys: Mapping[str, str] = getattr(reader, "_REMOVED_ZERO_CONFIG_KEYS", {})
    return {
        **getattr(reader, "_REMOVED_TOP_LEVEL_CONFIG_KEYS", {}),
        **{f"zero_optimization.{name}": text for name, text in zero_keys.items()},
    }


# ------------------------------------------------------------------------------ transformers

_TRANSFORMERS_MODULE = "transformers.integrations.deepspeed"
_HF_CONFIG = "_hf_deepspeed_config_weak_ref"
"""In transformers 4.30 to 5; only unsetting it is public."""


def hf_config_reference() -> Any:
    """The weak reference by which transformers decides that models are built in shards."""
    return getattr(sys.modules.get(_TRANSFORMERS_MODULE), _HF_CONFIG, None)


def keep_hf_config_reference(reference: Any) -> None:
    """Put a reference back that `hf_config_reference` gave; nothing where nothing is loaded."""
    if (module := sys.modules.get(_TRANSFORMERS_MODULE)) is not None:
        setattr(module, _HF_CONFIG, reference)
