"""The outer half: starts a session in network, process and host-name namespaces of its own."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import shutil
import subprocess
import sys
import tempfile
import uuid
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from harness.processes import TAG

if TYPE_CHECKING:
    from typing_extensions import Self  # typing has it from Python 3.11 on

HERE = Path(__file__).resolve().parent.parent
UNSHARE = ("unshare", "--pid", "--fork", "--mount-proc", "--net", "--uts", "--kill-child")
# PyTorch asks for the name of the peer of a socket: without these lines it warns each time,
# because no name server can be reached from here.
HOSTS = "127.0.0.1 localhost\n::1 localhost\n::ffff:127.0.0.1 localhost\n"
ENTER = 'ip link set lo up && hostname localhost && mount --bind "$0" /etc/hosts && "$@"; exit $?'
BOOT = (
    "import sys; sys.path.insert(0, sys.argv[1]); "
    "from harness.session import main; sys.path.pop(0); main(sys.argv[2])"
)


class SessionLostError(RuntimeError):
    """The session did not answer in time, or ended: nothing more can be asked of it."""


@cache
def can_isolate() -> bool:
    """Whether this user may make the namespaces (root, on Linux, with the tools there)."""
    if os.geteuid() != 0 or not all(shutil.which(name) for name in ("unshare", "ip")):
        return False
    with tempfile.NamedTemporaryFile("w") as hosts:
        command = [*UNSHARE, "sh", "-c", ENTER, hosts.name, "true"]
        return subprocess.run(command, capture_output=True, timeout=20, check=False).returncode == 0


class Remote:
    """A session with a kernel in it. Leaving the `with` block kills all its processes."""

    def __init__(self) -> None:
        self.tag = uuid.uuid4().hex
        self.folder = Path(tempfile.mkdtemp(prefix="bench-"))
        self._buffer = b""
        self._process = subprocess.Popen(
            self._command(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=(self.folder / "stderr").open("wb"),
            start_new_session=True,
        )
        try:
            self.ask("start", answer_in_s=90)
        except BaseException:
            self.close()
            raise

    def _command(self) -> list[str]:
        home = self.folder / "home"
        home.mkdir()
        hosts = self.folder / "hosts"
        hosts.write_text(HOSTS)
        settings = {TAG: self.tag, "ACCELERATE_USE_CPU": "1", "HOME": str(home)}
        # As in an activated environment: some start their workers with whatever `python` is.
        settings["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        for name in ("IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR"):
            settings[name] = str(home / name.lower())
        session = [sys.executable, "-c", BOOT, str(HERE), self.tag]
        marked = ["env", *(f"{name}={value}" for name, value in settings.items()), *session]
        return [*UNSHARE, "sh", "-c", ENTER, str(hosts), *marked] if can_isolate() else marked

    def new_folder(self) -> str:
        """An empty folder for the files that workers and harness leave for each other."""
        return tempfile.mkdtemp(dir=self.folder)

    def ask(self, operation: str, *, answer_in_s: float, **options: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        request = json.dumps({"operation": operation, "options": options})
        try:
            self._process.stdin.write(request.encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise SessionLostError(self._last_words()) from error
        answer: dict[str, Any] = json.loads(self._read_line(answer_in_s))
        if "failure" in answer:
            raise SessionLostError(answer["failure"])
        return answer

    def run(self, code: str, timeout_s: float = 120.0) -> dict[str, Any]:
        return self.ask("run", answer_in_s=timeout_s + 15, code=code, timeout_s=timeout_s)

    def must_run(self, code: str, timeout_s: float = 120.0) -> dict[str, Any]:
        """Run a cell that prepares something: an error in it ends the measurement."""
        answer = self.run(code, timeout_s)
        if answer["ended_at"] is None or answer["error"]:
            raise SessionLostError(answer["error"] or f"not done in {timeout_s} s: {code[:200]}")
        return answer

    def settle(self, timeout_s: float = 60.0) -> None:
        self.ask("settle", answer_in_s=timeout_s + 15, timeout_s=timeout_s)

    def _read_line(self, timeout_s: float) -> bytes:
        assert self._process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while b"\n" not in self._buffer:
                chunk = b""
                if selector.select(timeout_s):
                    chunk = os.read(self._process.stdout.fileno(), 1 << 16)
                if not chunk:
                    raise SessionLostError(self._last_words())
                self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line

    def _last_words(self) -> str:
        return "no answer; " + (self.folder / "stderr").read_text(errors="replace")[-2000:]

    def close(self) -> None:
        """Kill the session; in namespaces, all that it started dies with it."""
        if not can_isolate() and self._process.stdin is not None:
            self._process.stdin.close()  # it ends by shutting its kernel down
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=15)
        self._process.kill()
        self._process.wait(timeout=30)
        shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
