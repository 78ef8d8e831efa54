"""Files with what each rank prints: complete, unfolded, without prefix, written as it comes.

    DIR/20261125_101530_4711/rank_0.stdout.log
                             rank_0.stderr.log
                             rank_1.stdout.log ...

One folder per start of workers, named for its time and the process that started them, so that two
runs never share a file.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from nbaccel.base.errors import ConfigError
from nbaccel.base.log import write_notice

STREAM_NAMES = ("stdout", "stderr")


class RankLogs:
    """The files of one group of workers."""

    def __init__(self, log_dir: str, ranks: Iterable[int]) -> None:
        self._files: dict[tuple[int, str], int] = {}
        try:
            self.folder = _make_folder(Path(log_dir).expanduser())
            for rank in ranks:
                for name in STREAM_NAMES:
                    path = self.folder / f"rank_{rank}.{name}.log"
                    self._files[rank, name] = os.open(
                        path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644
                    )
        except OSError as error:
            self.close()
            raise ConfigError(
                f"log_dir={log_dir!r} cannot be written: {error}. Nothing of what workers print "
                "would be kept. Give a folder that can be written, or leave log_dir out."
            ) from error

    def write(self, rank: int, stream_name: str, output_bytes: bytes) -> str:
        """Append what a rank has written."""
        descriptor = self._files.get((rank, stream_name))
        if descriptor is None:
            return ""
        try:
            # A single write may take only a part, and the disk may be full for the rest.
            while output_bytes:
                output_bytes = output_bytes[os.write(descriptor, output_bytes) :]
        except OSError as error:
            # Training goes on: a full disk for logs must not cost hours of work.
            self._drop(rank, stream_name)
            return (
                f"nbaccel: rank {rank}'s {stream_name} is no longer written to {self.folder}: "
                f"{error.strerror or error}. Training goes on; what follows is shown only here."
            )
        return ""

    def close(self) -> None:
        """Close all files."""
        for rank, name in tuple(self._files):
            self._drop(rank, name)

    def _drop(self, rank: int, name: str) -> None:
        # Network file systems report a failed write when the file is closed.
        with contextlib.suppress(OSError):
            os.close(self._files.pop((rank, name)))


def hidden_streams(shown_output: str, ranks: Sequence[int]) -> frozenset[tuple[int, str]]:
    """What is not shown, by rank and stream."""
    numbers = _numbers_by_rank(shown_output)
    return frozenset(
        (rank, name)
        for local_rank, rank in enumerate(ranks)
        # As torchrun numbers streams: 1 is stdout, 2 stderr, 3 both.
        for bit, name in enumerate(STREAM_NAMES, 1)
        if not numbers.get(local_rank, numbers.get(None, 0)) & bit
    )


def _numbers_by_rank(shown_output: str) -> dict[int | None, int]:
    """``0:3,1:2`` by local rank; a number alone stands for all other ranks, under None."""
    parts = [part.rpartition(":") for part in shown_output.replace(" ", "").split(",")]
    return {int(text) if text else None: int(number) for text, _, number in parts}


def _make_folder(log_dir: Path) -> Path:
    name = f"{time.strftime('%Y%m%d_%H%M%S')}_{os.getpid()}"
    # Two starts of one process within a second: restarts of workers that fail at once.
    folders = (log_dir / (f"{name}_{number}" if number else name) for number in itertools.count())
    folder = next(folder for folder in folders if not folder.exists())
    folder.mkdir(parents=True)
    write_notice(f"nbaccel: what each rank prints is written to {folder}\n")
    return folder
