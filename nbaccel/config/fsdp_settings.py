"""``FullyShardedDataParallelPlugin``: how torch's ``fully_shard`` (FSDP2) shards models.

Arguments have Accelerate's order. Those of FSDP1 that change no number are accepted, and one
warning says that ``fully_shard`` does it differently; those that would change one are refused.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from nbaccel.base import env
from nbaccel.config.field_rules import (
    FieldCheck,
    FieldRule,
    OptionalCount,
    checked_as,
    field_mistakes,
    refuse_mistakes,
)
from nbaccel.config.settings_base import Settings
from nbaccel.config.value_readers import read_whole

_PLUGIN_NAME = "FullyShardedDataParallelPlugin"
_WRAP_POLICIES = ("transformer_based_wrap", "size_based_wrap", "no_wrap")
_STATE_TYPES = ("FULL_STATE_DICT", "SHARDED_STATE_DICT")
_SHARDING_STRATEGIES = {"FULL_SHARD": True, "SHARD_GRAD_OP": False}
# What fully_shard does by itself, whatever is given.
_OWN_WAY = {
    "backward_prefetch": "it prefetches by itself",
    "forward_prefetch": "it prefetches by itself",
}
_ALWAYS_DONE = ("use_orig_params", "sync_module_states", "limit_all_gathers")
FSDP_VARIABLES: Mapping[str, str] = {
    "sharding_strategy": "FSDP_SHARDING_STRATEGY",
    "reshard_after_forward": "FSDP_RESHARD_AFTER_FORWARD",
    "auto_wrap_policy": "FSDP_AUTO_WRAP_POLICY",
    "transformer_cls_names_to_wrap": "FSDP_TRANSFORMER_CLS_TO_WRAP",
    "min_num_params": "FSDP_MIN_NUM_PARAMS",
    "cpu_offload": "FSDP_OFFLOAD_PARAMS",
    "ignored_modules": "FSDP_IGNORED_MODULES",
    "state_dict_type": "FSDP_STATE_DICT_TYPE",
    "activation_checkpointing": "FSDP_ACTIVATION_CHECKPOINTING",
    "cpu_ram_efficient_loading": "FSDP_CPU_RAM_EFFICIENT_LOADING",
}
"""Settings that can be text, and Accelerate's variables, which its launcher and ours set.

FSDP1's settings without effect are not among them.
"""
_TRUTH_VARIABLES = (
    *("reshard_after_forward", "cpu_offload", "activation_checkpointing"),
    "cpu_ram_efficient_loading",
)
_SHARDING_WORDS = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
# Torch's classes by name, since nothing here imports torch.
_OFFLOAD_POLICIES = {"CPUOffloadPolicy": True, "OffloadPolicy": False}


def plain_name(value: Any) -> str:
    """The name of an enum's member, or of its text: ``FULL_SHARD``."""
    return str(getattr(value, "name", value)).rpartition(".")[2].upper()


def sharding_word(value: Any) -> Any:
    """FSDP1's sharding strategy by its word; torch and older files number them from 1."""
    text = str(value).strip()
    if text.isdecimal() and 1 <= int(text) <= len(_SHARDING_WORDS):
        return _SHARDING_WORDS[int(text) - 1]
    return value


def split_names(text: str) -> list[str]:
    """Names that are written with commas."""
    return [name.strip() for name in text.split(",") if name.strip()]


def _variable_value(setting_name: str, text: str) -> Any:
    """What a variable says of a setting; None where a launcher only set its default."""
    if setting_name == "sharding_strategy":
        return sharding_word(text)
    if setting_name == "transformer_cls_names_to_wrap":
        return split_names(text)
    if setting_name == "auto_wrap_policy":
        return text.lower()
    if setting_name == "min_num_params":
        return None if text == "0" else text
    # FSDP1's words for resharding, which are understood, are no truth values.
    is_truth = setting_name in _TRUTH_VARIABLES and text.upper() not in _SHARDING_WORDS
    return env.flag(FSDP_VARIABLES[setting_name]) if is_truth else text


def _wrap_policy(value: Any) -> Any:
    if isinstance(value, str) and value.lower() not in _WRAP_POLICIES:
        raise ValueError(value)
    return value


def _state_dict_type(value: Any) -> Any:
    return None if value is None else plain_name(value)


_VERSION_FIELD = Annotated[
    Literal[1, 2] | None,
    FieldRule(
        read=read_whole,
        must="1, 2 or None",
        why="FSDP has these two versions",
        do="Leave it out to get fully_shard, which is 2",
    ),
]
_WRAP_POLICY = Annotated[
    Any,
    FieldRule(
        read=_wrap_policy,
        must=f"one of {', '.join(_WRAP_POLICIES)}, or a function from a module to True or False",
        allowed=_WRAP_POLICIES,
        why="Nothing says what to shard",
        do="Leave it out to shard the blocks that the model names",
    ),
]
_STATE_TYPE = Annotated[
    Literal["FULL_STATE_DICT", "SHARDED_STATE_DICT"] | None,
    FieldRule(
        read=_state_dict_type,
        must=f"one of {', '.join(_STATE_TYPES)}",
        allowed=_STATE_TYPES,
        why="Checkpoints could not be written",
        do="Leave it out to write shards",
    ),
]


@dataclass
class FullyShardedDataParallelPlugin(Settings):
    """How torch's ``fully_shard`` (FSDP2) shards models.

    What is not given is taken from Accelerate's variables (``FSDP_OFFLOAD_PARAMS`` and the like),
    which launchers set.

    Attributes:
        fsdp_version: 2; 1 is accepted and trains with ``fully_shard``, too, with a warning.
        sharding_strategy: FSDP1's word for `reshard_after_forward`: ``FULL_SHARD`` for True,
            ``SHARD_GRAD_OP`` for False.
        reshard_after_forward: Whether gathered weights are freed after the forward: less
            memory, one more gather in the backward (ZeRO-3); False keeps them (ZeRO-2). None: True.
        backward_prefetch: FSDP1's, without effect: ``fully_shard`` prefetches by itself.
        mixed_precision_policy: ``torch.distributed.fsdp.MixedPrecisionPolicy``, a dict of its
            arguments, or ``fp16``/``bf16``; None follows the Accelerator's precision.
        auto_wrap_policy: Which submodules are sharded on their own: ``transformer_based_wrap``
            (classes named in `transformer_cls_names_to_wrap`, or the model's `_no_split_modules`),
            ``size_based_wrap`` (`min_num_params`), ``no_wrap``, or a function ``module -> bool``.
            None: transformer blocks where the model names them, else no submodule.
        cpu_offload: Whether shards live in host memory; torch's policy objects are understood.
        ignored_modules: Submodules left alone, or a regular expression on their names.
        state_dict_type: How ``save_state`` writes: ``SHARDED_STATE_DICT`` (every process its
            shard, torch.distributed.checkpoint) or ``FULL_STATE_DICT`` (one file). None: as
            `state_dict_config` says, else one file for `fsdp_version` 1 and shards for 2.
        state_dict_config: Torch's ``FullStateDictConfig`` or ``ShardedStateDictConfig``, another
            way to say `state_dict_type`. Whole weights are always collected in host memory.
        optim_state_dict_config: The same for the optimizer, which is written as the model is.
        limit_all_gathers: FSDP1's; True is the only way of ``fully_shard``.
        use_orig_params: The same.
        param_init_fn: FSDP1's, refused: build the model in an outer cell.
        sync_module_states: As `limit_all_gathers`.
        forward_prefetch: As `backward_prefetch`.
        activation_checkpointing: Whether wrapped submodules recompute activations.
        activation_checkpointing_offload: Refused: this version does not move them to the host.
        cpu_ram_efficient_loading: Taken for compatibility: workers share one copy anyway.
        transformer_cls_names_to_wrap: Class names of submodules sharded on their own.
        min_num_params: Least parameters of a submodule sharded on its own.
    """

    fsdp_version: int | None = field(default=None, metadata=checked_as(_VERSION_FIELD))
    sharding_strategy: Any = None
    reshard_after_forward: Any = None
    backward_prefetch: Any = None
    mixed_precision_policy: Any = None
    auto_wrap_policy: str | Callable[[Any], bool] | None = field(
        default=None, metadata=checked_as(_WRAP_POLICY)
    )
    cpu_offload: Any = None
    ignored_modules: Any = None
    state_dict_type: Any = field(default=None, metadata=checked_as(_STATE_TYPE))
    state_dict_config: Any = None
    optim_state_dict_config: Any = None
    limit_all_gathers: bool = True
    use_orig_params: bool | None = None
    param_init_fn: Any = None
    sync_module_states: bool | None = None
    forward_prefetch: bool | None = None
    activation_checkpointing: bool | None = None
    activation_checkpointing_offload: bool | None = None
    cpu_ram_efficient_loading: bool | None = None
    transformer_cls_names_to_wrap: Sequence[str] | None = None
    min_num_params: int | None = field(default=None, metadata=checked_as(OptionalCount))

    def __post_init__(self) -> None:
        self._take_variables()
        mistakes = field_mistakes(self)
        texts = list[str]()
        # A wrong type would be reported a second time, as a contradiction.
        if not any(field_mistake.path == "state_dict_type" for field_mistake in mistakes):
            texts = self._contradictions()
        refuse_mistakes([*mistakes, *texts, *self._unfollowed()])
        self._warn_of_fsdp1()
        # The default depends on the version that was given, so it is read before it becomes 2.
        if self.state_dict_type is None:
            self.state_dict_type = (
                _kind_of(self.state_dict_config) or _STATE_TYPES[self.fsdp_version != 1]
            )
        self.fsdp_version = 2
        choice = self.sharding_strategy or self.reshard_after_forward
        if choice is None or isinstance(choice, bool):
            self.reshard_after_forward = choice is not False
        else:
            self.reshard_after_forward = _SHARDING_STRATEGIES[plain_name(choice)]
        self.cpu_offload = _offloads_shards(self.cpu_offload)
        self.activation_checkpointing = bool(self.activation_checkpointing)

    def _take_variables(self) -> None:
        """Take what was not given from Accelerate's variables; a setting that was given wins."""
        names = set(FSDP_VARIABLES)
        if self.sharding_strategy is not None or self.reshard_after_forward is not None:
            # Two words for one thing: the variable of the other would contradict it.
            names -= {"sharding_strategy", "reshard_after_forward"}
        if self.state_dict_config is not None or self.optim_state_dict_config is not None:
            names.discard("state_dict_type")
        version = self.fsdp_version or (env.read("FSDP_VERSION") or "").strip()
        if str(version) == "2":
            # `accelerate launch` sets it all the same, to a default.
            names.discard("sharding_strategy")
        for name in FSDP_VARIABLES:
            text = (env.read(FSDP_VARIABLES[name]) or "").strip()
            if name in names and text and text.lower() != "none" and getattr(self, name) is None:
                setattr(self, name, _variable_value(name, text))

    @property
    def writes_shards(self) -> bool:
        """Whether every process writes its own shard of a checkpoint."""
        return plain_name(self.state_dict_type) == "SHARDED_STATE_DICT"

    def set_state_dict_type(self, state_dict_type: Any = None) -> None:
        """Let ``save_state`` write in another way from now on: train in shards, save one file.

        Args:
            state_dict_type: ``FULL_STATE_DICT`` or ``SHARDED_STATE_DICT``; None leaves it.

        Raises:
            ConfigError: It is another.
        """
        if state_dict_type is not None:
            self.state_dict_type = FieldCheck(_STATE_TYPE).read(
                "state_dict_type", state_dict_type, owner=type(self).__name__
            )

    def set_mixed_precision(
        self, mixed_precision: Any, buffer_autocast: bool = False, override: bool = False
    ) -> None:
        """Give the number format, where none was given.

        Args:
            mixed_precision: ``fp16``, ``bf16`` or ``fp32``.
            buffer_autocast: FSDP1's, without effect: ``fully_shard`` leaves buffers as they are.
            override: Whether it replaces one that was given.
        """
        del buffer_autocast
        if override or self.mixed_precision_policy is None:
            self.mixed_precision_policy = None if mixed_precision == "fp32" else mixed_precision

    def set_auto_wrap_policy(self, model: Any) -> None:
        """Nothing to do: what is sharded on its own is chosen in `prepare`, by the model there."""

    def set_cpu_offload(self) -> None:
        """Nothing to do: `cpu_offload` is a truth value as soon as it is given."""

    def _contradictions(self) -> list[str]:
        if self.state_dict_type is None:
            return []
        return [
            f"{_PLUGIN_NAME}(state_dict_type={self.state_dict_type!r}) contradicts "
            f"{name}={getattr(self, name)!r}: checkpoints would be written as only "
            "one of them says. Leave one of them out."
            for name in ("state_dict_config", "optim_state_dict_config")
            if _kind_of(getattr(self, name)) not in (None, self.state_dict_type)
        ]

    def _unfollowed(self) -> list[str]:
        """Messages about settings that ``fully_shard`` does not support, each with a remedy."""
        settings = [
            f"{_PLUGIN_NAME}({setting_name}={value!r}) is not supported: fully_shard has "
            f"{' and '.join(_SHARDING_STRATEGIES)}. Give reshard_after_forward=True or False; for "
            "NO_SHARD leave the plugin out, which trains with DDP."
            for setting_name in ("sharding_strategy", "reshard_after_forward")
            if not isinstance(value := getattr(self, setting_name), (bool, type(None)))
            and plain_name(value) not in _SHARDING_STRATEGIES
        ]
        if self.param_init_fn is not None:
            settings.append(
                f"{_PLUGIN_NAME}(param_init_fn={self.param_init_fn!r}) is FSDP1's and would have "
                "no effect with fully_shard. Leave it out; build the model with its values before "
                "prepare."
            )
        if self.activation_checkpointing_offload:
            settings.append(
                f"{_PLUGIN_NAME}(activation_checkpointing_offload=True) is not supported: this "
                "version recomputes activations and does not move them to host memory. Leave it "
                "out."
            )
        return settings

    def _warn_of_fsdp1(self) -> None:
        """Warn once of settings that are FSDP1's and change no number."""
        fsdp1_settings = ["fsdp_version=1"] * (self.fsdp_version == 1)
        fsdp1_settings += [
            f"{name}={value!r} ({behaviour})"
            for name, behaviour in _OWN_WAY.items()
            if (value := self._of(name))
        ]
        fsdp1_settings += [
            f"{name}=False (it always does it)" for name in _ALWAYS_DONE if self._of(name) is False
        ]
        if fsdp1_settings:
            warnings.warn(
                f"{_PLUGIN_NAME}({', '.join(fsdp1_settings)}): fully_shard, which is FSDP2, "
                "trains in FSDP1's place. Losses and weights are the same; parameters are "
                "DTensors, and none is flattened. Leave these arguments out.",
                stacklevel=4,  # past __post_init__ and the __init__ that dataclass made
            )

    def _of(self, name: str) -> Any:
        return getattr(self, name)


def _kind_of(state_dict_config: Any) -> str | None:
    """Which `state_dict_type` one of torch's configurations belongs to."""
    name = type(state_dict_config).__name__
    if state_dict_config is None or not name.endswith("StateDictConfig"):
        return None
    return "FULL_STATE_DICT" if name.startswith("Full") else "SHARDED_STATE_DICT"


def _offloads_shards(value: Any) -> bool:
    # An object of FSDP1's class is true whatever its field says.
    if type(value).__name__ == "CPUOffload":
        return bool(value.offload_params)
    return bool(_OFFLOAD_POLICIES.get(type(value).__name__, value))
