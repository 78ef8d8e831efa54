"""What the notebook has imported, the template has too: decided here, in the notebook's process.

    after a cell that has imported packages ─┬─ this process is clean ─► a fork of it is the base
    before a launch ─────────────────────────┘
    afterwards, and where it is not clean ───► the base forks a candidate, which imports them
    workers have imported more ──────────────► the base forks a candidate, which imports that, too
    an installed file has been changed ──────► what has the old version is not used any more

Modules of the user's own folders are never learned: workers import the version of the moment.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import select
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from nbaccel.base import env, frames
from nbaccel.base.errors import ConfigError
from nbaccel.plan import registry
from nbaccel.workers import installed_modules, template_prestart, time_limits, working_folder
from nbaccel.workers.installed_modules import FileStamp
from nbaccel.workers.template_prestart import TemplateBoot

if TYPE_CHECKING:
    from nbaccel.workers.messaging import Imported

__all__ = ["SWITCH", "TemplateLearner", "follow_cells", "learner", "unfollow_cells"]


SWITCH = "NBACCEL_TEMPLATE_IMPORTS"
"""Environment variable: with 0, templates are fresh interpreters and import torch only."""
_NEEDED_HERE = (
    "nbaccel.workers.worker",
    "nbaccel.calls.pool_worker",
    "nbaccel.calls.launch",
    "nbaccel.calls.pool",
    "nbaccel.workers.template_server",
    "nbaccel.workers.template_candidate",
    "numpy.random",
)
"""What a launch imports in any case: before the fork, so that it is there once."""
_NOTHING: Mapping[str, FileStamp | None] = {}
_WAIT_STEP_S = 0.1
_STATUS_S = 0.5


@dataclass(kw_only=True)
class _NextTemplate:
    """A template in the making."""

    boot: TemplateBoot
    base: TemplateBoot
    importing: str = ""
    is_paused: bool = False


@dataclass
class _Lacked:
    """Packages that a template lacks, found once for as long as nothing changes.

    A thousand modules take a tenth of a millisecond, several times after each cell.
    """

    of: tuple[Any, ...] = ()
    found: tuple[str, ...] = ()

    def packages(
        self,
        imported_files: Mapping[str, str],
        known_names: Mapping[str, Any],
        left_out: Mapping[str, str],
        label: Callable[[str], str] = str,
    ) -> tuple[str, ...]:
        """Packages with modules that are not known; nbaccel's own alone are not worth it."""
        asked = (imported_files, known_names, dict(left_out))
        if not self.of or not (
            self.of[0] is imported_files and self.of[1] is known_names and self.of[2] == left_out
        ):
            self.found = tuple(
                dict.fromkeys(
                    package
                    for module_name in imported_files
                    if module_name not in known_names
                    and label(package := module_name.partition(".")[0]) not in left_out
                    and package != "nbaccel"
                )
            )
            self.of = asked
        return self.found


@dataclass
class _WorkerModules:
    """What workers have imported, and where they had another environment than the notebook.

    Replaced as a whole, as :class:`_Lacked` compares by identity.
    """

    files: Mapping[str, str] = field(default_factory=dict)
    variables: Mapping[str, str | None] = field(default_factory=dict)


@dataclass(kw_only=True)
class Surroundings:
    """What imports for workers depended on: the notebook has not made them, and has not seen it.

    Attributes:
        environment: The notebook's, at the time of the imports.
        folders: The folders of packages then, each with its version: what is installed since may be
            what a package has looked for in vain.
        read_names: Variables that were read.
    """

    environment: Mapping[str, str]
    folders: Mapping[str, FileStamp | None]
    read_names: frozenset[str] = frozenset()

    @classmethod
    def now(cls) -> Surroundings:
        """As they are now."""
        folders = {path: path for path in sys.path if "-packages" in path}
        return cls(environment=env.snapshot(), folders=installed_modules.stamps_of(folders))

    def have_changed(self) -> bool:
        """Whether a worker that imports now may find something else."""
        if installed_modules.stamps_of({path: path for path in self.folders}) != self.folders:
            return True
        if env.EVERY_VARIABLE in self.read_names:
            return env.snapshot() != self.environment
        return any(env.read(name) != self.environment.get(name) for name in self.read_names)


def _label(package: str) -> str:
    """What workers have imported of a package is left out by itself: the rest may be no trouble."""
    return f"more of {package}"


class TemplateLearner:
    """Keeps a template of this process up to date with the notebook.

    Args:
        device: The device whose library the template imports; empty for none of its own.

    Attributes:
        left_out: Package → why the template does not import it, so that each worker does.
    """

    def __init__(self, device: str = "") -> None:
        self._device = device
        self._candidate: _NextTemplate | None = None
        self._lacked = _Lacked()
        self._lacked_by_workers = _Lacked()
        self._worker_modules = _WorkerModules()
        # A launch may run in a thread of the user's while a cell ends.
        self._lock = threading.RLock()
        self.left_out: dict[str, str] = {}

    def start_ahead(self) -> None:
        """Start the first template, as a fork of this process if that is possible."""
        # Importing nbaccel must work all the same: a launch says what is missing.
        with contextlib.suppress(OSError, AttributeError, ImportError, ConfigError):
            if self._may_learn() and self._fork_this_process():
                return
        template_prestart.start_ahead(self._device)

    def after_cell(self, _cell_result: object = None) -> None:
        """Let the template learn what the last cell has imported, in the background."""
        # A launch of another thread waits for the template: it sees to it.
        if not self._lock.acquire(blocking=False):
            return
        try:
            # The end of a cell must not raise: what is wrong here, the next launch says.
            with contextlib.suppress(OSError, AttributeError, ConfigError):
                self._follow()
        finally:
            self._lock.release()

    def _follow(self) -> None:
        self._read_candidate()
        if not self._may_learn() or self._best() is None:
            return
        if self._lacks_own() and not self._drop_outdated():
            self._fork_this_process()
        if self._lacks() or (self._is_bare() and self._candidate is None):
            self._begin()

    def before_launch(self) -> None:
        """Use no outdated template; fork this process if it has what the template lacks."""
        with self._lock:
            self._read_candidate()
            if not self._may_learn():
                return
            self._drop_outdated()
            if self._lacks_own() or template_prestart.base(self._device) is None:
                self._fork_this_process()

    @contextlib.contextmanager
    def during_launch(
        self, needs: Callable[[str], bool], say: Callable[[str], None]
    ) -> Iterator[None]:
        """Wait until the template has what a launch uses; nothing is learned during the block.

        Args:
            needs: Whether the launch may use a package.
            say: Takes what is being waited for, again and again.
        """
        with self._lock:
            self._await_needed(needs, say)
            self._pause(is_paused=True)
        try:
            yield
        finally:
            with self._lock:
                self._pause(is_paused=False)

    def note_imports(self, message: Imported) -> None:
        """Let the next template have what a worker has imported itself.

        Args:
            message: What the worker says.
        """
        # What else is imported beside a device's driver may wake it.
        if self._device:
            return
        own_variables = env.snapshot()
        variables = dict(self._worker_modules.variables)
        for name in own_variables.keys() | message.environment.keys():
            if own_variables.get(name) != message.environment.get(name):
                variables[name] = message.environment.get(name)
        self._worker_modules = _WorkerModules(
            {**self._worker_modules.files, **message.files}, variables
        )

    def learned_packages(self) -> list[str]:
        """Packages that workers have from their start: the notebook's, and what workers use."""
        packages = {
            package
            for name in self._known_stamps()
            if _label(package := name.partition(".")[0]) not in self.left_out
        }
        return sorted(packages - self.left_out.keys())

    # ---- what is lacking

    def _may_learn(self) -> bool:
        # Messages to the template need torch in this process, which would take seconds.
        return (
            "torch" in sys.modules
            and sys.platform.startswith("linux")
            and frames.running_shell() is not None
            and env.flag(SWITCH) is not False
        )

    def _best(self) -> TemplateBoot | None:
        return template_prestart.learned(self._device) or template_prestart.base(self._device)

    def _known_stamps(self) -> Mapping[str, FileStamp | None]:
        template_boot = self._best()
        return template_boot.stamps if template_boot is not None else _NOTHING

    def _lacked_packages(self, names: Mapping[str, Any]) -> tuple[str, ...]:
        """Packages with modules that are not among these."""
        return self._lacked.packages(installed_modules.installed_modules(), names, self.left_out)

    def _lacks_own(self) -> bool:
        """Whether the notebook has modules that no template was asked to import."""
        return bool(self._lacked_packages(self._asked_names()))

    def _lacks(self) -> bool:
        """Whether the notebook or its workers have such modules."""
        return self._lacks_own() or bool(
            self._lacked_by_workers.packages(
                self._worker_modules.files, self._asked_names(), self.left_out, _label
            )
        )

    def _asked_names(self) -> Mapping[str, FileStamp | None]:
        candidate = self._candidate
        return candidate.boot.stamps if candidate is not None else self._known_stamps()

    def _is_bare(self) -> bool:
        """Whether the only template is a fork of this process, which lacks what workers need."""
        base_boot = template_prestart.base(self._device)
        return (
            base_boot is not None
            and base_boot.is_of_this_process
            and template_prestart.learned(self._device) is None
        )

    def _drop_outdated(self) -> bool:
        """Use no template any more with a file that has been changed since; whether that was so."""
        template_boot = self._best()
        surroundings = template_boot.surroundings if template_boot is not None else None
        if surroundings is not None and surroundings.have_changed():
            self._drop_candidate()
            template_prestart.drop_learned(self._device)
            template_boot = self._best()
        if template_boot is None or not template_boot.stamps:
            return False
        files = {**self._worker_modules.files, **installed_modules.installed_modules()}
        known_files = {name: files[name] for name in template_boot.stamps if name in files}
        changed_packages = {
            module_name.partition(".")[0]
            for module_name, stamp in installed_modules.stamps_of(known_files).items()
            if template_boot.stamps[module_name] != stamp
        }
        if not changed_packages:
            return False
        self._drop_candidate()
        template_prestart.drop_learned(self._device)
        base_boot = template_prestart.base(self._device)
        if base_boot is not None and base_boot.is_of_this_process:
            # This process has the old version, too: no fork of it will do.
            template_prestart.start_anew(self._device)
        for package in changed_packages:
            for left_out_name in (package, _label(package)):
                self.left_out.pop(left_out_name, None)
        return True

    # ---- a fork of this process

    def _fork_this_process(self) -> bool:
        """Let a fork of this process be the base, if it is clean; whether that was done."""
        from nbaccel.base.process_death import uninterrupted
        from nbaccel.workers import template_from_kernel
        from nbaccel.workers.template_handles import ForkedProcess

        if self._device or template_from_kernel.why_not(_notebook_variables()):
            return False
        for module_name in _NEEDED_HERE:
            importlib.import_module(module_name)
        stamps = template_from_kernel.imported_stamps()
        if stamps is None:
            return False
        from nbaccel.workers.template_server import serve_notebook_fork

        parent_id = os.getpid()
        with uninterrupted():
            own_socket, template_socket, error_file = template_prestart.open_ends()
            with template_socket:
                process_id = template_from_kernel.fork_notebook(
                    lambda: serve_notebook_fork(template_socket.fileno(), parent_id),
                    kept_descriptors=(template_socket.fileno(),),
                    error_file=error_file,
                )
            if process_id is None:
                own_socket.close()
                os.close(error_file)
                return False
            self._drop_candidate()
            template_prestart.adopt(
                self._device,
                TemplateBoot(
                    process=ForkedProcess(process_id),
                    socket=own_socket,
                    errors=error_file,
                    owner=parent_id,
                    stamps=stamps,
                    is_of_this_process=True,
                ),
            )
        return True

    # ---- a candidate

    def _begin(self) -> None:
        """Have the base fork a candidate that imports all that the notebook has imported."""
        from nbaccel.workers import messaging, template_server

        base_boot = template_prestart.start_base(self._device)
        self._drop_candidate()
        # Someone may have stopped it (SIGSTOP).
        template_prestart.let_continue(base_boot)
        files = installed_modules.installed_modules()
        packages = installed_modules.by_package(
            dict.fromkeys(template_server.modules_for_workers(in_notebook=True), "") | dict(files)
        )
        files_of_workers = {
            name: path for name, path in self._worker_modules.files.items() if name not in files
        }
        own_socket, template_socket, error_file = template_prestart.open_ends()
        candidate_boot = TemplateBoot(
            process=_NotYet(),
            socket=own_socket,
            errors=error_file,
            owner=os.getpid(),
            stamps=installed_modules.stamps_of({**files, **files_of_workers}),
            surroundings=Surroundings.now() if files_of_workers else None,
        )
        self._candidate = _NextTemplate(boot=candidate_boot, base=base_boot)
        with template_socket:
            try:
                _send(
                    base_boot,
                    messaging.Learn(
                        packages=packages,
                        left_out=self.left_out,
                        environment=env.snapshot(),
                        import_path=tuple(working_folder.installed_first()),
                        of_workers={
                            _label(package): {name: files_of_workers[name] for name in names}
                            for package, names in installed_modules.by_package(
                                files_of_workers
                            ).items()
                        },
                        worker_variables=dict(self._worker_modules.variables),
                    ),
                    (template_socket.fileno(), error_file),
                )
            except OSError:
                self._drop_candidate()

    def _read_candidate(self) -> None:
        """Read what the candidate has said; use it if it is ready."""
        while (candidate := self._candidate) is not None:
            if candidate.boot.owner != os.getpid():
                self._candidate = None
                return
            if not select.select([candidate.boot.socket], [], [], 0.0)[0]:
                return
            self._note(candidate)

    def _note(self, candidate: _NextTemplate) -> None:
        from nbaccel.workers import messaging
        from nbaccel.workers.template_handles import DescendantProcess

        with contextlib.closing(messaging.Channel(candidate.boot.socket.dup())) as channel:
            try:
                message, _ = channel.receive()
            except EOFError:
                # The base has ended, or has given it up.
                self._drop_candidate()
                return
        if isinstance(message, messaging.Importing):
            candidate.importing = message.package
            base_boot = candidate.base
            process_id = message.pid
            if candidate.boot.process.pid != process_id:
                candidate.boot.process = DescendantProcess(
                    process_id, lambda: _reported_status(base_boot, process_id)
                )
        elif isinstance(message, messaging.Learned):
            surroundings = candidate.boot.surroundings
            if surroundings is not None:
                surroundings.read_names = message.read_names
                if surroundings.have_changed():
                    self._drop_candidate()
                    return
            self._candidate = None
            self.left_out = dict(message.left_out)
            candidate.boot.ready = True
            candidate.boot.base = candidate.base
            candidate.base.use()
            candidate.base.ended[candidate.boot.process.pid] = None
            template_prestart.adopt_learned(self._device, candidate.boot)

    def _drop_candidate(self) -> None:
        candidate = self._candidate
        self._candidate = None
        if candidate is not None and candidate.boot.owner == os.getpid():
            candidate.boot.end()

    def _await_needed(self, needs: Callable[[str], bool], say: Callable[[str], None]) -> None:
        if not self._may_learn() or not any(
            needs(package) for package in self._lacked_packages(self._known_stamps())
        ):
            return
        if self._lacks() or self._candidate is None:
            self._begin()
        self._pause(is_paused=False)
        deadline = time.monotonic() + time_limits.LEARN_S
        while (candidate := self._candidate) is not None and time.monotonic() < deadline:
            say(f"importing {candidate.importing or 'what the notebook has imported'}")
            select.select([candidate.boot.socket], [], [], _WAIT_STEP_S)
            self._read_candidate()

    def _pause(self, *, is_paused: bool) -> None:
        candidate = self._candidate
        if candidate is None or candidate.is_paused == is_paused:
            return
        from nbaccel.workers import messaging

        candidate.is_paused = is_paused
        # The base has ended, and the candidate with it.
        with contextlib.suppress(OSError):
            _send(candidate.base, messaging.PauseLearning(is_paused), ())


class _NotYet:
    """Stands for the process of a candidate that has said nothing yet; its base watches it."""

    pid = 0

    def poll(self) -> int | None:
        return None

    def wait(self, timeout: float | None = None) -> int:
        return 0

    def kill(self) -> None:
        """Its base ends it: a new candidate takes its place, or the base itself ends."""


def _send(template_boot: TemplateBoot, message: object, file_descriptors: tuple[int, ...]) -> None:
    from nbaccel.workers import messaging

    with contextlib.closing(messaging.Channel(template_boot.socket.dup())) as channel:
        channel.send(message, file_descriptors)


def _reported_status(base_boot: TemplateBoot, process_id: int) -> int | None:
    """How a fork of the base has ended, as the base reports it."""
    from nbaccel.workers import messaging

    deadline = time.monotonic() + _STATUS_S
    with base_boot.hearing:
        # Only of those that have become templates an entry is kept.
        if base_boot.socket.fileno() < 0 or process_id not in base_boot.ended:
            return None
        with contextlib.closing(messaging.Channel(base_boot.socket.dup())) as channel:
            while base_boot.ended.get(process_id) is None:
                patience_s = max(0.0, deadline - time.monotonic())
                if not select.select([channel], [], [], patience_s)[0]:
                    return None
                try:
                    message, _ = channel.receive()
                except EOFError:
                    return None
                if isinstance(message, messaging.Ready):
                    base_boot.ready = True
                elif isinstance(message, messaging.Ended) and message.pid in base_boot.ended:
                    base_boot.ended[message.pid] = message
    return int(base_boot.ended.pop(process_id).status)


def _notebook_variables() -> Mapping[str, Any]:
    return getattr(frames.running_shell(), "user_ns", {})


# What templates know is a fact of the process, like the templates themselves.
_LEARNERS: dict[str, TemplateLearner] = {}


def learner(device: str = "") -> TemplateLearner:
    """The learner of this process's template for a device.

    Args:
        device: The row of what workers compute on; empty for one without a template of its own.
    """
    has_own = bool(device) and registry.known_device(device).own_template
    name = device if has_own else ""
    return _LEARNERS.setdefault(name, TemplateLearner(name))


def follow_cells() -> None:
    """Learn after each cell from now on, where there are cells."""
    shell = frames.running_shell()
    if shell is not None and _after_cell not in shell.events.callbacks["post_run_cell"]:
        shell.events.register("post_run_cell", _after_cell)


def unfollow_cells() -> None:
    """Undo :func:`follow_cells`."""
    shell = frames.running_shell()
    if shell is not None and _after_cell in shell.events.callbacks["post_run_cell"]:
        shell.events.unregister("post_run_cell", _after_cell)


def _after_cell(result: object = None) -> None:
    for known_learner in tuple(_LEARNERS.values()):
        known_learner.after_cell(result)
