"""What a cell's way to the workers and back consists of: counted, as its time is a benchmark's."""

from __future__ import annotations

import json
import logging
import pickle
import sys
import threading
from typing import Any

import pytest

from nbaccel import notebook_launcher
from nbaccel.output.panel.display import Dashboard
from nbaccel.transfer import library_settings
from nbaccel.workers import messaging, worker_processes
from tests.house.source import ROOT
from tests.programs import run_program


class Counts(dict[str, int]):
    def of(self, owner: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        called = getattr(owner, name)

        def counted(*args: Any, **settings: Any) -> Any:
            self[name] = self.get(name, 0) + 1
            return called(*args, **settings)

        monkeypatch.setattr(owner, name, counted)


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> Counts:
    found = Counts()
    for owner, name in (
        (messaging, "pack_message"),
        (messaging.Channel, "send_packet"),
        (messaging.Channel, "receive"),
        (worker_processes, "process_use"),
        (Dashboard, "_rows"),
        (threading.Thread, "start"),
    ):
        found.of(owner, name, monkeypatch)
    return found


@pytest.mark.parametrize("code", ["_ = 1 + 1", "1 + 1"], ids=["nothing to show", "results"])
def test_a_cell_is_one_message_there_and_one_back_per_rank(pool, counts, code):
    pool.run(code)
    counts.clear()
    pool.run(code)
    assert counts == {"pack_message": 1, "send_packet": 2, "receive": 2}, (
        "pickled once for both; no thread, and no look at the workers' memory"
    )
    with pytest.raises(ZeroDivisionError):
        pool.run("1 / 0")
    assert counts["process_use"] == 2, "for the summary"


def test_a_long_cell_is_kept_in_one_file_for_all_ranks(pool, monkeypatch):
    sent: list[tuple[bytes, list[int]]] = []
    send = messaging.Channel.send_packet

    def noted(self: messaging.Channel, packet: bytes, fds: list[int]) -> None:
        sent.append((packet, list(fds)))
        send(self, packet, fds)

    monkeypatch.setattr(messaging.Channel, "send_packet", noted)
    text = "x" * 100_000
    assert pool.run(f"len({text!r})").shown[1] == pool.run("100_000").shown[0]
    assert [packet == messaging.IN_FILE for packet, _ in sent] == [True, True, False, False]
    assert sent[0][1] == sent[1][1]


def test_last_messages_of_a_worker_that_has_not_read_ours_are_received():
    notebook, worker = messaging.Channel.pair()
    worker.send(messaging.Word.STARTED)
    notebook.send(messaging.Word.ASK_WHEREABOUTS)
    worker.close()  # as when it is killed
    assert notebook.receive() == (messaging.Word.STARTED, [])
    with pytest.raises(EOFError):
        notebook.receive()
    notebook.close()


def test_what_a_rank_prints_after_it_has_finished_is_still_shown(pool, capsys):
    late = (
        "import os, threading, time\n"
        "if os.environ['RANK'] == '0':\n"
        "    threading.Timer(0.2, print, ['from a thread']).start()\n"
        "else:\n"
        "    time.sleep(0.6)"
    )
    pool.run(late)
    assert "from a thread" in capsys.readouterr().out


def test_a_change_of_any_kind_is_seen_at_the_next_cell():
    logger = logging.getLogger("users_own")
    handler = logging.StreamHandler()
    seen = [library_settings.logging_only()]
    changes = [
        lambda: logger.setLevel(logging.INFO),
        lambda: setattr(logger, "propagate", False),
        lambda: logger.addHandler(handler),
        lambda: handler.setLevel(logging.ERROR),
        lambda: handler.setFormatter(logging.Formatter("%(message)s")),
        lambda: setattr(handler.formatter._style, "_fmt", "%(name)s"),
        lambda: setattr(logger, "disabled", True),
        lambda: logging.getLogger("torch.distributed").setLevel(logging.CRITICAL),
    ]
    level = logging.getLogger("torch.distributed").level
    try:
        for change in changes:
            change()
            seen.append(library_settings.logging_only())
    finally:
        logging.getLogger("torch.distributed").setLevel(level)
        logging.root.manager.loggerDict.pop("users_own")
    assert len(set(seen)) == len(changes) + 1
    of_library = pickle.loads(pickle.loads(seen[-1])["logging"])[1]["torch.distributed"]
    assert of_library == (of_library[0], *library_settings._UNSET[1:]), "nothing else"


# Of a second launch: what is done once, such as the start of a template, is left out.
PROGRAM = """
import json, sys, threading
from nbaccel import notebook_launcher
import torch._dynamo

def function():
    return 1

def launch():
    assert list(notebook_launcher(function, (), 2, start_method=sys.argv[1])) == [1, 1]

def note(frame, event, _value):
    if event == "call":
        files.add(frame.f_code.co_filename)

files = set()
launch()
threading.setprofile(note)
sys.setprofile(note)
launch()
sys.setprofile(None)
threading.setprofile(None)
print(json.dumps(sorted(files)))
"""


@pytest.mark.parametrize("method", ["template", "fork"])
def test_a_launch_on_cpus_enters_few_files_and_none_of_other_devices_or_hosts(method):
    """The aim is 30: one who reads what a launch does has all of them to read."""
    done = run_program([sys.executable, "-c", PROGRAM, method], cwd=ROOT)
    package = f"{ROOT / 'nbaccel'}/"
    found: list[str] = json.loads(done.stdout.splitlines()[-1])
    entered = [path.removeprefix(package) for path in found if path.startswith(package)]
    assert "calls/launch.py" in entered
    others = ("deepspeed/", "devices/tpu/", "hosts/")
    assert [path for path in entered if path.startswith(others)] == []
    assert len(entered) <= 30, entered


def test_workers_import_nothing_of_nbaccel_themselves():
    """Every launch would wait for it in every worker."""

    def modules_since_fork() -> list[str]:  # not this module's, which imports all that it uses
        names = list(sys.modules)
        return names[names.index("nbaccel.workers.fork_server") + 1 :]  # the template's last one

    imported = notebook_launcher(modules_since_fork, (), 2, start_method="template")
    assert [name for rank in imported for name in rank if name.startswith("nbaccel")] == []
