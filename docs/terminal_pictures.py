"""Pictures of the command in a terminal: run in tmux, at 100 columns, and saved as SVG.

python docs/terminal_pictures.py            # all of them, into docs/pages/images
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import SVG_EXPORT_THEME
from rich.text import Text

IMAGES = Path(__file__).parent / "pages" / "images"
COLUMNS, LINES = 100, 60
_SESSION = "nbaccel-pictures"
_FONTS = re.compile(r"@font-face \{.*?\}", re.DOTALL)
"""Rich names fonts that a browser would fetch; the page takes what the reader has."""
_SMALL_MODEL = {
    "architectures": ["GPT2LMHeadModel"],
    "model_type": "gpt2",
    "n_embd": 1600,
    "n_layer": 48,
    "n_head": 25,
    "vocab_size": 50257,
    "n_positions": 1024,
}
_THEIRS = """compute_environment: LOCAL_MACHINE
distributed_type: FSDP
fsdp_config:
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_backward_prefetch: BACKWARD_PRE
  fsdp_offload_params: false
  fsdp_sharding_strategy: SHARD_GRAD_OP
  fsdp_transformer_layer_cls_to_wrap: GPT2Block
  fsdp_use_orig_params: true
machine_rank: 0
main_process_ip: null
mixed_precision: bf16
num_machines: 1
num_processes: 2
rdzv_backend: static
"""
_FAILING_SCRIPT = """import argparse

import torch
from torch.utils.data import DataLoader, TensorDataset

from nbaccel import Accelerator


def train(lr):
    accelerator = Accelerator()
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    data = TensorDataset(torch.randn(64, 4), torch.randn(64, 1))
    loader = DataLoader(data, batch_size=4)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    print("model prepared")
    for step, (inputs, targets) in enumerate(loader):
        if step == 3 and accelerator.process_index == 1:
            raise ValueError(f"no batch {step} in shard 1")
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}")


parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float)
train(parser.parse_args().lr)
"""


def main() -> None:
    """Take all pictures."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "gpt2-xl").mkdir()
        (folder / "gpt2-xl/config.json").write_text(json.dumps(_SMALL_MODEL), encoding="utf-8")
        (folder / "theirs.yaml").write_text(_THEIRS, encoding="utf-8")
        (folder / "train.py").write_text(_FAILING_SCRIPT, encoding="utf-8")
        (folder / "run.yaml").write_text("mixed_precision: bf16\n", encoding="utf-8")
        save("cli_test", folder, "nbaccel test -n 2 --cpu")
        save("launch_failure", folder, "nbaccel launch -n 2 --cpu train.py --lr 0.1")
        dry_run = "nbaccel launch --dry-run --config-file run.yaml -n 2 train.py"
        save("launch_dry_run", folder, dry_run)
        (folder / "run.yaml").unlink()
        # Last: from now on there is a configuration file, which the others would take.
        save(
            "cli_config",
            folder,
            "nbaccel config",
            "",
            "",
            "2",
            "",
            "bf16",
            "deepspeed",
            "",
            "2",
            "",
            "",
            "cpu",
            "n",
        )
        save("cli_import", folder, "nbaccel config import theirs.yaml --config_file run.yaml")
        save("cli_estimate_memory", folder, "nbaccel estimate-memory gpt2-xl --num-gpus 8 2> log")


def save(name: str, folder: Path, command: str, *answers: str) -> None:
    """Run a command, answer its questions, and save what the terminal shows.

    Args:
        name: The picture's.
        folder: The working folder.
        command: What is typed.
        answers: What is typed then, a line each.
    """
    tmux("new-session", "-d", "-s", _SESSION, "-x", str(COLUMNS), "-y", str(LINES), "bash --norc")
    try:
        package = Path(__file__).parents[1]
        program = shlex.join([sys.executable, "-m", "nbaccel"])
        setting_up = f"alias nbaccel={shlex.quote(program)}; export PS1='$ ' PYTHONPATH={package}"
        for line in (f"cd {folder}; XDG_CACHE_HOME={folder}; export XDG_CACHE_HOME", setting_up):
            tmux("send-keys", "-t", _SESSION, line, "Enter")
        for line in ("clear", command, *answers):
            tmux("send-keys", "-t", _SESSION, line, "Enter")
            wait_until_still()
        shown = tmux("capture-pane", "-t", _SESSION, "-e", "-p").rstrip()
    finally:
        tmux("kill-session", "-t", _SESSION)
    shown = shown.replace(str(folder), "~")
    console = Console(record=True, width=COLUMNS, file=tempfile.TemporaryFile("w"))
    console.print(Text.from_ansi(shown.removesuffix("$").rstrip()), soft_wrap=True)
    picture = console.export_svg(title="nbaccel", theme=SVG_EXPORT_THEME, unique_id=name)
    (IMAGES / f"{name}.svg").write_text(_FONTS.sub("", picture), encoding="utf-8")


def wait_until_still() -> None:
    """Wait until the terminal shows a prompt or a question, and has not changed for a while."""
    seen, since, deadline = "", time.monotonic(), time.monotonic() + 60
    while time.monotonic() < deadline and time.monotonic() - since < 1.5:
        shown = tmux("capture-pane", "-t", _SESSION, "-p")
        if shown != seen or not shown.rstrip().endswith(("$", ")")):
            seen, since = shown, time.monotonic()
        time.sleep(0.1)


def tmux(*arguments: str) -> str:
    """Run tmux, and give what it prints."""
    done = subprocess.run(["tmux", *arguments], check=True, capture_output=True, text=True)
    return done.stdout


if __name__ == "__main__":
    main()
