"""Trackers: found by name, started where they belong, and what they write can be read."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from nbaccel.abc.place import Place
from nbaccel.errors import ConfigError
from nbaccel.tracking import (
    LOGGER_TYPE_TO_CLASS,
    GeneralTracker,
    JsonlTracker,
    LoggerType,
    TensorBoardTracker,
    filter_trackers,
    get_available_trackers,
    register_tracker_class,
    start_trackers,
)

MAIN = Place(device=torch.device("cpu"))
OTHER = Place(device=torch.device("cpu"), rank=1, world_size=2)


class Recording(GeneralTracker):
    """As users write them: keeps what it is told."""

    name = "recording"
    requires_logging_directory = False

    def __init__(self, run_name: str = "run", **options: Any) -> None:
        super().__init__()
        self.told: list[Any] = [run_name, options]

    @property
    def tracker(self) -> list[Any]:
        return self.told

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.told.append(values)


class Everywhere(Recording):
    name = "everywhere"
    main_process_only = False


def lines(path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


# ------------------------------------------------------------------------- jsonl


def test_jsonl_writes_one_object_per_line_the_configuration_first(tmp_path):
    tracker = JsonlTracker("run", tmp_path)
    tracker.store_init_configuration({"lr": np.float32(0.5), "net": {"width": 8}, "act": len})
    tracker.log({"loss": torch.tensor(1.5), "hits": np.int64(3), "name": "a"}, step=2)
    config, line = lines(tmp_path / "run.jsonl")  # readable while the run goes on
    tracker.finish()
    assert config["config"] == {"lr": 0.5, "net": {"width": 8}, "act": str(len)}
    assert line["step"] == 2
    assert line["values"] == {"loss": 1.5, "hits": 3, "name": "a"}
    assert config["time"] <= line["time"]
    tracker = JsonlTracker("odd", tmp_path)
    tracker.log(
        {"loss": math.nan, "top": torch.tensor(math.inf), "many": torch.ones(2), "no": None}
    )
    tracker.finish()
    values = lines(tracker.path)[0]["values"]
    assert values == {"loss": "nan", "top": "inf", "many": [1.0, 1.0], "no": None}
    # One that was not used leaves no file.
    JsonlTracker("unused", tmp_path).finish()
    TensorBoardTracker("unused", tmp_path).finish()
    assert {path.name for path in tmp_path.iterdir()} == {"run.jsonl", "odd.jsonl"}


# ------------------------------------------------------------------------- tensorboard


def read_events(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return events


def test_tensorboard_has_curves_texts_and_charts_of_several_curves(tmp_path):
    tracker = TensorBoardTracker("run", tmp_path)
    for step in range(3):
        values = {"loss": torch.tensor(1.0 / (step + 1)), "note": "x", "none": None}
        tracker.log({**values, "acc": {"train": step, "val": np.float32(0.5)}}, step=step)
    tracker.finish()
    events = read_events(tmp_path / "run")
    assert [(e.step, round(e.value, 3)) for e in events.Scalars("loss")] == [
        (0, 1.0),
        (1, 0.5),
        (2, 0.333),
    ]
    assert "note/text_summary" in events.Tags()["tensors"]
    assert [e.value for e in read_events(tmp_path / "run" / "acc_train").Scalars("acc")] == [
        0,
        1,
        2,
    ]


def test_tensorboard_keeps_a_nested_configuration_flat(tmp_path):
    tracker = TensorBoardTracker("run", tmp_path)
    tracker.store_init_configuration({"lr": 0.1, "net": {"width": 8, "bias": True}, "none": None})
    tracker.finish()
    kept = yaml.safe_load((tmp_path / "run" / "hparams.yml").read_text())
    assert kept == {"lr": 0.1, "net.width": 8, "net.bias": True, "none": None}
    plugin = read_events(tmp_path / "run").summary_metadata
    assert "_hparams_/session_start_info" in plugin
    assert b"net.width" in plugin["_hparams_/session_start_info"].plugin_data.content


def test_tensorboard_shows_images_and_names_a_value_that_it_cannot_show(tmp_path):
    tracker = TensorBoardTracker("run", tmp_path)
    with pytest.raises(ConfigError, match=r"'weights': \[1.0, 1.0\].*add_histogram"):
        tracker.log({"weights": torch.ones(2)})
    tracker.log_images({"picture": torch.zeros(2, 3, 4, 4)}, step=1)
    tracker.finish()
    assert any(path.stat().st_size > 100 for path in (tmp_path / "run").iterdir())


# ------------------------------------------------------------------------- finding


def test_trackers_are_found_by_name_class_and_instance_and_all_mistakes_told(tmp_path):
    own = Recording()
    assert filter_trackers(None) == []
    assert filter_trackers("jsonl", tmp_path) == [JsonlTracker]
    assert filter_trackers(["tensorboard", own, "tensorboard"], tmp_path) == [
        TensorBoardTracker,
        own,
    ]
    assert filter_trackers(Recording) == [Recording]
    everything = filter_trackers(["all", own], tmp_path)
    assert [everything[0], everything[1], everything[-1]] == [JsonlTracker, TensorBoardTracker, own]
    with pytest.raises(ConfigError) as caught:
        filter_trackers(["jsonl", "nothing-like-it"])
    unknown, homeless = caught.value.mistakes
    assert "'nothing-like-it'" in unknown
    assert "logging_dir=None" in homeless


def test_one_that_is_not_installed_is_left_out_with_a_warning(tmp_path):
    missing = sorted(set(LoggerType.list()) - {"all", *map(str, get_available_trackers())})
    if not missing:
        pytest.skip("every tracker is installed here")
    with pytest.warns(UserWarning, match=rf"log_with='{missing[0]}' is left out.*pip install"):
        assert filter_trackers(["jsonl", missing[0]], tmp_path) == [JsonlTracker]


def test_a_class_can_be_registered_and_says_what_it_lacks():
    register_tracker_class(Recording)
    assert LOGGER_TYPE_TO_CLASS[Recording.name] is Recording
    assert filter_trackers("recording") == [Recording]
    with pytest.warns(UserWarning, match="takes the name 'recording' from another"):
        register_tracker_class(Recording)
    with pytest.raises(ConfigError, match=r"'Recording'.*no subclass of GeneralTracker"):
        register_tracker_class("Recording")
    nameless = type("Nameless", (GeneralTracker,), {"requires_logging_directory": False})
    with pytest.raises(ConfigError, match=r"Nameless.* defines a name"):
        register_tracker_class(nameless)
    del LOGGER_TYPE_TO_CLASS[Recording.name]

    class Half(GeneralTracker):
        name = "half"

    with pytest.raises(NotImplementedError, match=r"Half.*requires_logging_directory, tracker"):
        Half()


# ------------------------------------------------------------------------- starting


def test_trackers_start_with_what_they_are_given_on_processes_that_want_them(tmp_path):
    own = Recording("mine")
    found = filter_trackers([own, Recording, "jsonl"], tmp_path)
    first, second, third = start_trackers(
        found,
        MAIN,
        "project",
        logging_dir=tmp_path,
        config={"lr": 1},
        init_kwargs={"recording": {"tag": 2}},
    )
    third.finish()
    assert first is own
    assert first.tracker == ["mine", {}, {"lr": 1}]
    assert second.tracker == ["project", {"tag": 2}, {"lr": 1}]
    assert lines(tmp_path / "project.jsonl")[0]["config"] == {"lr": 1}
    found = [JsonlTracker, Everywhere, Recording()]
    started = start_trackers(found, OTHER, "project", logging_dir=tmp_path, config={"lr": 1})
    assert [type(tracker) for tracker in started] == [Everywhere]
    assert [path.name for path in tmp_path.iterdir()] == ["project.jsonl"]
