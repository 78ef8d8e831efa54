"""A real kernel on one host, whose cells run in workers on two."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from tests.hosts import netns
from tests.kernel.kernel import Kernel

pytestmark = [pytest.mark.slow, netns.needs_hosts]


SETUP = """
import os, socket, torch
from nbaccel import notebook_launcher
notebook_launcher(os.getpid, (), 2);
"""


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[netns.NamespaceHost]]:
    with netns.make_hosts(tmp_path_factory.mktemp("hosts")) as made:
        yield made


@pytest.fixture(scope="module")
def kernel(
    hosts: list[netns.NamespaceHost], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Kernel]:
    folder = tmp_path_factory.mktemp("notebook")
    hostfile = folder / "hostfile"
    hostfile.write_text("alpha slots=2\nbeta slots=2\n")
    shell = netns.remote_shell(folder, hosts)
    made = Kernel(lambda command: hosts[0].command(*command), NBACCEL_SSH=str(shell))
    try:
        # With a launch, so that its template is running before the first test.
        made.run(f"HOSTFILE = {str(hostfile)!r}\n{SETUP}").check()
        yield made
    finally:
        made.close()


def test_a_function_of_a_cell_runs_on_both_hosts(
    kernel: Kernel, hosts: list[netns.NamespaceHost]
) -> None:
    cell = kernel.run(
        """
        import os, socket, torch
        from nbaccel import notebook_launcher
        os.environ["MY_SETTING"] = "set in a cell"
        model = torch.nn.Linear(4, 1)
        before = model.weight.clone()

        def train(model):
            torch.distributed.init_process_group("gloo")
            with torch.no_grad():
                model.weight += 1
            print("rank", os.environ["RANK"], "on", socket.gethostname())
            return os.environ["MY_SETTING"], socket.gethostname()

        results = notebook_launcher(train, (model,), hostfile=HOSTFILE)
        print(results, torch.equal(model.weight, before + 1))
        """
    ).check()
    assert "[3] rank 3 on beta" in cell.stdout
    assert "('set in a cell', 'beta')] True" in cell.stdout


def test_stop_in_the_browser_stops_ranks_on_both_hosts(
    kernel: Kernel, hosts: list[netns.NamespaceHost]
) -> None:
    running = kernel.begin(
        """
        def hang():
            import time
            print("rank", os.environ["RANK"], "hangs", flush=True)
            time.sleep(600)

        notebook_launcher(hang, (), hostfile=HOSTFILE)
        """
    )
    for rank in range(4):
        kernel.until(running, f"rank {rank} hangs")
    pressed_at = time.monotonic()
    kernel.interrupt()
    cell = kernel.finish(running)
    assert cell.error == "KeyboardInterrupt"
    assert time.monotonic() - pressed_at < 8
    assert hosts[1].processes() == []


def test_live_cells_run_on_both_hosts(kernel: Kernel, hosts: list[netns.NamespaceHost]) -> None:
    kernel.run("%load_ext nbaccel").check()
    cell = kernel.run(
        "%%accelerate --hostfile {HOSTFILE} --out place\n"
        "place = socket.gethostname()\n"
        "print('rank', os.environ['RANK'], 'lives on', place)\n"
    ).check()
    assert "[2] rank 2 lives on beta" in cell.stdout
    assert "'alpha', 'alpha', 'beta', 'beta'" in kernel.run("print(place)").check().stdout
    kernel.run("%accelerate stop").check()
    deadline = time.monotonic() + 5
    while hosts[1].processes() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert hosts[1].processes() == []
