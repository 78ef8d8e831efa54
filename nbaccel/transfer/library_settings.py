"""Settings of Python, torch, NumPy and loggers that the notebook has made, for its workers.

    notebook                              worker
    read each row ─► bytes ── Job ──►     what differs from here, and from what came before, is set

Handlers of loggers that write to stderr or stdout write to the worker's; those that write to a file
append to the same one, without rotation: ranks would rename each other's files. Handlers of other
kinds stay with the notebook. Of loggers that libraries configure, only levels are carried over.
"""

from __future__ import annotations

import contextlib
import decimal
import functools
import locale
import logging
import os
import pickle
import random
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

from nbaccel.base import torch_private
from nbaccel.base.frames import Frame
from nbaccel.base.log import write_notice
from nbaccel.base.training_libraries import patch_module
from nbaccel.transfer import pickling


def _decimal_context() -> bytes:
    context = decimal.getcontext().copy()
    context.clear_flags()
    return pickle.dumps(context)  # contexts themselves are never equal


_GIVEN_FILTERS: list[Any] = []


def _warning_filters() -> list[Any]:
    """The filters, but for those that make an error of every warning: an import would fail."""
    return [found for found in warnings.filters if found[:4] != ("error", None, Warning, None)]


def _set_warning_filters(filters: list[Any]) -> None:
    # Those of packages that only this worker has imported are in front, as imports put them.
    known = [*filters, *_GIVEN_FILTERS]
    own = [found for found in warnings.filters if found not in known]
    _GIVEN_FILTERS[:] = filters
    # Clears them, and lets Python forget which warnings have been shown under the old ones.
    warnings.resetwarnings()
    warnings.filters.extend([*own, *filters])  # type: ignore[attr-defined]


@functools.cache  # torch keeps them all, too
def _pickled_global(entry: Any) -> tuple[str, bytes]:
    """It, behind the installed package that it is from; "" where it is the user's own."""
    holder = entry[0] if isinstance(entry, tuple) else entry
    package = str(getattr(holder, "__module__", "")).partition(".")[0]
    file = getattr(sys.modules.get(package), "__file__", None) or ""
    return package if "-packages/" in file else "", pickling.dumps_with_lines(entry)


def _add_safe_globals(given: list[tuple[str, bytes]]) -> None:
    for package, pickled in given:

        def add(_: object = None, pickled: bytes = pickled) -> None:
            torch.serialization.add_safe_globals([pickle.loads(pickled)])

        # torchao registers its own at import: a worker need not import it for that.
        if package and package not in sys.modules:
            patch_module(package, add)
        else:
            add()


# RuntimeError: it was set in torch's old and new way; see `_read_all`.
with contextlib.suppress(RuntimeError), warnings.catch_warnings():
    warnings.simplefilter("ignore")
    # Its first use: torch 2.9 and 2.10 say then, once, that the name is old.
    torch.get_float32_matmul_precision()

_ATTRIBUTES = (
    # Beside `set_float32_matmul_precision`: torch answers only for the one that has set it.
    "torch.backends.cuda.matmul.fp32_precision",
    "torch.backends.cudnn.enabled",
    "torch.backends.cudnn.benchmark",
    "torch.backends.cudnn.deterministic",
)
_SETTERS: dict[str, Callable[[Any], object]] = {
    "decimal.setcontext": lambda pickled: decimal.setcontext(pickle.loads(pickled)),
    "warnings.filters": _set_warning_filters,
    "locale.setlocale": functools.partial(locale.setlocale, locale.LC_ALL),
    "torch.serialization.add_safe_globals": _add_safe_globals,
}
"""Of settings that the function of their name does not take as they are read."""


def _at(name: str) -> Any:
    package, *path = name.split(".")
    return functools.reduce(getattr, path, sys.modules[package])


_SETTINGS: dict[str, Callable[[], Any]] = {
    "sys.setrecursionlimit": sys.getrecursionlimit,
    "decimal.setcontext": _decimal_context,
    "warnings.filters": _warning_filters,
    "locale.setlocale": functools.partial(locale.setlocale, locale.LC_ALL),
    "numpy.set_printoptions": np.get_printoptions,
    "numpy.seterr": np.geterr,
    "torch.set_default_dtype": torch.get_default_dtype,
    "torch.set_grad_enabled": torch.is_grad_enabled,
    "torch.set_printoptions": torch_private.print_options,
    "torch.set_warn_always": torch.is_warn_always_enabled,
    "torch.use_deterministic_algorithms": lambda: {
        "mode": torch.are_deterministic_algorithms_enabled(),
        "warn_only": torch.is_deterministic_algorithms_warn_only_enabled(),
    },
    "torch.autograd.set_detect_anomaly": lambda: {
        "mode": torch.is_anomaly_enabled(),
        "check_nan": torch.is_anomaly_check_nan_enabled(),
    },
    "torch.set_float32_matmul_precision": torch.get_float32_matmul_precision,
    **{name: functools.partial(_at, name) for name in _ATTRIBUTES},
    "torch.serialization.add_safe_globals": lambda: [
        _pickled_global(entry) for entry in torch.serialization.get_safe_globals()
    ],
    "torch.multiprocessing.set_sharing_strategy": torch.multiprocessing.get_sharing_strategy,
    **{
        f"torch.backends.cuda.enable_{kind}_sdp": _at(f"torch.backends.cuda.{kind}_sdp_enabled")
        for kind in ("flash", "mem_efficient", "math", "cudnn")
    },
}
"""What reads each setting; the function of its name sets it, given a dict by keywords."""


def _read_all() -> dict[str, Any]:
    settings = {}
    for name, read in _SETTINGS.items():
        try:
            settings[name] = read()
        # torch refuses where old and new ways to set a precision were mixed.
        except (RuntimeError, AttributeError):
            continue
    return settings


_FRESH = _read_all()
"""The settings before other packages are imported. What the notebook has left so, stays as packages
that only workers import have set it."""

_LOGGING = "logging"
_TOLD: dict[str, str] = {}  # setting → why it could not be sent, as the user has been told
_PICKLED: dict[str, tuple[Any, bytes]] = {}  # setting → its last value, and that pickled


def logging_only() -> bytes:
    """What a fork of this process has to be told, which has all the other settings."""
    return pickle.dumps({_LOGGING: _logging_settings()})


def library_settings() -> bytes:
    """The settings of this process, for :meth:`LibrarySettings.follow`."""
    settings = {_LOGGING: _logging_settings()}
    device = torch_private.default_device()
    if device is not None:
        # It would move what nbaccel itself makes, and a worker's device is another one.
        _tell_once("torch.set_default_device", f"{device} is not the device of each worker")
    for name, value in _read_all().items():
        # Each by itself: what was the same the last time, a worker leaves as it has it now.
        try:
            if name not in _PICKLED or _PICKLED[name][0] != value:
                _PICKLED[name] = (value, pickling.dumps_with_lines(value))
            settings[name] = _PICKLED[name][1]
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
        self._given: Mapping[str, bytes] = {_LOGGING: pickle.dumps((0, {}))}

    def follow(self, content: bytes) -> None:
        """Set what the notebook has set since the last call; what a worker's cell has set stays."""
        given = pickle.loads(content)
        if given == self._given:
            return
        known, self._given = self._given, given
        if given[_LOGGING] != known[_LOGGING]:
            _, settings_before = pickle.loads(known[_LOGGING])
            logging.root.manager.disable, settings = pickle.loads(given[_LOGGING])
            for logger_name in settings_before.keys() | settings.keys():
                _configure(logging.getLogger(logger_name), settings.get(logger_name, _UNSET))
        here = _read_all()
        for name in _SETTINGS:
            if name in given and given[name] != known.get(name):
                value = pickle.loads(given[name])
                is_left = name not in known and name in _FRESH and _FRESH[name] == value
                if not is_left and (name not in here or here[name] != value):
                    _write(name, value)


def _write(name: str, value: Any) -> None:
    try:
        if name in _ATTRIBUTES:
            holder, _, attribute = name.rpartition(".")
            setattr(_at(holder), attribute, value)
        elif isinstance(value, dict):
            _at(name)(**value)
        else:
            (_SETTERS.get(name) or _at(name))(value)
    # Another machine may lack a locale, or have another version of the package.
    except (RuntimeError, ValueError, TypeError, AttributeError, locale.Error) as error:
        sys.stderr.write(
            f"nbaccel: {name} is not as in the notebook, {value!r}: {error}. Set it in the "
            "launched function.\n"
        )


_HandlerSettings = tuple[str, str | None, int, bytes]
"""A handler's stream or file, encoding and level; formatter and filters, where they pickle."""
_LoggerSettings = tuple[int, bool, bool, tuple[_HandlerSettings, ...]]
"""A logger's level, whether it propagates and is disabled, and its handlers."""
_UNSET: _LoggerSettings = (logging.NOTSET, True, False, ())
_STREAMS = ("stderr", "stdout")
_OF_LIBRARIES: dict[str, logging.Logger] = {}  # loggers that are known to be
_NAMED_OTHERWISE = ("IPKernelApp", "strobelight_", "c10d-")  # Jupyter's and torch's, by their start


def _logging_settings() -> bytes:
    carried: dict[str | None, _LoggerSettings] = {None: _describe(logging.root)}
    loggers = logging.root.manager.loggerDict
    for name in loggers.keys() - _OF_LIBRARIES.keys():
        logger = loggers[name]
        if not isinstance(logger, logging.Logger):
            continue  # a name on the way to others
        if name.startswith(_NAMED_OTHERWISE) or _is_librarys(name):
            _OF_LIBRARIES[name] = logger
        elif logger.level or logger.handlers or logger.disabled or not logger.propagate:
            carried[name] = _describe(logger)
    # Libraries make hundreds, most of which nobody has configured.
    for name, logger in tuple(_OF_LIBRARIES.items()):
        if logger.level:
            carried[name] = (logger.level, *_UNSET[1:])
    return pickle.dumps((logging.root.manager.disable, carried))


def _describe(logger: logging.Logger) -> _LoggerSettings:
    return logger.level, logger.propagate, logger.disabled, tuple(_handler_settings(logger))


def _is_librarys(name: str) -> bool:
    """Whether a logger has the name of an installed package that is in use."""
    package = name.partition(".")[0]
    module = sys.modules.get(package) or sys.modules.get(package.lower())
    file = package != "__main__" and getattr(module, "__file__", None)
    return bool(file and Frame(file=str(file), line=0, function="").is_library)


def _handler_settings(logger: logging.Logger) -> Iterator[_HandlerSettings]:
    for handler in filter(_is_notebook_handler, logger.handlers):
        if isinstance(handler, logging.FileHandler):
            target = handler.baseFilename
            _append_only(handler)
        else:
            target = _stream_of(handler)
        parts = b""
        if target and (handler.formatter is not None or handler.filters):
            with contextlib.suppress(Exception):  # the user's own class may raise anything
                parts = pickling.dumps_with_lines((handler.formatter, handler.filters))
        if target:
            yield target, getattr(handler, "encoding", None), handler.level, parts


def _is_notebook_handler(handler: logging.Handler) -> bool:
    """Whether it is of a kind that workers are given."""
    return isinstance(handler, logging.FileHandler) or type(handler) is logging.StreamHandler


def _stream_of(handler: Any) -> str:
    """Which stream of this process a handler writes to; empty if none of them."""
    streams = ((name, (getattr(sys, name), getattr(sys, f"__{name}__"))) for name in _STREAMS)
    return next((name for name, ours in streams if handler.stream in ours), "")


def _append_only(handler: Any) -> None:
    """Let the notebook write behind what the workers will have written, not over it."""
    import fcntl  # Windows has none, where nbaccel can be imported, too

    # The stream is not open, or has no descriptor.
    with contextlib.suppress(OSError, ValueError, AttributeError):
        flags = fcntl.fcntl(handler.stream.fileno(), fcntl.F_GETFL)
        fcntl.fcntl(handler.stream.fileno(), fcntl.F_SETFL, flags | os.O_APPEND)


def _handler_from(target: str, encoding: str | None, level: int, parts: bytes) -> logging.Handler:
    handler: logging.Handler
    if target in _STREAMS:
        handler = logging.StreamHandler(getattr(sys, target))
    else:
        # delay: a worker that logs nothing must not create or touch the file.
        handler = logging.FileHandler(target, "a", encoding, delay=True)
    handler.setLevel(level)
    # Their classes cannot be imported here, or there are none: it works without them.
    with contextlib.suppress(Exception):
        handler.formatter, handler.filters = pickle.loads(parts)
    handler.is_nbaccels = True  # type: ignore[union-attr]
    return handler


def _configure(logger: logging.Logger, wanted: _LoggerSettings) -> None:
    level, propagate, disabled, handlers = wanted
    # A copy, because the loop removes handlers.
    for handler in tuple(logger.handlers):
        # A fork has the notebook's handlers already: without this, each line would be logged twice.
        if getattr(handler, "is_nbaccels", False) or (handlers and _is_notebook_handler(handler)):
            logger.removeHandler(handler)
    logger.setLevel(level)
    # A logger that a library has configured here keeps its own handlers and propagation.
    if handlers or not logger.handlers:
        logger.propagate = propagate
        logger.disabled = disabled
    for settings in handlers:
        logger.addHandler(_handler_from(*settings))


def seeded_states() -> bytes:
    """State of the random generators of Python, torch and NumPy."""
    # As an array: torch pickles its tensors in another, slower way.
    torch_state = torch.get_rng_state().numpy()
    return pickle.dumps((random.getstate(), torch_state, np.random.get_state()))


def restore_random_states(states: bytes) -> None:
    """Let this worker draw the numbers that a fork of the notebook would draw."""
    python_state, torch_state, numpy_state = pickle.loads(states)
    random.setstate(python_state)
    torch.set_rng_state(torch.from_numpy(torch_state))
    np.random.set_state(numpy_state)
