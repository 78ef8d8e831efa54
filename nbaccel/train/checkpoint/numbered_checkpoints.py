"""``Checkpoints``: names, saves and loads the checkpoints of an accelerator."""

from __future__ import annotations

import re
from collections import OrderedDict
from pathlib import Path
from typing import Any

from torch.utils.hooks import RemovableHandle

from nbaccel.base.errors import ConfigError
from nbaccel.base.log import get_logger
from nbaccel.config.handlers import ProjectConfiguration
from nbaccel.plan.contracts.training import Place
from nbaccel.train.checkpoint.folder_writing import discard_checkpoint
from nbaccel.train.checkpoint.loading import LoadHook, load_state
from nbaccel.train.checkpoint.saving import CheckpointParts, SaveHook, save_state
from nbaccel.train.collectives import Collectives

_log = get_logger(__name__)


class Checkpoints:
    """Names checkpoints, keeps as many as are wanted, and calls the hooks of users."""

    def __init__(
        self, configuration: ProjectConfiguration, place: Place, collectives: Collectives
    ) -> None:
        self._project = configuration
        self._place = place
        self._collectives = collectives
        self._save_hooks: OrderedDict[int, SaveHook] = OrderedDict()
        self._load_hooks: OrderedDict[int, LoadHook] = OrderedDict()

    def register_save_state_pre_hook(self, hook: SaveHook) -> RemovableHandle:
        """Let a function see models, weights and folder before weights are written."""
        handle = RemovableHandle(self._save_hooks)
        self._save_hooks[handle.id] = hook
        return handle

    def register_load_state_pre_hook(self, hook: LoadHook) -> RemovableHandle:
        """Let a function see models and folder before anything is loaded."""
        handle = RemovableHandle(self._load_hooks)
        self._load_hooks[handle.id] = hook
        return handle

    def save(
        self,
        folder: str | Path | None,
        parts: CheckpointParts,
        *,
        may_be_numbered: bool = True,
        **options: Any,
    ) -> Path:
        """Save everything that the run needs to continue; a collective."""
        project = self._project
        is_numbered = project.automatic_checkpoint_naming and may_be_numbered
        checkpoint_path = save_state(
            self._numbered_target(folder) if is_numbered else self._named_target(folder),
            parts,
            self._place,
            self._collectives,
            hooks=self._save_hooks.values(),
            series=is_numbered,
            **options,
        )
        # From the folder's name, which process 0 chose: the count of this process may be another.
        number = _number_of(checkpoint_path) if is_numbered else None
        project.iteration = (project.iteration if number is None else number) + 1
        # After the new one is in place: a save that fails must not cost an older checkpoint.
        if is_numbered and self._place.is_local_main:
            existing = list(_numbered_checkpoints(checkpoint_path.parent).values())
            for path in existing[: -project.total_limit if project.total_limit else 0]:
                discard_checkpoint(path)
        return checkpoint_path

    def _named_target(self, folder: str | Path | None) -> Path:
        if folder is None:
            raise ConfigError(
                f"save_state(output_dir={folder!r}) has nowhere to save to, because checkpoints "
                "are not numbered. Give a folder, or "
                "ProjectConfiguration(automatic_checkpoint_naming=True)."
            )
        return Path(folder)

    def _numbered_target(self, folder: str | Path | None) -> Path:
        parent = _folder_of(self._project)
        # After all existing ones, also of an earlier run.
        number = max([self._project.iteration, *(n + 1 for n in _numbered_checkpoints(parent))])
        numbered_folder = parent / f"checkpoint_{number}"
        if folder is not None:
            _log.warning(
                "checkpoints are numbered: saving to %s, not to %s", numbered_folder, folder
            )
        return numbered_folder

    def load(self, folder: str | Path | None, parts: CheckpointParts, **options: Any) -> int | None:
        """Put back what :meth:`save` wrote; a collective."""
        source_folder = self._source_folder(folder)
        saved_step = load_state(
            source_folder,
            parts,
            self._place,
            self._collectives,
            hooks=self._load_hooks.values(),
            **options,
        )
        checkpoint_number = _number_of(source_folder)
        if folder is None and checkpoint_number is not None:
            self._project.iteration = checkpoint_number + 1
        return saved_step

    def _source_folder(self, folder: str | Path | None) -> Path:
        if folder is not None:
            return Path(folder)
        if not self._project.automatic_checkpoint_naming:
            raise ConfigError(
                f"load_state(input_dir={folder!r}) has nothing to load from, because checkpoints "
                "are not numbered. Give the folder that save_state returned."
            )
        # Process 0 chooses: another one might look a moment later, when there is one more. What is
        # wrong is sent as text, because the others wait for the broadcast.
        found: Path | str = ""
        if self._place.is_main:
            try:
                found = _latest_checkpoint(_folder_of(self._project))
            except ConfigError as error:
                found = str(error)
        found = self._collectives.broadcast_object(found)
        if isinstance(found, str):
            raise ConfigError(found)
        return found


def _folder_of(configuration: ProjectConfiguration) -> Path:
    """The folder of all numbered checkpoints."""
    if configuration.project_dir is None:
        raise ConfigError(
            "ProjectConfiguration(automatic_checkpoint_naming=True) has "
            f"project_dir={configuration.project_dir!r}: checkpoints are numbered in a project's "
            "folder. Give Accelerator(project_dir=...) or ProjectConfiguration(project_dir=...)."
        )
    return Path(configuration.project_dir).expanduser() / "checkpoints"


def _number_of(folder: Path) -> int | None:
    """The number in a checkpoint's name; None for any other name."""
    name_match = re.fullmatch(r"checkpoint_(\d+)", folder.name)
    return int(name_match[1]) if name_match else None


def _numbered_checkpoints(folder: Path) -> dict[int, Path]:
    paths = folder.iterdir() if folder.is_dir() else ()
    numbered = [(_number_of(path), path) for path in paths if path.is_dir()]
    # By number: by name, checkpoint_10 would come before checkpoint_9.
    return dict(sorted((number, path) for number, path in numbered if number is not None))


def _latest_checkpoint(folder: Path) -> Path:
    """The checkpoint of the highest number."""
    existing = _numbered_checkpoints(folder)
    if not existing:
        raise ConfigError(
            f"load_state() found no checkpoint_<number> in {str(folder)!r}: there is nothing to "
            "continue from. Save one first, or give load_state the folder of a checkpoint."
        )
    return existing[max(existing)]
