"""The template: a clean process with the notebook's packages, from which workers are forked.

    notebook's process                       template process (`template_server`)
    start, at load time ──── program ──────► imports torch, then one package after the other
                        ◄─── Importing, Ready ──── it is clean: what is not was left out
    `template_starter`  ──── Fork ─────────► forks a worker
    a cell imports more ──── program ──────► a second one imports the longer list; once it is ready
                                             it takes the first one's place, which ends

Modules of the user's own folders are not among them: workers import the version of the moment.
Nothing but the standard library is needed to start one, so that it can be done at load time.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import os
import select
import sys
import threading
import time
from collections.abc import Callable

from nbaccel.base import frames
from nbaccel.base.errors import ConfigError, StartupFailed
from nbaccel.base.units import count_noun
from nbaccel.config.capabilities import engine_row
from nbaccel.plan import Choice, Plan, registry
from nbaccel.workers import time_limits
from nbaccel.workers.template_process import TemplateProcess

__all__ = ["Template", "follow_cells", "stop", "template_for"]


SAY_EVERY_S = 0.1


class Template:
    """The template of this process for a device, and the one that is to take its place.

    Attributes:
        left_out: Package → why the template does not import it, so that each worker does.
    """

    def __init__(self, device: str = "") -> None:
        self._device = device
        self._current: TemplateProcess | None = None
        self._next: TemplateProcess | None = None
        # A launch may run in a thread of the user's while a cell ends.
        self._lock = threading.RLock()
        self.left_out: dict[str, str] = {}

    def start_ahead(self) -> None:
        """Start it before it is needed, where that can be done.

        Where it cannot (a system without memory files, no room for a process), importing nbaccel
        must work all the same: a launch says what is missing, and one process needs none of it.
        """
        with contextlib.suppress(OSError, AttributeError, ConfigError):
            self.start()

    def start(self, *, in_background: bool = True) -> TemplateProcess:
        """The running process, or a new one that is not ready yet; returns at once."""
        with self._lock:
            if self._current is not None and not self._current.is_running():
                # An import may have ended it: then another one is made here.
                self._read(self._current)
            if self._current is not None and not self._current.is_running():
                self._current.replace()
                self._current, self._next = self._next, None
            if self._current is None or not self._current.is_running():
                self._current = self._start_process(in_background=in_background)
                atexit.register(stop)
            return self._current

    def processes(self) -> list[TemplateProcess]:
        """Those that run, the one that is used first."""
        return [
            process
            for process in (self._current, self._next)
            if process is not None and process.is_running()
        ]

    def stop(self) -> None:
        """End them."""
        for process in (self._current, self._next):
            if process is not None:
                process.end()
        self._current = self._next = None

    def after_cell(self) -> None:
        """Have what the last cell has imported imported in the background."""
        # A launch of another thread waits for the template: it sees to it.
        if not self._lock.acquire(blocking=False):
            return
        try:
            # The end of a cell must not raise: what is wrong here, the next launch says.
            with contextlib.suppress(OSError, AttributeError, ConfigError):
                self._follow()
        finally:
            self._lock.release()

    def is_ready(self) -> bool:
        """Whether workers with all that the notebook has imported can be forked at once."""
        with self._lock:
            self.start()
            self._follow()
            return self._serves(lambda _package: True)

    def drop_outdated(self) -> bool:
        """Make it anew where an installed file has been changed since; whether that was so."""
        with self._lock:
            newest = self._next or self._current
            if newest is None or not (changed_packages := newest.changed_packages()):
                return False
            for package in changed_packages:
                self.left_out.pop(package, None)
            for process in (self._current, self._next):
                if process is not None:
                    process.replace()
            self._current = self._next = None
            self.start()
            return True

    def wait(
        self, say: Callable[[str], None], needs: Callable[[str], bool] | None = None
    ) -> TemplateProcess:
        """A process that is ready."""
        with self._lock:
            began_at = time.monotonic()
            current = self._current
            started_here = None
            while True:
                if self.start(in_background=False) is not current:
                    # One that was there may have been killed; a new one that cannot start says why.
                    if started_here is not None and started_here.has_failed:
                        raise started_here.explain_end()
                    current = started_here = self._current
                self._follow()
                waited_s = time.monotonic() - began_at
                if waited_s > time_limits.PACKAGES_S:
                    needs = None
                if self._serves(needs or (lambda _package: False)):
                    return self.start()
                if waited_s > time_limits.TEMPLATE_S:
                    self.drop(self.start())
                    raise no_answer(time_limits.TEMPLATE_S)
                self._wait_a_moment(say)

    def drop(self, process: TemplateProcess) -> None:
        """Use a process no more: it has ended, or it does not answer."""
        with self._lock:
            if self._current is process:
                self._current = None
            process.end()

    def told_in(self, plan: Plan) -> Plan:
        """The plan with what each worker imports itself, though the notebook has it."""
        if not self.left_out:
            return plan
        stamps = self._current.stamps if self._current is not None else {}
        packages = {name.partition(".")[0] for name in stamps} - self.left_out.keys()
        reasons = [
            f"{package} is left out: {why}" for package, why in sorted(self.left_out.items())
        ]
        choice = Choice(
            "template_imports", count_noun(len(packages), "package"), "; ".join(reasons)
        )
        return dataclasses.replace(plan, choices=(*plan.choices, choice))

    def left_out_text(self) -> str:
        """A sentence for each package that every worker imports itself."""
        return " ".join(
            f"Each worker imports {package} itself, because {why}."
            for package, why in sorted(self.left_out.items())
        )

    # ---- following the notebook

    def _follow(self) -> None:
        """Read what those in the making have said, and begin one with what they lack."""
        # Messages need torch in this process, which would take seconds.
        if self._current is None or "torch" not in sys.modules:
            return
        self._read(self._current)
        if self._next is not None:
            self._read(self._next)
            if self._next.ready:
                self._current.replace()
                self._current, self._next = self._next, None
            elif self._next.has_failed:
                self._next.end()
                self._next = None
        newest = self._next or self._current
        if newest.has_failed or not newest.lacked_packages(self.left_out):
            return
        if newest.ready:
            self._next = self._start_process(in_background=True)
        else:
            self._make_again(newest, in_background=newest.in_background)

    def _start_process(self, *, in_background: bool) -> TemplateProcess:
        return TemplateProcess.start(self._device, self.left_out, in_background=in_background)

    def _make_again(self, process: TemplateProcess, *, in_background: bool) -> None:
        """Start another one in place of one that is not ready."""
        process.end()
        anew = self._start_process(in_background=in_background)
        if process is self._current:
            self._current = anew
        else:
            self._next = anew

    def _read(self, process: TemplateProcess) -> None:
        """Read what one has said while it was made; where an import has ended it, make another."""
        if "torch" not in sys.modules:
            return
        from nbaccel.workers import failure, messaging

        while not process.ready and process.owner == os.getpid() and process.socket.fileno() >= 0:
            if not select.select([process.socket], [], [], 0.0)[0]:
                return
            with contextlib.closing(messaging.Channel(process.socket.dup())) as channel:
                try:
                    message, _ = channel.receive()
                except EOFError:
                    if not process.importing:
                        process.has_failed = True
                        return
                    exit_name = failure.name_exit(process.process.wait())
                    self.left_out[process.importing] = f"its import ended the process ({exit_name})"
                    self._make_again(process, in_background=process.in_background)
                    return
            if isinstance(message, messaging.Importing):
                process.importing = message.package
            elif isinstance(message, messaging.Ready):
                process.ready = True
                self.left_out.update(message.left_out)

    def _serves(self, needs: Callable[[str], bool]) -> bool:
        """Whether workers can be forked at once, with all packages that are needed."""
        current = self._current
        return (
            current is not None
            and current.ready
            and current.is_running()
            and not any(needs(package) for package in current.lacked_packages(self.left_out))
        )

    def _wait_a_moment(self, say: Callable[[str], None]) -> None:
        in_making = [process for process in self.processes() if not process.ready]
        for process in in_making:
            process.let_continue()
            if process.is_starved():
                self._make_again(process, in_background=False)
                return
        package = in_making[-1].importing if in_making else ""
        first = "torch in the process that workers are forked from (once)"
        say(f"importing {package or first}")
        select.select([process.socket for process in in_making], [], [], SAY_EVERY_S)


def no_answer(limit_s: float) -> StartupFailed:
    """The error that a template did not answer in time."""
    return StartupFailed(
        f"The template process did not answer within {limit_s:.0f} s, so no worker could be "
        "started. The machine may be overloaded or swapping; it has been ended, and the next "
        "launch starts a new one."
    )


# A fact of the process, like the processes themselves.
_TEMPLATES: dict[str, Template] = {}


def template_for(device: str = "") -> Template:
    """The template of this process for a device."""
    has_own = bool(device) and registry.known_device(device).own_template
    return _TEMPLATES.setdefault(name := device if has_own else "", Template(name))


def uses_template(plan: Plan) -> bool:
    """Whether workers are forked from the template process of this very machine."""
    return plan.start_method == "template" and not engine_row(plan.engine).starts_agents


def running() -> list[TemplateProcess]:
    """The template processes of this process."""
    return [process for template in tuple(_TEMPLATES.values()) for process in template.processes()]


def stop() -> None:
    """End all template processes of this process. Safe to call at any time."""
    for template in tuple(_TEMPLATES.values()):
        template.stop()
    atexit.unregister(stop)


def follow_cells() -> None:
    """Follow each cell from now on, where there are cells."""
    shell = frames.running_shell()
    if shell is not None and _after_cell not in shell.events.callbacks["post_run_cell"]:
        shell.events.register("post_run_cell", _after_cell)


def unfollow_cells() -> None:
    """Undo :func:`follow_cells`."""
    shell = frames.running_shell()
    if shell is not None and _after_cell in shell.events.callbacks["post_run_cell"]:
        shell.events.unregister("post_run_cell", _after_cell)


def _after_cell(_result: object = None) -> None:
    for template in tuple(_TEMPLATES.values()):
        template.after_cell()
