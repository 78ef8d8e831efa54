"""Every private part of DeepSpeed and of transformers that nbaccel uses: one function each.

Private parts may change with any release. What stands here was seen in DeepSpeed 0.18.5 to 0.19.8
unless its function says otherwise. When DeepSpeed is first loaded in a process, `missing_parts`
looks for all of them, so that a warning names what a release lacks, and what is lost by it, before
a worker fails. Where DeepSpeed has a public function, that one is used and is not listed here.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

from nbaccel.base.errors import MissingBackend

_FIRST_SEEN = "0.18.5"
_LAST_SEEN = "0.19.8"


class PrivatePart(NamedTuple):
    """A private attribute that nbaccel reads.

    Attributes:
        name: The attribute.
        module: The module of DeepSpeed that has it.
        holder: The class in that module that has it; or the function whose code uses it, where
            DeepSpeed gives the attribute to parameters and engines while it makes an engine.
        lost: What cannot be done without it: a clause.
        is_silent: Whether its absence looks like a tensor that ZeRO does not have in parts, so
            that training would end without an error and without its float32 weights.
    """

    name: str
    module: str
    holder: str
    lost: str
    is_silent: bool = False

    def is_there(self) -> bool:
        """Whether the DeepSpeed that is loaded has it; True where its module is not loaded."""
        # Never imported for the check: a part of DeepSpeed that is not loaded is not used either.
        if self.module not in sys.modules:
            return True
        holder: Any = sys.modules[self.module]
        for name in self.holder.split("."):
            holder = getattr(holder, name, None)
        # There is no engine yet to look at, so the code of a function is searched that sets or
        # reads the attribute: attributes are in `co_names`, texts for `hasattr` in `co_consts`.
        code = getattr(holder, "__code__", None)
        if code is not None:
            return self.name in (*code.co_names, *code.co_consts)
        return hasattr(holder, self.name)

    def message(self) -> str:
        """What is missing, what is lost by it, and which DeepSpeed has it."""
        version = getattr(sys.modules.get("deepspeed"), "__version__", "(of unknown version)")
        return (
            f"DeepSpeed {version} has no private attribute {self.name} ({self.module}."
            f"{self.holder}), which nbaccel reads: {self.lost}. It was there from {_FIRST_SEEN} to "
            f"{_LAST_SEEN}. "
            f'Install one of these: pip install "deepspeed>={_FIRST_SEEN},<={_LAST_SEEN}"'
        )

    def read(self, owner: Any) -> Any:
        """The attribute of an object."""
        try:
            return getattr(owner, self.name)
        except AttributeError as error:
            raise MissingBackend(self.message(), name="deepspeed") from error


_FRAGMENTS = "deepspeed.utils.tensor_fragment"
_STAGE_3 = ("deepspeed.runtime.zero.stage3", "DeepSpeedZeroOptimizer_Stage3")
_ON_DISK = "weights that a notebook changes cannot reach float32 copies on disk (ZeRO 3 with nvme)"

_HP_MAPPING = PrivatePart(
    "_hp_mapping",
    _FRAGMENTS,
    "safe_get_full_fp32_param",
    "float32 weights trained by ZeRO 1 and 2 cannot be read back",
    is_silent=True,
)
_Z3_OPTIMIZER = PrivatePart(
    "_z3_optimizer",
    _FRAGMENTS,
    "safe_get_full_fp32_param",
    "float32 weights trained by ZeRO 3 cannot be read back",
    is_silent=True,
)
_FP32_PARTITION = PrivatePart("_get_fp32_opt_state_partition", *_STAGE_3, _ON_DISK)
_IS_SWAPPABLE = PrivatePart("_swappable_optimizer_subgroup", *_STAGE_3, _ON_DISK)
_SWAP_OUT = PrivatePart("_optimizer_states_and_gradient_swap_out", *_STAGE_3, _ON_DISK)
_ENGINE_CONFIG = PrivatePart(
    "_config",
    "deepspeed.runtime.engine",
    "DeepSpeedEngine.gradient_clipping",
    "clip_grad_norm_ cannot set the engine's norm, and checkpoints cannot be checked",
)
_PRIVATE_PARTS = (
    _HP_MAPPING,
    _Z3_OPTIMIZER,
    _FP32_PARTITION,
    _IS_SWAPPABLE,
    _SWAP_OUT,
    _ENGINE_CONFIG,
)


# ------------------------------------------------------------------------------ the check


def missing_parts() -> list[PrivatePart]:
    """The private parts that the DeepSpeed of this process does not have."""
    return [part for part in _PRIVATE_PARTS if not part.is_there()]


@lru_cache(maxsize=1)
def warn_of_missing() -> None:
    """Warn of each part that is missing; once per process, when DeepSpeed has been loaded."""
    for part in missing_parts():
        warnings.warn(part.message(), stacklevel=2)


def refuse_missing() -> None:
    """Refuse to train where the result would be silently wrong."""
    messages = [part.message() for part in missing_parts() if part.is_silent]
    if messages:
        raise MissingBackend("\n".join(messages), name="deepspeed")


# ------------------------------------------------------------------------------ parameters


def has_fp32_fragment(tensor: Any) -> bool:
    """Whether ZeRO 1 or 2 keeps a float32 copy of a parameter, in parts.

    It has on every rank; `fp32_fragment` is None on those that hold none of it.
    """
    return hasattr(tensor, _HP_MAPPING.name)


def fp32_fragment(tensor: Any) -> Any:
    """This rank's part of a parameter's float32 copy under ZeRO 1 and 2."""
    return getattr(tensor, _HP_MAPPING.name, None)


def zero3_optimizer(tensor: Any) -> Any:
    """The ZeRO 3 optimizer that trains a parameter; None where there is only inference."""
    return getattr(tensor, _Z3_OPTIMIZER.name, None)


def is_swapped_out(tensor: Any) -> bool:
    """Whether the float32 copy of a ZeRO 3 parameter lies on disk between steps."""
    optimizer = zero3_optimizer(tensor)
    if optimizer is None or not tensor.requires_grad:
        return False
    # The optimizer swaps by sub-groups, each of which is in memory or on disk as a whole.
    index = optimizer.grad_position[optimizer.get_param_id(tensor)][0]
    return bool(_IS_SWAPPABLE.read(optimizer)(index))


def write_swapped_fp32(tensor: Any, write: Callable[[Any], None]) -> None:
    """Change this rank's part of a float32 copy that lies on disk.

    ``deepspeed.utils.safe_set_local_fp32_param`` compares sizes with the 16-bit part, which is
    empty where that lies on disk, too, and refuses every value then.
    """
    optimizer = zero3_optimizer(tensor)
    # Both are looked up before the first is called: a group that is read must be written back.
    read_partition = _FP32_PARTITION.read(optimizer)
    swap_out = _SWAP_OUT.read(optimizer)
    values, index = read_partition(tensor, release_swap_buffers=False)
    # The buffers are kept from reading to writing; `swap_out` releases them.
    write(values.detach().view(-1))
    swap_out(index)


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
    return _ENGINE_CONFIG.read(engine)


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


def muon_argument_names(engine_class: Any) -> frozenset[str]:
    """What DeepSpeed's Muon takes for its two halves; from 0.19.7 on, empty before."""
    names = ("_MUON_HALF_KEYS", "_ADAM_HALF_KEYS")
    halves = [frozenset[str](getattr(engine_class, name, None) or ()) for name in names]
    return halves[0] | halves[1] if all(halves) else frozenset()


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
