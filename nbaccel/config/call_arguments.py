"""What is called: a function with its arguments, or a script. What cannot work is found first."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, ParamSpec, TypeVar

from nbaccel.base.errors import WrongArguments
from nbaccel.config.given_values import closest, shown
from nbaccel.config.run_config import RunConfig

P = ParamSpec("P")
R = TypeVar("R")

_RANK_NAMES = ("rank", "local_rank", "global_rank", "gpu", "gpu_id", "process_index", "proc_id")
"""Usual names of the first parameter of a function for `torch.multiprocessing.spawn`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Script:
    """A file, a module (``python -m``) or a program (no Python) that is to be run."""

    kind: Literal["file", "module", "program"]
    target: str  # The file's path, the module's name or the program
    arguments: tuple[str, ...] = ()  # What it finds in ``sys.argv`` after its own name


def call_title(function: Any, args: tuple[Any, ...]) -> str:
    """What a call runs, in a word: the function, or the script that it is to run."""
    if args and isinstance(args[0], Script):
        return Path(args[0].target).name
    name = getattr(function, "__qualname__", type(function).__name__)
    return str(name).rpartition("<locals>.")[2]


def explained(function: Callable[P, R]) -> Callable[P, R]:
    """Let a launcher, or a class, explain how arguments that it does not have should be written."""
    call_signature = inspect.signature(function)
    owner_name, _, name = function.__qualname__.rpartition(".")
    is_class = name == "__init__"
    called_name = owner_name if is_class else name
    # Without `self`, which is not the caller's to give.
    known_names = tuple(call_signature.parameters)[is_class:]
    example = "mixed_precision=…" if is_class else "train, (model,), num_processes=2"

    @functools.wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        __tracebackhide__ = True
        # Bound before the call: a TypeError raised inside the launcher is not about its arguments.
        try:
            call_signature.bind(*args, **kwargs)
        except TypeError as error:
            launched = None if is_class else kwargs.get("function", args[0] if args else None)
            call_mistakes = [
                f"{called_name}() has no argument {word!r}: got {word}={shown(value)}. "
                f"{_meant_keyword(word, known_names, launched)}"
                for word, value in kwargs.items()
                if word not in known_names
            ]
            call_mistakes = call_mistakes or [
                f"{called_name}() cannot be called: {error}. Write {called_name}({example})."
            ]
            raise WrongArguments(*call_mistakes) from None  # the message has Python's text
        return function(*args, **kwargs)

    return checked


def _meant_keyword(name: str, known_names: tuple[str, ...], function: Any) -> str:
    # The most likely mistake first: an argument of the function, passed as to the function itself.
    signature = _signature_of(function)
    if signature is not None and name in signature.parameters:
        return (
            f"It is an argument of {_function_name(function)}(): these go into a tuple, in their "
            f"order. Write args=({', '.join(signature.parameters)},)."
        )
    if name in RunConfig.model_fields and "config" in known_names:
        return f"It is a setting of RunConfig. Write config=RunConfig({name}=…)."
    return closest(name, known_names).strip() or f"The arguments are: {', '.join(known_names)}."


def check_call(function: Any, args: Any) -> None:
    """Refuse a call that cannot work, as far as that can be found out without making it."""
    call_mistakes = []
    if not callable(function):
        call_mistakes.append(
            f"function={shown(function)} is not callable: each worker calls it. Pass train itself."
        )
    if not isinstance(args, (tuple, list)):
        call_mistakes.append(
            f"args={shown(args)} is no tuple. For one argument write args=(model,)."
        )
    signature = _signature_of(function)
    if not call_mistakes and signature is not None:
        try:
            signature.bind(*args)
        except TypeError as error:
            call_mistakes = [_binding_message(_function_name(function), signature, args, error)]
    if call_mistakes:
        raise WrongArguments(*call_mistakes)


def _function_name(function: Any) -> str:
    return str(getattr(function, "__name__", type(function).__name__))


def _signature_of(function: Any) -> inspect.Signature | None:
    # A decorator may pass further arguments to the function that it wraps.
    try:
        return inspect.signature(function, follow_wrapped=False)
    except (TypeError, ValueError):  # some functions written in C have no signature
        return None


def _binding_message(name: str, signature: inspect.Signature, args: Any, error: TypeError) -> str:
    first, *others = signature.parameters or ("",)
    text = (
        f"{name}{signature} cannot be called with args={shown(tuple(args))}: {error}. Each worker "
        "would raise that. "
    )
    if first in _RANK_NAMES and len(args) == len(others):
        return (
            f"{text}mp.spawn passes the rank as the first argument, and this launcher does not. "
            f'Leave {first} out, and write {first} = int(os.environ["RANK"]) there.'
        )
    return (
        f"{text}Give args as many values as it takes; what goes by its name alone by "
        f"functools.partial({name}, name=…)."
    )
