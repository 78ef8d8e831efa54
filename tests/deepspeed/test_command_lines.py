"""Every command line of Accelerate's quick tour and of the DeepSpeed guide of transformers works.

`nbaccel launch` stands in the place of `accelerate launch`, `torchrun`, `python -m
torch.distributed.run` and `deepspeed`; the rest of each line is as the guides have it. Lines that
name two hosts are planned and not started.
"""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from nbaccel.cli import main
from tests.cli import scripts
from tests.deepspeed import needs

TRANSLATION = "examples/pytorch/translation/run_translation.py"
TRANSLATION_ARGUMENTS = (
    "--model_name_or_path google-t5/t5-small --per_device_train_batch_size 1 "
    "--output_dir output_dir --overwrite_output_dir --fp16 "
    "--do_train --max_train_samples 500 --num_train_epochs 1 "
    '--dataset_name wmt16 --dataset_config "ro-en" '
    "--source_lang en --target_lang ro"
)

# A script that takes its arguments as the guide's examples do, and trains by DeepSpeed's own call.
PROGRAM = """
    import argparse, os
    import torch
    parser = argparse.ArgumentParser()
    parser.add_argument("--deepspeed")
    arguments, others = parser.parse_known_args()
    if arguments.deepspeed:
        import deepspeed
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        deepspeed.init_distributed("gloo", verbose=False)
        engine, *_ = deepspeed.initialize(
            model=model, optimizer=optimizer, config=arguments.deepspeed
        )
        loss = engine(torch.ones(1, 4)).pow(2).mean()
        engine.backward(loss)
        engine.step()
        print("stage", engine.zero_optimization_stage(), "of", engine.world_size)
    print(f"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']}, {len(others)} arguments")
"""
DS_CONFIG = (
    '{"train_micro_batch_size_per_gpu": 1, "zero_allow_untested_optimizer": true, '
    '"zero_force_ds_cpu_optimizer": false, "zero_optimization": {"stage": %d}}'
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the files that the lines name."""
    for name in ("path_to_script.py", "your_program.py", TRANSLATION):
        scripts.write(tmp_path / name, PROGRAM)
    for stage in (2, 3):
        scripts.write(tmp_path / f"tests/deepspeed/ds_config_zero{stage}.json", DS_CONFIG % stage)
    scripts.write(tmp_path / "ds_config.json", DS_CONFIG % 2)
    scripts.write(tmp_path / "hostfile", "hostname1 slots=8\nhostname2 slots=8\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("flags", ["", "--cpu", "--cpu --num_processes=2"])
def test_the_line_of_the_quick_tour(flags: str, folder: Path, capfd) -> None:
    line = f"launch {flags} path_to_script.py --args_for_the_script"
    assert main(shlex.split(line)) == 0
    count = 2 if "2" in flags else 1
    assert f"rank 0 of {count}, 1 arguments" in capfd.readouterr().out


@needs.DEEPSPEED
@needs.ENGINE[1]
@pytest.mark.slow
@pytest.mark.parametrize(
    ("line", "printed"),
    [
        (
            f"--num_gpus=2 {TRANSLATION} --deepspeed tests/deepspeed/ds_config_zero3.json "
            f"{TRANSLATION_ARGUMENTS}",
            ["stage 3 of 2", "rank 1 of 2, 21 arguments"],
        ),
        (f"{TRANSLATION} ...", ["rank 0 of 1, 1 arguments"]),
    ],
    ids=["two processes", "in a cell"],
)
def test_lines_of_deepspeed_train_with_it(
    line: str, printed: list[str], folder: Path, tmp_path: Path
) -> None:
    done = scripts.nbaccel("launch", "--cpu", *shlex.split(line), folder=folder)
    assert done.returncode == 0, done.stderr
    assert all(text in done.stdout for text in printed), done.stdout


TORCHRUN = (
    "--nproc_per_node=8 --nnode=2 --node_rank=0 --master_addr=hostname1 "
    "--master_port=9901 your_program.py 1 2 --deepspeed ds_config.json"
)
SLURM = (
    "--nproc_per_node 8 --nnodes 2 --node_rank 1 --master_addr hostname1 --master_port 9901 "
    "your_program.py 1 2 --deepspeed ds_config.json"
)


DEEPSPEED = (
    "--num_gpus 8 --num_nodes 2 --hostfile hostfile --master_addr hostname1 "
    "--master_port=9901 your_program.py 1 2 --deepspeed ds_config.json"
)


@pytest.mark.parametrize(("line", "node_rank"), [(TORCHRUN, 0), (SLURM, 1), (DEEPSPEED, None)])
def test_lines_for_two_hosts_are_planned(
    line: str, node_rank: int | None, folder: Path, capfd
) -> None:
    assert main(["launch", "--dry-run", *shlex.split(line)]) == 0
    printed = capfd.readouterr().out
    rows = [row.split()[:2] for row in printed.splitlines()]
    assert "hostname1" in printed
    if node_rank is not None:
        assert (
            f"    torchrun --nproc-per-node 8 --nnodes 2 --node-rank {node_rank} "
            "--master-addr hostname1 --master-port 9901 "
            "your_program.py 1 2 --deepspeed ds_config.json\n"
        ) in printed
        expected = [["num_processes", "8"], ["num_nodes", "2"], ["master_addr", "hostname1"]]
        assert all(row in rows for row in [*expected, ["use_port", "9901"]])


def test_the_pieces_of_torchrun_s_line_run_here(folder: Path, capfd) -> None:
    line = "--nproc_per_node=2 --nnode=1 --node_rank=0 --master_addr=127.0.0.1 your_program.py 1 2"
    assert main(["launch", "--cpu", *shlex.split(line)]) == 0
    assert "rank 1 of 2, 2 arguments" in capfd.readouterr().out
