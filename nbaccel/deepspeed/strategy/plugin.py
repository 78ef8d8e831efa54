"""``DeepSpeedPlugin``: how an `Accelerator` is told to train with DeepSpeed.

Names, defaults and environment variables are Accelerate's. A file or dictionary says more than the
arguments can; where both say something, and not the same, that is refused.
"""

from __future__ import annotations

import base64
import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nbaccel import env
from nbaccel.config.dotted import value_at
from nbaccel.config.engine import BATCH_SIZES, tidied
from nbaccel.config.handlers import Settings
from nbaccel.config.mistakes import shown
from nbaccel.deepspeed import library
from nbaccel.deepspeed.config import ZERO, ZeroConfig, old_forms
from nbaccel.deepspeed.kinds import AUTO
from nbaccel.deepspeed.reading import load_settings
from nbaccel.deepspeed.strategy.filling import Filling
from nbaccel.errors import ConfigError, PlatformUnsupported

__all__ = ["DeepSpeedPlugin", "Plugins"]

_KEYS = {
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "gradient_clipping": "gradient_clipping",
    "zero_stage": f"{ZERO}.stage",
    "offload_optimizer_device": f"{ZERO}.offload_optimizer.device",
    "offload_param_device": f"{ZERO}.offload_param.device",
    "offload_optimizer_nvme_path": f"{ZERO}.offload_optimizer.nvme_path",
    "offload_param_nvme_path": f"{ZERO}.offload_param.nvme_path",
    "zero3_save_16bit_model": f"{ZERO}.stage3_gather_16bit_weights_on_model_save",
}
"""Argument → where DeepSpeed's file has it."""


def _steps(text: str) -> int | str:
    return int(text) if text.isdecimal() else text


def _number(text: str) -> float | str:
    return text if text == AUTO else float(text)


_VARIABLES: dict[str, tuple[str, Callable[[str], Any]]] = {
    "gradient_accumulation_steps": ("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", _steps),
    "gradient_clipping": ("ACCELERATE_GRADIENT_CLIPPING", _number),
    "zero_stage": ("ACCELERATE_DEEPSPEED_ZERO_STAGE", int),
    "offload_optimizer_device": ("ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE", str),
    "offload_param_device": ("ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE", str),
    "offload_optimizer_nvme_path": ("ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_NVME_PATH", str),
    "offload_param_nvme_path": ("ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_NVME_PATH", str),
    "zero3_save_16bit_model": (
        "ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL",
        lambda text: text.strip().lower() in ("1", "true", "yes"),
    ),
    "hf_ds_config": ("ACCELERATE_DEEPSPEED_CONFIG_FILE", str),
    "transformer_moe_cls_names": ("ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES", str),
}


@dataclass
class DeepSpeedPlugin(Filling, Settings):
    """How DeepSpeed shards, and where it keeps what it shards.

    None reads the variable that Accelerate's launcher sets, and else takes the default.

    Attributes:
        hf_ds_config: A DeepSpeed configuration: a dictionary, a `ZeroConfig`, the path of a JSON
            file, or JSON text; ``"auto"`` values in it are filled in by `prepare`.
        gradient_accumulation_steps: Batches for one optimizer step; default the Accelerator's.
        gradient_clipping: Largest norm of gradients; default 1.0, as Accelerate has it.
        zero_stage: 0, 1, 2 (default) or 3.
        is_train_batch_min: Of several loaders' batch sizes, whether the smallest is the training's.
        offload_optimizer_device: ``none``, ``cpu`` or ``nvme`` (stage 3).
        offload_param_device: The same of parameters (stage 3).
        offload_optimizer_nvme_path: Folder on the fast disk.
        offload_param_nvme_path: The same of parameters.
        zero3_init_flag: Whether transformers builds models in shards from here on, by
            ``deepspeed.zero.Init``; default at stage 3, if transformers has been imported by then.
        zero3_save_16bit_model: DeepSpeed's own switch for gathering on save; `get_state_dict` and
            `save_model` here gather without it.
        transformer_moe_cls_names: Names of mixture-of-experts layers, with commas, whose
            parameters are fetched together (stage 3).
        enable_msamp: Refused: MS-AMP's patches of DeepSpeed fit no version that can be installed.
        msamp_opt_level: The same.
        deepspeed_config: The configuration that came of it. It may be changed before `prepare`,
            which replaces it by the one without ``"auto"``.

    Raises:
        ConfigError: The file cannot be read, or contradicts the arguments.
        MissingBackend: DeepSpeed is installed, and too old.
    """

    hf_ds_config: Any = None
    gradient_accumulation_steps: int | str | None = None
    gradient_clipping: float | str | None = None
    zero_stage: int | None = None
    is_train_batch_min: bool = True
    offload_optimizer_device: str | None = None
    offload_param_device: str | None = None
    offload_optimizer_nvme_path: str | None = None
    offload_param_nvme_path: str | None = None
    zero3_init_flag: bool | None = None
    zero3_save_16bit_model: bool | None = None
    transformer_moe_cls_names: str | None = None
    enable_msamp: bool | None = None
    msamp_opt_level: str | None = None
    deepspeed_config: dict[str, Any] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        library.check_version()
        self._refuse_msamp()
        said = {name for name in _KEYS if getattr(self, name) is not None}
        self._read_variables()
        settings = self._file()
        if settings is None:
            settings = {ZERO: {"stage": 2 if self.zero_stage is None else self.zero_stage}}
        mistakes = [
            mistake for name in _KEYS if (mistake := self._merge(settings, name, said=name in said))
        ]
        if mistakes:
            raise ConfigError(*mistakes)
        for name in BATCH_SIZES:
            settings.setdefault(name, AUTO)
        settings.setdefault("gradient_clipping", AUTO)
        self.deepspeed_config = settings
        for name, key in _KEYS.items():
            setattr(self, name, self.get_value(key, getattr(self, name)))
        if self.zero_stage is None:
            self.zero_stage = 0  # DeepSpeed's default; without one nobody would use DeepSpeed
        if self.zero3_init_flag is None:
            chosen = env.flag("ACCELERATE_DEEPSPEED_ZERO3_INIT")
            # To import it would cost seconds, for models that may be nobody's but the user's.
            self.zero3_init_flag = "transformers" in sys.modules if chosen is None else chosen
        self.zero3_init_flag = bool(self.zero3_init_flag and self.zero_stage == 3)

    # ---------------------------------------------------------------- reading

    def get_value(self, ds_key_long: str, default: Any = None) -> Any:
        """What the configuration has under a dotted key.

        Args:
            ds_key_long: For example ``zero_optimization.stage``.
            default: What to answer where it has nothing.
        """
        return value_at(self.deepspeed_config, ds_key_long, default)

    def is_auto(self, ds_key_long: str) -> bool:
        """Whether a dotted key is still to be filled in."""
        return bool(self.get_value(ds_key_long) == AUTO)

    @property
    def mixed_precision(self) -> str | None:
        """What the file asks for: ``no``, ``fp16`` or ``bf16``; None where it leaves it open."""
        enabled = {name: self.get_value(f"{name}.enabled") for name in ("fp16", "bf16")}
        if any(value is True for value in enabled.values()):
            return next(name for name, value in enabled.items() if value is True)
        return "no" if all(value is False for value in enabled.values()) else None

    @property
    def accumulation_steps(self) -> int | None:
        """Batches for one step as the configuration has them; None where it leaves them open."""
        steps = self.get_value("gradient_accumulation_steps")
        return steps if isinstance(steps, int) else None

    @contextlib.contextmanager
    def zero3_init_context_manager(self, enable: bool = False) -> Iterator[None]:
        """Switch building in shards on or off for a block.

        Args:
            enable: What it is in the block.
        """
        from nbaccel.deepspeed.strategy import zero_init

        before, self.zero3_init_flag = self.zero3_init_flag, enable and self.zero_stage == 3
        with zero_init.applied(self.deepspeed_config if self.zero3_init_flag else None):
            try:
                yield
            finally:
                self.zero3_init_flag = before

    def is_zero3_init_enabled(self) -> bool:
        """Whether transformers builds models in shards."""
        return bool(self.zero3_init_flag)

    # ---------------------------------------------------------------- putting together

    def _refuse_msamp(self) -> None:
        if self.enable_msamp:
            raise PlatformUnsupported(
                f"DeepSpeedPlugin(enable_msamp={self.enable_msamp}) needs MS-AMP's patches of "
                "DeepSpeed, which fit no release that Python 3.10 or newer can install. Training "
                "would run without FP8. Leave it out, and use mixed_precision='bf16'."
            )

    def _read_variables(self) -> None:
        for name, (variable, read) in _VARIABLES.items():
            text = (env.read(variable) or "").strip()
            if getattr(self, name) is not None or not text or text == "none":
                continue
            try:
                setattr(self, name, read(text))
            except ValueError:
                raise ConfigError(
                    f"Environment variable {variable}={text!r} cannot be read: DeepSpeedPlugin "
                    f"takes {name} from it. Correct or unset it."
                ) from None

    def _file(self) -> dict[str, Any] | None:
        given = self.hf_ds_config
        if given is None or given == "none":
            return None
        if hasattr(given, "config") and not isinstance(given, (Mapping, ZeroConfig)):
            given = given.config  # HfDeepSpeedConfig of transformers or Accelerate
        if isinstance(given, str):
            given = _text(given)
        settings, _ = old_forms(load_settings(given))
        return tidied(settings)

    def _merge(self, settings: dict[str, Any], name: str, *, said: bool) -> str:
        """Put an argument where the file has ``"auto"`` or nothing; the mistake where it cannot."""
        value, key = getattr(self, name), _KEYS[name]
        if value is None or value == "none":
            return ""
        *holders, last = key.split(".")
        holder = settings
        for step in holders:
            found = holder.setdefault(step, {})
            if not isinstance(found, dict):
                return ""  # the check says what is wrong with it
            holder = found
        there = holder.get(last, AUTO)
        if there == AUTO:
            holder[last] = value
        elif said and value not in (there, AUTO):
            return (
                f"DeepSpeedPlugin({name}={value!r}) contradicts its configuration, where {key} is "
                f"{shown(there)}. One of them would be ignored. Leave one out."
            )
        return ""


class Plugins:
    """One plugin or several by name, of which one is in force.

    Args:
        given: A plugin, a mapping of names to plugins, or a sequence of them.

    Attributes:
        by_name: The plugins; one alone is called ``default``.

    Raises:
        ConfigError: Something is no plugin, or there is none.
    """

    def __init__(self, given: Any) -> None:
        named = given if isinstance(given, Mapping) else {"default": given}
        if isinstance(given, (list, tuple)):
            named = {str(number): plugin for number, plugin in enumerate(given)}
        wrong = {
            name: item for name, item in named.items() if not isinstance(item, DeepSpeedPlugin)
        }
        if wrong or not named:
            raise ConfigError(
                f"deepspeed_plugin got {shown(wrong or given)}, which is no DeepSpeedPlugin. "
                "Nothing says how to shard. Give DeepSpeedPlugin(...), or a dictionary of names "
                "and such."
            )
        self.by_name: dict[str, DeepSpeedPlugin] = dict(named)
        self._selected = next(iter(self.by_name))
        self.select(self._selected)

    @property
    def active(self) -> DeepSpeedPlugin:
        """The one that the next `prepare` goes by."""
        return self.by_name[self._selected]

    def get(self, name: str) -> DeepSpeedPlugin:
        """A plugin by its name.

        Raises:
            ConfigError: There is none of that name.
        """
        if name not in self.by_name:
            raise ConfigError(
                f"There is no DeepSpeed plugin named {name!r}: models would be sharded by another "
                f"one. There are {', '.join(map(repr, self.by_name))}."
            )
        return self.by_name[name]

    def select(self, name: str) -> None:
        """Let the next `prepare` go by another one.

        Raises:
            ConfigError: There is none of that name.
        """
        chosen = self.get(name)
        for plugin in self.by_name.values():
            plugin._unselect()
        chosen.select(_from_accelerator_state=True)
        self._selected = name


def _text(given: str) -> str:
    """A path or JSON text as it stands; decoded from Base64, as DeepSpeed's launcher passes it."""
    if not given.lstrip().startswith("{") and not _is_path(given):
        with contextlib.suppress(ValueError):
            decoded = base64.urlsafe_b64decode(given.strip()).decode()
            if decoded.lstrip().startswith("{"):
                return decoded
    return given


def _is_path(given: str) -> bool:
    try:
        return Path(given).exists()
    except (OSError, ValueError):  # no path has so many characters, or a null one
        return False
