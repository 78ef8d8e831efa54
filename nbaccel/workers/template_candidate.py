"""Templates that know what the notebook has imported: made in the background by the first one.

    template ── fork ──► candidate: imports, package by package, at the lowest priority
                              │ still like a fresh process?   yes ─► it is a template of its own
                              └ no ─► it ends, and the next one leaves the package out

A candidate is thrown away as soon as it could not be forked any more: a fork takes no threads
along, and shares connections and devices. What it writes down in memory that it shares with the
template survives any way it may end, a crash or a hang inside a package included.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import mmap
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NoReturn

import psutil

from nbaccel.base import env
from nbaccel.base.units import format_bytes
from nbaccel.workers import failure, import_effects, messaging, time_limits
from nbaccel.workers.forkable_state import ProcessState
from nbaccel.workers.reaping import end_with_parent

__all__ = ["CandidateKeeper"]


_NOTES_BYTES = 1 << 16
_MOST_BYTES = 4 * 2**30
_SHARE_OF_FREE = 4
"""A candidate may take a fourth of the memory that is free, at most."""
_REASON_CHARS = 200
_MOST_NAMES = 3
_PROGRESS_S = 0.05
_LOWEST_PRIORITY = 19
# Imports are deeply nested, and a thread's stack may be small (ulimit -s unlimited: 2 MiB).
_IMPORT_STACK_BYTES = 16 * 2**20


@dataclass
class _Notes:
    """What a candidate has written down, in memory that it shares with the template."""

    memory: mmap.mmap = field(default_factory=lambda: mmap.mmap(-1, _NOTES_BYTES))

    def write(self, *, package: str, left_out: dict[str, str], is_template: bool = False) -> None:
        """Replace them; the process may end at any moment after that."""
        text = json.dumps([package, left_out, is_template]).encode()
        # The length last: what is read before belongs to the old text, or does not parse.
        if len(text) < _NOTES_BYTES - 8:
            self.memory[:8] = bytes(8)
            self.memory[8 : 8 + len(text)] = text
            self.memory[:8] = len(text).to_bytes(8, "little")

    def read(self) -> tuple[str, dict[str, str], bool]:
        """The package that is being imported, those left out, and whether all is done.

        Nothing was written, or half of it: as if nothing had begun.
        """
        num_bytes = int.from_bytes(self.memory[:8], "little")
        if not num_bytes:
            return "", {}, False
        package, left_out, is_template = json.loads(self.memory[8 : 8 + num_bytes])
        return package, left_out, is_template


@dataclass
class _Candidate:
    message: messaging.Learn
    file_descriptors: tuple[int, ...]
    notes: _Notes
    process_id: int
    looked_at: tuple[str, float] = ("", 0.0)
    """The package and the processor time, in seconds, when it was last seen to get on."""
    got_on_at: float = field(default_factory=time.monotonic)
    was_killed: bool = False

    def hangs(self) -> bool:
        """Whether it has not got on for too long.

        Processor time counts as getting on: at the lowest priority an import may take minutes
        beside a cell that computes.
        """
        package, _, _ = self.notes.read()
        used_s = _processor_time(self.process_id)
        last_package, last_used_s = self.looked_at
        if package != last_package or used_s > last_used_s + _PROGRESS_S:
            self.looked_at = (package, used_s)
            self.got_on_at = time.monotonic()
        return time.monotonic() - self.got_on_at > time_limits.IMPORT_S

    def was_paused(self) -> None:
        """The time that it was stopped does not count."""
        self.got_on_at = time.monotonic()


class CandidateKeeper:
    """The template's side: forks candidates, ends those that hang, and tries again without these.

    Args:
        become_template: Called in a candidate that can be forked, with its channel and what to say
            there once it can serve; never returns.
        in_child: Called in a candidate at once: closes what is the template's.
    """

    def __init__(
        self,
        become_template: Callable[[messaging.Channel, messaging.Learned], NoReturn],
        in_child: Callable[[], None],
    ) -> None:
        self._become_template = become_template
        self._in_child = in_child
        self._candidates: dict[int, _Candidate] = {}
        self._is_paused = False

    def process_ids(self) -> set[int]:
        """Candidates, and the templates that they have become."""
        return set(self._candidates)

    def begin(self, message: messaging.Learn, file_descriptors: Sequence[int]) -> None:
        """Fork a candidate in place of one that still imports.

        Args:
            message: What to import.
            file_descriptors: Its channel, and the file for its stderr; copies are made.
        """
        for candidate in tuple(self._candidates.values()):
            if not candidate.notes.read()[-1]:
                self._close(self._candidates.pop(candidate.process_id))
                _kill(candidate.process_id)
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(candidate.process_id, 0)
        # What was stopped for a launch has ended above; a new one is stopped by the next message.
        self._is_paused = False
        copies = tuple(os.dup(file_descriptor) for file_descriptor in file_descriptors)
        self._fork(message, copies)

    def close_copies(self) -> None:
        """Close, in a child, what belongs to candidates."""
        while self._candidates:
            self._close(self._candidates.popitem()[1])

    def pause(self, *, is_paused: bool) -> None:
        """Stop candidates that import, or let them go on."""
        if is_paused == self._is_paused:
            return
        self._is_paused = is_paused
        for candidate in self._importing():
            with contextlib.suppress(ProcessLookupError):
                os.kill(candidate.process_id, signal.SIGSTOP if is_paused else signal.SIGCONT)
            candidate.was_paused()

    def due_in(self) -> float | None:
        """Seconds until a candidate has to be looked at; None if there is none that imports."""
        return time_limits.IMPORT_S / 4 if any(self._importing()) else None

    def end_overdue(self) -> None:
        """Kill candidates that hang in an import."""
        for candidate in self._importing():
            if not self._is_paused and candidate.hangs():
                candidate.was_killed = True
                _kill(candidate.process_id)

    def ended(self, process_id: int, exit_status: int) -> None:
        """A child of the template has ended: if it was a candidate, fork the next one.

        Args:
            process_id: Its process id.
            exit_status: As `os.waitstatus_to_exitcode` gives it.
        """
        candidate = self._candidates.pop(process_id, None)
        if candidate is None:
            return
        package, left_out, is_template = candidate.notes.read()
        if package and package not in left_out:
            left_out[package] = (
                f"its import does nothing for {time_limits.IMPORT_S:.0f} s"
                if candidate.was_killed
                else f"its import ended the process ({failure.name_exit(exit_status)})"
            )
        has_left = exit_status == 0 or not left_out
        if is_template or has_left:
            # The notebook reads the end of the channel once no process has its other end.
            self._close(candidate)
            return
        message = messaging.Learn(
            packages=candidate.message.packages,
            left_out=candidate.message.left_out | left_out,
            environment=candidate.message.environment,
            import_path=candidate.message.import_path,
            of_workers=candidate.message.of_workers,
            worker_variables=candidate.message.worker_variables,
        )
        self._fork(message, candidate.file_descriptors)

    def _importing(self) -> Iterator[_Candidate]:
        for candidate in tuple(self._candidates.values()):
            if not candidate.notes.read()[-1]:
                yield candidate

    def _fork(self, message: messaging.Learn, file_descriptors: tuple[int, ...]) -> None:
        notes = _Notes()
        template_id = os.getpid()
        process_id = os.fork()
        if process_id:
            self._candidates[process_id] = _Candidate(message, file_descriptors, notes, process_id)
            return
        exit_status = 1
        try:
            self._in_child()
            fd, file = file_descriptors
            _settle(template_id, file, message)
            channel = messaging.Channel.from_fd(fd)
            self._become_template(channel, _import_all(message, notes, channel))
        # The notebook has hung up: it wants this one no more.
        except (BrokenPipeError, ConnectionResetError):
            exit_status = 0
        except BaseException:  # there is no caller to raise to
            sys.excepthook(*sys.exc_info())
        finally:
            os._exit(exit_status)

    @staticmethod
    def _close(candidate: _Candidate) -> None:
        for file_descriptor in candidate.file_descriptors:
            os.close(file_descriptor)


def _processor_time(process_id: int) -> float:
    try:
        cpu_times = psutil.Process(process_id).cpu_times()
    except psutil.NoSuchProcess:
        return 0.0
    return float(cpu_times.user + cpu_times.system)


def _kill(process_id: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(process_id, signal.SIGKILL)


def _settle(template_id: int, error_file: int, message: messaging.Learn) -> None:
    os.setsid()
    end_with_parent()
    if os.getppid() != template_id:
        os._exit(1)
    os.dup2(error_file, 2)
    os.close(error_file)
    env.replace_all(message.environment)
    sys.path[:] = message.import_path


def _import_all(
    message: messaging.Learn, notes: _Notes, channel: messaging.Channel
) -> messaging.Learned:
    """Import everything, or end this process where it cannot be forked afterwards."""
    left_out = dict(message.left_out)
    of_workers = _OfWorkers(message)
    failed_names: dict[str, list[str]] = {}
    # In any case, also where nothing has to be imported: the notebook learns who this is.
    channel.send(messaging.Importing("", os.getpid()))
    with _bounded_memory() as allowed_bytes:
        for package, module_names in (*message.packages.items(), *message.of_workers.items()):
            if package in left_out:
                continue
            missing_names = [name for name in module_names if name not in sys.modules]
            if not missing_names:
                continue
            notes.write(package=package, left_out=left_out)
            channel.send(messaging.Importing(package, os.getpid()))
            state_before = ProcessState.now()
            if package in message.of_workers:
                import_error, changes = of_workers.import_one(package, missing_names)
            else:
                import_error = _import_in_background(missing_names)
                changes = []
            changes = [*ProcessState.now().changes_since(state_before), *changes]
            if changes:
                left_out[package] = " and ".join(changes)
                notes.write(package=package, left_out=left_out)
                os._exit(1)
            if isinstance(import_error, MemoryError):
                left_out[package] = f"it needs more than {format_bytes(allowed_bytes)}"
            elif import_error is not None and package not in sys.modules:
                failed_names[package] = missing_names
                left_out[package] = (
                    f"its import fails ({type(import_error).__name__}: {import_error})"
                )[:_REASON_CHARS]
    for package, names in failed_names.items():
        # One of two that import each other may fail first, and succeed with the other.
        if all(name in sys.modules for name in names):
            del left_out[package]
    # It outlives the template that it came from, if that is killed: the notebook has its channel.
    end_with_parent(is_wanted=False)
    notes.write(package="", left_out=left_out, is_template=True)
    import_effects.note_variables(of_workers.variables_before)
    return messaging.Learned(left_out, frozenset(of_workers.read_names))


class _OfWorkers:
    """Imports what workers have and the notebook has not, as if a worker did.

    Args:
        message: What to import.

    Attributes:
        read_names: Variables that these imports have read.
        variables_before: The environment before the first of them.
    """

    def __init__(self, message: messaging.Learn) -> None:
        self._message = message
        self.read_names: set[str] = set()
        self.variables_before: Mapping[str, str] = {}

    def import_one(
        self, package: str, module_names: Sequence[str]
    ) -> tuple[BaseException | None, list[str]]:
        """Import modules of a package.

        Args:
            package: Its key in the message.
            module_names: What of it is not there yet.

        Returns:
            The first error, or None; and what speaks against having it here: clauses with "it".
        """
        self.variables_before = self.variables_before or env.snapshot()
        state_before = import_effects.SetAnew.now()
        with env.noted_reads(None) as read_names:
            import_error = _import_in_background(module_names)
        self.read_names |= read_names
        return import_error, [
            *self._otherwise_in_workers(read_names),
            *_from_elsewhere(self._message.of_workers[package]),
            *import_effects.SetAnew.now().changes_since(state_before),
        ]

    def _otherwise_in_workers(self, read_names: Collection[str]) -> list[str]:
        """That an import has read what is otherwise in workers: clauses with "it"."""
        variables = self._message.worker_variables
        # What it sets itself, it has set in the worker, too.
        names = sorted(
            name
            for name in variables
            if (name in read_names or env.EVERY_VARIABLE in read_names)
            and env.read(name) != variables[name]
        )
        if not names:
            return []
        shown_names = ", ".join(names[:_MOST_NAMES]) + (" ..." if len(names) > _MOST_NAMES else "")
        return [f"it reads {shown_names} when it is imported, which workers have otherwise"]


def _from_elsewhere(files: Mapping[str, str]) -> list[str]:
    """That this process finds another file: a clause with "it"."""
    # Where the function has put a folder on the path, say.
    for name, path in files.items():
        if getattr(sys.modules.get(name), "__file__", path) != path:
            return [f"its {name} comes from {path} in workers"]
    return []


def _import_in_background(module_names: Sequence[str]) -> BaseException | None:
    """Import modules in a thread of the lowest priority; the first error, if there was one.

    In a thread, because a process that has lowered its priority may not raise it again, and its
    workers would inherit it.
    """
    import_errors: list[BaseException] = []

    def import_modules() -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST_PRIORITY)
        for module_name in module_names:
            try:
                importlib.import_module(module_name)
            # Workers that need the module meet the same error, with its traceback.
            except BaseException as error:  # code of other packages, which may call sys.exit()
                import_errors.append(error)

    thread_effects = import_effects.ThreadEffects()
    former_size = threading.stack_size(_IMPORT_STACK_BYTES)
    try:
        import_thread = threading.Thread(
            target=thread_effects.run, args=(import_modules,), name="nbaccel-imports"
        )
        import_thread.start()
        import_thread.join()
    finally:
        threading.stack_size(former_size)
    thread_effects.take_over()
    # What was looked at is not looked at again for each further package.
    gc.collect()
    gc.freeze()
    return import_errors[0] if import_errors else None


@contextlib.contextmanager
def _bounded_memory() -> Iterator[int]:
    """Let this process take so many bytes more than it has, and no more."""
    allowed_bytes = min(_MOST_BYTES, psutil.virtual_memory().available // _SHARE_OF_FREE)
    soft_limit, hard_limit = resource.getrlimit(resource.RLIMIT_DATA)
    wanted_limit = psutil.Process().memory_info().data + allowed_bytes
    lower_limit = min(
        (limit for limit in (wanted_limit, soft_limit, hard_limit) if limit > 0),
        default=wanted_limit,
    )
    resource.setrlimit(resource.RLIMIT_DATA, (lower_limit, hard_limit))
    try:
        yield allowed_bytes
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft_limit, hard_limit))
