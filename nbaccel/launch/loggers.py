"""Logging as the notebook configured it, in the workers.

    notebook: levels, propagation, handlers ─► bytes ─► worker: the same, on its own streams

Handlers that write to stderr or stdout write to the worker's; those that write to a file append to
the same one, from all ranks. Rotating files are appended to without rotation: two processes would
tear each other's files away. What else handlers do stays with the notebook.

A library that configures its own logger does so again when a worker imports it: of those only the
levels are carried over.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import cloudpickle

from nbaccel.frames import Frame

__all__ = ["Logging", "as_configured"]

_STDERR, _STDOUT = "stderr", "stdout"


@dataclass(frozen=True, kw_only=True, slots=True)
class _Handler:
    """A handler, without what belongs to one process."""

    stream: str
    """`stderr` or `stdout`; empty for a file."""
    file: str
    encoding: str | None
    level: int
    formatter: bytes
    filters: bytes

    def made(self) -> logging.Handler:
        """The same in this process."""
        handler: logging.Handler = (
            logging.StreamHandler(getattr(sys, self.stream))
            if self.stream
            else logging.FileHandler(self.file, "a", self.encoding, delay=True)
        )
        handler.setLevel(self.level)
        handler.setFormatter(_opened(self.formatter))
        for item in _opened(self.filters) or ():
            handler.addFilter(item)
        handler._nbaccel = True  # type: ignore[attr-defined]
        return handler


@dataclass(frozen=True, kw_only=True, slots=True)
class _Logger:
    """What was set at one logger."""

    level: int
    propagate: bool = True
    disabled: bool = False
    handlers: tuple[_Handler, ...] = ()


_AS_MADE = _Logger(level=logging.NOTSET)


def as_configured() -> bytes:
    """How logging is configured in this process."""
    names: list[str | None] = [None, *list(logging.root.manager.loggerDict)]
    found = {name: _described(name) for name in names if _is_logger(name)}
    kept = {name: one for name, one in found.items() if name is None or one != _AS_MADE}
    return pickle.dumps((logging.root.manager.disable, kept))


def _is_logger(name: str | None) -> bool:
    return name is None or isinstance(logging.root.manager.loggerDict[name], logging.Logger)


def _described(name: str | None) -> _Logger:
    logger = logging.getLogger(name)
    if name is not None and _is_librarys(name):
        return _Logger(level=logger.level)
    return _Logger(
        level=logger.level,
        propagate=logger.propagate,
        disabled=logger.disabled,
        handlers=tuple(_handlers(logger)),
    )


def _is_librarys(name: str) -> bool:
    """Whether a logger is called like an installed package that is in use."""
    top = name.partition(".")[0]
    module = sys.modules.get(top) or sys.modules.get(top.lower())
    file = getattr(module, "__file__", None) or ""
    return top != "__main__" and file != "" and Frame(file=file, line=0, function="").is_library


def _handlers(logger: logging.Logger) -> Iterator[_Handler]:
    for handler in logger.handlers:
        if not _is_carried(handler):
            continue
        file = getattr(handler, "baseFilename", "")
        if file:
            _append_only(handler)
        yield _Handler(
            stream="" if file else _stream_of(handler),
            file=file,
            encoding=getattr(handler, "encoding", None),
            level=handler.level,
            formatter=_packed(handler.formatter),
            filters=_packed(handler.filters),
        )


def _is_carried(handler: logging.Handler) -> bool:
    if isinstance(handler, logging.FileHandler):
        return True
    return type(handler) is logging.StreamHandler and bool(_stream_of(handler))


def _stream_of(handler: Any) -> str:
    """Which stream of this process a handler writes to; empty if none of them."""
    stream = getattr(handler, "stream", None)
    for name in (_STDERR, _STDOUT):
        if stream is not None and stream in (getattr(sys, name), getattr(sys, f"__{name}__")):
            return name
    return ""


def _append_only(handler: Any) -> None:
    """Let what the notebook writes later go behind what the workers will have written."""
    import fcntl  # Windows has none, where nbaccel can be imported, too

    stream = getattr(handler, "stream", None)
    if stream is not None:
        with contextlib.suppress(OSError, ValueError):  # it is closed, or no file of the system
            flags = fcntl.fcntl(stream.fileno(), fcntl.F_GETFL)
            fcntl.fcntl(stream.fileno(), fcntl.F_SETFL, flags | os.O_APPEND)


def _packed(value: Any) -> bytes:
    try:
        packed: bytes = cloudpickle.dumps(value)
    except Exception:  # the user's own class may raise anything: the handler does without it
        return b""
    return packed


def _opened(value: bytes) -> Any:
    try:
        return pickle.loads(value) if value else None
    except Exception:  # its class cannot be had here
        return None


class Logging:
    """The notebook's logging in one worker."""

    def __init__(self) -> None:
        self._given = b""
        self._names: set[str | None] = set()

    def follow(self, given: bytes) -> None:
        """Configure this process as the notebook is, unless that has not changed since.

        Args:
            given: What `as_configured` said there.
        """
        if given == self._given:
            return
        self._given = given
        logging.root.manager.disable, wanted = pickle.loads(given)
        for name in self._names - wanted.keys():
            _configure(logging.getLogger(name), _AS_MADE)
        for name, one in wanted.items():
            _configure(logging.getLogger(name), one)
        self._names = set(wanted)


def _configure(logger: logging.Logger, wanted: _Logger) -> None:
    for handler in tuple(logger.handlers):
        # In a fork, handlers of the notebook's streams and files are there.
        if getattr(handler, "_nbaccel", False) or (wanted.handlers and _is_the_notebooks(handler)):
            logger.removeHandler(handler)
    logger.setLevel(wanted.level)
    if wanted.handlers or not logger.handlers:
        logger.propagate, logger.disabled = wanted.propagate, wanted.disabled
    for one in wanted.handlers:
        logger.addHandler(one.made())


def _is_the_notebooks(handler: logging.Handler) -> bool:
    return isinstance(handler, logging.FileHandler) or type(handler) is logging.StreamHandler
