"""``nbaccel to-fp32 DIR OUT``: a checkpoint of DeepSpeed becomes fp32 weights in safetensors."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nbaccel.units import counted, format_bytes, format_seconds

if TYPE_CHECKING:
    from nbaccel.deepspeed.weights.writing import Written

__all__ = ["add_to"]

_DESCRIPTION = (
    "Convert a checkpoint that DeepSpeed's engine.save_checkpoint wrote (ZeRO stages 0 to 3, any "
    "number of ranks) into fp32 weights that Hugging Face's libraries read. A few MiB are in "
    "memory at a time, whatever the model's size. All files appear together at the end, or none."
)


def add_to(commands: argparse._SubParsersAction[Any]) -> None:
    """Add the subcommand.

    Args:
        commands: Where subcommands are kept.
    """
    parser = commands.add_parser(
        "to-fp32", help="fp32 weights out of a DeepSpeed checkpoint", description=_DESCRIPTION
    )
    parser.add_argument(
        "checkpoint_dir", metavar="DIR", help="the checkpoint's folder, or that of one tag in it"
    )
    parser.add_argument(
        "output_dir", metavar="OUT", help="folder for model.safetensors; made if it is not there"
    )
    parser.add_argument("--tag", help="which save (default: the one that the file `latest` names)")
    parser.add_argument(
        "--max-shard-size", default="5GB", metavar="SIZE", help="most bytes of a file (%(default)s)"
    )
    parser.add_argument(
        "--exclude-frozen-parameters", action="store_true", help="leave out what was not trained"
    )
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    from nbaccel.deepspeed.weights.converting import zero_to_fp32

    begin = time.monotonic()
    written = zero_to_fp32(
        options.checkpoint_dir,
        options.output_dir,
        tag=options.tag,
        max_shard_size=options.max_shard_size,
        exclude_frozen_parameters=options.exclude_frozen_parameters,
        progress=sys.stderr.isatty(),
    )
    print(_told(written, time.monotonic() - begin))
    return 0


def _told(written: Written, seconds: float) -> str:
    names = [path.name for path in written.files]
    listed = names[0] if len(names) == 1 else f"{names[0]} … {names[-1]}"
    return (
        f"{counted(written.num_tensors, 'tensor')}, {format_bytes(written.num_bytes)}, in "
        f"{counted(len(names), 'file')} ({listed}) in {written.files[0].parent}: "
        f"{format_seconds(seconds)}{_peak()}"
    )


def _peak() -> str:
    """What this process had in memory at most, where the system tells.

    `getrusage` would begin with the memory of whoever started it.
    """
    status = Path("/proc/self/status")
    lines = status.read_text(encoding="utf-8").splitlines() if status.exists() else []
    peaks = [int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")]
    return f", {format_bytes(peaks[0])} of memory at most" if peaks else ""
