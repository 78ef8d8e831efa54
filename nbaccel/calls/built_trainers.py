"""Calls of a Lightning `Trainer` of the notebook, found in a function before workers start.

Found is what the function's own code names: `trainer.fit(...)`, where `trainer` is a global, a
closure variable or an argument, or is reached from one by attributes (`self.trainer.fit(...)`).
Merely having a trainer within reach is no mistake: a model holds the one that trained it.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import inspect
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from nbaccel.base.errors import ConfigError
from nbaccel.base.lightning_library import TRAINER_ENTRIES, is_trainer, trainer_refusal
from nbaccel.plan import Plan

__all__ = ["refuse_built_trainers"]

_ATTRIBUTE_STEPS = ("LOAD_ATTR", "LOAD_METHOD")
_NO_STEPS = ("PUSH_NULL", "EXTENDED_ARG", "CACHE", "NOP", "PRECALL", "COPY_FREE_VARS")
"""Instructions that come between a name and its attributes, depending on Python's version."""


def refuse_built_trainers(plan: Plan, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """Refuse a function that would call a Lightning `Trainer` from the notebook in workers.

    Args:
        plan: What was planned. A single worker is as alone as the notebook, and may.
        function: What each worker is to call.
        args: Its arguments.

    Raises:
        ConfigError: It would train alone in each worker, or hang.
    """
    if plan.world_size < 2:
        return
    for trainer, path, name in _called_trainers(function, args):
        raise ConfigError(trainer_refusal(trainer, path, name, plan.num_processes))


def _called_trainers(
    function: Callable[..., Any], args: tuple[Any, ...]
) -> Iterator[tuple[Any, str, str]]:
    """Trainers whose methods are called: each with its path, and the method's name."""
    called: Any = function
    while isinstance(called, functools.partial):
        args = (*called.args, *args)
        called = called.func
    if isinstance(called, types.MethodType):
        if is_trainer(called.__self__) and called.__name__ in TRAINER_ENTRIES:
            yield called.__self__, "trainer", called.__name__
            return
        args = (called.__self__, *args)
        called = called.__func__
    if not isinstance(called, types.FunctionType):
        return
    outer_values = _outer_values(called, args)
    for code_object in _code_objects(called.__code__):
        for name_steps in _dotted_names(code_object):
            *trainer_steps, entry_name = name_steps
            if entry_name in TRAINER_ENTRIES and trainer_steps:
                value = _value_at(outer_values, trainer_steps)
                if is_trainer(value):
                    yield value, ".".join(trainer_steps), entry_name


def _outer_values(function: types.FunctionType, args: tuple[Any, ...]) -> Mapping[str, Any]:
    """What names of the function's body stand for: globals, closure variables, arguments."""
    values = dict(function.__globals__)
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
        # An empty closure cell raises ValueError: the variable has no value yet.
        with contextlib.suppress(ValueError):
            values[name] = cell.cell_contents
    code = function.__code__
    # Local variables hide globals of the same name, and get their values in the worker.
    for name in (*code.co_varnames, *code.co_cellvars):
        values.pop(name, None)
    with contextlib.suppress(TypeError, ValueError):  # has been refused, or has no signature
        call_signature = inspect.signature(function, follow_wrapped=False)
        values.update(call_signature.bind(*args).arguments)
    return values


def _code_objects(code_object: types.CodeType) -> Iterator[types.CodeType]:
    yield code_object
    for code_constant in code_object.co_consts:
        if isinstance(code_constant, types.CodeType):
            yield from _code_objects(code_constant)


def _dotted_names(code_object: types.CodeType) -> Iterator[list[str]]:
    """Names with their attributes, as in `self.trainer.fit`, unless the code binds the name."""
    instructions = list(dis.get_instructions(code_object))
    bound_names: set[str] = set()
    for instruction in instructions:
        if instruction.opname.startswith(("STORE_FAST", "STORE_DEREF")):
            bound_names.update(_variables_of(instruction)[:1])
    name_steps: list[str] = []
    for instruction in instructions:
        if instruction.opname in _ATTRIBUTE_STEPS:
            if name_steps:
                name_steps = [*name_steps, instruction.argval]
                yield name_steps
        elif "LOAD_" in instruction.opname and instruction.opname != "LOAD_CONST":
            # The last one is on top of the stack: attributes are taken of it.
            variable_names = _variables_of(instruction)[-1:]
            name_steps = [] if bound_names.issuperset(variable_names) else variable_names
        elif instruction.opname not in _NO_STEPS:
            name_steps = []


def _variables_of(instruction: dis.Instruction) -> list[str]:
    """One, or two: Python 3.13 stores or loads two variables with one instruction."""
    names = instruction.argval if isinstance(instruction.argval, tuple) else (instruction.argval,)
    return [variable_name for variable_name in names if isinstance(variable_name, str)]


def _value_at(outer_values: Mapping[str, Any], name_steps: list[str]) -> Any:
    first_name, *attribute_names = name_steps
    value = outer_values.get(first_name)
    for attribute_name in attribute_names:
        # Not `getattr`, which may run code of the user's: properties, `__getattr__`.
        try:
            value = inspect.getattr_static(value, attribute_name)
        except AttributeError:
            return None
    return value
