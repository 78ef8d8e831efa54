"""``Fp8Config``: which library computes in 8 bits, and by which recipe.

Names and defaults are Accelerate's (``TERecipeKwargs``, ``MSAMPRecipeKwargs``), but for
``amax_compute_algo="most_recent"``, which Accelerate documents and never passes on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import ConfigDict

from nbaccel.base import env
from nbaccel.base.errors import ConfigError
from nbaccel.config.capabilities import ENTRY_POINT_PROBLEMS, FP8_BACKENDS, words_of_rows
from nbaccel.config.field_rules import Handler, setting
from nbaccel.config.text_forms import Plain

_ANY_BACKEND = "auto"
_BACKEND_NAMES = (_ANY_BACKEND, *(row.name for row in FP8_BACKENDS))
if TYPE_CHECKING:
    BackendName = str  # a type checker cannot see the rows that other packages add
else:
    BackendName = Literal[_BACKEND_NAMES]
_VARIABLE_PREFIX = "ACCELERATE_FP8_"
_PASS_NAMES = ("FPROP", "DGRAD", "WGRAD")


def _upper_case(value: Any) -> Any:
    return value.strip().upper() if isinstance(value, str) else value


def _three_values(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    return [list_part.strip() for list_part in value.strip("()[] ").split(",")]


class Fp8Config(Plain):
    """How products are computed in 8 bits, where ``mixed_precision="fp8"``.

    All settings are keyword-only; wrong ones raise :class:`~nbaccel.base.errors.ConfigError`, which
    lists every mistake at once.

    Examples:
        >>> Fp8Config(backend="te", margin=1)
        Fp8Config(backend='te', margin=1)
    """

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=False)

    backend: BackendName = setting(
        "auto",
        "Library that computes in FP8; auto takes what is installed.",
        words=words_of_rows(FP8_BACKENDS),
        problems=ENTRY_POINT_PROBLEMS,
    )
    recipe: Literal["auto", "delayed", "current", "rowwise", "block", "mxfp8", "nvfp4"] = setting(
        "auto",
        "How scales are found: delayed from earlier steps, current from the tensor "
        "itself, rowwise or by blocks; auto takes the backend's default.",
    )
    opt_level: Literal["O1", "O2"] = setting(
        "O2",
        "MS-AMP level: O1 has weights in FP16 and gradients in FP8, O2 also "
        "moments in FP8 and FP16.",
        read=_upper_case,
    )
    fp8_format: Literal["HYBRID", "E4M3", "E5M2"] = setting(
        "HYBRID", "8-bit format: HYBRID is E4M3 forward and E5M2 for gradients.", read=_upper_case
    )
    margin: int = setting(0, "Headroom of the scaling factor, in powers of two.", ge=0)
    interval: int = setting(1, "Steps between two computations of the scaling factor.", ge=1)
    amax_history_len: int = setting(
        1024, "Steps whose largest magnitudes are remembered for the scale.", ge=1
    )
    amax_compute_algo: Literal["max", "most_recent"] = setting(
        "max", "Which of them decides: the largest, or the latest."
    )
    override_linear_precision: tuple[bool, bool, bool] = setting(
        (False, False, False),
        "Whether the products of forward, input gradient and weight gradient are "
        "computed in higher precision.",
        read=_three_values,
        must="three truth values",
    )
    skip_first_and_last: bool | None = setting(
        None,
        "Whether the first and the last linear layer stay in bfloat16; None: as is "
        "usual with the backend (ao and native leave them).",
    )
    pad_inner_dim: bool = setting(
        True, "Whether torchao pads matrices whose sizes 16 does not divide."
    )
    enable_fsdp_float8_all_gather: bool = setting(
        True, "Whether FSDP gathers weights in FP8, with torchao."
    )
    use_autocast_during_eval: bool = setting(False, "Whether evaluation computes in FP8, too.")

    @classmethod
    def read(cls, value: Any) -> Any:
        """Settings of a mapping or of a backend's name; another value is left to the validator.

        Raises:
            ConfigError: A setting in the mapping is wrong.
        """
        if isinstance(value, str):
            return cls(backend=value)
        return cls(**value) if isinstance(value, Mapping) else value

    def variables(self) -> dict[str, str]:
        """The environment variables by which Accelerate gets the same settings."""
        values: dict[str, object] = {
            _variable_name(name): value
            for name, value in dict(self).items()
            if value is not None and name != "override_linear_precision"
        }
        passes = zip(_PASS_NAMES, self.override_linear_precision, strict=True)
        values |= {f"OVERRIDE_{pass_name}": value for pass_name, value in passes}
        values["USE_MXFP8_BLOCK_SCALING"] = self.recipe == "mxfp8"
        values["BACKEND"] = self.backend.upper()
        # Accelerate has no backend of the name "auto".
        if self.backend == _ANY_BACKEND:
            del values["BACKEND"]
        return {f"{_VARIABLE_PREFIX}{name}": str(value) for name, value in values.items()}

    @classmethod
    def from_environment(cls) -> Fp8Config | None:
        """The settings that :meth:`variables` passed to this process; None where it passed none.

        Raises:
            ConfigError: A variable has a wrong value.
        """
        values = {
            name.removeprefix(_VARIABLE_PREFIX): value
            for name, value in env.snapshot().items()
            if name.startswith(_VARIABLE_PREFIX)
        }
        # Accelerate's name for one of the recipes.
        if values.get("USE_MXFP8_BLOCK_SCALING", "").lower() in ("1", "true", "yes"):
            values.setdefault("RECIPE", "mxfp8")
        keys = {name: _variable_name(name) for name in cls.model_fields}
        settings: dict[str, Any] = {
            name: values[key] for name, key in keys.items() if key in values
        }
        passes = [values.get(f"OVERRIDE_{pass_name}") for pass_name in _PASS_NAMES]
        if any(value is not None for value in passes):
            settings["override_linear_precision"] = tuple(value or "False" for value in passes)
        return cls(**settings) if settings else None


def _variable_name(setting_name: str) -> str:
    """Accelerate's name for a setting, behind the prefix of all."""
    return "FORMAT" if setting_name == "fp8_format" else setting_name.upper()


@dataclass
class Fp8Handler(Handler):
    """What says something of FP8."""

    BACKEND: ClassVar[str] = "auto"

    def __post_init__(self) -> None:
        # Wrong values are told where they are given.
        self.to_config()

    def to_config(self) -> Fp8Config:
        """The settings that it stands for, completed by variables of the environment."""
        said = {name: value for name, value in self.to_dict().items() if value is not None}
        said.pop("config", None)
        said.pop("module_filter_func", None)
        if said.pop("use_mxfp8_block_scaling", False):
            said["recipe"] = "mxfp8"
        if (level := said.pop("optimization_level", None)) is not None:
            if said.get("opt_level", level) != level:
                raise ConfigError(
                    f"opt_level={said['opt_level']!r} and optimization_level={level!r} are two "
                    "names of one setting. Give one of them."
                )
            said["opt_level"] = level
        from_variables = Fp8Config.from_environment()
        if self.BACKEND != "auto" or from_variables is None:
            said.setdefault("backend", self.BACKEND)
        return Fp8Config(**{**(dict(from_variables) if from_variables else {}), **said})


@dataclass
class TERecipeKwargs(Fp8Handler):
    """TransformerEngine and its recipe: settings of :class:`Fp8Config`, by Accelerate's names.

    `use_mxfp8_block_scaling` is its word for ``recipe="mxfp8"``.
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
    """MS-AMP's levels: settings of :class:`Fp8Config`, `opt_level` also by its longer name."""

    BACKEND: ClassVar[str] = "msamp"

    opt_level: str | None = None
    optimization_level: str | None = field(default=None, kw_only=True)
    skip_first_and_last: bool | None = field(default=None, kw_only=True)


@dataclass
class AORecipeKwargs(Fp8Handler):
    """torchao: settings of :class:`Fp8Config`, or of its own.

    Attributes:
        config: A ``torchao.float8.Float8LinearConfig``; it wins over all else.
        module_filter_func: Called with a layer and its name: whether it is converted.
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
    """Settings of :class:`Fp8Config` for any backend; None takes what is installed."""

    BACKEND: ClassVar[str] = "auto"

    backend: str | None = None
    pad_inner_dim: bool | None = field(default=None, kw_only=True)
    enable_fsdp_float8_all_gather: bool | None = field(default=None, kw_only=True)
