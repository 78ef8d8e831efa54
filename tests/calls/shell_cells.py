"""A worker's shell in a process of its own: tests write cells, and read what came of them.

test ── one JSON line ──► python -m tests.calls.shell_cells ── one JSON line ──► test
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import threading
from dataclasses import dataclass, field
from typing import Any

from tests.isolation import ROOT


@dataclass
class Answer:
    """What came of a request."""

    value: Any = None
    error: str = ""  # class of what was raised
    text: str = ""  # its text
    line: int | None = None  # the line that a SyntaxError names
    code: str = ""  # the code that a SyntaxError quotes
    frames: list[list[Any]] = field(default_factory=list)
    """File and line of each frame of its traceback below the shell's own."""
    out: str = ""
    err: str = ""
    sent: list[dict[str, Any]] = field(default_factory=list)

    @property
    def plain(self) -> str:
        """Text of the last expression."""
        return str(self.value["data"]["text/plain"])

    def check(self) -> Answer:
        assert not self.error, f"{self.error}: {self.text} {self.frames}"
        return self


class Cells:
    """The test's end."""

    def __init__(self, **environment: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.calls.shell_cells"],
            cwd=ROOT,
            env=os.environ | environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.number = 0

    def run(self, text: str, *, count: int | None = None, header: str = "%%accelerate") -> Answer:
        """Run a cell; its number is one more than the last one's."""
        self.number = self.number + 1 if count is None else count
        return self.ask("run", text=text, count=self.number, header=header)

    def ask(self, what: str, **how: Any) -> Answer:
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write(json.dumps({"what": what, **how}) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, f"the process has ended: {self._process.wait(timeout=100)}"
        return Answer(**json.loads(line))

    def close(self) -> None:
        with self._process:
            assert self._process.stdin
            self._process.stdin.close()
            self._process.wait(timeout=300)


def filename(count: int) -> str:
    return f"/tmp/ipykernel_1/{count}.py"


def main() -> None:
    requests, answers = sys.stdin, sys.stdout
    sys.stdin = open(os.devnull)  # noqa: PTH123  (a device)
    from nbaccel.calls.worker_shell import make_shell

    sent: list[Any] = []
    shell = make_shell(sent.append, rank=3)
    for line in requests:
        sent.clear()
        answer = vars(_answer(shell, json.loads(line)))
        answer["sent"] = [{"kind": type(m).__name__, **_fields(m)} for m in sent]
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def _answer(shell: Any, request: dict[str, Any]) -> Answer:
    answer = Answer()
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            answer.value = _do(shell, **request)
        except BaseException as error:
            answer.error, answer.text = type(error).__name__, str(error)
            if isinstance(error, SyntaxError):
                answer.line, answer.code = error.lineno, error.text or ""
            tb = error.__traceback__
            while tb is not None:
                answer.frames.append([tb.tb_frame.f_code.co_filename, tb.tb_lineno])
                tb = tb.tb_next
            answer.frames = [f for f in answer.frames if not _is_ours(f[0])]
    answer.out, answer.err = out.getvalue(), err.getvalue()
    return answer


def _is_ours(file: str) -> bool:
    return file == __file__ or "/nbaccel/calls/" in file


def _do(shell: Any, what: str, **how: Any) -> Any:
    if what == "run":
        from nbaccel.calls.pool_planning import CellSource

        above = [how["header"]] if how["header"] else []
        lines = [f"{line}\n" for line in (*above, *how["text"].splitlines())]
        source = CellSource(
            text=how["text"],
            filename=filename(how["count"]),
            cell=tuple(lines),
            first_line=len(above) + 1,
            count=how["count"],
        )
        return shell.run(source)
    if what == "interrupted":
        alarm = threading.Timer(how.pop("after"), os.kill, (os.getpid(), signal.SIGINT))
        alarm.start()
        try:
            return _do(shell, "run", **how)
        finally:
            alarm.join()
    if what == "complete":
        found = shell.completions_at(how["code"], len(how["code"]))
        return [found.matches, found.start, found.end, found.types]
    return shell.describe(how["name"], how["detail"])


def _fields(message: Any) -> dict[str, Any]:
    return {name: getattr(message, name) for name in message.__dataclass_fields__}


if __name__ == "__main__":
    main()
