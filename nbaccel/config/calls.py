"""Calls that cannot work, found before anything is started: arguments and keywords.

Python's own TypeError names the launcher or, seconds later, a worker; what the user wants to know
is how to write the call.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar

from nbaccel.config.mistakes import closest, shown
from nbaccel.config.run import RunConfig
from nbaccel.errors import ConfigError

__all__ = ["check_call", "explained"]

P = ParamSpec("P")
R = TypeVar("R")

_RANKS = ("rank", "local_rank", "global_rank", "gpu", "gpu_id", "process_index", "proc_id")
"""What the first parameter of a function for `torch.multiprocessing.spawn` is called."""
_SIMPLE = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def explained(function: Callable[P, R]) -> Callable[P, R]:
    """Let a launcher tell of arguments that it does not have how they are meant to be written.

    Args:
        function: The launcher. Its first parameter is the function that it launches.

    Returns:
        The same, but for a `ConfigError` in place of Python's TypeError.
    """
    signature = inspect.signature(function)

    @functools.wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        __tracebackhide__ = True
        try:
            signature.bind(*args, **kwargs)
        except TypeError as error:
            mistakes = _unknown(function.__name__, signature, args, kwargs)
            raise ConfigError(*(mistakes or [_refused(function.__name__, error)])) from None
        return function(*args, **kwargs)

    return checked


def _unknown(
    name: str, signature: inspect.Signature, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> list[str]:
    """What is to be said of each keyword that the launcher does not have."""
    launched = args[0] if args else kwargs.get("function")
    its_own = _parameters(launched)
    return [
        f"{name}() has no argument {word!r}: got {word}={shown(value)}. "
        + _meant(word, signature, its_own, launched)
        for word, value in kwargs.items()
        if word not in signature.parameters
    ]


def _meant(
    word: str, signature: inspect.Signature, its_own: Mapping[str, Any], launched: Any
) -> str:
    if word in its_own:
        return (
            f"It is one of {_name(launched)}()'s own: these go into a tuple, in their order. "
            f"Write args=({', '.join(its_own)},)."
        )
    if word in RunConfig.model_fields and "config" in signature.parameters:
        return f"It is a setting of RunConfig. Write config=RunConfig({word}=…)."
    near = closest(word, signature.parameters).strip()
    return near or f"The arguments are: {', '.join(signature.parameters)}."


def _refused(name: str, error: TypeError) -> str:
    text = str(error)
    if "'function'" in text:
        return (
            f"{name}() got no function: each worker calls one. Write {name}(train, (model,)), "
            "with the function itself and a tuple of its arguments."
        )
    return (
        f"{name}() cannot be called like this: {text}. Write {name}(train, (model,), "
        "num_processes=2), for example."
    )


def check_call(function: Any, args: Any) -> None:
    """Refuse a call that cannot work, as far as that can be told without making it.

    Args:
        function: What each worker is to call.
        args: Its arguments.

    Raises:
        ConfigError: `function(*args)` would raise a TypeError in each worker.
    """
    if mistakes := _argument_mistakes(function, args):
        raise ConfigError(*mistakes)


def _argument_mistakes(function: Any, args: Any) -> list[str]:
    if _are_swapped(function, args):
        return [
            f"function is {_kind(function)} and args is {_name(args)}(): they are swapped. The "
            f"function comes first: write ({_name(args)}, (…,)), with its arguments in a tuple."
        ]
    mistakes = []
    if not callable(function):
        mistakes.append(
            f"function={shown(function)} is not callable: each worker calls it. Pass the function "
            "itself, train, not its result, train()."
        )
    if not isinstance(args, (tuple, list)):
        mistakes.append(
            f"args is {_kind(args)}, not a tuple: it is unpacked into the call. For one "
            "argument write args=(model,), with the comma."
        )
    return mistakes or _unbound(function, tuple(args))


def _are_swapped(function: Any, args: Any) -> bool:
    return inspect.isroutine(args) and not inspect.isroutine(function)


def _kind(value: Any) -> str:
    name = type(value).__name__
    return f"{'an' if name[:1].lower() in 'aeiou' else 'a'} {name}"


def _name(function: Any) -> str:
    return str(getattr(function, "__name__", type(function).__name__))


def _signature(function: Any) -> inspect.Signature | None:
    # A decorator may give arguments of its own to what it wraps: its own signature counts.
    try:
        return inspect.signature(function, follow_wrapped=False)
    except (TypeError, ValueError):  # it is written in C, and has none
        return None


def _parameters(function: Any) -> Mapping[str, inspect.Parameter]:
    signature = _signature(function)
    return signature.parameters if signature is not None else {}


def _unbound(function: Any, args: tuple[Any, ...]) -> list[str]:
    """What is missing in a call, or too many."""
    signature = _signature(function)
    if signature is None:
        return []
    try:
        signature.bind(*args)
    except TypeError:
        return [_told(_name(function), signature, args)]
    return []


def _told(name: str, signature: inspect.Signature, args: tuple[Any, ...]) -> str:
    parameters = list(signature.parameters.values())
    taken = [p for p in parameters if p.kind in _SIMPLE]
    needed = [p.name for p in taken if p.default is p.empty]
    missing = needed[len(args) :]
    only_by_name = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY and p.default is p.empty]
    got = f"got {shown(args) if args else 'args=()'}"
    if len(missing) == 1 and taken[0].name in _RANKS:
        rest = ", ".join(needed[1:])
        return (
            f"{name}({', '.join(needed)}) needs {missing[0]}: {got}. mp.spawn passes the rank as "
            f"the first argument, and this launcher does not: its workers have it in the "
            f"environment. Write def {name}({rest}) with {taken[0].name} = "
            f'int(os.environ["RANK"]) in it, or launch lambda {rest}: '
            f'{name}(int(os.environ["RANK"]){", " if rest else ""}{rest}).'
        )
    if missing:
        return (
            f"{name}() needs {', '.join(missing)}: {got}. Each worker would raise a TypeError. "
            f"Write args=({', '.join(needed)},)."
        )
    if only_by_name:
        given = ", ".join(f"{word}=…" for word in only_by_name)
        return (
            f"{name}() takes {', '.join(only_by_name)} by name only, and args has values without "
            f"names. Pass functools.partial({name}, {given}) as the function."
        )
    takes = ", ".join(p.name for p in taken)
    return (
        f"{name}() takes {f'no more than {takes}' if takes else 'no arguments'}: {got}. Each "
        f"worker would raise a TypeError. Write {f'args=({takes},)' if takes else 'no args'}."
    )
