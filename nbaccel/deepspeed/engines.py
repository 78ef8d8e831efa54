"""Making DeepSpeed's engine, driving it, and what a training loop holds of it.

Floating-point inputs take the engine's format, and outputs come back as float32, as with every
other strategy here.

[Note: when it steps] DeepSpeed's engine must be told, before a backward pass, whether it ends a
group of accumulated batches, and reduces gradients in it. The step itself is taken when the loop
asks the optimizer for it, or clips gradients (the engine clips inside its step, with the norm given
to `clip_grad_norm_`), and at the latest before the next forward or backward pass: a loop that
leaves the step to DeepSpeed trains all the same.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import inspect
import math
import warnings
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from nbaccel.base import frames, mapped_files, torch_private
from nbaccel.base.errors import ConfigError, TrainingDiverged
from nbaccel.base.training_libraries import attribute
from nbaccel.base.trees import map_tensors
from nbaccel.deepspeed import library, local_shards
from nbaccel.deepspeed.environment import destroy
from nbaccel.deepspeed.local_shards import Claim, take_back, unhook
from nbaccel.deepspeed.zero_config import ZeroConfig
from nbaccel.plan.contracts.training import DummyOptim, DummyScheduler, Remembered
from nbaccel.precision.native import as_float32


def make_engine(
    model: nn.Module,
    optimizer: Any,
    scheduler: Any,
    zero_config: ZeroConfig,
    *,
    moe_layers: str | None,
    has_several: bool,
) -> Any:
    """Make an engine, where :func:`library.begin_comm` has been called."""
    deepspeed = library.load_module("deepspeed", why="Training with DeepSpeed")
    settings = zero_config.to_dict()
    settings.setdefault("steps_per_print", math.inf)
    arguments: dict[str, Any] = {"model": model, "config": settings}
    if isinstance(optimizer, DummyOptim):
        arguments["model_parameters"] = optimizer.params
    elif optimizer is not None:
        # Under ZeRO, DeepSpeed refuses optimizers that it does not know unless this is set.
        settings.setdefault("zero_allow_untested_optimizer", True)
        arguments["optimizer"] = _for_offload(optimizer, zero_config)
    if isinstance(scheduler, DummyScheduler):
        if scheduler.lr_scheduler_callable is not None:
            arguments["lr_scheduler"] = scheduler.lr_scheduler_callable
    elif scheduler is not None:
        arguments["lr_scheduler"] = scheduler
    if moe_layers and zero_config.zero_stage == 3:
        fetch_together(model, moe_layers)
    if has_several and zero_config.zero_stage == 3:
        shard_in_turn(model, zero_config)
    with library.usual_logging(zero_config):
        engine, *_ = deepspeed.initialize(**arguments)
    library.check_fp32_copies(engine)
    _convert_inputs(engine)
    # Only here are the model's first tensors free: the engine has replaced them.
    return_all()
    local_shards.skip_repeated_reads(engine.module)
    if has_several and zero_config.zero_stage == 3:
        _keep_in_step(engine.module)
    return engine


def is_engines(scheduler: Any) -> bool:
    """Whether a schedule is of DeepSpeed's own kinds, which the engine advances."""
    # Not at the top of the file: importing DeepSpeed loads its accelerator, for good.
    from deepspeed.runtime.lr_schedules import VALID_LR_SCHEDULES

    return isinstance(scheduler, DummyScheduler) or type(scheduler).__name__ in VALID_LR_SCHEDULES


def _for_offload(optimizer: Any, zero_config: ZeroConfig) -> Any:
    """DeepSpeed's Adam for steps on the CPU, in place of torch's; others DeepSpeed refuses."""
    is_adam = type(optimizer) in (torch.optim.Adam, torch.optim.AdamW)
    is_replaced = is_adam and library.offloads_optimizer(zero_config)
    if not is_replaced or zero_config.zero_force_ds_cpu_optimizer is False:
        return optimizer
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    known = inspect.signature(DeepSpeedCPUAdam).parameters
    defaults = {name: value for name, value in optimizer.defaults.items() if name in known}
    defaults["adamw_mode"] = type(optimizer) is torch.optim.AdamW
    # The same groups, not copies: a schedule made for the old one sets their learning rates.
    offload_optimizer = DeepSpeedCPUAdam(optimizer.param_groups, **defaults)
    # Otherwise torch's schedules would warn that the old one never stepped.
    torch_private.mark_as_stepped(optimizer)
    return offload_optimizer


def _convert_inputs(engine: Any) -> None:
    """Let it take and give what models here take and give, whatever it computes in."""
    dtypes = (parameter.dtype for parameter in engine.module.parameters())
    dtype = next((one for one in dtypes if one in (torch.bfloat16, torch.float16)), None)
    if dtype is None or not (engine.bfloat16_enabled() or engine.fp16_enabled()):
        return

    def before(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # Inputs may be nested, such as a dictionary of tensors.
        return map_tensors(cast, (args, kwargs))

    def cast(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    engine.register_forward_pre_hook(before, with_kwargs=True)
    engine.register_forward_hook(lambda _, __, output: as_float32(output))


def _keep_in_step(module: nn.Module) -> None:
    """Let `generate` go on on every rank until the last has finished: transformers' guide."""
    generate: Any = getattr(module, "generate", None)
    if not callable(generate) or "synced_gpus" not in inspect.signature(generate).parameters:
        return

    @functools.wraps(generate)
    def in_step(*args: Any, **kwargs: Any) -> Any:
        # A rank that stopped early would leave the others waiting for its part of the weights.
        if kwargs.get("synced_gpus") is None:
            kwargs["synced_gpus"] = True
        return generate(*args, **kwargs)

    module.generate = in_step  # type: ignore[assignment]


def shard_in_turn(model: nn.Module, zero_config: ZeroConfig) -> None:
    """Cut a model into shards, one parameter after the other; a collective."""
    # An engine would cast a whole model in every process, before it cuts it; for mapped ones.
    from deepspeed import zero

    parameters = [p for p in model.parameters() if not local_shards.is_partitioned(p)]
    # The same parameters on all processes, or none: cutting one is a collective.
    is_mapped = [all(map(_lies_in_file, parameters)) and bool(parameters)]
    all_mapped: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(all_mapped, is_mapped)
    if not all(answer[0] for answer in all_mapped):
        return
    half = torch.bfloat16 if zero_config.is_on("bf16") else torch.float32
    compute_dtype = torch.float16 if zero_config.is_on("fp16") else half
    settings = local_shards.without_auto(zero_config.to_dict(), dist.get_world_size())
    for buffer in model.buffers():
        # As the engine does with the buffers of a model that it casts itself.
        if buffer.is_floating_point():
            buffer.data = buffer.data.to(compute_dtype)
    for parameter in parameters:
        values = parameter.data
        # A copy even in the same format: process 0's values are received into it.
        dtype = compute_dtype if values.is_floating_point() else values.dtype
        parameter.data = values.to(dtype, copy=True)
        # What was written is kept, because another parameter may view the same memory.
        mapped_files.drop_pages(values.data_ptr(), values.nbytes, keep_written=True)
        first: Any = parameters[0]
        if parameter is first:
            # A module of its own, because the rest of the model is to be cut later.
            holder = nn.Module()
            holder.register_parameter("weight", parameter)
            zero.Init(module=holder, config_dict_or_path=settings, dtype=compute_dtype)
        else:
            first.convert_to_zero_parameters(param_list=[parameter])


def _lies_in_file(parameter: torch.Tensor) -> bool:
    is_plain = parameter.device.type == "cpu" and parameter.is_contiguous()
    return is_plain and (
        not parameter.nbytes
        or mapped_files.find_mapping(parameter.data_ptr(), parameter.nbytes) is not None
    )


def fetch_together(model: nn.Module, class_names: str) -> None:
    """Let ZeRO-3 gather layers as one, whose parts are not all used in every pass."""
    from deepspeed.utils import set_z3_leaf_modules

    names = [class_name.strip() for class_name in class_names.split(",") if class_name.strip()]
    # DeepSpeed is given classes, not names: those of this model, wherever they are defined.
    classes = {type(model_part).__name__: type(model_part) for model_part in model.modules()}
    missing_names = [class_name for class_name in names if class_name not in classes]
    if missing_names:
        raise ConfigError(
            f"transformer_moe_cls_names={class_names!r}: {type(model).__name__} has no layer of "
            f"class {', '.join(missing_names)}. It has {', '.join(sorted(classes))}."
        )
    set_z3_leaf_modules(model, [classes[class_name] for class_name in names])


# glibc keeps freed blocks of up to 32 MiB in its heaps (``mallopt(3)``, M_MMAP_THRESHOLD), such as
# gradients and gathered parameters. Other C libraries return them, and nothing is changed there.

# The number is in glibc's malloc.h, which Python does not expose.
_M_MMAP_THRESHOLD = -3
# Bytes from which a freed block is returned: above activations of small models, since to get many
# small ones again takes time, and below gradients of large ones.
_RETURNED_FROM = 1 << 20


def return_all() -> None:
    """Return what was freed until now: 4 bytes for each parameter that an engine has replaced."""
    # The parameter is a `size_t`; ctypes passes a Python integer as an `int`.
    _call_glibc("malloc_trim", ctypes.c_size_t(0))


def return_at_once() -> None:
    """From now on return large blocks when they are freed, for the rest of this process."""
    _call_glibc("mallopt", ctypes.c_int(_M_MMAP_THRESHOLD), ctypes.c_int(_RETURNED_FROM))


def _call_glibc(name: str, *arguments: Any) -> None:
    # Without a name, `dlopen` gives the running program, with whichever C library it has.
    program = ctypes.CDLL(None)
    if hasattr(program, "gnu_get_libc_version"):
        getattr(program, name)(*arguments)


def drive_of_loss(loss: torch.Tensor, drives: Sequence[Drive]) -> Drive:
    """The engine whose model made a loss."""
    training = [drive for drive in drives if drive.can_train]
    if not training:
        raise ConfigError(
            f"backward(loss={float(loss.detach())}) has no engine: none of {len(drives)} prepared "
            "model(s) has an optimizer. Prepare the model and its optimizer in one call."
        )
    # Walking the graph costs Python time for each node, in every backward pass.
    found = training if len(training) == 1 else _in_graph(loss, training)
    if len(found) == 1:
        return found[0]
    names = ", ".join(type(drive.engine.module).__name__ for drive in found or training)
    raise ConfigError(
        f"backward(loss={float(loss.detach())}) comes from {len(found)} of {len(training)} engines "
        f"({names}), each with a backward pass of its own. Call backward once for each model, with "
        "the others' outputs detached, or put the models in one module."
    )


def _in_graph(loss: torch.Tensor, drives: Sequence[Drive]) -> list[Drive]:
    """Those with parameters in the loss's graph."""
    drive_of = {id(p): drive for drive in drives for p in drive.engine.module.parameters()}
    found: list[Drive] = []
    seen: set[Any] = set()
    waiting = [loss.grad_fn]
    # A loop, not a recursion: graphs are deeper than Python's limit for recursion.
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        # Only a node that accumulates a gradient has `variable`, the parameter.
        drive = drive_of.get(id(getattr(node, "variable", None)))
        if drive is not None and drive not in found:
            found.append(drive)
        waiting += [following for following, _ in node.next_functions]
    return found


def drive_of_parameters(parameters: Iterable[torch.Tensor], drives: Sequence[Drive]) -> Drive:
    """The engine of parameters."""
    ids = {id(parameter) for parameter in parameters}
    found = [
        drive
        for drive in drives
        if drive.can_train and any(id(own) in ids for own in drive.engine.module.parameters())
    ]
    if len(found) != 1:
        raise ConfigError(
            f"clip_grad_norm_ got {len(ids)} parameter(s) of {len(found)} engines, and clips those "
            "of one. Give the parameters of one prepared model."
        )
    return found[0]


class _EngineProxy:
    """The engine's optimizer or schedule, in place of the object that was prepared."""

    _name_in_engine: ClassVar[str]  # the attribute with the object inside

    def __init__(self, drive: Drive) -> None:
        # The constructor of `Optimizer` is not called: it would make a second state and groups.
        self._drive = drive

    def __getattr__(self, name: str) -> Any:
        # An object made without its constructor, as by `copy`, would recurse without end.
        if name == "_drive":
            raise AttributeError(f"{type(self).__name__} has no {name!r} before it is made")
        return getattr(getattr(self._drive.engine, self._name_in_engine), name)

    def __repr__(self) -> str:
        inner = getattr(self._drive.engine, self._name_in_engine)
        return f"{type(self).__name__}({type(inner).__name__})"


class EngineOptimizer(_EngineProxy, Optimizer):
    """An engine's optimizer: a step of it is a step of the engine.

    Groups and state are those of the optimizer inside: this process's part of the parameters,
    flattened.
    """

    _name_in_engine = "basic_optimizer"

    @property
    def model(self) -> Any:
        """The engine whose parameters it steps."""
        return self._drive.engine

    def step(self, closure: Any = None) -> Any:
        """Take the step that the last backward pass of a group is due."""
        if closure is not None:
            raise ConfigError(
                f"step(closure={closure!r}) is not supported with DeepSpeed, whose backward pass "
                "reduces gradients. Use an optimizer that needs none, or train without DeepSpeed."
            )
        self._drive.warn_if_held_back()
        self._drive.step()

    # torch wraps each class's `step` for hooks and profiling; the inner one has that already.
    step.hooked = True  # type: ignore[attr-defined]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Nothing: the engine drops gradients when it has stepped."""

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last step did not happen because gradients were infinite."""
        return self._drive.was_skipped

    def state_dict(self) -> dict[str, Any]:
        """This process's part, in DeepSpeed's form."""
        values: dict[str, Any] = self._drive.engine.optimizer.state_dict()
        return values

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Refused: a part means nothing without the others."""
        raise ConfigError(
            f"load_state_dict got {len(state_dict)} entries for an optimizer in shards, which "
            "belong to one checkpoint. Use accelerator.save_state and load_state."
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused: the engine's parameters are laid out when it is made."""
        raise ConfigError(
            f"add_param_group of {len(param_group.get('params', ()))} parameter(s) comes too late: "
            "DeepSpeed's shards are laid out. Add it before `prepare`."
        )

    def __reduce__(self) -> Any:
        """Refused; see :meth:`Drive.__reduce__`."""
        return self._drive.__reduce__()


class EngineScheduler(_EngineProxy):
    """A schedule that the engine advances with its steps."""

    _name_in_engine = "lr_scheduler"

    def step(self, *_: Any, **__: Any) -> None:
        """Nothing: the engine's step has advanced it."""

    def get_last_lr(self) -> list[float]:
        """The learning rates of the optimizer's groups, as they are now."""
        return [float(group["lr"]) for group in self._drive.engine.optimizer.param_groups]


class Drive:
    """Drives one engine, made of a module that was what `before` says."""

    def __init__(
        self, engine: Any, folders: Claim, made_in: str | None, norm: Any, before: Remembered
    ) -> None:
        self.engine = engine
        # See [Note: when it steps]: a forward pass must see the weights of the step that is due.
        self._hook = engine.register_forward_pre_hook(lambda *_: self.step())
        self._claimed = folders
        self._troubles = Troubles(engine, made_in)
        # What the configuration has; "auto" is no norm that could contradict a call.
        self._clipping = float(norm) if isinstance(norm, (int, float)) else None
        self._before = before
        self._forced: bool | None = None
        self._due = False
        self._held_back = self._has_told_held_back = False
        self._norm: Any = None
        self.was_skipped = False

    def __reduce__(self) -> Any:
        """Refused, also for what refers to it: an engine is one process's part of a whole."""
        raise TypeError(
            f"what holds a {type(self.engine).__name__} (an Accelerator) cannot leave its process. "
            "Take get_state_dict(model), or numbers such as optimizer.param_groups[0]['lr']"
        )

    @property
    def can_train(self) -> bool:
        """Whether it has an optimizer."""
        return self.engine.basic_optimizer is not None

    def syncing(self, is_wanted: bool) -> contextlib.AbstractContextManager[None]:
        """A block whose backward passes end a group, or do not, whatever the loop says."""
        return attribute(self, "_forced", is_wanted)

    def backward(self, loss: torch.Tensor, *, sync: bool, **options: Any) -> None:
        """Compute and reduce gradients. See [Note: when it steps]."""
        if unknown := options.keys() - {"retain_graph"}:
            raise ConfigError(
                f"backward({', '.join(f'{name}={options[name]!r}' for name in sorted(unknown))}) "
                "would fail in DeepSpeed's engine. Leave it out; retain_graph is the only argument."
            )
        self.step()
        sync = sync if self._forced is None else self._forced
        self.engine.set_gradient_accumulation_boundary(sync)
        self._troubles.see_loss(loss)
        # The Accelerator has divided the loss by the number of accumulated batches already.
        self.engine.backward(loss, scale_wrt_gas=False, **options)
        self._due = sync
        self._held_back = self._forced is False

    def warn_if_held_back(self) -> None:
        """Say once that a step asked for after `no_sync` is none."""
        if not self._held_back or self._has_told_held_back:
            return
        self._has_told_held_back = True
        warnings.warn(
            "optimizer.step() after a backward pass in no_sync() takes no step with DeepSpeed: it "
            "steps where gradients are reduced, and so far they are only added up. If there is "
            "such a block around every batch, nothing is trained. Leave the last backward pass of "
            "each step outside of no_sync, or use accelerator.accumulate(model).",
            stacklevel=frames.caller_level(),
        )

    def step(self) -> None:
        """Take the step that is due, if one is."""
        if not self._due:
            return
        # First: one that raises must not be taken again by a hook or when models are released.
        self._due = False
        self.was_skipped = self._troubles.step()
        self._norm = self.engine.get_global_grad_norm()

    def clipped_step(self, max_norm: float) -> torch.Tensor:
        """Take the step that is due with gradients scaled down to a norm."""
        if self._due:
            # Dropped, so that the warning comes once and not in every step.
            configured_norm, self._clipping = self._clipping, None
            if configured_norm is not None and not math.isclose(configured_norm, max_norm):
                warnings.warn(
                    f"clip_grad_norm_(max_norm={max_norm}) overrides "
                    f"gradient_clipping={configured_norm} of the DeepSpeed configuration. "
                    'Write "auto" there, or leave the call out.',
                    stacklevel=frames.caller_level(),
                )
            # Its own optimizers clip, and say by which norm; torch's do neither.
            if hasattr(self.engine.optimizer, "clip_grad"):
                with self._clipping_at(max_norm):
                    self.step()
            else:
                # At stage 0 in float32 the engine would clip without keeping the norm.
                parameters = self.engine.module.parameters()
                gradient_norm = torch.nn.utils.clip_grad_norm_(parameters, max_norm)
                with self._clipping_at(0.0):
                    self.step()
                self._norm = gradient_norm
        norm = 0.0 if self._norm is None else self._norm
        return torch.as_tensor(norm, device=self.engine.device).float()

    def end(self, *, is_alone: bool) -> None:
        """Destroy the engine; a process that is alone has all of the module, and restores it."""
        self._hook.remove()
        if is_alone:
            take_back(self.engine.module, self._before)
            self._claimed.release()
        else:
            unhook(self.engine)
            destroy(self.engine)  # its files stay: the weights in them are still to be read back

    @contextlib.contextmanager
    def _clipping_at(self, max_norm: float) -> Iterator[None]:
        """A block in which steps clip at this norm; those of a loop without the call do not."""
        # Without a public function: the engine's configuration, and its optimizers' copies of it.
        with contextlib.ExitStack() as stack:
            settings = library.engine_settings(self.engine)
            stack.enter_context(attribute(settings, "gradient_clipping", max_norm))
            if hasattr(self.engine.optimizer, "clip_grad"):
                stack.enter_context(attribute(self.engine.optimizer, "clip_grad", max_norm))
            yield


# DeepSpeed's and transformers' troubleshooting guides; each message names the key to change.

PATIENCE = 5  # steps in a row without a number, or skipped at the lowest loss scale


class Troubles:
    """Steps one engine, and watches what comes of its losses."""

    def __init__(self, engine: Any, made_in: str | None) -> None:
        self._engine = engine
        self._made_in = made_in
        self._in_fp16 = bool(engine.fp16_enabled())
        self._bad: torch.Tensor | None = None
        self._bad_steps = self._stuck_steps = 0
        self._was_warned = False

    def see_loss(self, loss: torch.Tensor) -> None:
        """Note whether it is a number, without waiting for the device."""
        is_bad = ~torch.isfinite(loss.detach())
        # Losses of all batches of a step count; the step itself comes only after the last of them.
        self._bad = is_bad if self._bad is None else self._bad | is_bad

    def step(self) -> bool:
        """Take a step; whether it was skipped, as gradients were infinite."""
        try:
            self._engine.step()
        except Exception as error:  # DeepSpeed raises a bare one at the floor of its loss scale
            # Whatever else a step raises has a subclass of `Exception` as its type.
            if type(error) is not Exception or not self._at_floor:
                raise
            raise TrainingDiverged(self._scale_text("is as low as it may be")) from error
        # Without ZeRO and in float32 the optimizer is torch's, which has no `overflow`.
        was_skipped = bool(getattr(self._engine.optimizer, "overflow", False))
        # DeepSpeed's step has waited for the device already: reading this costs nothing more.
        is_bad = self._bad is not None and bool(self._bad.item())
        self._bad = None
        self._bad_steps = self._bad_steps + 1 if is_bad else 0
        self._stuck_steps = self._stuck_steps + 1 if was_skipped and self._at_floor else 0
        if self._stuck_steps >= PATIENCE:
            raise TrainingDiverged(self._scale_text(f"stayed there for {PATIENCE} steps"))
        text = f"The loss is NaN or infinite after optimizer step {self._engine.global_steps}."
        if self._in_fp16 and self._bad_steps >= PATIENCE:
            raise TrainingDiverged(f"{text} {self._remedy(was_skipped)}")
        if is_bad and not self._was_warned:
            # Once: a loss that has become NaN usually stays so, in every step to come.
            self._was_warned = True
            warnings.warn(f"{text} {self._remedy(was_skipped)}", stacklevel=2)
        return was_skipped

    @property
    def _scaler(self) -> Any:
        return getattr(self._engine.optimizer, "loss_scaler", None) if self._in_fp16 else None

    @property
    def _at_floor(self) -> bool:
        # Only DeepSpeed's dynamic scaler has `min_scale`.
        least = max(getattr(self._scaler, "min_scale", 1), 1)
        return self._scaler is not None and bool(self._scaler.cur_scale <= least)

    def _scale_text(self, event: str) -> str:
        return (
            f"The loss scale {self._scaler.cur_scale} {event} (fp16.min_loss_scale), after "
            f"{self._engine.skipped_steps} skipped steps: nothing is trained. {self._remedy(True)}"
        )

    def _remedy(self, was_skipped: bool) -> str:
        if not self._in_fp16:
            return (
                f"{'The step was skipped' if was_skipped else 'The weights are invalid by now'}. "
                "Set a lower optimizer.params.lr or gradient_clipping, or a warm-up, and look for "
                "NaN in the inputs."
            )
        made = "The weights were made in bfloat16. " * (self._made_in == "bfloat16")
        return (
            f'{made}float16 holds numbers up to 65504 only. Set "bf16": {{"enabled": true}} in '
            'place of "fp16", or a lower optimizer.params.lr, or a smaller gradient_clipping.'
        )
