"""Weights that ZeRO-3 had swapped to NVMe when it saved: DeepSpeed copies its swap files.

The optimizer's state then has an empty tensor for each sub-group that was swapped, marked with the
swapper's id, and its fp32 weights are in ``offloaded_tensors/rank<rr>/<id>.tensor.swp``: as long
as they are, rounded up for the disk. DeepSpeed's own script does not look there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from nbaccel.deepspeed.weights.stored import StoredTensor, num_elements
from nbaccel.errors import ConfigError

__all__ = ["swapped_in"]

_ROUNDED_BYTES = 2**20  # far above DeepSpeed's rounding; less than that is never swapped
_WITH_ENGINE = (
    "Load the checkpoint into its engine, in a fresh process, and use fp32_state_dict(engine)."
)


def swapped_in(
    folder: Path,
    rank: int,
    tensors: Sequence[StoredTensor],
    groups: Sequence[Mapping[str, tuple[int, ...]]],
    num_ranks: int,
) -> list[StoredTensor]:
    """Put swap files where a rank's state has nothing.

    Args:
        folder: The checkpoint's.
        rank: Whose state it is.
        tensors: Its sub-groups as its file of optimizer states has them.
        groups: Shapes of the trained parameters by name, for each sub-group.
        num_ranks: How many saved it.

    Returns:
        The sub-groups, all with their numbers.

    Raises:
        ConfigError: A swap file is missing, or not whole.
    """
    found = list(tensors)
    for number, (tensor, group) in enumerate(zip(tensors, groups, strict=False)):
        share = sum(-(-num_elements(shape) // num_ranks) for shape in group.values())
        if not tensor.numel and share:
            path = folder / "offloaded_tensors" / f"rank{rank:02d}" / f"{tensor.ds_id}.tensor.swp"
            _check(path, 4 * share, next(iter(group)))
            found[number] = StoredTensor(path, 0, "float32", 0, (share,), (1,))
    return found


def _check(path: Path, nbytes: int, name: str) -> None:
    if not path.is_file():
        raise ConfigError(
            f"{path} is missing: it should hold the fp32 weights of {name} and those after it, "
            "which were swapped to NVMe when the checkpoint was saved. Copy the folder "
            f"offloaded_tensors, too, from the machine that saved it. {_WITH_ENGINE}"
        )
    size = path.stat().st_size
    if not 0 <= size - nbytes < _ROUNDED_BYTES:
        raise ConfigError(
            f"{path} has {size:,} bytes, and the weights from {name} on, which it should hold, "
            f"have {nbytes:,}: it is torn, or of another save. {_WITH_ENGINE}"
        )
