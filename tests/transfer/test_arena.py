from __future__ import annotations

import gc
import os

import pytest
import torch
from torch import nn

from nbaccel.errors import ModelNotShareable
from nbaccel.transfer import arena, memfd
from nbaccel.transfer.object_walk import find_modules
from tests.process import descriptors

pytestmark = pytest.mark.no_memfd_growth


def share(*modules: nn.Module) -> arena.Sharing:
    return arena.share_modules(find_modules(modules))


def fds() -> int:
    return len(descriptors())


def in_arena(tensor: torch.Tensor) -> bool:
    return arena.arena_of(tensor.untyped_storage()) is not None


def snapshot(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in arena.named_tensors(module)}


def assert_holds(module: nn.Module, values: dict[str, torch.Tensor]) -> None:
    found = dict(arena.named_tensors(module))
    assert found.keys() == values.keys()
    for name, value in values.items():
        assert found[name].dtype == value.dtype, name
        assert torch.equal(found[name], value), name


class Odd(nn.Module):
    """Every shape of tensor that a module of a notebook may have."""

    def __init__(self) -> None:
        super().__init__()
        base = torch.arange(48.0)
        self.plain = nn.Parameter(torch.randn(5, 3))
        self.bf16 = nn.Parameter(torch.randn(7).to(torch.bfloat16))
        self.transposed = nn.Parameter(torch.randn(4, 6).t())
        self.strided = nn.Parameter(torch.randn(10)[::2])
        self.expanded = nn.Parameter(torch.randn(1, 4).expand(3, 4))
        self.scalar = nn.Parameter(torch.tensor(3.5))
        self.waves = nn.Parameter(torch.randn(3, dtype=torch.complex64))
        self.low, self.high = nn.Parameter(base[8:16]), nn.Parameter(base[16:40].view(4, 6))
        self.frozen = nn.Parameter(torch.arange(4), requires_grad=False)
        self.register_buffer("count", torch.tensor(7))
        self.register_buffer("mask", torch.tensor([True, False]))
        self.register_buffer("empty", torch.zeros(0, 3))
        self.register_buffer("secret", torch.randn(2), persistent=False)


def test_every_tensor_moves_with_its_values_geometry_and_identity():
    module = Odd()
    module.tied = module.plain
    values, tensors = snapshot(module), dict(arena.named_tensors(module))
    geometry = {name: (t.shape, t.stride()) for name, t in tensors.items()}
    sharing = share(module)
    assert_holds(module, values)
    for name, tensor in arena.named_tensors(module):
        assert tensor is tensors[name], "the same object, so that an optimizer still knows it"
        assert (tensor.shape, tensor.stride()) == geometry[name], name
        assert in_arena(tensor) or tensor.numel() == 0, name
    (home,) = sharing.arenas.values()
    slots = {slot.name: slot for slot in sharing.modules[0].slots}
    assert slots.keys() == values.keys() - {"empty"}
    reader = memfd.Mapping(home.fd, home.nbytes, is_private=True)
    for name, slot in slots.items():
        assert torch.equal(slot.view(reader), values[name]), name
    assert module.tied is module.plain
    assert slots["tied"].start == slots["plain"].start
    assert module.low.untyped_storage().data_ptr() == module.high.untyped_storage().data_ptr()
    assert module.high.data_ptr() - module.low.data_ptr() == 8 * 4
    with torch.no_grad():
        torch.as_strided(module.low, (1,), (1,), module.low.storage_offset() + 8).fill_(-1)
    assert module.high[0, 0] == -1


def test_of_a_shared_model_only_the_used_and_the_replaced_part_moves():
    module = nn.Linear(1, 1, bias=False)
    module.weight = nn.Parameter(torch.zeros(1_000_000)[500_000:500_001].view(1, 1))
    assert next(iter(share(module).arenas.values())).nbytes <= 128
    del module
    gc.collect()

    module, before = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), fds()
    assert share(nn.ReLU()).arenas == {}
    assert fds() == before
    first = share(module)
    address, open_files = module[0].weight.data_ptr(), fds()
    assert share(module).arenas == first.arenas
    module[1] = nn.Linear(4, 2)
    values = snapshot(module)
    assert module[0].weight.data_ptr() == address
    assert fds() == open_files
    sharing = share(module)
    assert next(iter(first.arenas.values())) in sharing.arenas.values()
    assert len(sharing.arenas) == 2
    assert_holds(module, values)


def test_an_arena_costs_one_descriptor_and_goes_with_its_last_tensor():
    before = fds()
    module = nn.Sequential(*(nn.Linear(8, 8) for _ in range(20)))
    share(module)
    gc.collect()
    assert fds() == before + 1
    weight = module[3].weight.detach()
    del module
    gc.collect()
    assert fds() == before + 1, "one tensor holds it"
    assert weight.sum().isfinite()
    del weight
    gc.collect()
    assert fds() == before


def test_an_optimizer_built_before_still_steps_the_right_parameters():
    torch.manual_seed(0)
    module, twin = nn.Linear(6, 2), nn.Linear(6, 2)
    twin.load_state_dict(module.state_dict())
    optimizers = [torch.optim.Adam(m.parameters(), lr=0.1) for m in (module, twin)]
    batch = torch.randn(4, 6)
    for step in range(3):
        if step == 1:
            share(module)
        for m, optimizer in zip((module, twin), optimizers, strict=True):
            optimizer.zero_grad()
            m(batch).pow(2).sum().backward()
            optimizer.step()
    assert in_arena(module.weight)
    assert_holds(module, snapshot(twin))


def test_a_forked_child_writes_to_memory_of_its_own():
    module = nn.Linear(3, 3)
    kept = share(module)
    before = module.weight.detach().clone()
    pid = os.fork()
    if pid == 0:
        try:
            arena.make_arenas_private()
            same = torch.equal(module.weight, before)
            module.weight.data.fill_(7)
            found = arena.find_arena(module.weight.data_ptr(), 4)
            os._exit(0 if same and found is None else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert torch.equal(module.weight, before)
    assert arena.find_arena(module.weight.data_ptr(), 4) is next(iter(kept.arenas.values()))


class Holding(nn.Module):
    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__()
        self.held = tensor if isinstance(tensor, nn.Parameter) else nn.Parameter(tensor)


def conjugated() -> nn.Module:
    module = nn.Module()
    module.register_buffer("held", torch.randn(3, dtype=torch.complex64).conj())
    return module


def subclass() -> nn.Module:
    class Odd(torch.Tensor):
        pass

    module = nn.Module()
    module.register_buffer("held", torch.randn(3).as_subclass(Odd))
    return module


META = nn.Linear(3, 2, device="meta")
EMPTY = nn.ParameterDict({name: torch.zeros(0, 4) for name in ("a", "b", "c")})


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        (META, r"weight \(Linear\): is on the meta device: it has shape \(2, 3\).*to_empty"),
        (nn.LazyLinear(3), r"weight \(LazyLinear\): a lazy parameter.*Run one batch"),
        (EMPTY, r"a \(ParameterDict\): is an empty parameter of shape \(0, 4\).*Gather it first"),
        (
            Holding(torch.eye(3).to_sparse()),
            r"held \(Holding\): has layout torch.sparse_coo.*inside the function",
        ),
        (conjugated(), r"held \(Module\): is a lazily conjugated.*resolve_conj"),
        (subclass(), r"held \(Module\): is a Odd, .*inside the function"),
    ],
)
def test_what_cannot_be_shared_is_refused_and_nothing_moves(bad, says):
    good = nn.Linear(4, 4)
    before, open_files = good.weight.data_ptr(), fds()
    with pytest.raises(ModelNotShareable, match=r"(?s)args\[1\]\." + says):
        share(good, bad)
    assert good.weight.data_ptr() == before
    assert not in_arena(good.weight)
    assert fds() == open_files


class Dummy(nn.Module):
    """With the well-known parameter that only tells the device."""

    def __init__(self) -> None:
        super().__init__()
        self.dummy_param = nn.Parameter(torch.empty(0))
        self.layer = nn.Linear(4, 4)


@pytest.mark.parametrize("weight", [None, torch.empty(4, 0), torch.empty(0, 4)])
def test_an_empty_parameter_is_shared_as_it_is(weight):
    module: nn.Module = Dummy()
    if weight is not None:  # nn.Linear(0, 4) warns of having nothing to initialise
        module = nn.Linear(4, 4)
        module.weight = nn.Parameter(weight)
    share(module)
    assert all(in_arena(p) for p in module.parameters() if p.numel())


def test_a_placeholder_of_deepspeed_is_refused_even_alone_and_all_refusals_come_at_once():
    module = Dummy()
    module.dummy_param.ds_id = 0  # type: ignore[attr-defined]
    with pytest.raises(ModelNotShareable, match=r"dummy_param .* like a placeholder"):
        share(module)
    with pytest.raises(ModelNotShareable) as caught:
        share(META, EMPTY)
    assert all(name in str(caught.value) for name in ("args[0].weight", "args[0].bias", "args[1]"))
