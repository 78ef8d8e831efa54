from __future__ import annotations

import logging
import socket
from pathlib import Path

import pytest
import torch
import yaml
from torch import nn

from nbaccel.errors import CheckpointDamaged, ConfigError
from nbaccel.utils import (
    compare_versions,
    compile_regions,
    convert_bytes,
    dtype_byte_size,
    extract_model_from_parallel,
    find_tied_parameters,
    get_module_children_bottom_up,
    get_pretty_name,
    has_compiled_regions,
    is_compiled_module,
    is_peft_model,
    is_port_in_use,
    is_torch_version,
    load,
    merge_dicts,
    named_module_tensors,
    recursive_getattr,
    save,
    write_basic_config,
)


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))


# Torch tells of its own deprecated parts when its compiler is imported, and of DataParallel.
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_a_model_comes_out_of_its_wrappers():
    model = net()
    assert extract_model_from_parallel(nn.DataParallel(nn.DataParallel(model))) is model
    compiled = torch.compile(model)
    assert extract_model_from_parallel(compiled) is compiled
    assert extract_model_from_parallel(compiled, keep_torch_compile=False) is model
    wrapped = torch.compile(nn.DataParallel(model))
    assert extract_model_from_parallel(wrapped)._orig_mod is model
    inner = nn.Sequential(nn.DataParallel(model))
    assert extract_model_from_parallel(inner, recursive=True)[0] is model


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_repeated_blocks_are_compiled_one_by_one():
    class Stack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
            self.head = nn.Linear(2, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = block(x)
            return self.head(x)

    model = Stack()
    x = torch.ones(1, 2)
    before = model(x)
    assert compile_regions(model, backend="eager") is model
    assert all(part._compiled_call_impl for part in (*model.blocks, model.head))
    assert torch.equal(model(x), before)
    assert not is_compiled_module(model)
    assert not has_compiled_regions(model)


def test_what_is_saved_runs_no_code_and_shared_tensors_are_stored_once(tmp_path, caplog):
    save({"x": torch.ones(2)}, tmp_path / "a.bin")
    assert load(str(tmp_path / "a.bin"))["x"].tolist() == [1, 1]
    save({"x": torch.ones(2)}, tmp_path / "a.safetensors", safe_serialization=True)
    torch.save(Path("evil"), tmp_path / "b.bin")
    with pytest.raises(CheckpointDamaged, match=r"b\.bin"):
        load(tmp_path / "b.bin")
    model = nn.Module()
    model.a = model.b = nn.Linear(2, 2)
    with caplog.at_level(logging.WARNING, logger="nbaccel"):
        save(model.state_dict(), tmp_path / "model.safetensors", safe_serialization=True)
    (record,) = caplog.records
    assert "['b.weight', 'b.bias']" in record.getMessage()


def test_facts_about_modules_and_small_ones():
    model = net()
    model[1].weight = model[0].bias
    assert find_tied_parameters(model) == [["0.bias", "1.weight"]]
    names = {name for name, _ in named_module_tensors(model[1])}
    assert names == {"weight", "bias", "running_mean", "running_var", "num_batches_tracked"}
    assert dtype_byte_size(torch.bfloat16) == 2
    assert not is_peft_model(model)
    assert [type(m).__name__ for m in get_module_children_bottom_up(model)][-1] == "Sequential"
    assert get_module_children_bottom_up(model, return_fqns=True)[-1][0] == ""
    assert merge_dicts({"a": {"b": 1}}, {"a": {"c": 2}}) == {"a": {"b": 1, "c": 2}}
    assert recursive_getattr(net(), "0.weight").shape == (2, 2)
    assert get_pretty_name(net) == "net"
    assert get_pretty_name(net()) == "Sequential"
    assert convert_bytes(3 * 1024**3) == "3.0 GiB"
    assert compare_versions("torch", ">=", "2.6")
    assert is_torch_version("<", "99")
    with pytest.raises(ConfigError, match="'=>'"):
        compare_versions("torch", "=>", "2.6")
    with socket.socket() as taken:
        taken.bind(("localhost", 0))
        taken.listen()
        assert is_port_in_use(taken.getsockname()[1])


def test_a_basic_configuration_is_written_once(tmp_path, capsys):
    path = tmp_path / "cache" / "config.yaml"
    assert write_basic_config("BF16", save_location=str(path)) == path
    content = yaml.safe_load(path.read_text())
    assert (content["mixed_precision"], content["num_machines"]) == ("bf16", 1)
    assert write_basic_config(save_location=path) is False
    assert "stays as it is" in capsys.readouterr().out
    with pytest.raises(ConfigError, match=r"'fp12'.*bf16"):
        write_basic_config("fp12", save_location=tmp_path / "other.yaml")


def test_an_old_kernel_is_told(caplog, monkeypatch):
    from nbaccel.utils import check_os_kernel

    monkeypatch.setattr("platform.release", lambda: "4.15.0-generic")
    monkeypatch.setattr("sys.platform", "linux")
    with caplog.at_level(logging.WARNING, logger="nbaccel"):
        check_os_kernel()
    assert "4.15.0-generic is older than 5.5" in caplog.text
