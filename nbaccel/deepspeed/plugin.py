"""``DeepSpeedPlugin``: the argument by which an `Accelerator` trains with DeepSpeed.

Names, defaults and environment variables are Accelerate's. A file or dictionary says more than the
arguments can; where both set a key to different values, that is refused. `prepare` fills in
``"auto"`` by `resolve_auto`, with reasons.
"""

from __future__ import annotations

import base64
import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from nbaccel.base import env
from nbaccel.base.errors import ConfigError, PlatformUnsupported
from nbaccel.base.training_libraries import attribute
from nbaccel.config.deepspeed_document import (
    ARGUMENT_KEYS,
    BATCH_SIZES,
    engine_config,
    taken_out,
    tidied_settings,
)
from nbaccel.config.field_rules import refuse_mistakes
from nbaccel.config.given_values import dotted_items, put_at, shown, value_at
from nbaccel.config.handlers import Settings
from nbaccel.deepspeed import library
from nbaccel.deepspeed.zero_config import AUTO, ZERO, ZeroConfig, todays_settings

if TYPE_CHECKING:
    from torch import nn

    from nbaccel.config import RunConfig


_READERS: dict[str, Callable[[str], Any]] = {
    "gradient_accumulation_steps": lambda text: int(text) if text.isdecimal() else text,
    "gradient_clipping": lambda text: text if text == AUTO else float(text),
    "zero_stage": int,
    "zero3_save_16bit_model": lambda text: text.lower() in ("1", "true", "yes"),
}
"""Of the variables that do not hold text."""
_VARIABLES = {
    **{argument: f"ACCELERATE_DEEPSPEED_{argument.upper()}" for argument in ARGUMENT_KEYS},
    "gradient_accumulation_steps": "ACCELERATE_GRADIENT_ACCUMULATION_STEPS",
    "gradient_clipping": "ACCELERATE_GRADIENT_CLIPPING",
    "hf_ds_config": "ACCELERATE_DEEPSPEED_CONFIG_FILE",
    "transformer_moe_cls_names": "ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES",
}
"""Argument → the variable that Accelerate's launcher sets for it."""


@dataclass
class DeepSpeedPlugin(Settings):
    """How DeepSpeed shards, and where it keeps what it shards.

    None reads the variable that Accelerate's launcher sets, and else takes the default.

    Attributes:
        hf_ds_config: A DeepSpeed configuration: a dictionary, a `ZeroConfig`, the path of a JSON
            file, or JSON text; ``"auto"`` values in it are filled in by `prepare`. Then an object
            with `config`, `get_value`, `is_zero3` and the like, as in Accelerate.
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
    _selected = False  # not annotated, so that it is no argument

    def __post_init__(self) -> None:
        library.check_version()
        if self.enable_msamp:
            raise PlatformUnsupported(
                f"DeepSpeedPlugin(enable_msamp={self.enable_msamp}) needs patches of DeepSpeed "
                "that fit no release for Python 3.10 or newer. Training would run without FP8. Use "
                "Accelerator(mixed_precision='fp8') instead, which works under ZeRO too."
            )
        # An argument that contradicts the file is a mistake; a variable fills in what it leaves.
        given = {argument for argument in ARGUMENT_KEYS if getattr(self, argument) is not None}
        self._read_variables()
        settings = _read_config(self.hf_ds_config)
        if settings is None:
            settings = {ZERO: {"stage": 2 if self.zero_stage is None else self.zero_stage}}
        refuse_mistakes(filter(None, [self._merge(settings, one, given) for one in ARGUMENT_KEYS]))
        # DeepSpeed refuses a configuration without batch sizes; `prepare` fills in "auto".
        for key in (*BATCH_SIZES, "gradient_clipping"):
            settings.setdefault(key, AUTO)
        self.take_configuration(settings)
        # Code written for Accelerate reads these attributes: they must say what is in force.
        for argument, key in ARGUMENT_KEYS.items():
            setattr(self, argument, self.get_value(key, getattr(self, argument)))
        self.zero_stage = self.zero_stage or 0  # DeepSpeed's default
        if self.zero3_init_flag is None:
            flag = env.flag("ACCELERATE_DEEPSPEED_ZERO3_INIT")
            # Importing transformers takes seconds, and a model need not come from there.
            self.zero3_init_flag = "transformers" in sys.modules if flag is None else flag
        self.zero3_init_flag = bool(self.zero3_init_flag and self.zero_stage == 3)

    def take_configuration(self, settings: dict[str, Any]) -> None:
        """Put a configuration in force, for those who ask either attribute."""
        self.deepspeed_config = settings
        self.hf_ds_config = ConfigQueries(settings)

    def get_value(self, ds_key_long: str, default: Any = None) -> Any:
        """What the configuration has under a dotted key: ``zero_optimization.stage``."""
        return value_at(self.deepspeed_config, ds_key_long, default)

    def is_auto(self, ds_key_long: str) -> bool:
        """Whether a dotted key is still to be filled in."""
        return bool(self.get_value(ds_key_long) == AUTO)

    @property
    def said(self) -> dict[str, Any]:
        """What the configuration decides of settings that a run has, too, by their names."""
        return taken_out(self.deepspeed_config)[1]

    @contextlib.contextmanager
    def zero3_init_context_manager(self, enable: bool = False) -> Iterator[None]:
        """Switch building in shards on or off for a block."""
        from nbaccel.deepspeed import local_shards

        # Below stage 3 there is nothing to build in shards, whatever is passed.
        is_on = enable and self.zero_stage == 3
        building = local_shards.applied_config(self.deepspeed_config if is_on else None)
        with attribute(self, "zero3_init_flag", is_on), building:
            yield

    def is_zero3_init_enabled(self) -> bool:
        """Whether transformers builds models in shards."""
        return bool(self.zero3_init_flag)

    @property
    def selected(self) -> bool:
        """Whether it is the plugin that the next `prepare` of its Accelerator uses."""
        return self._selected

    @selected.setter
    def selected(self, value: bool) -> None:
        raise NotImplementedError(
            f"selected={value} cannot be set. Call accelerator.state.select_deepspeed_plugin(name)."
        )

    def select(self, _from_accelerator_state: bool = False) -> None:
        """Refused, as in Accelerate: an Accelerator chooses among its plugins, by their names."""
        if not _from_accelerator_state:
            raise ConfigError(
                f"select({_from_accelerator_state}) is an Accelerator's: it chooses among plugins. "
                "Call accelerator.state.select_deepspeed_plugin(name)."
            )
        self._selected = True

    def fill_match(
        self,
        ds_key_long: str,
        mismatches: list[str] | None = None,
        must_match: bool = True,
        **kwargs: Any,
    ) -> None:
        """Fill in one ``"auto"`` by `kwargs`, values by dotted keys; or compare one value.

        `mismatches` gets a line where it is another one.
        """
        in_file = value_at(self.deepspeed_config, ds_key_long)
        if in_file == AUTO:
            if ds_key_long not in kwargs:
                raise ConfigError(
                    f'{ds_key_long}="auto" got no value to be filled in. Give it by its dotted '
                    "name."
                )
            put_at(self.deepspeed_config, ds_key_long, kwargs[ds_key_long])
        elif must_match and in_file is not None and mismatches is not None:
            given = kwargs.get(ds_key_long, in_file)
            if given != in_file:
                mismatches.append(f"- ds {ds_key_long}={in_file} vs arg {ds_key_long}={given}")

    def deepspeed_config_process(
        self,
        prefix: str = "",
        mismatches: list[str] | None = None,
        config: dict[str, Any] | None = None,
        must_match: bool = True,
        **kwargs: Any,
    ) -> None:
        """Fill in every ``"auto"``, and compare every value, of the configuration or a section.

        The section is `config`, and `prefix` its name with a dot at the end.
        """
        found = [] if mismatches is None else mismatches
        section = self.deepspeed_config if config is None else config
        # A list, because filling in changes the dictionary.
        for key, _ in list(dotted_items(section, prefix)):
            self.fill_match(key, found, must_match, **kwargs)
        # A section's mismatches are left to the caller, so that one error can name those of all.
        if found and not prefix:
            raise ConfigError(
                f"The DeepSpeed configuration contradicts the code: {shown(found)}. Write "
                '"auto" in the configuration.'
            )

    def set_mixed_precision(self, mixed_precision: str) -> None:
        """Write a precision where the configuration leaves it open."""
        # DeepSpeed has no section for FP8: its layers are part of a model in bfloat16.
        wanted = {"fp8": "bf16"}.get(mixed_precision, mixed_precision)
        other = {"fp16": "bf16", "bf16": "fp16"}.get(wanted)
        if other and self.get_value(f"{other}.enabled") is True:
            raise ConfigError(
                f"mixed_precision={mixed_precision!r} contradicts the DeepSpeed configuration, "
                f"where {other}.enabled is true. Leave one out."
            )
        for name in ("fp16", "bf16"):
            more = {"auto_cast": True} if name == wanted == "fp16" else {}
            section = self.deepspeed_config.setdefault(name, {"enabled": AUTO, **more})
            if section.get("enabled") == AUTO:
                section["enabled"] = name == wanted

    def set_moe_leaf_modules(self, model: nn.Module) -> None:
        """Let ZeRO-3 fetch each mixture-of-experts layer as one; `prepare` does it by itself."""
        from nbaccel.deepspeed.engines import fetch_together

        names = self.transformer_moe_cls_names or env.read(_VARIABLES["transformer_moe_cls_names"])
        if names:
            fetch_together(model, names)

    def _read_variables(self) -> None:
        for argument, variable in _VARIABLES.items():
            text = (env.read(variable) or "").strip()
            # Accelerate's launcher sets the variables of options that were not given to "none".
            if getattr(self, argument) is not None or text in ("", "none"):
                continue
            try:
                setattr(self, argument, _READERS.get(argument, str)(text))
            except ValueError:
                raise ConfigError(
                    f"Environment variable {variable}={text!r} cannot be read: DeepSpeedPlugin "
                    f"takes {argument} from it. Correct or unset it."
                ) from None

    def _merge(self, settings: dict[str, Any], argument: str, given: set[str]) -> str:
        """Put an argument where the file has ``"auto"`` or nothing; the mistake where it cannot."""
        value = getattr(self, argument)
        key = ARGUMENT_KEYS[argument]
        section = value_at(settings, key.rpartition(".")[0], {}) if "." in key else settings
        # A section that is none is a mistake, which the check tells.
        if value in (None, "none") or not isinstance(section, dict):
            return ""
        in_file = value_at(settings, key, AUTO)
        if in_file == AUTO:
            put_at(settings, key, value)
        elif argument in given and value not in (in_file, AUTO):
            return (
                f"DeepSpeedPlugin({argument}={value!r}) contradicts its configuration, where {key} "
                f"is {shown(in_file)}. Leave one out."
            )
        return ""


@dataclass
class ConfigQueries:
    """A configuration, by dotted keys, as code for Accelerate asks ``plugin.hf_ds_config`` for it.

    `config` is the plugin's own ``deepspeed_config``; names are those of `HfDeepSpeedConfig`.
    """

    config: dict[str, Any]

    def get_value(self, ds_key_long: str, default: Any = None) -> Any:
        return value_at(self.config, ds_key_long, default)

    def is_true(self, ds_key_long: str) -> bool:
        return bool(self.get_value(ds_key_long))

    def is_false(self, ds_key_long: str) -> bool:
        return self.get_value(ds_key_long) is not None and not self.get_value(ds_key_long)

    def is_zero2(self) -> bool:
        return bool(self.get_value(ARGUMENT_KEYS["zero_stage"]) == 2)

    def is_zero3(self) -> bool:
        return bool(self.get_value(ARGUMENT_KEYS["zero_stage"]) == 3)

    def is_offload(self) -> bool:
        keys = (ARGUMENT_KEYS["offload_optimizer_device"], ARGUMENT_KEYS["offload_param_device"])
        is_away = any(self.get_value(key) in ("cpu", "nvme") for key in keys)
        return is_away and (self.is_zero2() or self.is_zero3())


def _read_config(config: Any) -> dict[str, Any] | None:
    if config is None or config == "none":
        return None
    if hasattr(config, "config") and not isinstance(config, (Mapping, ZeroConfig)):
        config = config.config  # HfDeepSpeedConfig of transformers or Accelerate
    if isinstance(config, str):
        # DeepSpeed's launcher passes Base64, as which any short word can be read: only JSON is one.
        with contextlib.suppress(ValueError):
            decoded = base64.b64decode(config.strip(), altchars=b"-_", validate=True).decode()
            config = decoded if decoded.lstrip().startswith("{") else config
    return tidied_settings(todays_settings(config)[0])


class Plugins:
    """One plugin, which is called ``default``, or several by name, of which one is in force."""

    def __init__(self, given: Any) -> None:
        plugins = given if isinstance(given, Mapping) else {"default": given}
        wrong_items = {n: p for n, p in plugins.items() if not isinstance(p, DeepSpeedPlugin)}
        if wrong_items or not plugins:
            raise ConfigError(
                f"deepspeed_plugin got {shown(wrong_items or given)}, which is no DeepSpeedPlugin. "
                "Give one, or a dictionary of names and plugins."
            )
        self.by_name: dict[str, DeepSpeedPlugin] = dict(plugins)
        self.active: DeepSpeedPlugin  # the one that the next `prepare` uses
        self.select(next(iter(self.by_name)))

    def get(self, name: str) -> DeepSpeedPlugin:
        """The plugin of a name."""
        if name not in self.by_name:
            named = ", ".join(map(repr, self.by_name))
            raise ConfigError(f"There is no DeepSpeed plugin named {name!r}. Use one of {named}.")
        return self.by_name[name]

    def select(self, name: str) -> None:
        """Let the next `prepare` use another plugin."""
        plugin = self.get(name)
        # Code written for Accelerate reads `selected` of each plugin.
        for known_plugin in self.by_name.values():
            known_plugin._selected = known_plugin is plugin  # noqa: SLF001 - of the same module
        self.active = plugin


def make_plugins(plugin: Any, run_config: RunConfig | None) -> Plugins:
    """The plugins of an `Accelerator`, of what it was given or of its run's configuration."""
    if plugin is not None:
        return Plugins(plugin)
    if run_config is None or not run_config.uses_deepspeed:
        return Plugins(DeepSpeedPlugin(None))
    file = None if run_config.deepspeed is None else engine_config(run_config)
    return Plugins(DeepSpeedPlugin(file, zero_stage=run_config.zero_stage))
