"""What code written for Accelerate asks ``plugin.hf_ds_config``: the configuration, by dotted keys.

The names are those of Accelerate's ``HfDeepSpeedConfig``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from nbaccel.config.nested_keys import value_at
from nbaccel.deepspeed.zero_config import ZERO

_OFFLOAD_KEYS = (f"{ZERO}.offload_optimizer.device", f"{ZERO}.offload_param.device")


@dataclass
class ConfigQueries:
    """A configuration that answers questions; see `HfDeepSpeedConfig`.

    Attributes:
        config: The configuration, the same object as the plugin's ``deepspeed_config``.
    """

    config: dict[str, Any]

    def find_config_node(self, ds_key_long: str) -> tuple[dict[str, Any] | None, str]:
        """The section of a dotted key, None where there is none, and the key's last part."""
        path, _, last_key = ds_key_long.rpartition(".")
        section = value_at(self.config, path) if path else self.config
        return section if isinstance(section, dict) else None, last_key

    def get_value(self, ds_key_long: str, default: Any = None) -> Any:
        """The value of a dotted key."""
        return value_at(self.config, ds_key_long, default)

    def del_config_sub_tree(self, ds_key_long: str, must_exist: bool = False) -> None:
        """Remove a dotted key."""
        section, last_key = self.find_config_node(ds_key_long)
        if section is not None and last_key in section:
            del section[last_key]
        elif must_exist:
            raise ValueError(
                f"{ds_key_long!r} is not in the DeepSpeed configuration, so nothing was removed. "
                "Leave must_exist out if it need not be there."
            )

    def is_true(self, ds_key_long: str) -> bool:
        """Whether a value is set, and true."""
        return bool(self.get_value(ds_key_long))

    def is_false(self, ds_key_long: str) -> bool:
        """Whether a value is set, and false."""
        value = self.get_value(ds_key_long)
        return value is not None and not value

    def is_zero2(self) -> bool:
        """Whether it is stage 2."""
        return bool(self.get_value(f"{ZERO}.stage") == 2)

    def is_zero3(self) -> bool:
        """Whether it is stage 3."""
        return bool(self.get_value(f"{ZERO}.stage") == 3)

    def is_offload(self) -> bool:
        """Whether something of stage 2 or 3 is kept in host memory or on a disk."""
        devices = {self.get_value(key) for key in _OFFLOAD_KEYS}
        return (self.is_zero2() or self.is_zero3()) and not devices.isdisjoint({"cpu", "nvme"})
