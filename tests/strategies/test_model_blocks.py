from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from nbaccel.config.handlers import FullyShardedDataParallelPlugin
from nbaccel.errors import ConfigError
from nbaccel.strategies.model_blocks import choose_modules, ignored_parameters
from tests.strategies.workers import Block, Tower


def chosen(model: nn.Module, **settings: Any) -> list[str]:
    plugin = FullyShardedDataParallelPlugin(**settings)
    names = {id(module): name for name, module in model.named_modules()}
    found = choose_modules(model, plugin, ignored_parameters(model, plugin))
    return [names[id(module)] for module in found]


BLOCKS = ["blocks.2", "blocks.1", "blocks.0"]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"auto_wrap_policy": "transformer_based_wrap"},
        {"auto_wrap_policy": "TRANSFORMER_BASED_WRAP"},
        {"transformer_cls_names_to_wrap": ["Block"]},
        {"transformer_cls_names_to_wrap": "Block"},
        {"auto_wrap_policy": lambda module: isinstance(module, Block)},
    ],
)
def test_blocks_are_found_by_their_class(settings):
    assert chosen(Tower(), **settings) == BLOCKS


def test_modules_are_chosen_by_size_and_a_shared_parameter_or_the_model_itself_is_not():
    model = nn.Sequential(nn.Linear(10, 10), nn.Sequential(nn.Linear(10, 10), nn.Linear(2, 2)))
    by_size = {"auto_wrap_policy": "size_based_wrap"}
    assert chosen(model, **by_size, min_num_params=110) == ["1.0", "0"]
    assert chosen(model, **by_size, min_num_params=111) == ["1"]
    assert chosen(model, **by_size) == [], "100 million"
    assert chosen(Tower(1), auto_wrap_policy=lambda m: isinstance(m, nn.Embedding)) == []
    inside = nn.Sequential(nn.Linear(2, 2), Tower(1))
    found = chosen(inside, auto_wrap_policy=lambda m: isinstance(m, Tower))
    assert found == ["1"], "tied within itself"
    assert chosen(Tower(1), auto_wrap_policy=lambda m: isinstance(m, Tower)) == []
    assert chosen(Tower(1), auto_wrap_policy="no_wrap") == []
    assert chosen(nn.Linear(1, 1)) == []


def test_a_class_or_name_that_is_not_there_is_told_with_those_that_are():
    with pytest.raises(ConfigError, match=r"no module of class Layer.*It has Block, Embedding"):
        chosen(Tower(), transformer_cls_names_to_wrap=["Block", "Layer"])
    with pytest.raises(ConfigError, match=r"Linear names none.*transformer_cls_names_to_wrap"):
        chosen(nn.Linear(1, 1), auto_wrap_policy="transformer_based_wrap")
    with pytest.raises(ConfigError, match=r"ignored_modules='block'.*'embed', 'blocks'"):
        chosen(Tower(), ignored_modules="block")


def test_ignored_modules_are_neither_chosen_nor_sharded():
    model = Tower()
    plugin = FullyShardedDataParallelPlugin(ignored_modules=r"blocks\.[01]")
    assert chosen(model, ignored_modules=r"blocks\.[01]") == ["blocks.2"]
    expected = {*model.blocks[0].parameters(), *model.blocks[1].parameters()}
    assert ignored_parameters(model, plugin) == expected
    listed = FullyShardedDataParallelPlugin(ignored_modules=[model.blocks[0]])
    assert ignored_parameters(model, listed) == set(model.blocks[0].parameters())
    alone = FullyShardedDataParallelPlugin(ignored_modules=model.blocks[0])
    assert ignored_parameters(model, alone) == set(model.blocks[0].parameters())
