"""What a training loop holds in place of an optimizer and a schedule that an engine drives."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer

from nbaccel.errors import ConfigError

if TYPE_CHECKING:
    from nbaccel.deepspeed.strategy.drive import Drive

__all__ = ["EngineOptimizer", "EngineScheduler"]


class _OfEngine:
    """What an engine has of a kind, in place of what was prepared.

    Args:
        drive: Drives the engine.
        given: What was prepared, or stood for it.

    Attributes:
        given: As given.
    """

    def __init__(self, drive: Drive, given: Any) -> None:
        # Without the constructor of `Optimizer`: it would make a second state and second groups.
        self._drive = drive
        self.given = given

    @property
    def _inner(self) -> Any:
        """Whose attributes it has, besides its own."""
        raise NotImplementedError

    def __getattr__(self, name: str) -> Any:
        if name in ("_drive", "given"):
            raise AttributeError(f"{type(self).__name__} has no {name!r} before it is made")
        return getattr(self._inner, name)


class EngineOptimizer(_OfEngine, Optimizer):
    """An engine's optimizer: a step of it is a step of the engine."""

    @property
    def model(self) -> Any:
        """The engine whose parameters it steps."""
        return self._drive.engine

    def step(self, closure: Any = None) -> Any:
        """Take the step that the last backward pass of a group is due.

        Raises:
            ConfigError: A closure was given.
        """
        if closure is not None:
            raise ConfigError(
                f"step(closure={closure!r}) cannot go with DeepSpeed: its engine reduces gradients "
                "in the backward pass and would not see those of the closure. Use an optimizer "
                "that needs none, or train without DeepSpeed."
            )
        self._drive.step()

    # torch wraps each class's `step` for hooks and profiling; the inner one has that already.
    step.hooked = True  # type: ignore[attr-defined]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Nothing: the engine drops gradients when it has stepped."""

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last step did not happen because gradients were infinite."""
        return self._drive.was_skipped

    @property
    def _own(self) -> Any:
        return self._drive.engine.optimizer

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The engine's; its parameters are this process's part of them, flattened."""
        groups: list[dict[str, Any]] = self._own.param_groups
        return groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The engine's, by flattened parameter."""
        return self._own.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """Of the torch optimizer inside."""
        found: dict[str, Any] = self._inner.defaults
        return found

    def state_dict(self) -> dict[str, Any]:
        """This process's part, in DeepSpeed's form."""
        found: dict[str, Any] = self._own.state_dict()
        return found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Refused: a part means nothing without the others.

        Raises:
            ConfigError: Always.
        """
        raise ConfigError(
            f"load_state_dict got {len(state_dict)} entries for an optimizer that DeepSpeed has in "
            "shards: they belong to the weights of the same checkpoint. Use "
            "accelerator.save_state and load_state."
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused: the engine's parameters are laid out when it is made.

        Raises:
            ConfigError: Always.
        """
        raise ConfigError(
            f"add_param_group of {len(param_group.get('params', ()))} parameter(s) comes too late: "
            "DeepSpeed lays its shards out when the model is prepared. Add it before `prepare`."
        )

    def __reduce__(self) -> Any:
        """Refused; see :meth:`Drive.__reduce__`."""
        return self._drive.__reduce__()

    @property
    def _inner(self) -> Any:
        return self._drive.engine.basic_optimizer

    def __repr__(self) -> str:
        names = (type(found).__name__ for found in (self, self._own, self._inner))
        return "{}({} over {})".format(*names)


class EngineScheduler(_OfEngine):
    """A schedule that the engine advances with its steps."""

    @property
    def _inner(self) -> Any:
        return self._drive.engine.lr_scheduler

    def step(self, *_: Any, **__: Any) -> None:
        """Nothing: the engine's step has advanced it."""

    def get_last_lr(self) -> list[float]:
        """The learning rates of the optimizer's groups, as they are now."""
        return [float(group["lr"]) for group in self._drive.engine.optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        """The schedule's own."""
        found: dict[str, Any] = self._inner.state_dict()
        return found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over what :meth:`state_dict` gave."""
        self._inner.load_state_dict(state_dict)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._inner!r})"
