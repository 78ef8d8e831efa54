"""``Drive``: one engine, its backward passes and its steps, and what a training loop holds of it.

[Note: when it steps] DeepSpeed's engine must be told, before a backward pass, whether it ends a
group of accumulated batches, and reduces gradients in it. The step itself is taken when the loop
asks the optimizer for it, or clips gradients (the engine clips inside its step, with the norm given
to `clip_grad_norm_`), and at the latest before the next forward or backward pass: a loop that
leaves the step to DeepSpeed trains all the same.
"""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, ClassVar

import torch
from torch.optim import Optimizer

from nbaccel.base import frames
from nbaccel.base.errors import ConfigError, TrainingDiverged
from nbaccel.deepspeed import private_api
from nbaccel.deepspeed.environment import destroy
from nbaccel.deepspeed.strategy.local_shards import Claim
from nbaccel.deepspeed.strategy.restore import take_back, unhook
from nbaccel.plan.contracts.training import Remembered


def drive_of_loss(loss: torch.Tensor, drives: Sequence[Drive]) -> Drive:
    """The engine whose model made a loss."""
    training = [drive for drive in drives if drive.can_train]
    if not training:
        raise ConfigError(
            f"backward(loss={float(loss.detach())}) has no engine to go through: {len(drives)} "
            "prepared model(s), none with an optimizer. Prepare the model and its optimizer in one "
            "call."
        )
    # In most runs there is one, and the graph need not be walked: that costs Python time for each
    # of its nodes, in every backward pass.
    if len(training) == 1:
        return training[0]
    found = [drive for drive in training if drive.ran]
    if len(found) > 1:
        found = _in_graph(loss, found)
    if len(found) == 1:
        return found[0]
    names = ", ".join(type(drive.engine.module).__name__ for drive in found or training)
    raise ConfigError(
        f"backward(loss={float(loss.detach())}) comes from {len(found)} of {len(training)} engines "
        f"({names}). Each engine reduces its own gradients, in a backward pass of its own. Call "
        "backward once for each model, with the others' outputs detached, or put the models in one "
        "module."
    )


def _in_graph(loss: torch.Tensor, drives: Sequence[Drive]) -> list[Drive]:
    """Those with parameters in the loss's graph."""
    drive_of = {
        id(parameter): drive for drive in drives for parameter in drive.engine.module.parameters()
    }
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
            f"clip_grad_norm_ got {len(ids)} parameter(s) of {len(found)} engines. DeepSpeed clips "
            "what one engine has reduced. Give the parameters of one prepared model."
        )
    return found[0]


class _EngineProxy:
    """The engine's optimizer or schedule, in place of the object that was prepared."""

    _name_in_engine: ClassVar[str]
    """The engine's attribute with the object whose attributes are read where this one has none."""

    def __init__(self, drive: Drive) -> None:
        # The constructor of `Optimizer` is not called: it would make a second state and groups.
        self._drive = drive

    @property
    def _inner(self) -> Any:
        return getattr(self._drive.engine, self._name_in_engine)

    def __getattr__(self, name: str) -> Any:
        # `_inner` reads `_drive`: without this, an object made without its constructor, as `copy`
        # makes it, would recurse without end.
        if name == "_drive":
            raise AttributeError(f"{type(self).__name__} has no {name!r} before it is made")
        return getattr(self._inner, name)


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
                f"step(closure={closure!r}) is not supported with DeepSpeed: its engine reduces "
                "gradients in the backward pass and would not see those of the closure. Use an "
                "optimizer that needs none, or train without DeepSpeed."
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
            f"load_state_dict got {len(state_dict)} entries for an optimizer that DeepSpeed keeps "
            "in shards: they belong to the weights of the same checkpoint. Use "
            "accelerator.save_state and load_state."
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused: the engine's parameters are laid out when it is made."""
        raise ConfigError(
            f"add_param_group of {len(param_group.get('params', ()))} parameter(s) comes too late: "
            "DeepSpeed lays its shards out when the model is prepared. Add it before `prepare`."
        )

    def __reduce__(self) -> Any:
        """Refused; see :meth:`Drive.__reduce__`."""
        return self._drive.__reduce__()

    def __repr__(self) -> str:
        own = type(self._drive.engine.optimizer).__name__
        return f"{type(self).__name__}({own} over {type(self._inner).__name__})"


class EngineScheduler(_EngineProxy):
    """A schedule that the engine advances with its steps."""

    _name_in_engine = "lr_scheduler"

    def step(self, *_: Any, **__: Any) -> None:
        """Nothing: the engine's step has advanced it."""

    def get_last_lr(self) -> list[float]:
        """The learning rates of the optimizer's groups, as they are now."""
        return [float(group["lr"]) for group in self._drive.engine.optimizer.param_groups]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._inner!r})"


class Drive:
    """Drives one engine, made of a module that was what `before` says."""

    def __init__(
        self,
        engine: Any,
        folders: Claim,
        loss_troubles: Troubles,
        norm: float | None,
        before: Remembered,
    ) -> None:
        self.engine = engine
        self.ran = False  # whether a forward pass is waiting for its backward pass
        # See [Note: when it steps]: a forward pass must see the weights of the step that is due.
        self._hooks = [
            engine.register_forward_pre_hook(lambda *_: self.step()),
            engine.register_forward_hook(self._note_run),
        ]
        self._claimed = folders
        self._troubles = loss_troubles
        self._clipping = norm
        self._before = before
        self._forced: bool | None = None
        self._due = False
        self._held_back = self._has_told_held_back = False
        self._norm: Any = None
        self.was_skipped = False

    def __reduce__(self) -> Any:
        """Refused, also for what refers to it: an engine is one process's part of a whole."""
        raise TypeError(
            f"what holds a {type(self.engine).__name__} (an engine's optimizer, its schedule, an "
            "Accelerator) cannot leave its process. Take accelerator.get_state_dict(model), or "
            "numbers such as optimizer.param_groups[0]['lr']"
        )

    @property
    def can_train(self) -> bool:
        """Whether it has an optimizer."""
        return self.engine.basic_optimizer is not None

    @contextlib.contextmanager
    def syncing(self, is_wanted: bool) -> Iterator[None]:
        """A block whose backward passes end a group, or do not, whatever the loop says."""
        # Such blocks may be nested: the outer one counts again when the inner one has ended.
        forced_before = self._forced
        self._forced = is_wanted
        try:
            yield
        finally:
            self._forced = forced_before

    def backward(self, loss: torch.Tensor, *, sync: bool, **options: Any) -> None:
        """Compute and reduce gradients. See [Note: when it steps]."""
        self.step()
        sync = sync if self._forced is None else self._forced
        self.engine.set_gradient_accumulation_boundary(sync)
        self._troubles.see_loss(loss)
        try:
            # The Accelerator has divided the loss by the number of accumulated batches already.
            self.engine.backward(loss, scale_wrt_gas=False, **options)
        except TypeError as error:
            # A wrong argument and a mistake inside the pass raise the same type: frames tell them
            # apart.
            inside_frames = frames.of_traceback(error.__traceback__)[1:]
            if not options or any(
                error_frame.function == "backward" for error_frame in inside_frames
            ):
                raise  # the engine's backward pass had begun: it took the arguments
            given_options = ", ".join(f"{name}={value!r}" for name, value in options.items())
            raise ConfigError(
                f"backward({given_options}) has an argument that DeepSpeed's engine does not "
                f"take: {error}. Leave it out; retain_graph is the only one."
            ) from error
        self.ran = False
        self._due = sync
        self._held_back = self._forced is False

    def _note_run(self, *_: Any) -> None:
        # An evaluation's forward pass has no backward pass to come.
        self.ran = self.ran or torch.is_grad_enabled()

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
        # Before the step: one that raises must not be taken again by a hook or when models are
        # released.
        self._due = False
        with self._troubles.explained():
            self.engine.step()
        # Without ZeRO and in float32 the optimizer is torch's, which has no `overflow`.
        self.was_skipped = bool(getattr(self.engine.optimizer, "overflow", False))
        self._norm = self.engine.get_global_grad_norm()
        self._troubles.after_step(skipped=self.was_skipped)

    def clipped_step(self, max_norm: float) -> torch.Tensor:
        """Take the step that is due with gradients scaled down to a norm."""
        if self._due:
            self._warn_of_two_norms(max_norm)
            if self._clips_itself:
                with self._clipping_at(max_norm):
                    self.step()
            else:
                # At stage 0 in float32 torch's optimizer steps, and the engine would clip before
                # it without keeping the norm: it is clipped here, and not once more there.
                parameters = self.engine.module.parameters()
                gradient_norm = torch.nn.utils.clip_grad_norm_(parameters, max_norm)
                with self._clipping_at(0.0):
                    self.step()
                self._norm = gradient_norm
        device = self.engine.device
        return torch.as_tensor(0.0 if self._norm is None else self._norm, device=device).float()

    def end(self, *, is_alone: bool) -> None:
        """Destroy the engine; a process that is alone has all of the module, and restores it."""
        for handle in self._hooks:
            handle.remove()
        if is_alone:
            take_back(self.engine.module, self._before)
            self._claimed.release()
        else:
            unhook(self.engine)
            destroy(self.engine)  # its files stay: the weights in them are still to be read back

    @property
    def _clips_itself(self) -> bool:
        """Whether its optimizer clips, and says by which norm; torch's own does neither."""
        return hasattr(self.engine.optimizer, "clip_grad")

    @contextlib.contextmanager
    def _clipping_at(self, max_norm: float) -> Iterator[None]:
        """A block in which steps clip at this norm; those of a loop without the call do not."""
        # DeepSpeed has no public function for it: the engine reads its configuration, and
        # optimizers hold a copy of the value.
        setting_places = [(private_api.engine_settings(self.engine), "gradient_clipping")]
        if self._clips_itself:
            setting_places.append((self.engine.optimizer, "clip_grad"))
        values_before = [getattr(*setting_place) for setting_place in setting_places]
        try:
            for setting_place in setting_places:
                setattr(*setting_place, max_norm)
            yield
        finally:
            for setting_place, value_before in zip(setting_places, values_before, strict=True):
                setattr(*setting_place, value_before)

    def _warn_of_two_norms(self, max_norm: float) -> None:
        # The value is dropped, so that the warning comes once and not in every step.
        configured_norm = self._clipping
        self._clipping = None
        if configured_norm is not None and not math.isclose(configured_norm, max_norm):
            warnings.warn(
                f"clip_grad_norm_(max_norm={max_norm}) overrides "
                f"gradient_clipping={configured_norm} of the DeepSpeed configuration. "
                'Write "auto" there, or leave the call out.',
                stacklevel=frames.caller_level(),
            )


# ------------------------------------------------------------------------------ troubles
# DeepSpeed's and transformers' troubleshooting guides; each message names the key to change.

PATIENCE = 5
"""Steps in a row without a number, or skipped at the lowest loss scale, before it is given up."""

_BF16_KEYS = '"bf16": {"enabled": true} in place of "fp16"'


class Troubles:
    """Watches the losses and steps of one engine."""

    def __init__(self, engine: Any, made_in: str | None) -> None:
        self._engine = engine
        self._made_in = made_in
        self._in_fp16 = bool(engine.fp16_enabled())
        self._bad: torch.Tensor | None = None
        self._bad_steps = 0
        self._stuck_steps = 0
        self._was_warned = False

    def see_loss(self, loss: torch.Tensor) -> None:
        """Note whether it is a number, without waiting for the device."""
        is_bad = ~torch.isfinite(loss.detach())
        # Losses of all batches of a step count; the step itself comes only after the last of them.
        self._bad = is_bad if self._bad is None else self._bad | is_bad

    @contextlib.contextmanager
    def explained(self) -> Iterator[None]:
        """A block in which the exception by which DeepSpeed gives up says what to change."""
        try:
            yield
        except Exception as error:  # DeepSpeed raises a bare one at the floor of its loss scale
            # Whatever else a step raises has a subclass of `Exception` as its type.
            if type(error) is not Exception or not self._at_floor:
                raise
            raise TrainingDiverged(self._scale_text("is as low as it may be")) from error

    def after_step(self, *, skipped: bool) -> None:
        """Look at what the step brought."""
        # DeepSpeed's step has waited for the device already, to look for overflow: reading the
        # value here costs nothing more.
        is_bad = self._bad is not None and bool(self._bad.item())
        self._bad = None
        self._bad_steps = self._bad_steps + 1 if is_bad else 0
        self._stuck_steps = self._stuck_steps + 1 if skipped and self._at_floor else 0
        if self._stuck_steps >= PATIENCE:
            raise TrainingDiverged(self._scale_text(f"stayed there for {PATIENCE} steps"))
        if is_bad and self._in_fp16 and self._bad_steps >= PATIENCE:
            raise TrainingDiverged(self._nan_text(skipped=skipped))
        if is_bad and not self._was_warned:
            # Once: a loss that has become NaN usually stays so, in every step to come.
            self._was_warned = True
            warnings.warn(self._nan_text(skipped=skipped), stacklevel=2)

    @property
    def _at_floor(self) -> bool:
        loss_scaler = getattr(self._engine.optimizer, "loss_scaler", None)
        if not self._in_fp16 or loss_scaler is None:
            return False
        # Only DeepSpeed's dynamic scaler has `min_scale`.
        return bool(loss_scaler.cur_scale <= max(getattr(loss_scaler, "min_scale", 1), 1))

    def _nan_text(self, *, skipped: bool) -> str:
        number = self._engine.global_steps
        loss_text = f"The loss is NaN or infinite after optimizer step {number}."
        if self._in_fp16 and self._made_in == "bfloat16":
            return (
                f"{loss_text} The model's weights were made in bfloat16 and train in float16, "
                f"whose largest number is 65504: activations overflow. Set {_BF16_KEYS}, or leave "
                "both out to train in float32."
            )
        if self._in_fp16:
            return (
                f"{loss_text} float16 holds numbers up to 65504 only. Set {_BF16_KEYS}, or a lower "
                "optimizer.params.lr, or a smaller gradient_clipping."
            )
        result = "The step was skipped." if skipped else "The weights are invalid by now."
        return (
            f"{loss_text} {result} Set a lower optimizer.params.lr, a smaller "
            "gradient_clipping, or scheduler.params.warmup_num_steps, and look for NaN or "
            "infinity in the inputs."
        )

    def _scale_text(self, event: str) -> str:
        loss_scaler = getattr(self._engine.optimizer, "loss_scaler", None)
        scale = getattr(loss_scaler, "cur_scale", "?")
        hint = (
            " Its weights were made in bfloat16, whose range float16 does not have."
            if self._made_in == "bfloat16"
            else ""
        )
        return (
            f"Every step overflows in float16: the loss scale {scale} {event} "
            f"(fp16.min_loss_scale), after {self._engine.skipped_steps} skipped steps, so that "
            f"nothing is trained.{hint} Set {_BF16_KEYS}, or a lower optimizer.params.lr."
        )
