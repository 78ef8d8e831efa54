"""The workers of one notebook, and what its magics do with them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from IPython.core.interactiveshell import InteractiveShell

from nbaccel.config import RunConfig
from nbaccel.errors import ConfigError
from nbaccel.notebook.line import Line, check_ranks, missing_names, told_ranks
from nbaccel.notebook.picker_texts import flag
from nbaccel.plan import Plan
from nbaccel.pool.planning import plan_pool
from nbaccel.pool.source import Source
from nbaccel.pool.states import PoolState
from nbaccel.units import format_bytes

if TYPE_CHECKING:
    from nbaccel.notebook.pickers import Picker
    from nbaccel.pool.pool import Pool

__all__ = ["Session"]

_LIVE = (PoolState.STARTING, PoolState.IDLE, PoolState.RUNNING)
# What a worker runs where `--autoreload` is given: IPython's own extension, as in a notebook.
_AUTORELOAD = "%load_ext autoreload\n%autoreload {mode}"


class Session:
    """Starts, uses and ends the pool of a notebook.

    Attributes:
        shell: The notebook's shell.
        pool: The workers, once a cell has asked for some.
        dist: Whether the next workers join their process group at once.
    """

    def __init__(self, shell: InteractiveShell) -> None:
        self.shell = shell
        self.pool: Pool | None = None
        self._config = RunConfig()
        self._picker: Picker | None = None
        self.dist = False
        self._reloads = False
        self._reloading: Pool | None = None

    @property
    def config(self) -> RunConfig:
        """The settings for the next start."""
        return self._config

    @config.setter
    def config(self, config: RunConfig) -> None:
        self._config = config
        if self._picker is not None:
            self._picker.config = config  # a form that shows them follows

    def is_live(self) -> bool:
        """Whether there are workers."""
        return self.pool is not None and self.pool.state in _LIVE

    def run(self, line: Line, source: Source) -> None:
        """Run a cell, with workers started where there are none.

        Args:
            line: What its line asks for.
            source: The cell.
        """
        pool = self._ready(line)
        check_ranks(line.ranks, pool.num_processes)
        self._autoreload(pool, line.autoreload)
        result = pool.run(source, ranks=line.ranks, out=line.out)
        if line.out:
            self._bind(pool, result.out)

    def restart(self, line: Line) -> None:
        """Start new workers in the place of the old ones."""
        pool, dist = self.pool, self.dist or line.dist
        plan_pool(line.wanted)  # a refusal leaves the old ones as they are
        self._reloading = None
        if pool is None or pool.state is PoolState.STOPPED or dist != self.dist:
            self.stop()
            self._start(line.wanted, dist=dist)
        else:
            pool.restart(line.wanted)
            self.config = line.wanted

    def stop(self) -> bool:
        """End the workers.

        Returns:
            Whether there were any.
        """
        pool = self.pool
        if pool is None:
            return False
        was_live = pool.state in _LIVE
        pool.stop()
        self.pool = self._reloading = None
        return was_live

    def pull(self, names: Sequence[str], ranks: Sequence[int] | None) -> str:
        """Bind names of the workers in the notebook.

        Returns:
            What was done.
        """
        pool = self._living("pulled from", names)
        check_ranks(ranks, pool.num_processes)
        self._bind(pool, pool.pull(*names, ranks=ranks))
        asked = tuple(range(pool.num_processes)) if ranks is None else ranks
        is_value = ranks is not None and len(ranks) == 1
        shape = "" if is_value else ", a list by rank" + (" each" if len(names) > 1 else "")
        return f"Pulled {', '.join(names)} from {told_ranks(asked)}{shape}."

    def push(self, names: Sequence[str], ranks: Sequence[int] | None) -> str:
        """Send names of the notebook to the workers.

        Returns:
            What was done.
        """
        pool = self._living("pushed to", names)
        check_ranks(ranks, pool.num_processes)
        missing_names(names, self.shell.user_ns)
        copied = pool.push(*names, ranks=ranks)
        asked = tuple(range(pool.num_processes)) if ranks is None else ranks
        return f"Pushed {', '.join(names)} to {told_ranks(asked)}: {format_bytes(copied)} copied."

    def configure(self, line: Line) -> None:
        """Settle what the next start uses."""
        plan_pool(line.wanted)
        self.config, self.dist = line.wanted, self.dist or line.dist

    def open_picker(self, names: Sequence[str]) -> Picker:
        """A form for the settings of the next start.

        Args:
            names: The notebook's model, and a batch, for the memory that it shows; may be empty.

        Returns:
            The form. What is picked in it is what the next start uses.

        Raises:
            ConfigError: There is no such variable, or it is no model.
        """
        from nbaccel.notebook.pickers import Picker

        missing_names(names, self.shell.user_ns)
        if len(names) > 2:
            raise ConfigError(
                f"%accelerate config takes a model and a batch at most: got {', '.join(names)}. "
                "Nothing says what the others are for. Write %accelerate config model batch."
            )
        model, batch, *_ = (*(self.shell.user_ns[name] for name in names), None, None)
        picker = Picker(self._config, model=model, sample_batch=batch)
        if self._picker is not None:
            self._picker.unobserve(self._picked, "config")
        picker.observe(self._picked, "config")
        self._picker = picker
        return picker

    def _picked(self, change: Mapping[str, Any]) -> None:
        self._config = change["new"]

    def told_config(self) -> str:
        """The settings for the next start, and the plan of the workers there are or would be."""
        is_live = self.pool is not None and self.is_live()
        plan = self.pool.plan if self.pool is not None and is_live else plan_pool(self.config)
        return f"{self.told_settings()}\n\n{plan.explain()}"

    def told_settings(self) -> str:
        """The settings for the next start, and in what those of the workers there are differ."""
        told = [f"Next start: {self.config!r}{', process group joined' if self.dist else ''}"]
        if self.pool is None or not self.is_live():
            return told[0]
        if differing := self._differing(self.pool, self.config, tuple(RunConfig.model_fields)):
            now = ", ".join(f"{name}={_effective(self.pool.plan, name)!r}" for name in differing)
            told.append(f"The workers run with {now} until %accelerate restart.")
        return "\n".join(told)

    def told_absence(self) -> str:
        """What there is to say where there are no workers."""
        headline = plan_pool(self.config).headline()
        return f"No workers yet. The first %%accelerate cell starts {headline}."

    def _ready(self, line: Line) -> Pool:
        """The pool that serves a cell with this line."""
        pool = self.pool
        if pool is not None and self.is_live():
            self._refuse_other(pool, line)
            return pool
        if line.ranks:
            check_ranks(line.ranks, plan_pool(line.wanted).num_processes)
        self._reloading = None  # whoever runs the cell, those that reloaded are gone
        if pool is None or pool.state is PoolState.STOPPED:
            return self._start(line.wanted, dist=self.dist or line.dist)
        if line.wanted != pool.config:  # broken, and asked for otherwise
            pool.restart(line.wanted)
            self.config = line.wanted
        return pool

    def _start(self, config: RunConfig, *, dist: bool) -> Pool:
        plan_pool(config)  # a refusal need not wait for torch
        # Here, not above: this is where torch may come in.
        from nbaccel.pool.pool import Pool

        pool = Pool(config=config, namespace=self.shell.user_ns, dist=dist)
        pool.start()
        # What could not start is not kept for the next start.
        self.pool, self.config, self.dist = pool, config, dist
        return pool

    def _refuse_other(self, pool: Pool, line: Line) -> None:
        differing = self._differing(pool, line.wanted, line.given)
        mistakes = [
            f"The workers run with {name}={_effective(pool.plan, name)!r}: got "
            f"{getattr(line.wanted, name)!r}. Workers keep their settings as long as they live."
            for name in differing
        ]
        if line.dist and not self.dist:
            mistakes.append(
                "The workers run with dist=False: got --dist. They have not joined a process group "
                "at their start."
            )
        if mistakes:
            flags = " ".join([*(flag(line.wanted, n) for n in differing), *["--dist"] * line.dist])
            mistakes[-1] += (
                f" %accelerate restart {flags} starts others, without the variables of these; or "
                "leave it out here."
            )
            raise ConfigError(*mistakes)

    @staticmethod
    def _differing(pool: Pool, wanted: RunConfig, names: Sequence[str]) -> list[str]:
        """Settings that the workers do not have, by what comes of them where the plan chooses."""
        asked = [name for name in names if getattr(wanted, name) != getattr(pool.config, name)]
        plan = plan_pool(wanted) if asked else pool.plan
        return [name for name in asked if _effective(plan, name) != _effective(pool.plan, name)]

    def _bind(self, pool: Pool, values: dict[str, Any]) -> None:
        """Bind what came from the workers: it is theirs, and no change to be sent back."""
        self.shell.push(values)  # type: ignore[no-untyped-call]
        pool.bound_here(tuple(values))

    def _living(self, what: str, names: Sequence[str]) -> Pool:
        if self.pool is not None and self.is_live():
            return self.pool
        told = f" ({self.pool.reason})" if self.pool is not None and self.pool.reason else ""
        raise ConfigError(
            f"{', '.join(names)} cannot be {what} workers: there are none{told}. "
            "Run a %%accelerate cell first, or start them with %accelerate restart."
        )

    def _autoreload(self, pool: Pool, wanted: bool | None) -> None:
        """Switch IPython's autoreload in the workers, once for as long as they live."""
        self._reloads = self._reloads if wanted is None else wanted
        running = self._reloading is pool
        if self._reloads == running:
            return
        pool.run(_AUTORELOAD.format(mode=2 if self._reloads else 0))
        self._reloading = pool if self._reloads else None


def _effective(plan: Plan, name: str) -> Any:
    """What a setting comes to be in a plan."""
    decided = {choice.name: choice.value for choice in plan.choices}
    return decided.get(name, getattr(plan.config, name))
