"""What all precisions of 8 bits share: everything but their layers computes in bfloat16."""

from __future__ import annotations

from typing import ClassVar

from torch import nn

from nbaccel.base.log import write_notice
from nbaccel.config import Fp8Config
from nbaccel.plan.contracts.precision import PrecisionSettings
from nbaccel.plan.launch_plan import Choice
from nbaccel.precision.fp8.conversion import LayerSelection
from nbaccel.precision.native import Bf16


class Fp8Precision(Bf16):
    """A precision whose linear layers compute in 8 bits.

    Attributes:
        choices: What was decided while preparing.
    """

    name: ClassVar[str] = "fp8"
    converts_layers: ClassVar[bool] = True

    def __init__(self, settings: PrecisionSettings) -> None:
        super().__init__(settings.device, settings.autocast, settings.scaler)
        self.settings = settings
        self.fp8 = settings.fp8 or Fp8Config()
        self.choices: tuple[Choice, ...] = ()

    @classmethod
    def build(cls, settings: PrecisionSettings) -> Fp8Precision:
        """See :meth:`Precision.build`."""
        return cls(settings)

    def skips_ends(self, by_default: bool) -> bool:
        """Whether first and last layer stay as they are."""
        said = self.fp8.skip_first_and_last
        return by_default if said is None else said

    def tell(self, model: nn.Module, selection: LayerSelection, what: str) -> None:
        """Say on process 0, and in the plan, which layers compute in 8 bits."""
        described = selection.describe()
        self.choices += (Choice(f"fp8 layers of {type(model).__name__}", what, described),)
        # Layers that were asked for and stay out are worth a line; the rest is in the plan.
        if self.settings.is_main and selection.left:
            write_notice(f"nbaccel: {type(model).__name__} in fp8 by {what}: {described}.\n")
