"""Which files of a checkpoint one process will read, and whether each is as it was saved."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import nn
from torch.optim import Optimizer

from nbaccel.abc.place import Place
from nbaccel.intact import Recorded, file_problem
from nbaccel.train.checkpoint import layout
from nbaccel.train.checkpoint.parts import Parts

__all__ = ["Shards", "Sources", "find_sources"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Shards:
    """A folder of which every process reads a part.

    Attributes:
        model: What it is read into.
        optimizer: The optimizer whose state lies there, too.
        folder: The folder.
    """

    model: nn.Module
    optimizer: Optimizer | None
    folder: Path


@dataclass(frozen=True, kw_only=True, slots=True)
class Sources:
    """The files of a load, by what they are read into.

    Attributes:
        folder: The checkpoint.
        recorded: Sizes and checksums noted when it was saved, by path below the folder.
        weights: By number of the model; a load hook's own files are not known.
        sharded_models: By number of the model.
        optimizers: By number of the optimizer.
        sharded_optimizers: Optimizers with a folder of their own, by number.
        schedulers: In order.
        scaler: Of fp16.
        custom: Of registered objects, in order.
        loaders: By number of the loader.
        gradients: Of this process, amid a group of batches.
        generators: Of this process.
        first_generators: Of process 0, which has the step.
    """

    folder: Path
    recorded: Mapping[str, Recorded]
    weights: Mapping[int, Path]
    sharded_models: Mapping[int, Shards]
    optimizers: Mapping[int, Path]
    sharded_optimizers: Mapping[int, Shards]
    schedulers: tuple[Path, ...]
    scaler: Path | None
    custom: tuple[Path, ...]
    loaders: Mapping[int, Path]
    gradients: Path | None
    generators: Path | None
    first_generators: Path | None

    def damaged(self, place: Place) -> list[str]:
        """What is wrong with files; each is read through by one process of a node.

        Args:
            place: This process.

        Returns:
            A sentence for each file; none if all are as they were saved.
        """
        mine = [path for path in (*self.loaders.values(), self.gradients, self.generators) if path]
        common = self._common()
        shared_out = common[place.local_rank :: place.local_world_size]
        return [text for path in {*mine, *shared_out} if (text := self._problem(path))]

    def _common(self) -> list[Path]:
        shards = (*self.sharded_models.values(), *self.sharded_optimizers.values())
        found = {
            *self.weights.values(),
            *self.optimizers.values(),
            *self.schedulers,
            *self.custom,
            *(path for path in (self.scaler, self.first_generators) if path),
            *(path for shard in shards for path in self._inside(shard.folder)),
        }
        return sorted(found)

    def _inside(self, folder: Path) -> Iterable[Path]:
        """The files of shards: those that are there, and those that were."""
        yield from (path for path in folder.rglob("*") if path.is_file())
        start = folder.relative_to(self.folder).as_posix() + "/"
        yield from (self.folder / name for name in self.recorded if name.startswith(start))

    def _problem(self, path: Path) -> str:
        name = path.relative_to(self.folder).as_posix()
        problem = file_problem(path, self.recorded.get(name))
        if not problem:
            return ""
        return (
            f"{path} {problem}. Nothing has been loaded. Load another checkpoint, or copy the file "
            "again from where it was saved."
        )


def find_sources(
    folder: Path, parts: Parts, place: Place, recorded: Mapping[str, Recorded]
) -> Sources:
    """Find the files that this process will read.

    Args:
        folder: The checkpoint.
        parts: What is to be loaded.
        place: This process.
        recorded: What was noted of files when it was saved.

    Returns:
        Those that are there, or were when it was saved.
    """
    return _Finding(folder, parts, place, recorded).all()


class _Finding:
    def __init__(
        self, folder: Path, parts: Parts, place: Place, recorded: Mapping[str, Recorded]
    ) -> None:
        self._folder = folder
        self._parts = parts
        self._place = place
        self._recorded = recorded

    def all(self) -> Sources:
        parts, sharded = self._parts, self._sharded_models()
        optimizers, in_folders = self._optimizers()
        return Sources(
            folder=self._folder,
            recorded=self._recorded,
            weights=self._weights(sharded),
            sharded_models=sharded,
            optimizers=optimizers,
            sharded_optimizers=in_folders,
            schedulers=self._numbered(layout.SCHEDULER, len(parts.schedulers)),
            scaler=self._folder / layout.SCALER if parts.scaler is not None else None,
            custom=tuple(
                self._folder / layout.CUSTOM.format(number) for number in range(len(parts.custom))
            ),
            loaders=self._loaders(),
            gradients=None if parts.sharder else self._there(layout.gradients(self._place.rank)),
            generators=self._there(layout.random_states(self._place.rank)),
            first_generators=self._there(layout.random_states(0)),
        )

    def _there(self, *names: str) -> Path | None:
        """The first that is there, or that was when the checkpoint was saved."""
        found = (n for n in names if n in self._recorded or (self._folder / n).exists())
        name = next(found, None)
        return None if name is None else self._folder / name

    def _numbered(self, name: str, count: int) -> tuple[Path, ...]:
        return tuple(self._folder / layout.numbered(name, number) for number in range(count))

    def _sharded_models(self) -> dict[int, Shards]:
        sharder, found = self._parts.sharder, {}
        for number, model in enumerate(self._parts.models if sharder is not None else ()):
            kind = sharder.shard_kind if sharder is not None else ""
            folder = self._folder / layout.sharded_model(kind, number)
            if folder.is_dir():
                own = self._parts.optimizer_of(model)
                found[number] = Shards(model=model, optimizer=own, folder=folder)
        return found

    def _weights(self, sharded: Mapping[int, Shards]) -> dict[int, Path]:
        found = {}
        for number in set(range(len(self._parts.models))) - sharded.keys():
            names = (layout.numbered(name, number) for name in (layout.SAFE, layout.UNSAFE))
            path = self._there(*names)
            if path is not None:
                found[number] = path
        return found

    def _optimizers(self) -> tuple[dict[int, Path], dict[int, Shards]]:
        files: dict[int, Path] = {}
        folders: dict[int, Shards] = {}
        for number, (optimizer, model) in enumerate(self._parts.plain_optimizers()):
            shards = self._folder / layout.SHARDED_OPTIMIZER.format(number)
            name = layout.numbered(layout.OPTIMIZER, number)
            if model is not None and self._parts.sharder is not None and shards.is_dir():
                folders[number] = Shards(model=model, optimizer=optimizer, folder=shards)
            elif model is None or self._there(name) is not None:
                files[number] = self._folder / name
        return files, folders

    def _loaders(self) -> dict[int, Path]:
        found = {}
        for number, loader in self._parts.stateful_loaders():
            stateful = bool(getattr(loader, "use_stateful_dataloader", False))
            own = layout.loader_file(number, stateful=stateful, rank=self._place.rank)
            path = self._there(own, layout.loader_file(number, stateful=stateful))
            if path is not None:
                found[number] = path
        return found
