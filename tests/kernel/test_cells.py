"""Launches from the cells of a real kernel, which has threads, matmuls and a history."""

from __future__ import annotations

import importlib.metadata
from typing import Any

import pytest

from tests.kernel.conftest import SETUP
from tests.kernel.kernel import Kernel, wait_for


@pytest.fixture(autouse=True, scope="module")
def without_a_dashboard(kernel: Kernel) -> None:
    """What a cell shows is compared to its last output, and a dashboard comes after a second."""
    kernel.run("os.environ['NBACCEL_DASHBOARD'] = '0'").check()


TRAIN = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
    def forward(self, x):
        return helper(self.layer(x))

def helper(x):
    return x * scale

scale = 2.0

def train(net, lr=0.1):
    dist.init_process_group("gloo")
    parallel = nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=lr)
    for _ in range(3):
        optimizer.zero_grad()
        parallel(torch.ones(2, 4)).pow(2).sum().backward()
        optimizer.step()
    return net.layer.weight.sum().item()

model = Net()
before = model.layer.weight.detach().clone()
results = notebook_launcher(train, (model,), 2{more})
assert results[0] == results[1] == model.layer.weight.sum().item(), results
assert not torch.equal(before, model.layer.weight)
print("trained", results.plan.start_method)
"""


def train(more: str = "") -> str:
    return TRAIN.replace("{more}", more)


@pytest.mark.skipif(
    importlib.metadata.version("torch").startswith("2.6."),
    reason="threads of its libgomp forbid a fork",
)
def test_a_fork_after_matmul_and_backward_and_beside_threads(kernel):
    kernel.run(
        """
        torch.set_num_threads(2)
        a = torch.randn(800, 800, requires_grad=True)
        (a @ a).sum().backward()
        """
    ).check()
    cell = kernel.run(train(", start_method='fork'")).check()
    assert cell.stdout == "trained fork\n"
    assert cell.stderr == "", "the kernel's own threads are no cause for a warning"
    kernel.run(
        """
        import threading
        stop = threading.Event()
        threads = [threading.Thread(target=stop.wait, name=f"mine-{i}") for i in range(20)]
        [t.start() for t in threads];
        """
    ).check()
    try:
        cell = kernel.run(train(", start_method='fork'")).check()
        assert "trained fork" in cell.stdout
        assert "20 thread(s) of yours are running" in cell.stdout
        assert cell.stderr == ""
    finally:
        kernel.run("stop.set(); [t.join() for t in threads];").check()


def test_lambdas_closures_redefinitions_and_what_cannot_be_pickled(kernel):
    cell = kernel.run(
        """
        def outer():
            offset = torch.arange(3)
            return lambda x: (offset + x).tolist()
        print(notebook_launcher(outer(), (1,), 2))
        print(notebook_launcher(lambda g: sum(g), ((i for i in range(4)),), 2))
        """
    ).check()
    first, notice, last = cell.stdout.splitlines()
    assert (first, last) == ("[[1, 2, 3], [1, 2, 3]]", "[6, 6]")
    assert "forked from the notebook, because args[0] (a generator)" in notice
    assert cell.stderr == "", "a notice is no error"
    for version in (1, 2):
        kernel.run(f"def helper(): return {version}").check()
        kernel.run("def work(): return helper()").check()
        assert f"[{version}, {version}]" in kernel.run("print(notebook_launcher(work, (), 2))").text
    # Transformers makes a handler when it is imported: a fork has it, with the kernel's own stream.
    cell = kernel.run(
        "import logging, sys\n"
        "made = logging.StreamHandler(sys.stderr)\n"
        "logging.getLogger('numpy.somewhere').addHandler(made)\n"
        "def warn():\n"
        "    logging.getLogger('numpy.somewhere').warning('from a worker')\n"
        "notebook_launcher(warn, (), 2, start_method='fork')\n"
        "logging.getLogger('numpy.somewhere').removeHandler(made)"
    ).check()
    assert cell.stderr == "[0-1] from a worker\n"


@pytest.mark.parametrize("method", ["template", "fork"])
def test_displays_and_figures_arrive_as_such_and_at_the_end_those_that_nobody_showed(
    kernel, method
):
    cell = kernel.run(
        f"""
        %matplotlib inline
        from IPython.display import HTML, Markdown, display
        def show():
            if int(os.environ["RANK"]) == 0:
                import matplotlib.pyplot as plt
                from matplotlib.figure import Figure
                print("before")
                display(HTML("<b>bold</b>"), Markdown("*text*"))
                figure = Figure()
                figure.subplots().plot([1, 2])
                display(figure)
                plt.plot([1, 2, 3])
                plt.show()
                plt.plot([1, 2, 3])
                plt.figure()
                plt.plot([3, 2, 1])
                from ipywidgets import Output
                with Output():  # as rich's progress bars do
                    print("within")
        notebook_launcher(show, (), 2, start_method={method!r});
        """
    ).check()
    shown = without_waiting_line(cell.displays)
    assert shown[0]["text/html"] == "<b>bold</b>"
    assert "text/markdown" in shown[1]
    assert "before" in cell.stdout
    assert "within" in cell.stdout
    assert ["image/png" in data for data in shown[3:]] == [True] * 3, "those of pyplot"


def without_waiting_line(displays: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A start that takes its time says so in a display of its own, which is empty afterwards."""
    texts = [data.get("text/plain", "") for data in displays]
    return [
        data
        for data, text in zip(displays, texts, strict=True)
        if text and not text.startswith("starting 2 workers")
    ]


@pytest.mark.parametrize("method", ["template", "fork"])
@pytest.mark.parametrize("flavour", ["auto", "notebook"])
def test_progress_bars_show_text(kernel, flavour, method):
    cell = kernel.run(
        f"""
        from tqdm.{flavour} import tqdm, trange
        def train():
            from tqdm.{flavour} import tqdm
            for _ in tqdm(range(5), desc="inside"):
                time.sleep(0.01)
            for _ in trange(5, desc="outside"):
                time.sleep(0.01)
        notebook_launcher(train, (), 2, start_method={method!r})
        """
    ).check()
    # Without a dashboard a bar is drawn in place, and is no error either.
    assert "inside: 100%" in cell.stdout
    assert "outside: 100%" in cell.stdout
    assert "5/5" in cell.stdout
    assert cell.stderr == ""


def test_a_crash_shows_the_cells_line(kernel):
    cell = kernel.run(
        """
        def crash():
            import ctypes
            if int(os.environ["RANK"]) == 1:
                ctypes.string_at(0)  # boom
            time.sleep(600)
        notebook_launcher(crash, (), 2)
        """
    )
    text = "\n".join(cell.traceback)
    assert "rank 1 of 2 was killed by SIGSEGV" in text
    assert "ctypes.string_at(0)  # boom" in text
    assert len(cell.traceback) <= 40


@pytest.mark.slow
@pytest.mark.parametrize("method", ["template", "fork"])
def test_nothing_survives_the_kernel(fresh_kernel, method):
    fresh_kernel.run(SETUP).check()
    running = fresh_kernel.begin(
        f"""
        def hang():
            loader = torch.utils.data.DataLoader(range(9), num_workers=1)
            next(iter(loader))
            print("inside", os.environ["RANK"])
            workers.ignore_everything()
        notebook_launcher(hang, (), 2, start_method={method!r})
        """
    )
    for rank in range(2):  # not one line of both: under load they print apart
        fresh_kernel.until(running, f"inside {rank}")
    left = fresh_kernel.descendants()
    assert len(left) >= 3
    fresh_kernel.kill()
    assert wait_for(lambda: not any(p.is_running() and p.status() != "zombie" for p in left)), left


PROMPTS = "[name for name in ('ps1', 'ps2', 'ps3') if hasattr(sys, name)]"


def test_workers_of_a_kernel_have_no_prompts(kernel):
    """Nobody types there, and libraries that look for a person find none."""
    said = kernel.run(
        f"""
        from nbaccel import Pool
        def prompts():
            return {PROMPTS}
        print(prompts()[:2])
        for method in ("template", "fork"):
            print(*notebook_launcher(prompts, (), 2, start_method=method))
        with Pool(2, namespace={{}}) as pool:
            pool.run("import sys; found = {PROMPTS}")
            print(*pool.pull("found")["found"])
        """
    ).check()
    assert said.stdout.splitlines() == ["['ps1', 'ps2']", *["[] []"] * 3]
