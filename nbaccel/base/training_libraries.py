"""Accelerate, transformers and Lightning in a worker: what they found out in the notebook is wrong.

None is imported here: modules are changed when they are imported, or at once where they have been.
"""

from __future__ import annotations

import functools
import os
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

from nbaccel.base import env
from nbaccel.base.errors import ConfigError, PlatformUnsupported
from nbaccel.base.units import count_noun

PatchModule = Callable[[ModuleType], None]
_AroundTraining = Callable[[], AbstractContextManager[None]]
_Hook = Callable[..., Any]  # what is called in place of a method, which is its first argument


def enter_worker(rank: int, around_training: _AroundTraining) -> None:
    """Let all of them work in this worker; `around_training` is entered while a Trainer trains."""
    # Lets this worker prepare what has the mark of the notebook's `prepare`, too.
    prepare = functools.partial(_prepare, weakref.WeakSet[Any]())
    preparing = {"prepare_model": prepare, "prepare_data_loader": prepare}
    _wrap_methods("accelerate.accelerator", "Accelerator", preparing)
    evaluate = functools.partial(_adopt, nullcontext)
    training = {"train": functools.partial(_adopt, around_training)}
    training |= {"evaluate": evaluate, "predict": evaluate}
    _wrap_methods("transformers.trainer", "Trainer", training)
    guarded = {"__init__": _mark, **dict.fromkeys(("fit", "validate", "test", "predict"), _guard)}
    # One package under two names; each has a class `Trainer` of its own.
    for name in ("lightning.pytorch.trainer.trainer", "pytorch_lightning.trainer.trainer"):
        _wrap_methods(name, "Trainer", guarded)
    _tell_lightning(rank)


def _wrap_methods(module_name: str, class_name: str, hooks: Mapping[str, _Hook]) -> None:
    """Let hooks make the calls of a class's methods that this version of the library has."""

    def wrap(module: ModuleType) -> None:
        owner = getattr(module, class_name)
        for name, hook in hooks.items():
            if (method := getattr(owner, name, None)) is not None:
                setattr(owner, name, hooked(method, hook))

    patch_module(module_name, wrap)


def patch_module(module_name: str, patch: PatchModule) -> None:
    """Change a module, now or when it is imported. The module is not imported for it."""
    if (module := sys.modules.get(module_name)) is not None:
        patch(module)
        return
    for finder in sys.meta_path:
        # One finder for all patches of a module: the first one finds it, and no other is asked.
        if isinstance(finder, _ModulePatcher) and finder.module_name == module_name:
            finder.patches.append(patch)
            return
    sys.meta_path.insert(0, _ModulePatcher(module_name, patch))


class _ModulePatcher(MetaPathFinder):
    """Patches a module when it is imported: unpickling a method looks it up at once."""

    def __init__(self, module_name: str, patch: PatchModule) -> None:
        self.module_name = module_name
        self.patches = [patch]

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        # PathFinder itself, because importlib.util.find_spec would call this finder again.
        module_spec = PathFinder.find_spec(name, path) if name == self.module_name else None
        if module_spec is None or module_spec.loader is None:
            return None
        load_module = module_spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            load_module(module)
            for patch in self.patches:
                patch(module)

        module_spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return module_spec


# In a worker forked from a notebook that has used it, each would take itself for the only process.

# Accelerate sets it on what it has prepared, and returns what has it as it is. Seen in 1.15.
_MARK = "_is_accelerate_prepared"


def accelerate_is_set_up() -> bool:
    """Whether this process has such a state."""
    return _has_shared_state("PartialState")


def accelerates_precision() -> str | None:
    """The precision that its ``Accelerator`` trains in; None where there is none yet."""
    if not _has_shared_state("AcceleratorState"):
        return None
    return str(sys.modules["accelerate.state"].AcceleratorState().mixed_precision)


def _has_shared_state(name: str) -> bool:
    """Whether a class is set up, in Accelerate 1.15: making the object to ask sets it up."""
    state = getattr(sys.modules.get("accelerate.state"), name, None)
    return bool(getattr(state, "_shared_state", None))


def forget_accelerate() -> None:
    """Let the next ``Accelerator`` find out anew what this process is."""
    if not accelerate_is_set_up():
        return
    state = sys.modules["accelerate.state"]
    # The way of Accelerate's own tests, in 1.15.
    for name, arguments in (("AcceleratorState", (True,)), ("GradientState", ())):
        reset = getattr(getattr(state, name, None), "_reset_state", None)
        if reset is None:
            raise PlatformUnsupported(
                f"This version of Accelerate has no {name}._reset_state: workers would take over "
                "what the notebook's Accelerator found, a process alone. Restart the kernel and "
                "create no Accelerator before the launch, or use accelerate 1.15."
            )
        reset(*arguments)


def _prepare(
    prepared_here: weakref.WeakSet[Any],
    method: Callable[..., Any],
    accelerator: Any,
    given: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    if getattr(given, _MARK, False) and given not in prepared_here:
        vars(given).pop(_MARK, None)
    prepared = method(accelerator, given, *args, **kwargs)
    prepared_here.add(prepared)
    return prepared


def hooked(plain: Callable[..., Any], hook: Callable[..., Any]) -> Any:
    """A function in whose place another one is called, with it as the first argument."""

    @functools.wraps(plain)
    def call(*args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        return hook(plain, *args, **kwargs)

    return call


@contextmanager
def attribute(holder: Any, name: str, value: object) -> Iterator[None]:
    """A block in which an attribute has another value; blocks may be nested."""
    before = getattr(holder, name)
    setattr(holder, name, value)
    try:
        yield
    finally:
        setattr(holder, name, before)


# A Trainer's accelerator was made for the notebook's single process; in a worker it gets another.


def is_sharding_new_models() -> bool:
    """Whether transformers now cuts models while it builds them (ZeRO-3)."""
    module = sys.modules.get("transformers.integrations.deepspeed")
    return module is not None and bool(module.is_deepspeed_zero3_enabled())


def _adopt(
    context: _AroundTraining, method: Callable[..., Any], trainer: Any, *args: Any, **kwargs: Any
) -> Any:
    if _comes_from_notebook(trainer):
        _rebuild_accelerator(trainer)
    with context():
        return method(trainer, *args, **kwargs)


def _comes_from_notebook(trainer: Any) -> bool:
    """Whether it was made for another process than this one."""
    try:
        is_other = bool(trainer.args.world_size != int(env.snapshot()["WORLD_SIZE"]))
    # Missing where it was bound to the notebook's process and therefore not pickled.
    except (AttributeError, KeyError):
        return True
    return is_other or not accelerate_is_set_up()


def _rebuild_accelerator(trainer: Any) -> None:
    """Do again what its constructor made of the process it ran in."""
    forget_accelerate()
    arguments = trainer.args
    # A cached property, under its name and that of older versions; it holds the notebook's device.
    vars(arguments).pop("_setup_devices", None)
    vars(arguments).pop("__cached__setup_devices", None)
    arguments.device  # noqa: B018 - looks at the process and joins its group
    trainer.create_accelerator_and_postprocess()
    if getattr(trainer, "place_model_on_device", False):
        # As its constructor does: some devices need more than `to`. Seen in transformers 5.23.
        move = getattr(trainer, "_move_model_to_device", lambda model, device: model.to(device))
        move(trainer.model, arguments.device)
    trainer.state.is_local_process_zero = trainer.is_local_process_zero()
    trainer.state.is_world_process_zero = trainer.is_world_process_zero()


# A Trainer's strategy is chosen in the constructor. Seen with Lightning 2.6 in two workers: one of
# one process trained alone in each, and one with `ddp_notebook` waited for ever.

_BUILT_IN = "_nbaccel_built_in_process"


def _mark(constructor: Callable[..., None], trainer: Any, *args: Any, **kwargs: Any) -> None:
    constructor(trainer, *args, **kwargs)
    setattr(trainer, _BUILT_IN, os.getpid())


def _guard(method: Callable[..., Any], trainer: Any, *args: Any, **kwargs: Any) -> Any:
    __tracebackhide__ = True
    variables = env.snapshot()
    # One worker is as alone as the notebook is.
    is_alone = int(variables.get("WORLD_SIZE", "1")) < 2
    if getattr(trainer, _BUILT_IN, None) == os.getpid() or is_alone:
        return method(trainer, *args, **kwargs)
    num_workers = int(variables.get("LOCAL_WORLD_SIZE", "1"))
    entry_name = method.__name__
    strategy_name = type(getattr(trainer, "strategy", None)).__name__
    num_built_for = getattr(trainer, "world_size", 1)
    outcome = "train alone" if num_built_for == 1 else "wait for processes that never start"
    raise ConfigError(
        f"trainer.{entry_name}() cannot be called in {num_workers} workers: this Lightning Trainer "
        f"was built outside of them, for {count_noun(num_built_for, 'process')} ({strategy_name}). "
        f"Each worker would {outcome}. Build it in the function or cell that the workers run: "
        f'Trainer(devices={num_workers}, strategy="ddp").{entry_name}(...); or call it in the '
        "notebook, without workers: Lightning starts processes by itself."
    )


def _tell_lightning(rank: int) -> None:
    """Correct what Lightning 2.6 found before the fork, such as that somebody types here."""
    rank_module = sys.modules.get("lightning_utilities.core.rank_zero")
    if (rank_zero_only := getattr(rank_module, "rank_zero_only", None)) is not None:
        rank_zero_only.rank = rank
    # Modules of both packages have the answer under this name, which they import from each other.
    packages = ("lightning", "lightning_fabric", "pytorch_lightning")
    for module_name, module in tuple(sys.modules.items()):
        if module_name.partition(".")[0] in packages and "_IS_INTERACTIVE" in vars(module):
            vars(module)["_IS_INTERACTIVE"] = False
