"""Settings of Python, torch and NumPy that the notebook has made, for its workers.

    notebook                              worker
    read each row ─► bytes ── Job ──►     what differs from here, and from what came before, is set

The random states, the default dtype of a launch and logging travel beside them. How many threads a
worker computes with is its own matter.
"""

from __future__ import annotations

import decimal
import functools
import locale
import pickle
import sys
import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

from nbaccel.base import torch_private
from nbaccel.base.import_patches import patch_module
from nbaccel.base.log import write_notice
from nbaccel.transfer import pickling


class _Setting(NamedTuple):
    name: str
    """How a user sets it."""
    read: Callable[[], Any]
    """What it is here, as something that can be compared and pickled."""
    write: Callable[[Any], Any]


_DECIMAL_FIELDS = ("prec", "rounding", "Emin", "Emax", "capitals", "clamp")


def _decimal_context() -> dict[str, Any]:
    here = decimal.getcontext()
    traps = [signal for signal, is_trapped in here.traps.items() if is_trapped]
    return {name: getattr(here, name) for name in _DECIMAL_FIELDS} | {"traps": traps}


def _set_decimal_context(fields: dict[str, Any]) -> None:
    decimal.setcontext(decimal.Context(**fields, flags=[]))


_GIVEN_FILTERS: list[Any] = []


def _warning_filters() -> list[Any]:
    """The filters, but for those that make an error of every warning.

    Such a one would end a training at what a library says while a worker imports it.
    """
    return [found for found in warnings.filters if found[:4] != ("error", None, Warning, None)]


def _set_warning_filters(filters: list[Any]) -> None:
    # Those of packages that only this worker has imported are in front, as imports put them.
    known = [*filters, *_GIVEN_FILTERS]
    own = [found for found in warnings.filters if found not in known]
    _GIVEN_FILTERS[:] = filters
    # Clears them, and lets Python forget which warnings have been shown under the old ones.
    warnings.resetwarnings()
    warnings.filters.extend([*own, *filters])  # type: ignore[attr-defined]


def _set_deterministic(modes: tuple[bool, bool]) -> None:
    torch.use_deterministic_algorithms(modes[0], warn_only=modes[1])


@functools.cache
def _take_deprecation_warning() -> None:
    """Have torch say once, unseen, that this name is old, as 2.9 and 2.10 do at its first use."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.get_float32_matmul_precision()


def _matmul_precision() -> str:
    _take_deprecation_warning()
    return torch.get_float32_matmul_precision()


def _safe_globals() -> list[tuple[str, bytes]]:
    """Each pickled, behind the installed package that it is from; "" where it is the user's own."""
    found = []
    for entry in torch.serialization.get_safe_globals():
        holder = entry[0] if isinstance(entry, tuple) else entry
        package = str(getattr(holder, "__module__", "")).partition(".")[0]
        file = getattr(sys.modules.get(package), "__file__", None) or ""
        is_installed = "-packages/" in file
        found.append((package if is_installed else "", pickling.dumps_with_lines(entry)))
    return found


def _add_safe_globals(given: list[tuple[str, bytes]]) -> None:
    for package, pickled in given:

        def add(_: object = None, pickled: bytes = pickled) -> None:
            torch.serialization.add_safe_globals([pickle.loads(pickled)])

        # torchao registers its own at import: a worker need not import it for that.
        if package and package not in sys.modules:
            patch_module(package, add)
        else:
            add()


def _attribute(name: str, holder: Any, attribute: str) -> _Setting:
    return _Setting(
        f"{name}.{attribute}",
        lambda: getattr(holder, attribute),
        lambda value: setattr(holder, attribute, value),
    )


_OF_PYTHON = (
    _Setting("sys.setrecursionlimit", sys.getrecursionlimit, sys.setrecursionlimit),
    _Setting("decimal.setcontext", _decimal_context, _set_decimal_context),
    _Setting("warnings.filters", _warning_filters, _set_warning_filters),
    _Setting(
        "locale.setlocale",
        lambda: locale.setlocale(locale.LC_ALL),
        lambda words: locale.setlocale(locale.LC_ALL, words),
    ),
    _Setting(
        "numpy.set_printoptions",
        np.get_printoptions,
        lambda options: np.set_printoptions(**options),
    ),
    _Setting("numpy.seterr", np.geterr, lambda modes: np.seterr(**modes)),
)
_OF_TORCH = (
    _Setting("torch.set_default_dtype", torch.get_default_dtype, torch.set_default_dtype),
    _Setting("torch.set_grad_enabled", torch.is_grad_enabled, torch.set_grad_enabled),
    _Setting(
        "torch.set_printoptions",
        torch_private.print_options,
        lambda options: torch.set_printoptions(**options),  # type: ignore[no-untyped-call]
    ),
    _Setting("torch.set_warn_always", torch.is_warn_always_enabled, torch.set_warn_always),
    _Setting(
        "torch.use_deterministic_algorithms",
        lambda: (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        ),
        _set_deterministic,
    ),
    _Setting(
        "torch.autograd.set_detect_anomaly",
        lambda: (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
        lambda modes: torch.autograd.set_detect_anomaly(*modes),
    ),
    _Setting(
        "torch.set_float32_matmul_precision",
        _matmul_precision,
        torch.set_float32_matmul_precision,
    ),
    # Beside it: torch answers one of the two only where the other has been used to set it.
    _attribute("torch.backends.cuda.matmul", torch.backends.cuda.matmul, "fp32_precision"),
    *(
        _attribute("torch.backends.cudnn", torch.backends.cudnn, name)
        for name in ("enabled", "benchmark", "deterministic")
    ),
    *(
        _Setting(
            f"torch.backends.cuda.enable_{kind}_sdp",
            getattr(torch.backends.cuda, f"{kind}_sdp_enabled"),
            getattr(torch.backends.cuda, f"enable_{kind}_sdp"),
        )
        for kind in ("flash", "mem_efficient", "math", "cudnn")
        if hasattr(torch.backends.cuda, f"enable_{kind}_sdp")
    ),
    _Setting("torch.serialization.add_safe_globals", _safe_globals, _add_safe_globals),
    _Setting(
        "torch.multiprocessing.set_sharing_strategy",
        torch.multiprocessing.get_sharing_strategy,
        torch.multiprocessing.set_sharing_strategy,
    ),
)
_SETTINGS = (*_OF_PYTHON, *_OF_TORCH)


def _read_all() -> dict[str, Any]:
    settings = {}
    for setting in _SETTINGS:
        # torch refuses to answer where old and new ways to set a precision were mixed, and has no
        # such way before 2.9.
        try:
            settings[setting.name] = setting.read()
        except (RuntimeError, AttributeError):
            continue
    return settings


_FRESH = _read_all()
"""The settings before other packages are imported: workers have them from the template.

What the notebook has left so, stays as packages that only workers import have set it.
"""

_TOLD: dict[str, str] = {}
"""Setting → why it could not be sent, as the user has been told."""


def library_settings() -> bytes:
    """The settings of this process, for :meth:`LibrarySettings.follow`."""
    settings = {}
    device = torch_private.default_device()
    if device is not None:
        # It would move what nbaccel itself makes, and a worker's device is another one.
        _tell_once("torch.set_default_device", f"{device} is not the device of each worker")
    for name, value in _read_all().items():
        # Each by itself: what was the same the last time, a worker leaves as it has it now.
        try:
            settings[name] = pickling.dumps_with_lines(value)
        except Exception as error:  # a formatter or a class of warnings of the user's may raise any
            _tell_once(name, f"it cannot be pickled ({error})")
    return pickle.dumps(settings)


def _tell_once(name: str, why: str) -> None:
    if _TOLD.get(name) != why:
        _TOLD[name] = why
        write_notice(
            f"nbaccel: workers do not have what {name} was given in the notebook: {why}. "
            'Call it in the launched function, or use start_method="fork".\n'
        )


class LibrarySettings:
    """The notebook's settings in one worker."""

    def __init__(self) -> None:
        self._given: Mapping[str, bytes] = {}

    def follow(self, content: bytes) -> None:
        """Set what the notebook has set since the last call; what a worker's cell has set stays."""
        given = pickle.loads(content) if content else self._given
        if given == self._given:
            return
        known = self._given
        self._given = given
        here = _read_all()
        for setting in _SETTINGS:
            name = setting.name
            if name in given and given[name] != known.get(name):
                value = pickle.loads(given[name])
                is_left = name not in known and name in _FRESH and _FRESH[name] == value
                if not is_left and (name not in here or here[name] != value):
                    _write(setting, value)


def _write(setting: _Setting, value: Any) -> None:
    try:
        setting.write(value)
    # Another machine may lack a locale, or have another version of the package.
    except (RuntimeError, ValueError, TypeError, AttributeError, locale.Error) as error:
        sys.stderr.write(
            f"nbaccel: {setting.name} is not as in the notebook, {value!r}: {error}. Set it in the "
            "launched function.\n"
        )
