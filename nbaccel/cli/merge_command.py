"""``nbaccel merge-weights DIR OUT``: shards that every process wrote become whole weights."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from nbaccel.base.units import format_bytes, format_seconds

_MERGE_HELP = (
    "Make whole weights of the shards that FSDP's processes wrote (torch.distributed.checkpoint): "
    "of pytorch_model_fsdp_0 in a checkpoint of Accelerate's or nbaccel's save_state. All files "
    "appear together at the end, or none."
)


def add_to(app: typer.Typer) -> None:
    """Add the subcommand."""
    app.command(
        "merge-weights",
        help=_MERGE_HELP,
        short_help="whole weights out of FSDP's shards",
    )(_merge)


def _merge(
    checkpoint_dir: Annotated[
        str, typer.Argument(metavar="DIR", help="The folder with the shards, or one above it.")
    ],
    output_dir: Annotated[
        str,
        typer.Argument(
            metavar="OUT", help="Folder for model.safetensors; made if it is not there."
        ),
    ],
    unsafe_serialization: Annotated[
        bool, typer.Option("--unsafe-serialization", help="Write pytorch_model.bin, a pickle.")
    ] = False,
    remove_checkpoint_dir: Annotated[
        bool, typer.Option("--remove-checkpoint-dir", help="Delete the shards afterwards.")
    ] = False,
) -> None:
    # Here, so that `nbaccel --help` does not import torch.
    from nbaccel.utils.fsdp_utils import merge_fsdp_weights

    start_time = time.monotonic()
    merge_fsdp_weights(
        checkpoint_dir,
        output_dir,
        safe_serialization=not unsafe_serialization,
        remove_checkpoint_dir=remove_checkpoint_dir,
    )
    file_name = "pytorch_model.bin" if unsafe_serialization else "model.safetensors"
    merged_path = Path(output_dir, file_name)
    print(
        f"{format_bytes(merged_path.stat().st_size)} in {merged_path}: "
        f"{format_seconds(time.monotonic() - start_time)}"
    )
    if remove_checkpoint_dir:
        print("The shards have been deleted.")
