"""What is called: a function with its arguments, or a script. What cannot work is found first.

Python's TypeError names the launcher or, seconds later, a worker; the user has to know how to write
the call.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
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
_POSITIONAL_KINDS = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


@dataclass(frozen=True, kw_only=True, slots=True)
class Script:
    """A file, a module (``python -m``) or a program (no Python) that is to be run."""

    kind: Literal["file", "module", "program"]
    target: str
    """The file's path, the module's name or the program."""
    arguments: tuple[str, ...] = ()
    """What it finds in ``sys.argv`` after its own name."""


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
    parameters = list(call_signature.parameters.values())
    # Without `self`, which is not the caller's to give.
    public_signature = call_signature.replace(parameters=parameters[is_class:])

    @functools.wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        __tracebackhide__ = True
        # Bound before the call: a TypeError raised inside the launcher is not about its arguments.
        try:
            call_signature.bind(*args, **kwargs)
        except TypeError as error:
            given_args = () if is_class else args
            called_name = owner_name if is_class else function.__name__
            call_mistakes = _unknown_keywords(called_name, public_signature, given_args, kwargs)
            if not call_mistakes and is_class:
                call_form = f"{owner_name}({', '.join(kwargs) or '…'}=…)"
                call_mistakes = [
                    f"{owner_name}() cannot be called: {error}. Name the arguments: {call_form}."
                ]
            elif not call_mistakes:
                has_function = bool(args) or "function" in kwargs
                call_mistakes = [_call_refusal(called_name, error, has_function)]
            raise WrongArguments(*call_mistakes) from None  # the message has Python's text
        return function(*args, **kwargs)

    return checked


def _unknown_keywords(
    function_name: str,
    signature: inspect.Signature,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> list[str]:
    """A message about each keyword that the launcher does not have."""
    function = args[0] if args else kwargs.get("function")
    function_signature = _signature_of(function)
    parameters = {} if function_signature is None else function_signature.parameters
    return [
        f"{function_name}() has no argument {argument_name!r}: got "
        f"{argument_name}={shown(value)}. "
        + _meant_keyword(argument_name, signature, parameters, function)
        for argument_name, value in kwargs.items()
        if argument_name not in signature.parameters
    ]


def _meant_keyword(
    name: str,
    signature: inspect.Signature,
    parameters: Mapping[str, Any],
    function: Any,
) -> str:
    # The most likely mistake first: an argument of the function, passed as to the function itself.
    if name in parameters:
        return (
            f"It is an argument of {_function_name(function)}(): these go into a tuple, "
            f"in their order. Write args=({', '.join(parameters)},)."
        )
    if name in RunConfig.model_fields and "config" in signature.parameters:
        return f"It is a setting of RunConfig. Write config=RunConfig({name}=…)."
    near_names = closest(name, signature.parameters).strip()
    return near_names or f"The arguments are: {', '.join(signature.parameters)}."


def _call_refusal(name: str, error: TypeError, has_function: bool) -> str:
    if not has_function:
        return (
            f"{name}() got no function: each worker calls one. Write "
            f"{name}(train, (model,)), with the function itself and a tuple of its "
            "arguments."
        )
    return (
        f"{name}() cannot be called like this: {error}. Write {name}(train, "
        "(model,), num_processes=2), for example."
    )


def check_call(function: Any, args: Any) -> None:
    """Refuse a call that cannot work, as far as that can be found out without making it."""
    call_mistakes = []
    if not callable(function):
        call_mistakes.append(
            f"function={shown(function)} is not callable: each worker calls it. Pass the "
            "function itself, train, not its result, train()."
        )
    if not isinstance(args, (tuple, list)):
        call_mistakes.append(
            f"args is {_kind_of_value(args)}, not a tuple: it is unpacked into the call. For one "
            "argument write args=(model,), with the comma."
        )
    signature = _signature_of(function)
    if not call_mistakes and signature is not None:
        try:
            signature.bind(*args)
        except TypeError:
            call_mistakes = [_binding_message(_function_name(function), signature, tuple(args))]
    if call_mistakes:
        raise WrongArguments(*call_mistakes)


def _kind_of_value(value: Any) -> str:
    name = type(value).__name__
    return f"{'an' if name[:1].lower() in 'aeiou' else 'a'} {name}"


def _function_name(function: Any) -> str:
    return str(getattr(function, "__name__", type(function).__name__))


def _signature_of(function: Any) -> inspect.Signature | None:
    # A decorator may pass further arguments to the function that it wraps, so its own signature
    # counts, not the wrapped one's.
    try:
        return inspect.signature(function, follow_wrapped=False)
    except (TypeError, ValueError):  # some functions written in C have no signature
        return None


def _binding_message(
    function_name: str, signature: inspect.Signature, args: tuple[Any, ...]
) -> str:
    parameter_list = list(signature.parameters.values())
    taken_parameters = [
        parameter for parameter in parameter_list if parameter.kind in _POSITIONAL_KINDS
    ]
    needed_names = [
        parameter.name for parameter in taken_parameters if parameter.default is parameter.empty
    ]
    missing_names = needed_names[len(args) :]
    only_by_name = [
        parameter.name
        for parameter in parameter_list
        if parameter.kind is parameter.KEYWORD_ONLY and parameter.default is parameter.empty
    ]
    got_text = f"got {shown(args) if args else 'args=()'}"
    if len(missing_names) == 1 and taken_parameters[0].name in _RANK_NAMES:
        other_names = ", ".join(needed_names[1:])
        return (
            f"{function_name}({', '.join(needed_names)}) needs {missing_names[0]}: {got_text}. "
            "mp.spawn passes the rank as the first argument, and this launcher does not: its "
            f"workers have it in the environment. Write def {function_name}({other_names}) with "
            f'{taken_parameters[0].name} = int(os.environ["RANK"]) in it, or launch lambda '
            f"{other_names}: "
            f'{function_name}(int(os.environ["RANK"]){", " if other_names else ""}{other_names}).'
        )
    if missing_names:
        return (
            f"{function_name}() needs {', '.join(missing_names)}: {got_text}. Each worker would "
            f"raise a TypeError. Write args=({', '.join(needed_names)},)."
        )
    if only_by_name:
        given_names = ", ".join(f"{argument_name}=…" for argument_name in only_by_name)
        return (
            f"{function_name}() takes {', '.join(only_by_name)} by name only, and args has values "
            f"without names. Pass functools.partial({function_name}, {given_names}) as the "
            "function."
        )
    taken_names = ", ".join(parameter.name for parameter in taken_parameters)
    return (
        f"{function_name}() takes "
        f"{f'no more than {taken_names}' if taken_names else 'no arguments'}: {got_text}. Each "
        "worker would raise a TypeError. Write "
        f"{f'args=({taken_names},)' if taken_names else 'no args'}."
    )
