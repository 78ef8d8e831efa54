"""Who keeps live workers, and how a kernel comes to two of them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec

from harness.namespace import Remote, SessionLostError

OURS = "nbaccel"
NUM_WORKERS = 2
# In the notebook's kernel. The names begin with an underscore: one peer copies those of the workers
# that do not into the notebook.
TOOLS = """
import json as _json
import time as _time


def _report(**values):
    print("@@" + _json.dumps(values))


def _time_trips(count, name, code):
    shell, seconds = get_ipython(), []
    for _ in range(count):
        began = _time.perf_counter()
        shell.run_cell_magic(name, "", code + "\\n")
        seconds.append(_time.perf_counter() - began)
    _report(seconds=seconds)
"""
WITH_TORCH = TOOLS + "\nimport torch\n"
FIRST = 'import os\nimport torch\nprint(f"answer {os.getpid()} {torch.__version__}")'
ANSWER = re.compile(r"\banswer (\d+) ")
_IPP_GROUP = """
import socket as _socket
with _socket.socket() as _probe:
    _probe.bind(("127.0.0.1", 0))
    _port = _probe.getsockname()[1]
view.scatter("rank", [0, 1], flatten=True, block=True)
_ = view.push({"port": _port}, block=True)
"""


@dataclass(frozen=True, kw_only=True)
class Live:
    """One way to have workers that stay.

    Attributes:
        name: As in the table; also the package that must be installed.
        module: What must be importable.
        magic: Name and line of the cell magic; None where all cells go to the workers.
        load: The cell that brings it in, before anybody asks for workers.
        start: The cells of a request for two workers.
        first_line: What stands behind the magic of the first cell.
        local: Cells after the start that make plain cells run in the notebook's kernel again.
        group: Cells of the notebook that prepare the process group.
        join: Code of the workers that makes it, after `import torch.distributed as dist`.
        limit_s: After so long a cell that should have ended is said to hang.
        offers_state: Whether it has a way for a model into the workers and back.
        culprit: Finds the rank that is blamed in what a cell shows.
    """

    name: str
    module: str
    magic: str | None
    load: str = ""
    start: tuple[str, ...] = ()
    first_line: str = ""
    local: tuple[str, ...] = ()
    group: tuple[str, ...] = ()
    join: str = ""
    limit_s: float = 20.0
    offers_state: bool = False
    culprit: str

    @property
    def is_installed(self) -> bool:
        return find_spec(self.module) is not None

    @property
    def is_proxy(self) -> bool:
        """Whether the kernel itself is replaced by one that hands all cells on."""
        return self.magic is None

    def cell(self, code: str, line: str = "") -> str:
        """A cell that the workers run."""
        return code if self.magic is None else f"%%{self.magic} {line}".rstrip() + f"\n{code}"

    def request(self) -> list[str]:
        """The cells from nothing to the first answer."""
        return [*self.start, self.cell(FIRST, self.first_line)]


SUBJECTS = (
    Live(
        name=OURS,
        module="nbaccel",
        magic="accelerate",
        load="%load_ext nbaccel",
        first_line="-n 2",
        group=("%accelerate restart -n 2 --dist",),
        join='rank = int(os.environ["RANK"])',
        offers_state=True,
        culprit=r"\b[Rr]ank (\d+)",
    ),
    Live(
        name="ipyparallel",
        module="ipyparallel",
        magic="px",
        load="import ipyparallel as ipp",
        start=(
            "cluster = ipp.Cluster(n=2)\nrc = cluster.start_and_connect_sync()\n"
            "view = rc[:]\nview.block = True\nview.activate()",
        ),
        group=(_IPP_GROUP,),
        join='dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)',
        offers_state=True,
        culprit=r"^Output for (\d+):|\[(\d+):execute\]",
    ),
    Live(
        name="jupyter-distributed",
        module="jupyter_distributed",
        magic=None,
        join='rank = int(os.environ["RANK"])\ndist.init_process_group("gloo")',
        culprit=r"\[Rank (\d+) — error\]|\[Rank (\d+) — running\]\n-{9}",
    ),
    Live(
        name="nbdistributed",
        module="nbdistributed",
        magic="distributed",
        load="%load_ext nbdistributed",
        start=("%dist_init -n 2",),
        local=("%dist_mode --disable",),
        limit_s=75.0,  # its own is 30, and then 30 more for the workers' names
        culprit=r"Error on Rank (\d+)",
    ),
)


def did_answer(text: str) -> bool:
    return len(set(ANSWER.findall(text))) == NUM_WORKERS


@contextmanager
def kernel_for(subject: Live, *, prepare: str = WITH_TORCH, load: bool = True) -> Iterator[Remote]:
    """A kernel at rest, with the subject brought in and no workers yet."""
    with Remote() as remote:
        remote.must_run(prepare)
        if load and subject.load:
            remote.must_run(subject.load)
        remote.settle()
        yield remote


def ask_for_workers(remote: Remote, subject: Live, cells: list[str] | None = None) -> float:
    """Two workers with torch; seconds from the request to the end of the first answered cell.

    A first cell that is lost is run again, as its user would.
    """
    timeout_s = 60.0
    cells = cells or subject.request()
    if subject.is_proxy:
        asked = remote.ask("distribute", answer_in_s=90, num_processes=NUM_WORKERS)
        started_at = asked["started_at"]
        answers = [remote.run(cells[-1], timeout_s)]
    else:
        answers = remote.ask(
            "run_all", answer_in_s=timeout_s * len(cells) + 30, codes=cells, timeout_s=timeout_s
        )["answers"]
        started_at = answers[0]["started_at"]
    last = answers[-1]
    for _retry in range(2):
        if did_answer(last["text"]) or last["ended_at"] is None:
            break
        last = remote.run(cells[-1], timeout_s)
    if last["ended_at"] is None or not did_answer(last["text"]):
        raise SessionLostError("no answer of both workers: " + last["text"][-300:])
    seconds: float = last["ended_at"] - started_at
    return seconds


@contextmanager
def workers_of(subject: Live, *, prepare: str = WITH_TORCH) -> Iterator[Remote]:
    """A kernel with two workers that have answered, at rest. How long that took is no matter."""
    with kernel_for(subject, prepare=prepare) as remote:
        if subject.is_proxy:
            ask_for_workers(remote, subject)
        else:
            for code in subject.start:
                remote.must_run(code)
            remote.settle()  # so that no first cell is lost
            for code in (*subject.local, subject.cell(FIRST, subject.first_line)):
                answer = remote.must_run(code)
            if not did_answer(answer["text"]):
                raise SessionLostError("no answer of both workers: " + answer["text"][-300:])
        remote.settle()
        yield remote
