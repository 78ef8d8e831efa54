"""What Accelerate's own code asks of a ``DeepSpeedPlugin`` beside its fields.

Code that was written for Accelerate fills in ``"auto"`` by hand with these; `prepare` here does it
by `resolve_auto`, with reasons.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from nbaccel import env
from nbaccel.config.dotted import has, put, value_at
from nbaccel.config.mistakes import shown
from nbaccel.deepspeed.kinds import AUTO
from nbaccel.errors import ConfigError

if TYPE_CHECKING:
    from torch import nn

__all__ = ["Filling"]

_MOE_LAYERS = "ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES"


class Filling:
    """Filling in a configuration by hand, and which of several plugins is in force."""

    deepspeed_config: dict[str, Any]
    transformer_moe_cls_names: str | None
    _selected: bool = False

    @property
    def selected(self) -> bool:
        """Whether it is the plugin that the next `prepare` of its Accelerator goes by."""
        return self._selected

    @selected.setter
    def selected(self, value: bool) -> None:
        raise NotImplementedError(
            f"selected={value} cannot be set: which plugin is in force belongs to an Accelerator. "
            "Call accelerator.state.select_deepspeed_plugin(name)."
        )

    def select(self, _from_accelerator_state: bool = False) -> None:
        """Refused, as in Accelerate: an Accelerator chooses among its plugins, by their names.

        Raises:
            ConfigError: Unless the Accelerator's state calls it.
        """
        if not _from_accelerator_state:
            raise ConfigError(
                f"select({_from_accelerator_state}) cannot be called on a DeepSpeedPlugin: which "
                "one is in force belongs to an Accelerator. Call "
                "accelerator.state.select_deepspeed_plugin(name)."
            )
        self._selected = True

    def _unselect(self) -> None:
        self._selected = False

    def fill_match(
        self,
        ds_key_long: str,
        mismatches: list[str] | None = None,
        must_match: bool = True,
        **kwargs: Any,
    ) -> None:
        """Fill in one ``"auto"``, or compare one value.

        Args:
            ds_key_long: A dotted key; nothing happens where the configuration has not its section.
            mismatches: Gets a line where a value is another one.
            must_match: Whether values are compared.
            **kwargs: Values by dotted keys.

        Raises:
            ConfigError: It is ``"auto"``, and none of the values is for it.
        """
        section = ds_key_long.rpartition(".")[0]
        if section and not isinstance(value_at(self.deepspeed_config, section), Mapping):
            return
        mine = value_at(self.deepspeed_config, ds_key_long)
        if mine == AUTO:
            if ds_key_long not in kwargs:
                raise ConfigError(
                    f'{ds_key_long}="auto" cannot be filled in: no value was given for it. '
                    "DeepSpeed would fall back to its own default or fail. Give it by its dotted "
                    "name, or write a value in the configuration."
                )
            put(self.deepspeed_config, ds_key_long, kwargs[ds_key_long])
            return
        theirs = kwargs.get(ds_key_long, mine)
        if must_match and mine is not None and mine != theirs and mismatches is not None:
            mismatches.append(f"- ds {ds_key_long}={mine} vs arg {ds_key_long}={theirs}")

    def deepspeed_config_process(
        self,
        prefix: str = "",
        mismatches: list[str] | None = None,
        config: dict[str, Any] | None = None,
        must_match: bool = True,
        **kwargs: Any,
    ) -> None:
        """Fill in every ``"auto"``, and compare every value, of the configuration or a section.

        Args:
            prefix: The section, with a dot at its end; empty for all.
            mismatches: Gets a line for each value that is another one.
            config: The section; the configuration where left out.
            must_match: Whether values are compared.
            **kwargs: Values by dotted keys.

        Raises:
            ConfigError: A value is missing, or there are mismatches.
        """
        found = [] if mismatches is None else mismatches
        for key, value in list((self.deepspeed_config if config is None else config).items()):
            if isinstance(value, dict):
                self.deepspeed_config_process(f"{prefix}{key}.", found, value, must_match, **kwargs)
            else:
                self.fill_match(f"{prefix}{key}", found, must_match, **kwargs)
        if found and not prefix:
            raise ConfigError(
                f"The DeepSpeed configuration says something else than the code: {shown(found)}. "
                'One of them would be ignored. Write "auto" in the configuration.'
            )

    def set_mixed_precision(self, mixed_precision: str) -> None:
        """Write a precision where the configuration leaves it open.

        Args:
            mixed_precision: ``no``, ``fp16``, ``bf16`` or ``fp8``, which runs in a bfloat16 model.

        Raises:
            ConfigError: The other one is turned on.
        """
        wanted = {"fp8": "bf16"}.get(mixed_precision, mixed_precision)
        other = {"fp16": "bf16", "bf16": "fp16"}.get(wanted)
        if other and value_at(self.deepspeed_config, f"{other}.enabled") is True:
            raise ConfigError(
                f"mixed_precision={mixed_precision!r} contradicts the DeepSpeed configuration, "
                f"where {other}.enabled is true. Training has one number format. Leave one out."
            )
        for name in ("fp16", "bf16"):
            on = name == wanted
            if not has(self.deepspeed_config, name):
                cast = {"auto_cast": True} if on and name == "fp16" else {}
                self.deepspeed_config[name] = {"enabled": on, **cast}
            if value_at(self.deepspeed_config, f"{name}.enabled") == AUTO:
                put(self.deepspeed_config, f"{name}.enabled", on)

    def set_moe_leaf_modules(self, model: nn.Module) -> None:
        """Let ZeRO-3 fetch each mixture-of-experts layer as one; `prepare` does it by itself.

        Args:
            model: Has layers of the classes that ``transformer_moe_cls_names`` names.

        Raises:
            ConfigError: It has none of such a name.
        """
        from nbaccel.deepspeed.strategy.engines import fetch_together

        if self.transformer_moe_cls_names is None:
            self.transformer_moe_cls_names = env.read(_MOE_LAYERS)
        if self.transformer_moe_cls_names:
            fetch_together(model, self.transformer_moe_cls_names)
