"""A checkpoint folder takes its name in one step, or every process hears why not."""

from __future__ import annotations

import os
import resource
from dataclasses import replace
from pathlib import Path

import pytest

from nbaccel import debug_launcher
from nbaccel.errors import CheckpointFailed, ConfigError
from nbaccel.train.checkpoint import load_state, save_state
from nbaccel.train.checkpoint.folder_writing import find_checkpoint, new_checkpoint
from nbaccel.train.collectives import Collectives
from nbaccel.train.distributed import init_process
from tests.train.checkpoint.training import ALONE, Training, arrived

COLLECTIVES = Collectives(ALONE)


def build(target: Path, text: str = "new", **options) -> Path:
    with new_checkpoint(target, ALONE, COLLECTIVES, **options) as (partial, made, _):
        (partial / "optimizer.bin").write_text(text)
    return made


def build_and_fail(target: Path) -> None:
    with new_checkpoint(target, ALONE, COLLECTIVES) as (partial, _, _):
        (partial / "optimizer.bin").write_text("new")
        raise KeyError("odd")


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# ------------------------------------------------------------------------- one process


def test_a_folder_or_what_a_link_leads_to_is_replaced_and_a_users_files_stay(tmp_path):
    target = build(tmp_path / "ckpt", "old")
    (target / "optimizer_7.bin").touch()
    (target / "notes").mkdir()
    (target / "notes" / "mine.txt").write_text("keep")
    build(target)
    assert names(tmp_path) == ["ckpt"]
    assert names(target) == ["nbaccel_manifest.json", "notes", "optimizer.bin"]
    assert (target / "optimizer.bin").read_text() == "new"
    assert (target / "notes" / "mine.txt").read_text() == "keep"
    build(tmp_path / "real", "old")
    link = tmp_path / "latest"
    link.symlink_to("real")
    assert build(link) == (tmp_path / "real").resolve()
    assert link.is_symlink()
    assert (link / "optimizer.bin").read_text() == "new"


def test_a_failure_leaves_the_old_one_which_is_found_between_the_two_renames(tmp_path):
    target = build(tmp_path / "ckpt", "old")
    inode = target.stat().st_ino
    with pytest.raises(CheckpointFailed, match=r"Process 0: KeyError: 'odd'.*unchanged") as caught:
        build_and_fail(target)
    assert isinstance(caught.value.__cause__, KeyError)
    assert names(tmp_path) == ["ckpt"]
    assert target.stat().st_ino == inode
    target.rename(tmp_path / ".ckpt.old")
    assert (find_checkpoint(target) / "optimizer.bin").read_text() == "old"
    with pytest.raises(CheckpointFailed), new_checkpoint(target, ALONE, COLLECTIVES):
        raise OSError(5, "broken")
    assert (target / "optimizer.bin").read_text() == "old"


def test_leftovers_of_this_name_are_cleared_away_and_no_others(tmp_path):
    for name in (
        ".ckpt.partial-ab12",
        ".ckpt.partial-mine",
        ".other.partial-ab12",
        ".checkpoint_9.partial-0f",
    ):
        (tmp_path / name).mkdir()
    build(tmp_path / "ckpt")
    left = [".checkpoint_9.partial-0f", ".ckpt.partial-mine", ".other.partial-ab12"]
    assert names(tmp_path) == [*left, "ckpt"]
    build(tmp_path / "checkpoint_10", series=True)
    assert names(tmp_path) == [*left[1:], "checkpoint_10", "ckpt"]


def test_folders_that_cannot_be_replaced_are_refused(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"file'\) is a file"):
        build(tmp_path / "file")
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    for here in (Path(), Path("..") / "work", tmp_path / "work"):
        with pytest.raises(ConfigError, match=r"working folder.*checkpoint'"):
            build(here)
    with pytest.raises(ConfigError, match=r"mount point"):
        build(Path("/dev/shm"))
    assert not names(tmp_path / "work")


def test_a_full_disk_is_named_as_such(tmp_path):
    training = Training(width=64)
    save = lambda: save_state(tmp_path / "c", training.parts, ALONE, COLLECTIVES, step=0)  # noqa: E731
    save()
    training.step()
    saved = names(tmp_path / "c")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        with pytest.raises(CheckpointFailed, match=r"OSError: \[Errno 27\] File too large.* free"):
            save()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert names(tmp_path) == ["c"]
    assert names(tmp_path / "c") == saved
    load_state(tmp_path / "c", Training(width=64).parts, ALONE, COLLECTIVES)


# ------------------------------------------------------------------------- several processes


class Unwilling:
    """A registered object, a loader: its state cannot be had on one process."""

    def state_dict(self) -> dict[str, int]:
        raise OSError(28, "No space left on device")

    def load_state_dict(self, state: object) -> None:
        raise OSError(5, "Input/output error")


def outcome(action) -> tuple[str, str]:
    try:
        action()
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


def save_where_one_fails(folder: str, failing: int, what: str) -> tuple[str, str]:
    training = arrived()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if training.place.rank == failing and what == "limit":
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    if training.place.rank == failing and what == "object":
        training.parts = replace(training.parts, loaders=[Unwilling()])
    try:
        return outcome(
            lambda: save_state(folder, training.parts, training.place, training.collectives, step=2)
        )
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.slow
@pytest.mark.parametrize("what", ["limit", "object"])
@pytest.mark.parametrize("failing", [0, 1])
def test_if_one_process_fails_all_raise_and_name_it(tmp_path, failing, what):
    target = build(tmp_path / "ckpt", "old")
    found = debug_launcher(save_where_one_fails, args=(str(target), failing, what))
    cause = "File too large" if what == "limit" else "No space left on device"
    for kind, message in found:
        assert kind == "CheckpointFailed"
        assert f"Process {failing}: " in message
        assert cause in message
        assert f"Process {1 - failing}" not in message
    assert names(tmp_path) == ["ckpt"]
    assert (target / "optimizer.bin").read_text() == "old"


def load_where_one_fails(folder: str) -> tuple[str, str]:
    training = arrived()
    if training.place.rank == 1:
        training.parts = replace(training.parts, loaders=[Unwilling()])
    return outcome(lambda: load_state(folder, training.parts, training.place, training.collectives))


def test_if_one_process_cannot_load_none_goes_on(tmp_path):
    save_state(tmp_path / "ckpt", Training().parts, ALONE, COLLECTIVES, step=0)
    first, second = debug_launcher(load_where_one_fails, args=(str(tmp_path / "ckpt"),))
    assert second == ("OSError", "[Errno 5] Input/output error")
    assert first[0] == "CheckpointFailed"
    assert "Process 1: OSError: [Errno 5]" in first[1]


# ------------------------------------------------------------------------- several nodes


def save_on_two_nodes(shared: str, own: list[str]) -> list[str]:
    """Two processes, each alone on its node; `own` are the nodes' disks."""
    place = init_process(cpu=True)
    place = replace(place, local_rank=0, local_world_size=1)
    training = Training(place)
    # A disk of one's own is a working folder of one's own: the name is the same everywhere.
    os.chdir(shared or own[place.rank])
    save_state("ckpt", training.parts, place, training.collectives, step=4)
    load_state("ckpt", training.parts, place, training.collectives)
    return names(Path("ckpt"))


@pytest.mark.parametrize("shares", [True, False])
def test_nodes_that_share_a_disk_write_one_checkpoint_and_others_one_each(tmp_path, capfd, shares):
    own = [tmp_path / "a", tmp_path / "b"]
    for disk in own:
        disk.mkdir()
    shared = str(own[0]) if shares else ""
    first, second = debug_launcher(save_on_two_nodes, args=(shared, [str(disk) for disk in own]))
    assert "model.safetensors" in first
    assert "model.safetensors" in second
    if shares:
        assert first == second
        assert {"random_states_0.pkl", "random_states_1.pkl"} < set(first)
    else:
        assert "complete for its own processes" in capfd.readouterr().err
        assert "random_states_0.pkl" in set(first) - set(second)
        assert "random_states_1.pkl" in set(second) - set(first)
    assert [names(disk) for disk in own] == [["ckpt"], [] if shares else ["ckpt"]]
