"""Where a loader is in its data, so that a training that was killed goes on as if it had not been.

[Note: the same order again] An epoch's order is drawn at its beginning: by the sampler's generator
where it has one, else from the process's random state. So the states at the beginning are kept. A
resumed epoch puts them back, makes its iterator, skips, reads the first batch, and then returns
the process's random state to what it was before: the unbroken run, too, had drawn all this long
ago. The batch that was read ahead when the checkpoint was written is read once more; torch's state
just before is kept for it, so that a dataset which draws (a random crop) draws the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from nbaccel.abc.place import Place
from nbaccel.errors import ConfigError
from nbaccel.train import rng

__all__ = ["Position"]

_HOST = Place(device=torch.device("cpu"))  # orders are drawn there, whatever trains


class Position:
    """The epoch and batch that a loader, and the loaders that skip some of its batches, are at.

    Args:
        generators: What draws the order, by a name of its own each.

    Attributes:
        epoch: Epochs that were iterated to their end.
        batches_seen: Batches of the running epoch that were given out, skipped ones included.
        ahead: Torch's random state before the batch was read that comes after the one at hand.
        restored: What the next iteration starts from, instead of drawing anew; None: nothing.
        has_begun: Whether any epoch was begun before the next one.
    """

    def __init__(self, generators: Mapping[str, torch.Generator]) -> None:
        self.epoch = 0
        self.batches_seen = 0
        self.ahead: torch.Tensor | None = None
        self.restored: dict[str, Any] | None = None
        self.has_begun = False
        self._generators = dict(generators)
        self._start: dict[str, Any] | None = None  # of the running epoch; None between two

    @property
    def is_within_epoch(self) -> bool:
        """Whether an epoch was begun and not ended."""
        return self._start is not None or self.restored is not None

    def begin(self, skipped: int) -> None:
        """An epoch begins now: keep what its order is drawn from."""
        self.batches_seen = skipped
        self.ahead = None
        self._start = {
            "process": rng.capture(_HOST),
            "generators": self._draw_states(),
            "has_begun": self.has_begun,
        }
        self.has_begun = True

    def advance(self) -> None:
        """An epoch has ended."""
        self.epoch += 1
        self.batches_seen = 0
        self._start = None

    def move_to(self, epoch: int) -> None:
        """Make this the epoch; what is known of the place in another one is void."""
        if epoch != self.epoch:
            self.epoch = epoch
            self.batches_seen = 0
            self.restored = self._start = None

    def put_back(self) -> dict[str, Any] | None:
        """Go back to the beginning of the restored epoch, once.

        Returns:
            What was restored; None where nothing was.
        """
        state, self.restored = self.restored, None
        if state is not None:
            rng.restore(_HOST, state["start"]["process"])
            self._set_draw_states(state["start"]["generators"])
        return state

    def state_dict(self, *, is_through: bool = False) -> dict[str, Any]:
        """The position, in plain containers and tensors.

        Args:
            is_through: Tell the beginning of the next epoch although this one's last batch is
                still at hand.
        """
        if self.restored is not None:
            return dict(self.restored)
        within = self._start is not None and not is_through
        return {
            "epoch": self.epoch + is_through,
            "batches_seen": self.batches_seen if within else 0,
            "start": self._start if within else None,
            "ahead": self.ahead if within else None,
            "has_begun": self._start["has_begun"] if within and self._start else self.has_begun,
            "generators": self._draw_states(),
        }

    @staticmethod
    def check(state: Any) -> None:
        """Refuse what is no position.

        Raises:
            ConfigError: It was not :meth:`state_dict` that told it.
        """
        if not isinstance(state, Mapping):
            raise ConfigError(
                f"No state of a prepared loader, but a {type(state).__name__}: the loader would "
                "begin at the wrong batch. Give what its state_dict() returned."
            )
        if not {"epoch", "batches_seen", "start", "generators", "has_begun"} <= state.keys():
            raise ConfigError(
                f"No state of a prepared loader: it has {', '.join(map(repr, sorted(state)))}. The "
                "loader would begin at the wrong batch. Give what its state_dict() returned; of "
                "another library's checkpoint, load model and optimizer only."
            )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a position that :meth:`state_dict` told.

        Raises:
            ConfigError: It is something else.
        """
        self.check(state)
        self.epoch = int(state["epoch"])
        self.batches_seen = int(state["batches_seen"])
        self.has_begun = bool(state["has_begun"])
        self._start = None
        self.restored = dict(state) if state["start"] is not None else None
        self._set_draw_states(state["generators"])

    @contextmanager
    def undisturbed(self) -> Iterator[None]:
        """Leave all that draws the order as it was before the block."""
        states = self._draw_states()
        with rng.preserved():
            yield
        self._set_draw_states(states)

    def _draw_states(self) -> dict[str, torch.Tensor]:
        return {name: generator.get_state() for name, generator in self._generators.items()}

    def _set_draw_states(self, states: Mapping[str, torch.Tensor]) -> None:
        for name in states.keys() & self._generators.keys():
            self._generators[name].set_state(states[name])
