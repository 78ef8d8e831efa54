"""``nbaccel export``: the script trains as the notebook's launch did; jobs have what they need."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from nbaccel.cli import main
from nbaccel.cli.script_making import make_script, read_notebook
from nbaccel.errors import ConfigError
from tests.cli import scripts
from tests.programs import run_program

CELLS = [
    "%matplotlib inline\nimport os\nimport torch\nfrom torch.utils.data import DataLoader, "
    "TensorDataset\nfrom nbaccel import Accelerator, notebook_launcher",
    "!pip install \\\n  something\nBATCH = 4  # a global that the function reads\nunused = 3",
    "class Net(torch.nn.Module):\n"
    "    def __init__(self):\n"
    "        super().__init__()\n"
    "        self.inner = torch.nn.Linear(4, 1)\n\n"
    "    def forward(self, inputs):\n"
    "        return self.inner(inputs)",
    "def loss_of(model, inputs, targets):\n"
    "    return torch.nn.functional.mse_loss(model(inputs), targets)",
    # Defined before what it uses, and with a comment above.
    "# What each worker does.\n"
    "def train(model, path):\n"
    "    accelerator = Accelerator()\n"
    "    optimizer = torch.optim.SGD(model.parameters(), lr=LR)\n"
    "    generator = torch.Generator().manual_seed(0)\n"
    "    data = TensorDataset(torch.randn(32, 4, generator=generator), torch.ones(32, 1))\n"
    "    model, optimizer, loader = accelerator.prepare(\n"
    "        model, optimizer, DataLoader(data, BATCH)\n"
    "    )\n"
    "    for inputs, targets in loader:\n"
    "        loss = loss_of(model, inputs, targets)\n"
    "        accelerator.backward(loss)\n"
    "        optimizer.step()\n"
    "        optimizer.zero_grad()\n"
    "    if accelerator.is_main_process:\n"
    "        weights = [p.detach() for p in accelerator.unwrap_model(model).parameters()]\n"
    "        torch.save([accelerator.num_processes, *weights], path)",
    "LR = 0.1\ntorch.manual_seed(0)\nmodel = Net()",
    "with torch.no_grad():\n    model.inner.bias.fill_(0.5)\nprint(model)",
    "path = os.path.join(FOLDER, 'weights.pt')".replace("FOLDER", "os.environ['OUT']"),
    "results = notebook_launcher(train, (model, path), num_processes=2, start_method='template')",
    "%%bash\necho this is no Python",
    "results[0]",
]


def write_notebook(path: Path, cells: list[str], tags: dict[int, str] | None = None) -> Path:
    """A notebook file; tags by the cell's number, from 1."""
    found = [
        {
            "cell_type": "code",
            "execution_count": None,
            "id": f"cell{number}",
            "metadata": {"tags": [tags[number]]} if tags and number in tags else {},
            "outputs": [],
            "source": source.splitlines(keepends=True),
        }
        for number, source in enumerate(cells, 1)
    ]
    markdown = {"cell_type": "markdown", "id": "text", "metadata": {}, "source": ["# Title"]}
    notebook = {"cells": [markdown, *found], "metadata": {}, "nbformat": 4, "nbformat_minor": 5}
    path.write_text(json.dumps(notebook))
    return path


@pytest.fixture
def notebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return write_notebook(tmp_path / "my notebook.ipynb", CELLS)


# What a process of torchrun says that torch's threads abort while Python shuts down: seldom, on a
# busy machine, and after the script has done all that it does.
ABORTED_AT_THE_END = "terminate called without an active exception"


def run(command: list[str], folder: Path, tries: int = 3) -> list:
    """The world size and weights that a run of a script has saved."""
    import torch

    folder.mkdir(exist_ok=True)
    done = run_program(
        command,
        env={**scripts.environment(), "OUT": str(folder), "ACCELERATE_USE_CPU": "true"},
        check=False,
    )
    if ABORTED_AT_THE_END in done.stderr and "torch.distributed.run" in command and tries > 1:
        return run(command, folder, tries - 1)
    assert done.returncode == 0, done.stderr
    return torch.load(folder / "weights.pt")


@pytest.mark.slow
def test_the_script_trains_as_the_notebook_s_launch_did(notebook, tmp_path):
    import torch

    assert main(["export", notebook.name]) == 0
    # The notebook itself: its cells in one process, magics left out.
    lines = [cell for cell in CELLS if not cell.startswith(("%%", "results[0]"))]
    code = (
        "\n".join(lines)
        .replace("%matplotlib inline", "")
        .replace("!pip install \\\n  something", "")
    )
    (tmp_path / "as_notebook.py").write_text(code)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    ways = {
        "notebook": [sys.executable, "as_notebook.py"],
        "nbaccel": [sys.executable, "-m", "nbaccel", "launch", "-n", "2", "my_notebook.py"],
        "torchrun": [*torchrun, "--standalone", "my_notebook.py"],
    }
    results = {name: run(command, tmp_path / name) for name, command in ways.items()}
    for name in ("nbaccel", "torchrun"):
        assert results[name][0] == results["notebook"][0] == 2, name
        for ours, notebooks in zip(results[name][1:], results["notebook"][1:], strict=True):
            assert torch.equal(ours, notebooks), name


def test_the_script_has_what_is_needed_and_nothing_else(notebook, tmp_path):
    made = make_script(read_notebook(notebook), notebook.name)
    assert made.cell_numbers == (1, 2, 3, 4, 5, 6, 7, 8)
    for part in ("BATCH = 4", "# What each worker does.\ndef train(", "LR = 0.1", "class Net"):
        assert part in made.text
    main_function = made.text[made.text.index("def main():") :]
    for line in ("torch.manual_seed(0)", "model = Net()", "with torch.no_grad():", "train(model"):
        assert f"    {line}" in main_function
    assert "\n# !pip install \\\n# something\nBATCH" in made.text
    for word in ("unused", "notebook_launcher", "results", "echo", "print("):
        assert word not in made.text, word
    assert made.launch.settings == {"num_processes": 2, "start_method": "template"}


def test_tagged_cells_are_the_script_and_those_to_skip_are_left_out(tmp_path):
    cells = ["%pip install x\nimport os", "secret = 1", "%%accelerate -n 2\nprint(os.name)"]
    cells += ["def f(): pass", "notebook_launcher(f, num_processes=3)"]
    tags = {1: "export", 3: "export", 4: "export", 5: "export"}
    path = write_notebook(tmp_path / "n.ipynb", cells, tags)
    made = make_script(read_notebook(path), path.name)
    assert "secret" not in made.text
    assert "# %pip install x\nimport os" in made.text
    assert "# %%accelerate -n 2\nprint(os.name)" in made.text
    assert 'if __name__ == "__main__":\n    f()' in made.text
    assert made.launch.settings == {"num_processes": 3}
    compile(made.text, "script", "exec")
    cells = ["import os", "def f(): return os", "def f(): return 1 +", "notebook_launcher(f)"]
    path = write_notebook(tmp_path / "n.ipynb", cells, {3: "nbaccel-skip"})
    assert make_script(read_notebook(path), path.name).cell_numbers == (1, 2)


def test_settings_are_read_from_the_call_and_its_config(tmp_path, capfd, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cells = [
        "config = RunConfig(num_processes=2, mixed_precision='bf16', device='cpu')",
        "def f(): pass",
        "nbaccel.notebook_launcher(f, config=config)",
    ]
    write_notebook(tmp_path / "n.ipynb", cells)
    assert main(["export", "n.ipynb", "--max-restarts", "1"]) == 0
    command = (
        "nbaccel launch --nproc-per-node 2 --device cpu --precision bf16 --max-restarts 1 n.py"
    )
    assert f"    {command}\n" in capfd.readouterr().out
    cells[0] = "config = configure()"
    write_notebook(tmp_path / "n.ipynb", cells)
    assert main(["export", "n.ipynb", "--overwrite"]) == 0
    assert "config of the launch cannot be read" in capfd.readouterr().err


def test_the_notebook_comes_after_what_was_saved_and_before_a_file_that_is_given(
    tmp_path, capfd, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "saved.yaml"
    file.write_text("num_processes: 1\nmixed_precision: bf16\n")
    cells = ["def f(): pass", "notebook_launcher(f, num_processes=2)"]
    write_notebook(tmp_path / "n.ipynb", cells)
    monkeypatch.setenv("NBACCEL_CONFIG", str(file))
    assert main(["export", "n.ipynb"]) == 0
    assert "nbaccel launch --nproc-per-node 2 --precision bf16 n.py" in capfd.readouterr().out
    assert main(["export", "n.ipynb", "--overwrite", "--config-file", str(file)]) == 0
    assert "nbaccel launch --nproc-per-node 1 --precision bf16 n.py" in capfd.readouterr().out


COMMANDS = {
    "nbaccel": "nbaccel launch --nproc-per-node 4 --nnodes 2 --node-rank 0 --master-addr h1 "
    "--master-port 29500 --device cpu --precision bf16 n.py",
    "torchrun": "ACCELERATE_MIXED_PRECISION=bf16 ACCELERATE_USE_CPU=true torchrun --nproc-per-node "
    "4 --nnodes 2 --node-rank 0 --master-addr h1 --master-port 29500 n.py",
}
SETTINGS = ["--nproc-per-node", "4", "--num-nodes", "2", "--master-addr", "h1", "--cpu"]


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return write_notebook(tmp_path / "n.ipynb", ["def f(): print(1)", "notebook_launcher(f)"])


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_line_for_each_launcher(command, small, capfd):
    words = [*SETTINGS, "--mixed-precision", "bf16", "--to", command]
    assert main(["export", *words, small.name]) == 0
    assert f"    {COMMANDS[command]}\n" in capfd.readouterr().out
    # What is written after nbaccel launch, or after another's name, is understood by it.
    line = COMMANDS[command]
    own_words = shlex.split(line[line.index(command) + len(command) :].replace(" launch", "", 1))
    assert main(["launch", "--dry-run", *own_words]) == 0
    rows = [row.split()[:2] for row in capfd.readouterr().out.splitlines()]
    assert ["num_processes", "4"] in rows
    assert ["num_nodes", "2"] in rows


def test_launchers_have_files_of_their_own(small):
    words = ["--to", "slurm", "--nproc-per-node", "8", "--num-nodes", "2", "--overwrite"]
    assert main(["export", *words, small.name]) == 0
    subprocess.run(["bash", "-n", "n.sbatch"], check=True)
    text = Path("n.sbatch").read_text()
    for line in ("#SBATCH --nodes=2", "#SBATCH --ntasks-per-node=1", "#SBATCH --gpus-per-node=8"):
        assert line in text.replace("  #", "\n#")
    assert '--nnodes 2 --node-rank "$SLURM_NODEID" --master-addr "$MASTER_ADDR"' in text
    assert main(["export", "--to", "ray", "-n", "4", "--overwrite", small.name]) == 0
    subprocess.run(["bash", "-n", "n_ray.sh"], check=True)
    text = Path("n_ray.sh").read_text()
    assert "ray job submit" in text
    assert "--entrypoint-num-gpus 4" in text
    assert "-- nbaccel launch --nproc-per-node 4 n.py" in text
    assert (
        main(["export", "--to", "ray", "-n", "4", "--num-nodes", "2", "--overwrite", small.name])
        == 0
    )
    text = Path("n_ray.sh").read_text()
    # The engine places the workers: the job itself needs nothing.
    assert "--entrypoint-num" not in text
    assert "-- nbaccel launch --num-processes 4 --engine ray n.py" in text


RAY = """#!/bin/sh
# As Ray's own command: the words behind `--` are joined by list2cmdline, and a shell runs them.
exec {python} -c '
import subprocess, sys
words = sys.argv[sys.argv.index("--") + 1:]
sys.exit(subprocess.run(subprocess.list2cmdline(words), shell=True).returncode)
' "$@"
"""


def test_settings_of_a_job_for_ray_are_no_commands(small):
    value = """$(touch ran) `touch ran` * ~ ${HOME} say "x" it's back\\slash\nlines ; touch ran"""
    words = ["--to", "ray", "-n", "2", "--log-dir", value, "--log-line-prefix-template", value]
    assert main(["export", *words, small.name]) == 0
    programs = Path("programs")
    programs.mkdir()
    show = f"#!{sys.executable}\nimport json, sys\nprint(json.dumps(sys.argv[1:]))\n"
    for name, text in (("ray", RAY.format(python=sys.executable)), ("nbaccel", show)):
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    done = run_program(
        ["bash", "n_ray.sh"],
        env={**os.environ, "PATH": f"{programs.resolve()}:{os.environ['PATH']}"},
    )
    given = json.loads(done.stdout)
    assert given[given.index("--log-dir") + 1] == value
    assert given[given.index("--log-line-prefix-template") + 1] == value
    assert not Path("ran").exists()


def test_a_deepspeed_configuration_has_a_file_and_nothing_is_replaced_unasked(small, capfd):
    Path("n.py").write_text("mine")
    assert main(["export", small.name]) == 2
    assert "n.py would be replaced" in capfd.readouterr().err
    assert Path("n.py").read_text() == "mine"
    assert main(["export", small.name, "--overwrite"]) == 0
    assert "def f()" in Path("n.py").read_text()
    words = ["--deepspeed", '{"gradient_clipping": 1.0, "zero_optimization": {"stage": 2}}']
    assert main(["export", *words, "--to", "torchrun", "--overwrite", small.name]) == 0
    assert "ACCELERATE_DEEPSPEED_CONFIG_FILE=ds_config.json" in capfd.readouterr().out
    assert json.loads(Path("ds_config.json").read_text())["zero_optimization"]["stage"] == 2


@pytest.mark.parametrize(
    ("cells", "words"),
    [
        (["x = 1"], ["Looked in 1 code cells", "export", "notebook_launcher"]),
        (
            ["def f(): pass", "def g(): pass", "notebook_launcher(f)", "notebook_launcher(g)"],
            ["launches f, g", "--function g"],
        ),
        (["x = (", "y = 1 +", "notebook_launcher(f)"], ["Code cell 1, line 1", "Code cell 2"]),
    ],
    ids=["no launch", "two launches", "no Python"],
)
def test_a_notebook_that_cannot_be_exported(cells, words, tmp_path):
    path = write_notebook(tmp_path / "n.ipynb", cells)
    with pytest.raises(ConfigError) as raised:
        make_script(read_notebook(path), path.name)
    assert all(word in str(raised.value) for word in words), str(raised.value)


def test_one_of_several_launches_can_be_chosen_and_what_is_no_notebook_is_refused(tmp_path):
    cells = ["def f(): pass", "def g(): pass", "notebook_launcher(f)", "notebook_launcher(g)"]
    made = make_script(read_notebook(write_notebook(tmp_path / "n.ipynb", cells)), "n.ipynb", "f")
    assert "def g" not in made.text
    (tmp_path / "n.ipynb").write_text("{}")
    for name in ("n.ipynb", "gone.ipynb"):
        with pytest.raises(ConfigError, match="cannot be read as a notebook"):
            read_notebook(tmp_path / name)
