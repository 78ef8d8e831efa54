"""``nbaccel to-fp32 DIR OUT``: a checkpoint of DeepSpeed becomes fp32 weights in safetensors."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nbaccel.units import count_noun, format_bytes, format_seconds

if TYPE_CHECKING:
    from nbaccel.deepspeed.weights.converting import Written

__all__ = ["add_to"]

_COMMAND_DESCRIPTION = (
    "Convert a checkpoint that DeepSpeed's engine.save_checkpoint wrote (ZeRO stages 0 to 3, any "
    "number of ranks) into fp32 weights that Hugging Face's libraries read. A few MiB are in "
    "memory at a time, whatever the model's size. All files appear together at the end, or none."
)


def add_to(command_parsers: argparse._SubParsersAction[Any]) -> None:
    """Add the subcommand.

    Args:
        command_parsers: Where subcommands are kept.
    """
    command_parser = command_parsers.add_parser(
        "to-fp32",
        help="fp32 weights out of a DeepSpeed checkpoint",
        description=_COMMAND_DESCRIPTION,
    )
    command_parser.add_argument(
        "checkpoint_dir", metavar="DIR", help="the checkpoint's folder, or that of one tag in it"
    )
    command_parser.add_argument(
        "output_dir", metavar="OUT", help="folder for model.safetensors; made if it is not there"
    )
    command_parser.add_argument(
        "--tag", help="which save (default: the one that the file `latest` names)"
    )
    command_parser.add_argument(
        "--max-shard-size", default="5GB", metavar="SIZE", help="most bytes of a file (%(default)s)"
    )
    command_parser.add_argument(
        "--exclude-frozen-parameters", action="store_true", help="leave out what was not trained"
    )
    command_parser.set_defaults(run=_run_command)


def _run_command(parsed_options: argparse.Namespace) -> int:
    # Here, so that `nbaccel --help` does not import numpy and safetensors.
    from nbaccel.deepspeed.weights.converting import zero_to_fp32

    start_time = time.monotonic()
    written_files = zero_to_fp32(
        parsed_options.checkpoint_dir,
        parsed_options.output_dir,
        tag=parsed_options.tag,
        max_shard_size=parsed_options.max_shard_size,
        exclude_frozen_parameters=parsed_options.exclude_frozen_parameters,
        # In a log file the bar would be a line for each of its updates.
        progress=sys.stderr.isatty(),
    )
    sys.stdout.write(f"{_result_text(written_files, time.monotonic() - start_time)}\n")
    return 0


def _result_text(written_files: Written, elapsed_seconds: float) -> str:
    file_names = [file_path.name for file_path in written_files.files]
    listed_files = file_names[0] if len(file_names) == 1 else f"{file_names[0]} … {file_names[-1]}"
    return (
        f"{count_noun(written_files.num_tensors, 'tensor')}, "
        f"{format_bytes(written_files.num_bytes)}, in {count_noun(len(file_names), 'file')} "
        f"({listed_files}) in {written_files.files[0].parent}: "
        f"{format_seconds(elapsed_seconds)}{_peak_memory()}"
    )


def _peak_memory() -> str:
    """What this process had in memory at most, where the system tells.

    The maximum of `getrusage` includes the memory of the process that started this one.
    """
    status_path = Path("/proc/self/status")
    status_lines = (
        status_path.read_text(encoding="utf-8").splitlines() if status_path.exists() else []
    )
    peak_bytes = [
        int(status_line.split()[1]) * 1024
        for status_line in status_lines
        if status_line.startswith("VmHWM:")
    ]
    return f", {format_bytes(peak_bytes[0])} of memory at most" if peak_bytes else ""
