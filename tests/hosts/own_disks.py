"""A notebook's cells on hosts without a shared disk: `own_disks.py CELL HOSTFILE ...`.

Weights and optimizer are in shards here, each process's on the disk of its host.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from safetensors.torch import load_file

from nbaccel import Accelerator, DeepSpeedPlugin, FullyShardedDataParallelPlugin, notebook_launcher
from nbaccel.utils import ProjectConfiguration
from tests.hosts.notebook import make_model, tell

STEPS = 2


def accelerator_for(kind):
    """`sharded` and `full` are FSDP's forms; `zero1`, `zero3`, and `zero1-local` with a setting.

    `ddp` keeps a whole model on each host.
    """
    project = ProjectConfiguration(save_on_each_node=kind in ("full", "zero3-local"))
    if kind in ("sharded", "full"):
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2, state_dict_type=f"{kind.upper()}_STATE_DICT"
        )
        return Accelerator(cpu=True, fsdp_plugin=plugin, project_config=project)
    if kind == "ddp":
        return Accelerator(cpu=True, project_config=project)
    stage, _, is_local = kind.removeprefix("zero").partition("-")
    settings = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": int(stage)}}
    if is_local:
        settings["checkpoint"] = {"use_node_local_storage": True}
    plugin = DeepSpeedPlugin(hf_ds_config=settings)
    return Accelerator(cpu=True, deepspeed_plugin=plugin, project_config=project)


def train_steps(accelerator, model, optimizer, first_step):
    losses = []
    for step in range(first_step, first_step + STEPS):
        torch.manual_seed(100 * step + accelerator.process_index)
        loss = model(torch.randn(4, 8)).pow(2).mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def save_or_load(kind, folder, is_first):
    """Losses of the steps after the checkpoint, and what lies in it on this host."""
    accelerator = accelerator_for(kind)
    # 30 rows: the shards of four processes are not equal.
    model = make_model(width=30)
    # Every process holds it whole.
    model.register_buffer("whole", torch.full((3,), float(is_first)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    model, optimizer = accelerator.prepare(model, optimizer)
    checkpoint = Path(folder) / kind
    if is_first:
        train_steps(accelerator, model, optimizer, first_step=0)
        accelerator.save_state(checkpoint)
    else:
        accelerator.load_state(checkpoint)
    losses = train_steps(accelerator, model, optimizer, first_step=STEPS)
    accelerator.save_model(model, checkpoint.with_suffix(".model"))
    saved_model = checkpoint.with_suffix(".model") / "model.safetensors"
    return {
        "losses": losses,
        "whole": accelerator.unwrap_model(model).whole.tolist(),
        "files": sorted(path.name for path in checkpoint.rglob("*") if path.is_file()),
        "names": sorted(load_file(saved_model)) if saved_model.exists() else [],
        "gathered": sorted(accelerator.get_state_dict(model)),
    }


def outcome_of(kind, folder, is_first):
    try:
        return save_or_load(kind, folder, is_first)
    except Exception as error:
        return {"kind": type(error).__name__, "text": str(error)}


def over_all(kinds, folder, is_first):
    return {kind: outcome_of(kind, folder, is_first) for kind in kinds.split(",")}


def cell_resume(hostfile, folder, kinds):
    """Save on all hosts, go on from it with other workers, and then on beta alone."""
    only_beta = Path(hostfile).with_name("only_beta")
    only_beta.write_text("beta slots=2\n")
    saved, loaded, fewer = (
        notebook_launcher(over_all, (kinds, folder, is_first), hostfile=str(hosts))
        for hosts, is_first in ((hostfile, True), (hostfile, False), (only_beta, False))
    )
    tell(saved=list(saved), loaded=list(loaded), fewer=list(fewer))


if __name__ == "__main__":
    globals()[f"cell_{sys.argv[1]}"](*sys.argv[2:])
