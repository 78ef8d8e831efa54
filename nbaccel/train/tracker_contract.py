"""What a tracker must be able to do, and values as trackers take them."""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar

from nbaccel.train import arrival

__all__ = ["GeneralTracker", "ServiceTracker", "flattened", "on_main_process", "plain"]


def on_main_process(function: Callable[..., Any]) -> Callable[..., Any]:
    """Let a tracker's method run on process 0 alone; elsewhere the call returns None.

    Args:
        function: Of a `GeneralTracker`. Where its `main_process_only` is False it runs everywhere.

    Returns:
        The method.
    """

    @functools.wraps(function)
    def call(tracker: Any, *args: Any, **kwargs: Any) -> Any:
        everywhere = not getattr(tracker, "main_process_only", True)
        return function(tracker, *args, **kwargs) if everywhere or arrival.rank() == 0 else None

    return call


class GeneralTracker:
    """Base class of all trackers.

    A subclass has the class attributes `name` and `requires_logging_directory` and the property
    `tracker`, and calls ``super().__init__()``.

    Args:
        _blank: A tracker that does nothing, for processes that have none.

    Attributes:
        name: What `log_with` and `get_tracker` call it.
        requires_logging_directory: Whether it writes to a folder.
        main_process_only: Whether only process 0 has one.

    Raises:
        NotImplementedError: The class lacks one of them; it lists which.
    """

    name: ClassVar[str]
    requires_logging_directory: ClassVar[bool]
    main_process_only: bool = True

    def __init__(self, _blank: bool = False) -> None:
        needed = () if _blank else ("name", "requires_logging_directory", "tracker")
        # In the class: asking the instance would run the property before it can answer.
        missing = [name for name in needed if not hasattr(type(self), name)]
        if missing:
            raise NotImplementedError(
                f"The tracker {type(self).__name__} does not define {', '.join(missing)}. It could "
                "be neither named nor started. Define them in its class."
            )

    def start(self) -> None:
        """Begin to track; called once, where the tracker is used."""

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Write the run's configuration.

        Args:
            values: Hyperparameters by name.
        """

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Write numbers.

        Args:
            values: Numbers or texts by name.
            step: Of the training.
            **kwargs: What the tracker itself takes.
        """

    def finish(self) -> None:
        """Write what is left and close; nothing is logged afterwards."""


class ServiceTracker(GeneralTracker):
    """A run of a service.

    Args:
        run_name: The project's name.
        **kwargs: Of what begins a run in the service.
    """

    requires_logging_directory = False

    def __init__(self, run_name: str = "", **kwargs: Any) -> None:
        super().__init__()
        self.run_name = run_name
        self.init_kwargs = kwargs
        self.run: Any = None

    @property
    def tracker(self) -> Any:
        """What the service calls a run; None before `start`."""
        return self.run

    def finish(self) -> None:
        """See :meth:`GeneralTracker.finish`."""
        if self.run is not None:
            self.run.finish()

    def shown(
        self, values: Mapping[str, Any], kinds: tuple[type, ...]
    ) -> Iterator[tuple[str, Any]]:
        """Names and values that the service shows; the others are left out, with a warning.

        Args:
            values: By name; a tensor of one number counts as that number.
            kinds: What the service shows.

        Yields:
            Names and values.
        """
        for name, value in values.items():
            single = plain(value, exact=True) if hasattr(value, "dtype") else value
            if isinstance(single, kinds):
                yield name, single
            else:
                warnings.warn(
                    f"log({name!r}: ...) is left out: {self.name} shows no "
                    f"{type(value).__name__} this way. Use "
                    f"accelerator.get_tracker({self.name!r}, unwrap=True) for the service's own "
                    "methods.",
                    stacklevel=4,
                )


# ------------------------------------------------------------------------- values


def plain(value: Any, *, exact: bool = False) -> Any:
    """A value that JSON can hold: tensors and numpy numbers as Python's, the rest as text.

    Args:
        value: Anything.
        exact: Leave infinite numbers as they are.
    """
    if isinstance(value, Mapping):
        return {str(name): plain(item, exact=exact) for name, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(item, exact=exact) for item in value]
    if hasattr(value, "tolist") and hasattr(value, "dtype"):  # of torch or numpy
        found = value.tolist()
        # One number in an array of any shape counts as that number.
        single = value.item() if math.prod(value.shape) == 1 else found
        return plain(single, exact=exact)
    if isinstance(value, float) and not math.isfinite(value):
        return value if exact else str(value)
    if value is None or type(value) in {bool, int, float, str}:
        return value
    return str(value)


def flattened(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Nested values under names such as ``outer.inner``."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from flattened(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
