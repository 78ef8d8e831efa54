"""What cannot be chosen as things are, and why: asked of the plan, the rows and the model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from nbaccel._optional import is_installed
from nbaccel._origin import install_line
from nbaccel.capabilities import FP8_BACKENDS, strategy_row
from nbaccel.config import Fp8Config, RunConfig, dotted
from nbaccel.deepspeed.config import ZERO
from nbaccel.errors import ConfigError, NbaccelError
from nbaccel.notebook.picker.choices import OPTIMIZER_PLACE, PARAM_PLACE, Option, Setting
from nbaccel.notebook.picker.edits import value_of
from nbaccel.plan import Inventory, resolve

__all__ = ["View", "is_shown", "option_refusal", "problems_of", "setting_refusal"]

_NODES = ("node_rank", "master_addr", "rdzv_endpoint", "rdzv_conf", "rdzv_id", "rdzv_backend")
_WHERE = (OPTIMIZER_PLACE, PARAM_PLACE)
_STAGE_3 = (f"{ZERO}.stage3_", f"{ZERO}.offload_param.", f"{ZERO}.leaf_module.")


@dataclass(frozen=True, slots=True)
class View:
    """What is looked at: the configuration, the machine, the model (which may be None).

    `problems` is what the plan has against the configuration already.
    """

    config: RunConfig
    inventory: Inventory
    module: Any
    problems: tuple[str, ...] = ()

    @property
    def stage(self) -> int | None:
        """The ZeRO stage; None without DeepSpeed."""
        return self.config.zero_stage if self.config.uses_deepspeed else None

    def place(self, key: str) -> str | None:
        """Where something is offloaded to; None where it is not."""
        found: str | None = dotted.value_at(self.config.deepspeed, key)
        return None if found == "none" else found

    @property
    def fp8_backend(self) -> str:
        """The backend that FP8 comes to: the one chosen, or the first that is installed."""
        chosen = (self.config.fp8 or Fp8Config()).backend
        named = {row.name for row in FP8_BACKENDS}
        if chosen in named:
            return chosen
        return next((row.name for row in FP8_BACKENDS if is_installed(row.package)), "")


def option_refusal(view: View, setting: Setting, option: Option) -> str:
    """Why an option cannot be chosen.

    Args:
        view: As things are.
        setting: The choice.
        option: The option.

    Returns:
        A clause, without a stop; empty where it can.
    """
    if option.value == value_of(view.config, setting):
        return ""  # what is in force can be seen to be in force
    if setting.name == "zero_stage":
        return "" if option.value is None else _engine_refusal(view)
    if setting.name in _WHERE:
        return _place_refusal(view, setting.name, option.value)
    if setting.name == "fp8.backend":
        return _backend_refusal(option.value)
    if setting.run_field in RunConfig.model_fields and setting.run_field == setting.name:
        return _plan_refusal(view, setting.name, option.value)
    return ""


def setting_refusal(view: View, setting: Setting) -> str:
    """Why a whole choice cannot be made.

    Args:
        view: As things are.
        setting: The choice.

    Returns:
        A clause, without a stop; empty where it can.
    """
    name = setting.name
    if name == "activation_checkpointing":
        return _switch_refusal(view)
    if setting.run_field != "deepspeed":
        return ""
    if view.stage is None:
        return "choose a ZeRO stage first"
    if name.startswith(_STAGE_3) and name != PARAM_PLACE and view.stage != 3:
        return f"for stage 3 only: the stage is {view.stage}"
    if name.startswith(f"{ZERO}.offload_optimizer.") and name != OPTIMIZER_PLACE:
        return "" if view.place(OPTIMIZER_PLACE) else "optimizer state is on the device"
    if name.startswith(f"{ZERO}.offload_param.") and name != PARAM_PLACE:
        return "" if view.place(PARAM_PLACE) else "parameters are on the device"
    if name.startswith("aio.") and "nvme" not in (
        view.place(OPTIMIZER_PLACE),
        view.place(PARAM_PLACE),
    ):
        return "nothing is on NVMe"
    return ""


def is_shown(view: View, setting: Setting) -> bool:
    """Whether a choice means anything as things are.

    Args:
        view: As things are.
        setting: The choice.

    Returns:
        False for recipes of another precision or backend, folders of what is not on disk, and
        addresses where there is one machine.
    """
    name = setting.name
    if name.startswith("fp8."):
        if view.config.mixed_precision != "fp8":
            return False
        read = {row.name: row.settings for row in FP8_BACKENDS}.get(view.fp8_backend, ())
        return name == "fp8.backend" or setting.run_field.removeprefix("fp8.") in read
    for place in _WHERE:
        if name == place.replace(".device", ".nvme_path"):
            return view.place(place) == "nvme"
    return name not in _NODES or view.config.num_nodes > 1


def _engine_refusal(view: View) -> str:
    row = strategy_row("deepspeed")
    if not is_installed(row.library):
        return f"DeepSpeed is not installed: {install_line('deepspeed')}"
    if view.config.mixed_precision not in row.precisions:
        return f"DeepSpeed's engine does not train in {view.config.mixed_precision}"
    return ""


def _place_refusal(view: View, name: str, place: str | None) -> str:
    if place is None:
        return ""
    if view.stage is None:
        return "choose a ZeRO stage first"
    if name == PARAM_PLACE and view.stage < 3:
        return f"needs ZeRO stage 3: the stage is {view.stage}"
    if view.stage == 0:
        return "needs ZeRO stage 1 or higher: the stage is 0"
    if place == "nvme" and view.stage < 3:
        return f"needs ZeRO stage 3: the stage is {view.stage}"
    return ""


def _backend_refusal(name: str) -> str:
    row = {row.name: row for row in FP8_BACKENDS}.get(name)
    if row is None or is_installed(row.package):
        return ""
    return f"{row.package} is not installed"


def _switch_refusal(view: View) -> str:
    if view.module is None:
        return ""
    from nbaccel.strategies.gradient_checkpointing import can_checkpoint_gradients

    if can_checkpoint_gradients(view.module):
        return ""
    return f"{type(view.module).__name__} has no gradient_checkpointing_enable()"


def _plan_refusal(view: View, name: str, value: Any) -> str:
    """What the plan says to it that it does not say now."""
    try:
        changed = view.config.changed(**{name: value})
    except ConfigError as error:
        return _clause(error.mistakes[0], name)
    new = [text for text in problems_of(changed, view.inventory) if text not in view.problems]
    return _clause(new[0], name) if new else ""


def problems_of(config: RunConfig, inventory: Inventory) -> tuple[str, ...]:
    """Why a machine cannot serve a configuration.

    Args:
        config: The configuration.
        inventory: The machine.

    Returns:
        The plan's mistakes; nothing where it can.
    """
    try:
        resolve(config, inventory)
    except ConfigError as error:
        return error.mistakes
    except NbaccelError as error:
        return (str(error),)
    return ()


def _clause(mistake: str, name: str) -> str:
    """The first sentence without its subject, which stands above it; the rest is for a message."""
    sentence = mistake.partition(". ")[0].replace("`", "")
    subject, _, rest = sentence.partition(" ")
    return rest if subject.startswith(f"{name}=") else sentence
