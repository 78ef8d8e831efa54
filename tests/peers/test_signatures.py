"""Every public callable takes Accelerate's arguments: names, order and defaults.

What differs is a row of `DIFFERENT`, with the reason. Arguments of our own come after theirs, or by
keyword only.
"""

from __future__ import annotations

import enum
import importlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests import needs

accelerate = pytest.importorskip("accelerate")

MODULES = (
    *("", "big_modeling", "data_loader", "hooks", "launchers", "local_sgd", "logging"),
    *("optimizer", "scheduler", "state", "tracking", "utils", "utils.modeling", "utils.offload"),
)
NO_NAME = "a run may go without a name"

DIFFERENT = {
    "DistributedDataParallelKwargs.to_dict(ignore_keys)": "which fields theirs leaves out",
    "InitProcessGroupKwargs(backend)": "None is what fits the device; nccl fails on CPUs",
    "notebook_launcher(use_port)": "None is a free port; 29500 can be taken",
    "skip_first_batches(num_batches)": "None is where the loaded state was",
    "Accelerator.skip_first_batches(num_batches)": "None is where the loaded state was",
    "Accelerator(split_batches)": "None is what nobody gave; theirs is an object without a name",
    "Accelerator(gradient_accumulation_steps)": "None takes what the launcher was asked for",
    "Accelerator.init_trackers(project_name)": "theirs has *args of a decorator",
    "Accelerator.log(values)": "theirs has *args of a decorator",
    "GradientAccumulationPlugin(adjust_scheduler)": "None tells that nobody wrote it",
    "recursively_apply(test_type)": "their function, and ours of the same name",
    "ClearMLTracker(run_name)": NO_NAME,
    "CometMLTracker(run_name)": NO_NAME,
    "SwanLabTracker(run_name)": NO_NAME,
    "TrackioTracker(run_name)": NO_NAME,
    "WandBTracker(run_name)": NO_NAME,
    "SeedableRandomSampler(data_source)": "theirs has *args for torch's sampler, which needs it",
    "MultiProcessAdapter.warning_once(msg)": "theirs has *args for `warning`, which needs it",
}
NOT_FOR_USERS = {"AcceleratorState": "its arguments are the Accelerator's own affair"}
POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def parameters(function: Callable[..., Any]) -> dict[str, inspect.Parameter] | None:
    try:
        found = dict(inspect.signature(function).parameters)
    except (ValueError, TypeError):  # of a class in C
        return None
    found.pop("self", None)
    return found


def differences(theirs: Callable[..., Any], ours: Callable[..., Any]) -> Iterator[str]:
    wanted, had = parameters(theirs), parameters(ours)
    if wanted is None or had is None:
        return
    for name, parameter in wanted.items():
        if parameter.kind in VARIADIC:
            continue
        if name not in had or not same_default(parameter.default, had[name].default):
            yield name
    order = [name for name, one in wanted.items() if one.kind in POSITIONAL and name in had]
    own = [name for name, one in had.items() if one.kind in POSITIONAL]
    if own[: len(order)] != order:
        yield "order"
    more = [one for name, one in had.items() if name not in wanted and one.kind not in VARIADIC]
    yield from (one.name for one in more if one.default is inspect.Parameter.empty)


def same_default(one: Any, other: Any) -> bool:
    if isinstance(one, enum.Enum) and isinstance(other, enum.Enum):
        return bool(one.value == other.value)
    return bool(one == other) or repr(one) == repr(other)


def pairs(module: str) -> Iterator[tuple[str, Callable[..., Any], Callable[..., Any]]]:
    """Their public callables that are ours, too, and the methods of classes among them."""
    theirs = importlib.import_module(f"accelerate.{module}".rstrip("."))
    ours = importlib.import_module(f"nbaccel.{module}".rstrip("."))
    for name, other in vars(theirs).items():
        is_theirs = str(getattr(other, "__module__", "")).startswith("accelerate")
        mine = getattr(ours, name, None)
        if name.startswith("_") or not (callable(other) and is_theirs) or mine is None:
            continue
        if hasattr(mine, "_part") or name in NOT_FOR_USERS:  # the former say so when used
            continue
        yield name, other, mine
        if inspect.isclass(other) and not issubclass(other, enum.Enum):
            for method, function in inspect.getmembers(other, callable):
                if not method.startswith("_") and callable(own := getattr(mine, method, None)):
                    yield f"{name}.{method}", function, own


@needs.DEEPSPEED_ROW
@pytest.mark.parametrize("module", MODULES)
def test_names_order_and_defaults_are_accelerates(module: str) -> None:
    found = {
        f"{name}({argument})"
        for name, theirs, ours in pairs(module)
        for argument in differences(theirs, ours)
    }
    assert found <= set(DIFFERENT), sorted(found - set(DIFFERENT))


@needs.DEEPSPEED_ROW
def test_each_reason_is_still_needed() -> None:
    every = [pair for module in MODULES for pair in pairs(module)]
    found = {f"{name}({one})" for name, *both in every for one in differences(*both)}
    assert set(DIFFERENT) <= found


NOT_HERE = {
    "DeepSpeedPlugin.set_deepspeed_weakref",  # how theirs reaches transformers
    "DistributedDataParallelKwargs.register_comm_hook",  # done by `prepare`
    "FullyShardedDataParallelPlugin.validate_cpu_offload",  # done when it is made
    "FullyShardedDataParallelPlugin.validate_mixed_precision_policy",
    # How theirs keeps the state of an iteration.
    *(
        f"{owner}.{method}"
        for owner in ("DataLoaderDispatcher", "DataLoaderShard", "SkipDataLoader")
        for method in (
            *("adjust_state_dict_for_prefetch", "begin", "end", "get_sampler", "reset"),
            "set_sampler",
        )
    ),
}


@needs.DEEPSPEED_ROW
def test_no_method_is_missing_that_users_call() -> None:
    missing = set()
    for module in MODULES:
        for name, theirs, ours in pairs(module):
            if inspect.isclass(theirs) and not issubclass(theirs, enum.Enum):
                missing |= {
                    f"{name}.{method}"
                    for method, function in inspect.getmembers(theirs, inspect.isfunction)
                    if function.__module__.startswith("accelerate")
                    and not method.startswith("_")
                    and not hasattr(ours, method)
                }
    assert missing <= NOT_HERE, sorted(missing - NOT_HERE)
