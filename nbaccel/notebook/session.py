"""The workers of one notebook, and what its magics do with them."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from IPython.core.interactiveshell import InteractiveShell

from nbaccel.base.errors import ConfigError
from nbaccel.base.units import format_bytes
from nbaccel.calls.pool_planning import CellSource, PoolState, plan_pool, ranks_of
from nbaccel.config import RunConfig
from nbaccel.notebook import magic_line
from nbaccel.plan import Plan
from nbaccel.workers.template import template_for

if TYPE_CHECKING:
    from nbaccel.calls.pool import Pool
    from nbaccel.notebook.pickers import Picker

# The pool, and what of numpy it uses at its start: together half of a first cell's time.
_NEEDED_MODULES = ("nbaccel.calls.pool", "numpy.random")


def import_with_torch(shell: InteractiveShell) -> Callable[[], None]:
    """Import what starts workers, as soon as the notebook itself has imported torch."""

    def end() -> None:
        if poll in shell.events.callbacks["post_run_cell"]:
            shell.events.unregister("post_run_cell", poll)

    def poll(_result: object = None) -> None:
        if "torch" in sys.modules:
            end()
            # A missing package is reported by the cell that needs it.
            with contextlib.suppress(ImportError):
                for name in _NEEDED_MODULES:
                    importlib.import_module(name)

    shell.events.register("post_run_cell", poll)
    poll()
    return end


_LIVE_STATES = (PoolState.STARTING, PoolState.IDLE, PoolState.RUNNING)


class Session:
    """Starts, uses and ends the pool of a notebook."""

    def __init__(self, shell: InteractiveShell) -> None:
        self.shell = shell
        self.pool: Pool | None = None  # the workers, once a cell has started some
        self._config = RunConfig()
        self._picker: Picker | None = None
        self.dist = False  # whether the next workers join their process group at once
        self.on_poll: Callable[[], None] | None = None  # called each second while a cell runs

    @property
    def config(self) -> RunConfig:
        """The settings for the next start."""
        return self._config

    @config.setter
    def config(self, config: RunConfig) -> None:
        self._config = config
        if self._picker is not None:
            self._picker.config = config  # a form that is shown follows

    @property
    def living_pool(self) -> Pool | None:
        """The workers; None where there are none, or none any more."""
        return self.pool if self.pool is not None and self.pool.state in _LIVE_STATES else None

    def run(self, line: magic_line.MagicLine, source: CellSource) -> None:
        """Run a cell; workers are started if there are none."""
        pool = self._ready(line)
        result = pool.run(source, ranks=line.ranks, out=line.out)
        if line.out:
            self._bind(pool, result.out)

    def restart(self, line: magic_line.MagicLine) -> None:
        """Start new workers in the place of the old ones."""
        plan_pool(line.wanted)  # a refusal must leave the old ones running
        self.stop()
        self._start(line.wanted, joins_group=self.dist or line.dist)

    def stop(self) -> bool:
        """End the workers."""
        was_live = self.living_pool is not None
        if self.pool is not None:
            self.pool.stop()
        self.pool = None
        return was_live

    def pull(self, names: Sequence[str], ranks: Sequence[int] | None) -> str:
        """Bind names of the workers in the notebook."""
        pool = self._living("pulled from", names)
        self._bind(pool, pool.pull(*names, ranks=ranks))
        asked = tuple(range(pool.num_processes)) if ranks is None else ranks
        is_value = ranks is not None and len(ranks) == 1
        each = " each" if len(names) > 1 else ""
        shape_text = "" if is_value else f", a list by rank{each}"
        return f"Pulled {', '.join(names)} from {magic_line.ranks_as_text(asked)}{shape_text}."

    def push(self, names: Sequence[str], ranks: Sequence[int] | None) -> str:
        """Send names of the notebook to the workers."""
        pool = self._living("pushed to", names)
        magic_line.missing_names(names, self.shell.user_ns)
        copied_bytes = pool.push(*names, ranks=ranks)
        asked = tuple(range(pool.num_processes)) if ranks is None else ranks
        sent_names = f"{', '.join(names)} to {magic_line.ranks_as_text(asked)}"
        return f"Pushed {sent_names}: {format_bytes(copied_bytes)} copied."

    def configure(self, line: magic_line.MagicLine) -> None:
        """Set what the next start uses."""
        plan_pool(line.wanted)
        self.config = line.wanted
        self.dist = self.dist or line.dist

    def open_picker(self, names: Sequence[str]) -> Picker:
        """A form for the settings of the next start."""
        from nbaccel.notebook.pickers import Picker

        magic_line.missing_names(names, self.shell.user_ns)
        if len(names) > 2:
            raise ConfigError(
                f"%accelerate config takes a model and a batch at most: got {', '.join(names)}. "
                "Write %accelerate config model batch."
            )
        values = (self.shell.user_ns[name] for name in names)
        given = dict(zip(("model", "sample_batch"), values, strict=False))
        picker = Picker(self._config, **given)
        if self._picker is not None:
            # An older form may still be on the page; only the newest sets the next start.
            self._picker.unobserve(self._picked, "config")
        picker.observe(self._picked, "config")
        self._picker = picker
        return picker

    def _picked(self, change: Mapping[str, Any]) -> None:
        # Not through `config`, whose setter would write to the picker again.
        self._config = change["new"]

    def config_text(self) -> str:
        """The settings for the next start, and the plan of the present or future workers."""
        pool = self.living_pool
        plan = plan_pool(self.config) if pool is None else pool.plan
        return f"{self.settings_text()}\n\n{plan.explain()}"

    def settings_text(self) -> str:
        """The settings for the next start, and those in which the present workers differ."""
        text = f"Next start: {self.config!r}{', process group joined' if self.dist else ''}"
        pool = self.living_pool
        if pool is None or not (differing := self._differing(pool, self.config)):
            return text
        values = [f"{name}={_effective_value(pool.plan, name)!r}" for name in differing]
        return f"{text}\nThe workers run with {', '.join(values)} until %accelerate restart."

    def absence_text(self) -> str:
        """The text where there are no workers."""
        plan = plan_pool(self.config)
        left_out = template_for(plan.device).left_out_text()
        first_cell = f"The first %%accelerate cell starts {plan.headline()}."
        return f"No workers yet. {first_cell} {left_out}".rstrip()

    def _ready(self, line: magic_line.MagicLine) -> Pool:
        if (pool := self.living_pool) is not None:
            self._refuse_other(pool, line)
            return pool
        if line.ranks:  # refused before workers are started
            ranks_of(line.ranks, plan_pool(line.wanted).num_processes)
        broken = self.pool
        if broken is None or broken.state is PoolState.STOPPED:
            return self._start(line.wanted, joins_group=self.dist or line.dist)
        if line.wanted != broken.config:
            broken.restart(line.wanted)
            self.config = line.wanted
        return broken

    def _start(self, config: RunConfig, *, joins_group: bool) -> Pool:
        plan_pool(config)  # refuses before the import below, which may take seconds
        # Not at the top: it imports torch.
        from nbaccel.calls.pool import Pool

        new_pool = Pool(config=config, namespace=self.shell.user_ns, dist=joins_group)
        new_pool.on_poll = lambda: self.on_poll() if self.on_poll is not None else None
        new_pool.start()
        # Kept only after the start, so that settings that cannot start are not used again.
        self.pool = new_pool
        self.config = config
        self.dist = joins_group
        return new_pool

    def _refuse_other(self, pool: Pool, line: magic_line.MagicLine) -> None:
        differing = self._differing(pool, line.wanted, line.given)
        mistakes = [
            f"The workers run with {name}={_effective_value(pool.plan, name)!r}: got "
            f"{getattr(line.wanted, name)!r}. Workers keep their settings as long as they live."
            for name in differing
        ]
        if line.dist and not self.dist:
            mistakes.append("The workers run with dist=False, without a process group: got --dist.")
        if mistakes:
            # One remedy for all mistakes, after the last of them.
            flags = [magic_line.flag_of(line.wanted, name) for name in differing]
            flags += ["--dist"] * line.dist
            mistakes[-1] += (
                f" %accelerate restart {' '.join(flags)} starts others, without the variables of "
                "these; or leave it out here."
            )
            raise ConfigError(*mistakes)

    @staticmethod
    def _differing(
        pool: Pool, config: RunConfig, setting_names: Iterable[str] = RunConfig.model_fields
    ) -> list[str]:
        """Settings that the workers do not have; where the plan chooses, by what it chose."""
        names = [n for n in setting_names if getattr(config, n) != getattr(pool.config, n)]
        # Planning inspects the machine, which a cell without changed settings need not wait for.
        plan = plan_pool(config) if names else pool.plan
        return [n for n in names if _effective_value(plan, n) != _effective_value(pool.plan, n)]

    def _bind(self, pool: Pool, values: dict[str, Any]) -> None:
        """Bind what came from the workers, without sending it back as a change of the notebook."""
        self.shell.push(values)  # type: ignore[no-untyped-call]
        pool.bound_here(tuple(values))

    def _living(self, action: str, names: Sequence[str]) -> Pool:
        if (pool := self.living_pool) is not None:
            return pool
        text = f" ({self.pool.reason})" if self.pool is not None and self.pool.reason else ""
        raise ConfigError(
            f"{', '.join(names)} cannot be {action} workers: there are none{text}. "
            "Run a %%accelerate cell first, or start them with %accelerate restart."
        )


def _effective_value(plan: Plan, name: str) -> Any:
    values = {choice.name: choice.value for choice in plan.choices}
    return values.get(name, getattr(plan.config, name))
