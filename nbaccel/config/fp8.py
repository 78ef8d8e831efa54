"""``Fp8Config``: which library computes in 8 bits, and by which recipe.

Names and defaults are Accelerate's (``TERecipeKwargs``, ``MSAMPRecipeKwargs``), so that its
variables can carry them to whatever reads them in a worker.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field, ValidationError

from nbaccel.config.exchange import Plain
from nbaccel.config.mistakes import Hint, explain
from nbaccel.config.plain import number, plain, truth
from nbaccel.errors import ConfigError

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Fp8Config"]

_Number = BeforeValidator(number)
_ANY = "auto"


def _upper(value: Any) -> Any:
    return value.strip().upper() if isinstance(value, str) else value


def _lower(value: Any) -> Any:
    return value.strip().lower() if isinstance(value, str) else value


def _three(value: Any) -> Any:
    if isinstance(value, str):
        value = [part.strip() for part in value.strip("()[] ").split(",")]
    return tuple(value) if isinstance(value, list) else value


class Fp8Config(Plain):
    """How products are computed in 8 bits, where ``mixed_precision="fp8"``.

    All settings are keyword-only; wrong ones raise :class:`~nbaccel.errors.ConfigError`, which
    lists every mistake at once.

    Example:
        >>> Fp8Config(backend="te", margin=1)
        Fp8Config(backend='te', margin=1)
    """

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=False)

    backend: Annotated[
        Literal["auto", "te", "msamp", "ao"],
        Field(description="Library that computes in FP8; auto takes what is installed."),
        BeforeValidator(_lower),
        Hint(
            must="one of auto, te, msamp, ao",
            why="That library replaces the linear layers",
            do='Leave it at "auto" to take what is installed',
            words={"transformerengine": "te", "transformer_engine": "te", "torchao": "ao"},
        ),
    ] = "auto"
    opt_level: Annotated[
        Literal["O1", "O2"],
        Field(
            description="MS-AMP level: O1 keeps weight gradients and their all-reduce in FP8, O2 "
            "also the optimizer's first moment."
        ),
        BeforeValidator(_upper),
        Hint(
            must="one of O1, O2",
            why="It decides what MS-AMP keeps in 8 bits",
            do="Give O2, its default",
        ),
    ] = "O2"
    fp8_format: Annotated[
        Literal["HYBRID", "E4M3", "E5M2"],
        Field(description="8-bit format: HYBRID is E4M3 forward and E5M2 for gradients."),
        BeforeValidator(_upper),
        Hint(
            must="one of HYBRID, E4M3, E5M2",
            why="It divides the bits into exponent and mantissa",
            do="Give HYBRID for training",
        ),
    ] = "HYBRID"
    margin: Annotated[
        int,
        Field(ge=0, description="Headroom of the scaling factor, in powers of two."),
        _Number,
        Hint(
            must="a whole number of at least 0",
            why="Scales are that many powers of two below the largest that fits",
            do="Give 0, the default",
        ),
    ] = 0
    interval: Annotated[
        int,
        Field(ge=1, description="Steps between two computations of the scaling factor."),
        _Number,
        Hint(
            must="a whole number of at least 1",
            why="So many steps go by before scales are computed anew",
            do="Give 1, the default",
        ),
    ] = 1
    amax_history_len: Annotated[
        int,
        Field(ge=1, description="Steps whose largest magnitudes are remembered for the scale."),
        _Number,
        Hint(
            must="a whole number of at least 1",
            why="Scales follow from the largest magnitudes of so many steps",
            do="Give 1024, the default",
        ),
    ] = 1024
    amax_compute_algo: Annotated[
        Literal["max", "most_recent"],
        Field(description="Which of them decides: the largest, or the latest."),
        BeforeValidator(_lower),
        Hint(
            must="one of max, most_recent",
            why="It picks the magnitude that the scale follows",
            do="Give most_recent, the default",
        ),
    ] = "most_recent"
    override_linear_precision: Annotated[
        tuple[bool, bool, bool],
        Field(
            description="Whether the products of forward, input gradient and weight gradient are "
            "computed in higher precision."
        ),
        BeforeValidator(_three),
        Hint(
            must="three truth values",
            why="They stand for forward, input gradient and weight gradient",
            do="Give (False, False, False), the default",
        ),
    ] = (False, False, False)
    use_autocast_during_eval: Annotated[
        bool,
        Field(description="Whether evaluation computes in FP8, too."),
        BeforeValidator(truth),
        Hint(
            must="True or False",
            why="Metrics are usually better without",
            do="Leave it at False",
        ),
    ] = False

    if not TYPE_CHECKING:  # a checker must see the keywords, not **settings

        def __init__(self, **settings: Any) -> None:
            try:
                super().__init__(**{name: plain(value) for name, value in settings.items()})
            except ValidationError as error:
                raise ConfigError(*explain(type(self), error)) from error

    @classmethod
    def read(cls, value: Any) -> Any:
        """Make the settings of what was given for them.

        Args:
            value: Settings, a mapping of them, or the name of a backend.

        Returns:
            The settings, or the value for a validator to refuse.

        Raises:
            ConfigError: A setting in the mapping is wrong.
        """
        if isinstance(value, str):
            return cls(backend=value)  # type: ignore[arg-type]
        return cls(**value) if isinstance(value, Mapping) else value

    def changed(self, **settings: Any) -> Self:
        """A copy with other values, validated like a new one.

        Args:
            **settings: The settings to change.

        Returns:
            The copy.

        Raises:
            ConfigError: The new settings are wrong.
        """
        return type(self)(**{**dict(self), **settings})

    def variables(self) -> dict[str, str]:
        """The environment variables by which Accelerate is told the same.

        Returns:
            Names and values.
        """
        named: dict[str, object] = {
            "OPT_LEVEL": self.opt_level,
            "FORMAT": self.fp8_format,
            "MARGIN": self.margin,
            "INTERVAL": self.interval,
            "AMAX_HISTORY_LEN": self.amax_history_len,
            "AMAX_COMPUTE_ALGO": self.amax_compute_algo,
            "USE_AUTOCAST_DURING_EVAL": self.use_autocast_during_eval,
        }
        passes = ("FPROP", "DGRAD", "WGRAD")
        named |= {
            f"OVERRIDE_{name}": value
            for name, value in zip(passes, self.override_linear_precision, strict=True)
        }
        named |= {} if self.backend == _ANY else {"BACKEND": self.backend.upper()}
        return {f"ACCELERATE_FP8_{name}": str(value) for name, value in named.items()}
