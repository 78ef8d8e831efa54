"""``Checkpoints``: names, saves and loads the checkpoints of an accelerator."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch.utils.hooks import RemovableHandle

from nbaccel.base.errors import ConfigError
from nbaccel.base.log import get_logger
from nbaccel.config.handlers import ProjectConfiguration
from nbaccel.plan.contracts.training import Place
from nbaccel.train.checkpoint import folder_writing
from nbaccel.train.checkpoint.loading import LoadHook, load_state
from nbaccel.train.checkpoint.saving import CheckpointParts, SaveHook, save_state
from nbaccel.train.collectives import Collectives

_log = get_logger(__name__)


class Checkpoints:
    """Names checkpoints, keeps as many as are wanted, and calls the hooks of users."""

    def __init__(
        self, configuration: ProjectConfiguration, place: Place, collectives: Collectives
    ) -> None:
        self._project_configuration = configuration
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
        step: int,
        safe_serialization: bool = True,
        may_be_numbered: bool = True,
    ) -> Path:
        """Save everything that the run needs to continue; a collective."""
        configuration = self._project_configuration
        is_numbered = configuration.automatic_checkpoint_naming and may_be_numbered
        checkpoint_path = save_state(
            self._target_folder(folder, is_numbered=is_numbered),
            parts,
            self._place,
            self._collectives,
            step=step,
            safe_serialization=safe_serialization,
            hooks=self._save_hooks.values(),
            series=is_numbered,
        )
        # From the folder's name, which process 0 chose; the count of this process may be another
        # one.
        checkpoint_number = folder_writing.number_of(checkpoint_path) if is_numbered else None
        configuration.iteration = (
            configuration.iteration if checkpoint_number is None else checkpoint_number
        ) + 1
        # After the new one is in place: a save that fails must not cost an older checkpoint.
        if is_numbered and self._place.is_local_main:
            folder_writing.delete_oldest(checkpoint_path.parent, configuration.total_limit)
        return checkpoint_path

    def _target_folder(self, folder: str | Path | None, *, is_numbered: bool) -> Path:
        if not is_numbered:
            if folder is None:
                raise ConfigError(
                    f"save_state(output_dir={folder!r}) has nowhere to save to, because "
                    "checkpoints are not numbered. Give a folder, or "
                    "ProjectConfiguration(automatic_checkpoint_naming=True)."
                )
            return Path(folder)
        number = folder_writing.next_number(self._project_configuration)
        numbered_folder = (
            folder_writing.folder_of(self._project_configuration) / f"checkpoint_{number}"
        )
        if folder is not None:
            _log.warning(
                "checkpoints are numbered: saving to %s, not to %s", numbered_folder, folder
            )
        return numbered_folder

    def load(
        self,
        folder: str | Path | None,
        parts: CheckpointParts,
        *,
        map_location: str | None = None,
        load_kwargs: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> int | None:
        """Put back what :meth:`save` wrote; a collective."""
        source_folder = self._source_folder(folder)
        saved_step = load_state(
            source_folder,
            parts,
            self._place,
            self._collectives,
            map_location=map_location,
            load_kwargs=load_kwargs,
            hooks=self._load_hooks.values(),
            **options,
        )
        checkpoint_number = folder_writing.number_of(source_folder)
        if folder is None and checkpoint_number is not None:
            self._project_configuration.iteration = checkpoint_number + 1
        return saved_step

    def _source_folder(self, folder: str | Path | None) -> Path:
        if folder is not None:
            return Path(folder)
        if not self._project_configuration.automatic_checkpoint_naming:
            raise ConfigError(
                f"load_state(input_dir={folder!r}) has nothing to load from, because checkpoints "
                "are not numbered. Give the folder that save_state returned."
            )
        # Process 0 chooses: another one might look a moment later, when there is one more.
        choice: tuple[Path | None, str] = (None, "")
        if self._place.is_main:
            choice = _latest_or_problem(self._project_configuration)
        path, text = self._collectives.broadcast_object(choice)
        if path is None:
            raise ConfigError(text)
        return Path(path)


def _latest_or_problem(configuration: ProjectConfiguration) -> tuple[Path | None, str]:
    try:
        # Returned as text, because the others wait for the broadcast that follows.
        return folder_writing.latest_checkpoint(configuration), ""
    except ConfigError as error:
        return None, str(error)
