"""Settings of FP8 as Accelerate names them: ``Accelerator(kwargs_handlers=[...])``.

Each stands for an `Fp8Config`. None means that nothing was said: then the variables count by which
launchers pass settings on, else the defaults of `Fp8Config`. Both spellings are taken that
guides have.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

from nbaccel.base.errors import ConfigError
from nbaccel.config.fp8 import Fp8Config
from nbaccel.config.settings_base import Handler


@dataclass
class Fp8Handler(Handler):
    """What says something of FP8."""

    BACKEND: ClassVar[str] = "auto"
    _NOT_SETTINGS: ClassVar[tuple[str, ...]] = (
        "config",
        "module_filter_func",
        "optimization_level",
        "use_mxfp8_block_scaling",
    )

    def __post_init__(self) -> None:
        # Wrong values are told where they are given.
        self.to_config()

    def to_config(self) -> Fp8Config:
        """The settings that it stands for, completed by variables of the environment.

        Raises:
            ConfigError: A value is wrong.
        """
        said = {
            name: value
            for name, value in self.to_dict().items()
            if value is not None and name not in self._NOT_SETTINGS
        }
        if self.to_dict().get("use_mxfp8_block_scaling"):
            said["recipe"] = "mxfp8"
        level = self.to_dict().get("optimization_level")
        if level is not None:
            if said.get("opt_level", level) != level:
                raise ConfigError(
                    f"opt_level={said['opt_level']!r} and optimization_level={level!r} are two "
                    "names of one setting, and differ. Give one of them."
                )
            said["opt_level"] = level
        from_variables = Fp8Config.from_environment()
        said.setdefault("backend", self._backend(from_variables))
        return Fp8Config(**{**(dict(from_variables) if from_variables else {}), **said})

    def _backend(self, from_variables: Fp8Config | None) -> str:
        if self.BACKEND == "auto" and from_variables is not None:
            return from_variables.backend
        return self.BACKEND


@dataclass
class TERecipeKwargs(Fp8Handler):
    """TransformerEngine and its recipe.

    Attributes:
        use_autocast_during_eval: Whether evaluation computes in FP8, too.
        margin: Headroom of scales, in powers of two.
        interval: Steps between two computations of scales.
        fp8_format: ``HYBRID`` or ``E4M3``.
        amax_history_len: Steps that are remembered for a scale.
        amax_compute_algo: ``max`` or ``most_recent``.
        override_linear_precision: Whether forward, input gradient and weight gradient are computed
            in higher precision.
        use_mxfp8_block_scaling: ``recipe="mxfp8"``.
        recipe: ``delayed``, ``current``, ``block``, ``mxfp8`` or ``nvfp4``.
        skip_first_and_last: Whether the first and the last linear layer stay in bfloat16.
    """

    BACKEND: ClassVar[str] = "te"

    use_autocast_during_eval: bool | None = None
    margin: int | None = None
    interval: int | None = None
    fp8_format: str | None = None
    amax_history_len: int | None = None
    amax_compute_algo: str | None = None
    override_linear_precision: tuple[bool, bool, bool] | None = None
    use_mxfp8_block_scaling: bool | None = None
    recipe: str | None = field(default=None, kw_only=True)
    skip_first_and_last: bool | None = field(default=None, kw_only=True)


@dataclass
class MSAMPRecipeKwargs(Fp8Handler):
    """MS-AMP's levels.

    Attributes:
        opt_level: ``O1``, ``O2`` (the default) or ``O3``.
        optimization_level: The same, as some guides spell it.
        gradient_reduction: ``two_shot`` (the default) or ``sum``, as in the FP8-LM paper.
        skip_first_and_last: Whether the first and the last linear layer stay in bfloat16.
    """

    BACKEND: ClassVar[str] = "msamp"

    opt_level: str | None = None
    optimization_level: str | None = field(default=None, kw_only=True)
    gradient_reduction: str | None = field(default=None, kw_only=True)
    skip_first_and_last: bool | None = field(default=None, kw_only=True)


@dataclass
class AORecipeKwargs(Fp8Handler):
    """torchao.

    Attributes:
        config: A ``torchao.float8.Float8LinearConfig``; it wins over all else.
        module_filter_func: Called with a layer and its name: whether it is converted.
        pad_inner_dim: Whether matrices are padded whose sizes 16 does not divide.
        enable_fsdp_float8_all_gather: Whether FSDP gathers weights in FP8.
        recipe: ``current`` or ``rowwise``.
        skip_first_and_last: Whether the first and the last linear layer stay in bfloat16.
    """

    BACKEND: ClassVar[str] = "ao"

    config: Any = None
    module_filter_func: Callable[[Any, str], bool] | None = None
    pad_inner_dim: bool | None = None
    enable_fsdp_float8_all_gather: bool | None = None
    recipe: str | None = field(default=None, kw_only=True)
    skip_first_and_last: bool | None = field(default=None, kw_only=True)


@dataclass
class FP8RecipeKwargs(TERecipeKwargs, MSAMPRecipeKwargs):
    """Any backend; see the classes of each.

    Attributes:
        backend: ``te``, ``msamp``, ``ao`` or ``native``; None takes what is installed.
        pad_inner_dim: Whether torchao pads matrices whose sizes 16 does not divide.
        enable_fsdp_float8_all_gather: Whether FSDP gathers weights in FP8, with torchao.
    """

    BACKEND: ClassVar[str] = "auto"

    backend: str | None = None
    pad_inner_dim: bool | None = field(default=None, kw_only=True)
    enable_fsdp_float8_all_gather: bool | None = field(default=None, kw_only=True)
