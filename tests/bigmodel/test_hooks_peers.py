"""The same actions with Accelerate and with nbaccel: equal outputs, devices and hooks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from nbaccel import hooks as our_hooks
from nbaccel.utils import modeling, offload

accelerate = pytest.importorskip("accelerate")
peer_hooks = pytest.importorskip("accelerate.hooks")
peer_offload = pytest.importorskip("accelerate.utils.offload")


def make_model() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Sequential(nn.Linear(4, 2)))
    return model.eval()


X = torch.randn(3, 4, generator=torch.Generator().manual_seed(1))

HOOK_ATTRIBUTES = (
    *("execution_device", "offload", "io_same_device", "offload_buffers"),
    *("place_submodules", "skip_keys", "original_devices"),
)


def facts(model: nn.Module) -> dict[str, Any]:
    """All that transformers or a user could see of a hooked model."""
    return {
        "devices": {
            n: t.device.type for n, t in [*model.named_parameters(), *model.named_buffers()]
        },
        "state": list(model.state_dict()),
        "grad": {n: p.requires_grad for n, p in model.named_parameters()},
        "hooks": {
            name: [
                (
                    type(hook).__name__,
                    *(getattr(hook, a, None) for a in HOOK_ATTRIBUTES if hook.offload),
                )
                for hook in getattr(module._hf_hook, "hooks", [module._hf_hook])
            ]
            for name, module in model.named_modules()
            if hasattr(module, "_hf_hook")
        },
        "forwards": [n for n, module in model.named_modules() if hasattr(module, "_old_forward")],
    }


def story(hooks: Any, way: str) -> list[Any]:
    """Attach, run twice, remove; what is seen after each step."""
    model = make_model()
    attach(hooks, model, way)
    seen: list[Any] = [facts(model)]
    for _ in range(2):
        seen += [model(X), facts(model)]
    hooks.remove_hook_from_submodules(model)
    return [*seen, {name: t.clone() for name, t in model.state_dict().items() if not t.is_meta}]


def alike(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return one.device == other.device and (one.is_meta or torch.equal(one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(alike(one[k], other[k]) for k in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(alike, one, other))
    return bool(one == other)


PARTS = {"": "cpu", "0": "cpu", "1": "cpu", "2": "cpu"}
STAYS = {"0": True, "1": False, "2": True}
# A function, its arguments, and whether weights are given in a map.
ALIGN, BLOCKS = "attach_align_device_hook", "attach_align_device_hook_on_blocks"
WAYS: dict[str, tuple[str, dict[str, Any], bool]] = {
    "offloaded": (ALIGN, {"offload": True}, True),
    "without a map": (ALIGN, {"offload": True}, False),
    "with buffers": (ALIGN, {"offload": True, "offload_buffers": True}, True),
    "preloaded": (ALIGN, {"offload": True, "preload_module_classes": ["Sequential"]}, True),
    "aligned": (ALIGN, {}, False),
    "execution device": ("attach_execution_device_hook", {}, False),
    "blocks": (BLOCKS, {"execution_device": PARTS, "offload": STAYS}, True),
    "blocks, one device": (BLOCKS, {"offload": STAYS}, True),
    "one block": (BLOCKS, {"offload": True}, True),
    "all blocks stay": (BLOCKS, {"execution_device": PARTS, "offload": False}, False),
    "appended": (ALIGN, {"offload": True}, False),
}


def attach(hooks: Any, model: nn.Module, way: str) -> None:
    name, options, with_map = WAYS[way]
    if way == "appended":
        aligned = hooks.AlignDevicesHook(io_same_device=True)
        hooks.add_hook_to_module(model[0], aligned, append=True)
    if with_map:
        weights = {name: value.clone() for name, value in model.state_dict().items()}
        options = options | {"weights_map": weights}
    getattr(hooks, name)(model, **{"execution_device": "cpu"} | options)


@pytest.mark.parametrize("way", WAYS)
def test_hooks_do_the_same(way):
    ours, theirs = story(our_hooks, way), story(peer_hooks, way)
    for step, (own, other) in enumerate(zip(ours, theirs, strict=True)):
        assert alike(own, other), (step, own, other)


WEIGHTS = {
    "a": torch.randn(2, 3),
    "b": torch.randn(3).bfloat16(),
    "c": torch.tensor(2.5),
    "d": torch.tensor([True, False]),
    "e": torch.arange(4, dtype=torch.int64),
    "f": torch.randn(4).to(torch.float8_e4m3fn),
}


def test_folders_are_the_same(tmp_path):
    for module, folder in ((offload, "ours"), (peer_offload, "theirs")):
        module.offload_state_dict(tmp_path / folder, WEIGHTS)
    ours, theirs = (
        {path.name: path.read_bytes() for path in (tmp_path / folder).iterdir()}
        for folder in ("ours", "theirs")
    )
    assert ours == theirs


def test_hooks_of_accelerate_are_understood():
    """Transformers attaches them when it loads a model with a device map."""
    model = make_model()
    attach(peer_hooks, model, "offloaded")
    assert modeling.has_offloaded_params(model[0])
    with modeling.align_module_device(model[0]):
        assert torch.equal(model[0].weight, make_model()[0].weight)
    assert model[0].weight.is_meta
    assert alike(modeling.get_state_dict_offloaded_model(model), make_model().state_dict())
