"""``nbaccel to-fp32 DIR OUT``: a checkpoint of DeepSpeed becomes fp32 weights in safetensors."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from nbaccel.base.units import count_noun, first_few, format_bytes, format_seconds

if TYPE_CHECKING:
    from nbaccel.deepspeed.weights.converting import Written

__all__ = ["add_to"]

_COMMAND_DESCRIPTION = (
    "Convert a checkpoint that DeepSpeed's engine.save_checkpoint wrote (ZeRO stages 0 to 3, any "
    "number of ranks) into fp32 weights that Hugging Face's libraries read. A few MiB are in "
    "memory at a time, whatever the model's size. All files appear together at the end, or none."
)


def add_to(app: typer.Typer) -> None:
    """Add the subcommand."""
    app.command(
        "to-fp32",
        help=_COMMAND_DESCRIPTION,
        short_help="fp32 weights out of a DeepSpeed checkpoint",
    )(_convert)


def _convert(
    checkpoint_dir: Annotated[
        str,
        typer.Argument(metavar="DIR", help="The checkpoint's folder, or that of one tag in it."),
    ],
    output_dir: Annotated[
        str,
        typer.Argument(
            metavar="OUT", help="Folder for model.safetensors; made if it is not there."
        ),
    ],
    tag: Annotated[
        str | None,
        typer.Option(help="Which save (default: the one that the file `latest` names)."),
    ] = None,
    max_shard_size: Annotated[
        str, typer.Option(metavar="SIZE", help="Most bytes of a file.")
    ] = "5GB",
    exclude_frozen_parameters: Annotated[
        bool, typer.Option("--exclude-frozen-parameters", help="Leave out what was not trained.")
    ] = False,
) -> None:
    # Here, so that `nbaccel --help` does not import numpy and safetensors.
    from nbaccel.deepspeed.weights.converting import zero_to_fp32

    start_time = time.monotonic()
    written_files = zero_to_fp32(
        checkpoint_dir,
        output_dir,
        tag=tag,
        max_shard_size=max_shard_size,
        exclude_frozen_parameters=exclude_frozen_parameters,
        # In a log file the bar would be a line for each of its updates.
        progress=sys.stderr.isatty(),
    )
    sys.stdout.write(f"{_result_text(written_files, time.monotonic() - start_time)}\n")


def _result_text(written_files: Written, elapsed_seconds: float) -> str:
    names = [path.name for path in written_files.files]
    listed_files = names[0] if len(names) == 1 else f"{names[0]} … {names[-1]}"
    return (
        f"{count_noun(written_files.num_tensors, 'tensor')}, "
        f"{format_bytes(written_files.num_bytes)}, in {count_noun(len(names), 'file')} "
        f"({listed_files}) in {written_files.files[0].parent}: "
        f"{format_seconds(elapsed_seconds)}{_peak_memory()}{_tied_text(written_files.tied)}"
    )


def _tied_text(tied_names: Mapping[str, str]) -> str:
    """How to load tied names, which `load_state_dict` of the file's tensors would miss."""
    if not tied_names:
        return ""
    pairs = first_few([f"{name} is {target}" for name, target in sorted(tied_names.items())], 3)
    # Both names in the file would in turn be refused by safetensors' own load_model.
    return (
        f"\nTied weights are in it under one name ({pairs}). from_pretrained, "
        "load_checkpoint_in_model and safetensors.torch.load_model know; for load_state_dict take "
        "nbaccel.load_fp32_state_dict(DIR), which has all names."
    )


def _peak_memory() -> str:
    """What this process had in memory at most, where the system tells.

    The maximum of `getrusage` includes the memory of the process that started this one.
    """
    path = Path("/proc/self/status")
    status_lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    peak_bytes = [
        int(status_line.split()[1]) * 1024
        for status_line in status_lines
        if status_line.startswith("VmHWM:")
    ]
    return f", {format_bytes(peak_bytes[0])} of memory at most" if peak_bytes else ""
