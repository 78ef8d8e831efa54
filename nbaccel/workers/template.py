"""The template: a clean process with the notebook's packages, from which workers are forked.

    notebook's process                       template process (`template_server`)
    start, at load time ──── program ──────► imports torch, then one package after the other
                        ◄─── JSON ────────── what it has by itself; which one it imports; that it
                                             is clean, and what is left out
    `TemplateStarter`   ──── Fork ─────────► forks a worker, and reports its end
    a cell imports more ──── program ──────► a second one takes its place, once it is ready

Modules of the user's own folders are not among them: workers import the version of the moment.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import functools
import json
import multiprocessing
import os
import select
import signal
import socket
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nbaccel.base import env, frames
from nbaccel.base.errors import ConfigError, StartupFailed
from nbaccel.base.units import count_noun
from nbaccel.config.capabilities import engine_row
from nbaccel.plan import Choice, Plan, registry
from nbaccel.workers import time_limits

SAY_EVERY_S = 0.1
_SWITCH = "NBACCEL_TEMPLATE_IMPORTS"  # environment variable: with 0, templates import torch only
# With it, `import torch` imports every package that extends it; torch_tpu takes seconds, also where
# there is no TPU. The template imports those that devices of this machine need, and all unknown.
_AUTOLOAD_VARIABLE = "TORCH_DEVICE_BACKEND_AUTOLOAD"
_PROGRAM = (
    "import sys; sys.path[:] = {path!r}; "
    "from nbaccel.workers.template_server import serve; serve({fd})"
)
_BY_ITSELF = ("torch", "numpy", "sympy", "mpmath", "colorama", "cloudpickle", "xxhash")  # at least
_FEW_MODULES = 20  # cells import some without saying so: not worth a new template
_MESSAGE_CHARS = 2000
_PACKET_BYTES = 1 << 20


@dataclass(kw_only=True, eq=False)
class TemplateProcess:
    """A template process that has been started."""

    process: subprocess.Popen[bytes]
    socket: socket.socket
    errors: int  # memory file that collects its stderr: the reason, if it cannot start
    modules: frozenset[str] = field(repr=False)  # of the notebook, which it imports
    own: frozenset[str] = field(default=frozenset(), repr=False)  # it has by itself; empty: not yet
    packages: frozenset[str] = field(default=frozenset(), repr=False)  # of both; set with `own`
    owner: int = field(default_factory=os.getpid)  # forks of it must not use or end this one
    importing: str = ""
    ready: bool = False
    has_failed: bool = False  # it ended before it was ready, and no package is at fault
    status: int | None = None  # as `subprocess` gives it, if it has ended by itself
    said: str = ""
    is_replaced: bool = False
    users: int = 0  # starters that have workers of it; it stays for them, also if replaced

    @classmethod
    def start(cls, device: str, left_out: dict[str, str]) -> TemplateProcess:
        """Start one; returns at once."""
        modules = tuple(installed_modules()) if _follows_notebook() else ()
        request = {
            "parent_id": os.getpid(),
            "device": device,
            "in_notebook": "IPython" in sys.modules,
            "extends_torch": env.read(_AUTOLOAD_VARIABLE) != "0",
            "packages": by_package(modules),
            "left_out": left_out,
            "import_limit_s": time_limits.IMPORT_S,
            # By it a worker may use what a `multiprocessing.Manager` of the notebook holds.
            "authkey": bytes(multiprocessing.current_process().authkey).hex(),
        }
        own_end, its_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # Room for hundreds of messages: a full socket that has room again sends SIGIO, too.
        its_end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _PACKET_BYTES)
        # A file, not a pipe: it is read only after the end, and a full pipe would block.
        errors = os.memfd_create("nbaccel-template-errors", os.MFD_CLOEXEC)
        with its_end, open(os.memfd_create("nbaccel-template-request"), "w+") as request_file:
            json.dump(request, request_file)
            request_file.seek(0)
            program = _PROGRAM.format(path=installed_first(), fd=its_end.fileno())
            process = subprocess.Popen(
                [sys.executable, "-c", program],
                stdin=request_file,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                env=env.snapshot() | {_AUTOLOAD_VARIABLE: "0"},
                # Where the own one has been deleted, MKL ends a process that imports torch.
                cwd=current_folder(),
                pass_fds=[its_end.fileno()],
                # Ctrl-C in a terminal must reach the notebook process only.
                start_new_session=True,
            )
        return cls(process=process, socket=own_end, errors=errors, modules=frozenset(modules))

    @property
    def is_open(self) -> bool:
        """Whether it belongs to this very process, which has not hung up."""
        return self.owner == os.getpid() and self.socket.fileno() >= 0

    def is_running(self) -> bool:
        """Whether it runs and belongs to this very process."""
        return self.is_open and self.process.poll() is None

    def lacked_packages(self, left_out: Collection[str]) -> tuple[str, ...]:
        """Packages of which the notebook has imported more; empty where that is not worth much."""
        if not _follows_notebook():
            return ()
        # What of nbaccel comes into the notebook with a launch, workers do not need.
        passed_over = {"nbaccel", *left_out, *(() if self.own else _BY_ITSELF)}
        new = installed_modules().keys() - self.modules - self.own
        lacked = [package for package in map(_package_of, new) if package not in passed_over]
        packages = self.packages or frozenset(map(_package_of, self.modules))
        is_worth_it = len(lacked) > _FEW_MODULES or not packages.issuperset(lacked)
        return tuple(sorted(set(lacked))) if is_worth_it else ()

    def let_continue(self) -> None:
        """Let it continue if it was stopped (SIGSTOP)."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid, signal.SIGCONT)

    def end_unless_used(self) -> None:
        """Let one that is replaced end, unless a starter has workers of it."""
        if self.is_replaced and self.users <= 0:
            self.end()

    def end(self) -> None:
        """Hang up, wait for it to leave, kill it if it does not."""
        if not self.is_open:
            return
        # Before hanging up: afterwards it ends because of this process, not by itself.
        self.status = self.process.poll()
        self.said = os.pread(self.errors, 1 << 20, 0).decode(errors="replace").strip()
        # A worker that was forked from the notebook has a copy of this end.
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)
        self.socket.close()
        os.close(self.errors)
        if not self.ready:
            # It has no workers yet, and need not do anything at its end.
            self.process.kill()
        try:
            self.process.wait(timeout=2.0)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def explain_end(self) -> list[str]:
        """Why it has ended, or hung up, and what to do, in lines; afterwards it has ended."""
        from nbaccel.workers import failure

        if self.socket.fileno() >= 0:
            # It has closed its end and is about to exit; its status says why.
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(timeout=1.0)
        self.end()
        reason = "was ended on request (nbaccel.shutdown, or the end of this process)"
        if self.status is not None:
            reason = failure.name_exit(self.status).removesuffix(" before the function returned")
        lines = [
            f"The process that workers are forked from {reason}, and its workers ended with it.",
            f"It said: {self.said[-_MESSAGE_CHARS:]}" if self.said else "",
            "Run the cell again: the next launch starts a new one.",
        ]
        return [line for line in lines if line]


def _package_of(module: str) -> str:
    return module.partition(".")[0]


def _follows_notebook() -> bool:
    """Whether templates import what this process has imported."""
    return (
        sys.platform.startswith("linux")
        and frames.running_shell() is not None
        and env.flag(_SWITCH) is not False
    )


class Template:
    """The template of this process for a device, and the one that is to take its place."""

    def __init__(self, device: str = "") -> None:
        self._device = device
        self._processes: list[TemplateProcess] = []  # the one used, and its successor-to-be
        # A launch may run in a thread of the user's while a cell ends.
        self._lock = threading.RLock()
        self.left_out: dict[str, str] = {}  # package → why each worker imports it itself

    def start_ahead(self) -> None:
        """Start it before it is needed, where that can be done; else a launch says what lacks."""
        with contextlib.suppress(OSError, AttributeError, ConfigError):
            self.start()

    def start(self) -> TemplateProcess:
        """The running process, or a new one that is not ready yet; returns at once."""
        with self._lock:
            if self._processes and not self._processes[0].is_running():
                # An import may have ended it: then another one is made here.
                self._read(self._processes[0])
            while self._processes and not self._processes[0].is_running():
                self._replace_first()
            if not self._processes:
                self._processes.append(TemplateProcess.start(self._device, self.left_out))
                atexit.register(stop)
            return self._processes[0]

    def processes(self) -> list[TemplateProcess]:
        """Those that run, the one that is used first."""
        return [process for process in self._processes if process.is_running()]

    def stop(self) -> None:
        """End them."""
        while self._processes:
            self._processes.pop().end()

    def after_cell(self) -> None:
        """Have what the last cell has imported imported in the background."""
        # Nothing trains without torch; a launch of another thread, which waits, sees to it.
        if "torch" not in sys.modules or not self._lock.acquire(blocking=False):
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

    def wait(
        self, say: Callable[[str], None], needs: Callable[[str], bool] = lambda _package: False
    ) -> TemplateProcess:
        """A process that is ready, and has imported the packages that are needed."""
        with self._lock:
            began_at = time.monotonic()
            current = self._processes[0] if self._processes else None
            started_here = None
            while True:
                if self.start() is not current:
                    # One that was there may have been killed; a new one that cannot start says why.
                    if started_here is not None and started_here.has_failed:
                        raise StartupFailed("\n".join(started_here.explain_end()))
                    current = started_here = self._processes[0]
                self._follow()
                waited_s = time.monotonic() - began_at
                if self._serves(needs) or (
                    waited_s > time_limits.PACKAGES_S and self._serves(lambda _package: False)
                ):
                    return self.start()
                if waited_s > time_limits.TEMPLATE_S:
                    self.drop(self.start())
                    raise no_answer(time_limits.TEMPLATE_S)
                in_making = [process for process in self.processes() if not process.ready]
                for process in in_making:
                    process.let_continue()
                first = "torch in the process that workers are forked from (once)"
                say(f"importing {(in_making[-1].importing if in_making else '') or first}")
                select.select([process.socket for process in in_making], [], [], SAY_EVERY_S)

    def drop(self, process: TemplateProcess) -> None:
        """Use a process no more: it has ended, or it does not answer."""
        with self._lock:
            if process in self._processes:
                self._processes.remove(process)
            process.end()

    def told_in(self, plan: Plan) -> Plan:
        """The plan with what each worker imports itself, though the notebook has it."""
        if not self.left_out:
            return plan
        modules = self._processes[0].modules if self._processes else ()
        packages = set(map(_package_of, modules)) - self.left_out.keys()
        left_out = sorted(self.left_out.items())
        reason = "; ".join(f"{package} is left out: {why}" for package, why in left_out)
        choice = Choice("template_imports", count_noun(len(packages), "package"), reason)
        return dataclasses.replace(plan, choices=(*plan.choices, choice))

    def left_out_text(self) -> str:
        """A sentence for each package that every worker imports itself."""
        return " ".join(
            f"Each worker imports {package} itself, because {why}."
            for package, why in sorted(self.left_out.items())
        )

    def _follow(self) -> None:
        """Read what those in the making have said, and begin one with what they lack."""
        for process in tuple(self._processes):
            self._read(process)
        if len(self._processes) > 1 and self._processes[1].ready:
            self._replace_first()
        elif len(self._processes) > 1 and self._processes[1].has_failed:
            self._processes.pop().end()
        newest = self._processes[-1] if self._processes else None
        if newest is None or newest.has_failed or not newest.lacked_packages(self.left_out):
            return
        if newest.ready:
            self._processes.append(TemplateProcess.start(self._device, self.left_out))
        else:
            self._make_again(newest)

    def _replace_first(self) -> None:
        first = self._processes.pop(0)
        first.is_replaced = True
        first.end_unless_used()

    def _make_again(self, process: TemplateProcess) -> None:
        process.end()
        place = self._processes.index(process)
        self._processes[place] = TemplateProcess.start(self._device, self.left_out)

    def _read(self, process: TemplateProcess) -> None:
        """Read what one has said while it was made; where an import has ended it, make another."""
        while (
            not process.ready
            and process.is_open
            and select.select([process.socket], [], [], 0.0)[0]
        ):
            try:
                packet = process.socket.recv(_PACKET_BYTES)
            except ConnectionResetError:  # said once, before its last words
                continue
            if not packet and not process.importing:
                process.has_failed = True
                return
            said: dict[str, Any] = json.loads(packet) if packet else {}
            obstacle = said.get("obstacle") if packet else _why_ended(process)
            if obstacle:
                self.left_out[process.importing] = obstacle
                self._make_again(process)
                return
            if "own" in said:
                process.own = frozenset(said["own"])
                process.packages = frozenset(map(_package_of, process.own | process.modules))
            process.importing = said.get("importing", process.importing)
            process.ready = "left_out" in said
            self.left_out.update(said.get("left_out", {}))

    def _serves(self, needs: Callable[[str], bool]) -> bool:
        """Whether workers can be forked at once, with all packages that are needed."""
        if not self._processes:
            return False
        used = self._processes[0]
        lacked = used.lacked_packages(self.left_out)
        return used.ready and used.is_running() and not any(map(needs, lacked))


def _why_ended(process: TemplateProcess) -> str:
    """What the import of a package has done to a template, which has ended by it."""
    from nbaccel.workers import failure

    status = process.process.wait()
    if status == -signal.SIGALRM:
        return f"its import takes more than {time_limits.IMPORT_S:.0f} s"
    return f"its import ended the process ({failure.name_exit(status)})"


def no_answer(limit_s: float) -> StartupFailed:
    """The error that a template did not answer in time."""
    return StartupFailed(
        f"The template process did not answer within {limit_s:.0f} s, so no worker was started. "
        "The machine may be overloaded or swapping; the next launch starts a new template."
    )


# A fact of the process, like the processes themselves.
_TEMPLATES: dict[str, Template] = {}


def template_for(device: str = "") -> Template:
    """The template of this process for a device."""
    name = device if device and registry.device(device).own_template else ""
    return _TEMPLATES.setdefault(name, Template(name))


def uses_template(plan: Plan) -> bool:
    """Whether workers are forked from the template process of this very machine."""
    return plan.start_method == "template" and not engine_row(plan.engine).runs_on_hosts


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


# ------------------------------------------------------------------------- what is imported here

# A kernel's own: its threads, sockets and tracing are the notebook's, and no worker uses them.
_OF_THE_KERNEL = frozenset(
    {"ipykernel", "ipykernel_launcher", "zmq", "tornado", "jupyter_client", "jupyter_core"}
    # The latter sets itself up for the shell that is there when it is imported.
    | {"nest_asyncio", "matplotlib_inline"}
)
# What of nbaccel works in the notebook's process only; of the rest workers have what they need.
_OF_LAUNCHES = tuple(
    f"nbaccel.{name}"
    for name in ("launchers", "output", "hosts", "notebook", "cli", "calls", "plan")
)
_OF_THE_DEBUGGER = f"{os.sep}debugpy{os.sep}"  # its modules have names of their own
_IMPORTED_BY_THE_TEMPLATE = ("nbaccel", "torch", "numpy", "IPython")


def installed_modules() -> Mapping[str, str]:
    """Modules of installed packages, and of nbaccel, in the order of their imports → files."""
    return _sorted_out(len(sys.modules), next(reversed(sys.modules)))[0]


def local_modules() -> frozenset[str]:
    """Names of the modules from files that belong to no installed package: the user's own."""
    return _sorted_out(len(sys.modules), next(reversed(sys.modules)))[1]


def by_package(module_names: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """The same by top-level package, the last one first: it depends on none of the others."""
    packages: dict[str, list[str]] = {}
    for name in module_names:
        packages.setdefault(_package_of(name), []).append(name)
    return {package: tuple(packages[package]) for package in reversed(packages)}


@functools.lru_cache(maxsize=1)
def _sorted_out(_num_names: int, _last_name: str) -> tuple[Mapping[str, str], frozenset[str]]:
    """Installed modules and local ones. Kept, as each cell would wait a millisecond for them."""
    installed: dict[str, str] = {}
    local = set()
    for name in tuple(sys.modules):
        # Not by getattr: a module may import another one when it is asked for what it lacks.
        attributes = getattr(sys.modules.get(name), "__dict__", {})
        file = attributes.get("__file__")
        package = _package_of(name)
        if (
            not isinstance(file, str)
            or not file.endswith((".py", ".so", ".pyd"))
            or package in _OF_THE_KERNEL
            or _OF_THE_DEBUGGER in file
            or name.startswith(_OF_LAUNCHES)
            or package in {"__main__", "__mp_main__"}
        ):
            continue
        if package == "nbaccel" or _is_installed(os.path.dirname(file)):
            if getattr(attributes.get("__spec__"), "name", None) == name:
                installed[name] = file
        elif not file.startswith(_standard_folders()):
            local.add(name)
    return installed, frozenset(local)


@functools.lru_cache(maxsize=4096)
def _is_installed(folder: str) -> bool:
    package_folders = tuple(map(sysconfig.get_path, ("purelib", "platlib")))
    if "-packages" in folder or folder.startswith(package_folders):
        return True
    if folder.startswith(_standard_folders()):
        return False
    # pip install --target: the folder of packages has their metadata beside them.
    entries = {os.path.normpath(entry) for entry in sys.path if entry}
    return any(folder.startswith(path) and any(Path(path).glob("*.dist-info")) for path in entries)


@functools.lru_cache(maxsize=1)
def _standard_folders() -> tuple[str, ...]:
    return tuple(map(sysconfig.get_path, ("stdlib", "platstdlib")))


def current_folder(*, tells: bool = False) -> str:
    """The working folder; if it has been deleted, which is told, the next one above that exists."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        # As far as the system remembers it.
        gone = os.readlink("/proc/self/cwd").removesuffix(" (deleted)")
        above = (folder for folder in Path(gone).parents if folder.is_dir())
        folder = str(next(above, Path.home()))
    if tells:
        sys.stderr.write(
            f"nbaccel: the notebook's working folder {gone} has been deleted, so its workers run "
            f"in {folder}. Go to a folder that exists: %cd {folder}\n"
        )
    return folder


def import_path() -> list[str]:
    """`sys.path` for a process that works elsewhere: without relative entries."""
    here = current_folder()
    return [os.path.normpath(os.path.join(here, entry)) for entry in sys.path]


def installed_first() -> list[str]:
    """The same with the user's own folders last, where a `random.py` would hide the real one."""
    files = [getattr(sys.modules.get(name), "__file__", None) for name in _IMPORTED_BY_THE_TEMPLATE]
    # Where this process has imported them from, which may be a folder of sources.
    imported_from = {str(Path(file).parent.parent) for file in files if file}

    def is_users(entry: str) -> bool:
        is_pythons = entry.startswith(_standard_folders()) or entry.endswith(".zip")
        return not (is_pythons or entry in imported_from or _is_installed(entry))

    # A stable sort: within both groups the order of the notebook is kept.
    return sorted(import_path(), key=is_users)
