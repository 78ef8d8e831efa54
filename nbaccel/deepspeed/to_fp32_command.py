"""``nbaccel to-fp32 DIR OUT``: a checkpoint of DeepSpeed becomes fp32 weights in safetensors."""

from __future__ import annotations

import sys
import time
from typing import Annotated

import typer

from nbaccel.base.units import count_noun, first_few, format_bytes, format_seconds

_HELP = (
    "Convert a checkpoint of DeepSpeed's engine.save_checkpoint (ZeRO stages 0 to 3, any number of "
    "ranks) into fp32 weights that Hugging Face's libraries read, a few MiB at a time."
)


def add_to(app: typer.Typer) -> None:
    """Add the subcommand."""
    summary = "fp32 weights out of a DeepSpeed checkpoint"
    app.command("to-fp32", help=_HELP, short_help=summary)(_convert)


def _convert(
    checkpoint_dir: Annotated[
        str, typer.Argument(metavar="DIR", help="The checkpoint, or one tag.")
    ],
    output_dir: Annotated[str, typer.Argument(metavar="OUT", help="Folder for model.safetensors.")],
    tag: Annotated[str | None, typer.Option(help="Which save (default: that of `latest`).")] = None,
    max_shard_size: Annotated[str, typer.Option(metavar="SIZE", help="Most of a file.")] = "5GB",
    exclude_frozen_parameters: Annotated[
        bool, typer.Option("--exclude-frozen-parameters", help="Leave out what was not trained.")
    ] = False,
) -> None:
    # Here, so that `nbaccel --help` does not import torch and safetensors.
    from nbaccel.deepspeed.converting import zero_to_fp32

    start_time = time.monotonic()
    written = zero_to_fp32(
        checkpoint_dir,
        output_dir,
        tag=tag,
        max_shard_size=max_shard_size,
        exclude_frozen_parameters=exclude_frozen_parameters,
        # In a log file the bar would be a line for each of its updates.
        progress=sys.stderr.isatty(),
    )
    names = [path.name for path in written.files]
    sys.stdout.write(
        f"{count_noun(written.num_tensors, 'tensor')}, {format_bytes(written.num_bytes)}, in "
        f"{count_noun(len(names), 'file')} ({first_few(names, 3)}) in {written.files[0].parent}: "
        f"{format_seconds(time.monotonic() - start_time)}\n"
    )
