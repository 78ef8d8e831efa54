from __future__ import annotations

import linecache
import pickle
import types
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from typing_extensions import Self

from nbaccel.transfer import arena, memfd, pickling
from nbaccel.transfer.object_walk import find_modules
from nbaccel.transfer.pickling import Sender
from tests.process import descriptors

MIB = 2**20


def travel(obj: Any, sender: Sender | None = None, *, most_pickled: int = 100_000) -> Any:
    """Pack and unpack; the pickle itself must be small."""
    sender = sender or Sender()
    packed, fd = pickling.pack(obj, sender)
    assert memfd.total_bytes([packed.pickle]) < most_pickled
    table = {
        key: memfd.Mapping(a.fd, a.nbytes, is_private=True) for key, a in sender.arenas.items()
    }
    with memfd.closing_files(fd):
        return pickling.unpack(packed, fd, table)


def test_a_large_array_travels_beside_the_pickle_and_odd_ones_as_they_are():
    array = np.random.default_rng(0).random((512, 1024))
    found = travel({"data": array, "again": array})
    assert np.array_equal(found["data"], array)
    assert found["data"] is found["again"]
    found["data"][0, 0] = -1
    assert array[0, 0] != -1

    arrays = [
        np.asfortranarray(np.arange(12.0).reshape(3, 4)),
        np.arange(20)[::2],
        np.array(["a", "bc"]),
        np.array([{"x": 1}, None], dtype=object),
        np.zeros((0, 3)),
        np.array(5, dtype=np.int8),
    ]
    for array, found in zip(arrays, travel(arrays), strict=True):
        assert found.dtype == array.dtype
        assert found.tolist() == array.tolist()


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(300_000),
        torch.randn(5, 3).t(),
        torch.randn(1, 4).expand(3, 4),
        torch.randn(10).to(torch.bfloat16),
        torch.tensor(3),
        torch.tensor([True, False]),
        torch.randn(3, dtype=torch.complex64),
        torch.zeros(0, 7),
        torch.randn(4, requires_grad=True),
        torch.eye(3).to_sparse(),
        torch.empty(3, device="meta"),
    ],
    ids=lambda t: f"{t.dtype}-{tuple(t.shape)}-{t.layout}-{t.device}",
)
def test_tensors_of_every_kind(tensor):
    found = travel(tensor)
    assert (found.dtype, found.shape, found.layout) == (tensor.dtype, tensor.shape, tensor.layout)
    assert found.requires_grad == tensor.requires_grad
    assert found.device == tensor.device
    if tensor.device.type == "meta":
        return
    dense = (t.to_dense() if t.is_sparse else t for t in (found, tensor))
    assert torch.equal(*dense)
    if not tensor.is_sparse:
        assert found.stride() == tensor.stride()


def test_what_is_one_stays_one_and_receivers_do_not_see_each_others_writes():
    base = torch.arange(10.0)
    one, other = travel((base[:6], base[4:]))
    one[4] = -1
    assert other[0] == -1
    module = nn.Linear(2, 2)
    found = travel({"a": module, "b": module.weight})
    assert found["a"].weight is found["b"]
    assert torch.equal(found["b"], module.weight)
    found = travel(torch.ones(3, requires_grad=True) * 2)  # in the middle of a graph
    assert found.requires_grad
    assert found.tolist() == [2, 2, 2]
    packed, fd = pickling.pack(torch.zeros(10), Sender())
    with memfd.closing_files(fd):
        one, other = (pickling.unpack(packed, fd, {}) for _ in range(2))
    one.fill_(3)
    assert not other.any()
    shared = [torch.zeros(3).share_memory_()]
    packed, fd = pickling.pack(shared[0], Sender(shares=True))
    with memfd.closing_files(fd):
        pickling.unpack(packed, fd, {}).fill_(4)
        assert shared.pop().tolist() == [4, 4, 4]  # the last that has the memory
        assert pickling.unpack(packed, fd, {}).tolist() == [0, 0, 0]  # as on another host


def test_what_a_function_closes_over_travels_beside_the_pickle():
    tensor, array = torch.randn(300_000), np.ones(300_000)
    shift = 2.0

    def train(x: float, scale: torch.Tensor = tensor[:3]) -> Any:
        return tensor.sum() + array.sum() + x + shift, scale

    total, scale = travel(train)(1.0)
    assert total == pytest.approx(float(tensor.sum()) + 300_003)
    assert torch.equal(scale, tensor[:3])


def test_functions_and_classes_of_a_cell_travel_by_value_with_their_source():
    name = "/tmp/ipykernel_7/1.py"
    code = (
        "import torch\n"
        "FACTOR = 3\n"
        "class Net(torch.nn.Module):\n"
        "    def forward(self, x):\n"
        "        return helper(x) * FACTOR\n"
        "def helper(x):\n"
        "    return x + 1\n"
        "def train(net):\n"
        "    return net(2)\n"
    )
    linecache.cache[name] = (len(code), None, code.splitlines(keepends=True), name)
    namespace: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(code, name, "exec"), namespace)
    sender = Sender()
    try:
        train, net = travel((namespace["train"], namespace["Net"]()), sender)
    finally:
        del linecache.cache[name]
    assert train(net) == 9
    assert sender.sources == {name: code.splitlines(keepends=True)}


def test_a_shared_model_travels_by_address_only():
    module = nn.Linear(512, 512)
    sharing = arena.share_modules(find_modules((module,)))
    sender = Sender()
    packed, fd = pickling.pack((module, module.weight[3], [module.bias]), sender)
    with memfd.closing_files(fd):
        assert packed.nbytes < 100_000
        (home,) = sender.arenas.values()
        private = memfd.Mapping(home.fd, home.nbytes, is_private=True)
        found, row, (bias,) = pickling.unpack(packed, fd, dict.fromkeys(sender.arenas, private))
    assert found.bias is bias
    assert torch.equal(found.weight, module.weight)
    with torch.no_grad():
        found.weight[3].fill_(9)
    assert bool((row == 9).all())
    assert not bool((module.weight[3] == 9).any())
    sender = Sender(sharing.stand_ins)
    assert torch.equal(travel(lambda: module.weight, sender)(), module.weight)  # in a closure, too
    assert sender.arenas == sharing.arenas
    assert sender.sources == {}, "the source of a file does not travel"


class OwnState(nn.Linear):
    """Pickled in its own way."""

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"sent": True}


class OwnRestore(nn.Linear):
    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state | {"restored": True})


class OwnBirth(nn.Linear):
    def __new__(cls, *args: Any) -> Self:
        module = super().__new__(cls)
        object.__setattr__(module, "born_with", args)
        return module

    def __getnewargs__(self) -> tuple[int, int]:
        return (3, 2)


def _doubled(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
    return output * 2


def test_modules_that_pickle_in_their_own_way_keep_it_and_all_their_tables_of_hooks():
    models = [OwnState(3, 2), OwnRestore(3, 2), OwnBirth(3, 2)]
    arena.share_modules([("models", nn.ModuleList(models))])
    sent, restored, born = travel(models)
    assert sent.sent
    assert restored.restored
    assert born.born_with == (3, 2)
    for mine, theirs in zip(models, (sent, restored, born), strict=True):
        assert torch.equal(mine.weight, theirs.weight)

    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    model[0].register_forward_hook(_doubled)
    arena.share_modules([("model", model)])
    found = travel(model)
    assert vars(found[1]).keys() == vars(model[1]).keys()
    assert {k: type(v) for k, v in vars(found[1]).items()} == {
        k: type(v) for k, v in vars(model[1]).items()
    }
    x = torch.ones(4, 3)
    assert torch.equal(found(x), model(x))
    found[1].register_forward_hook(_doubled)
    assert torch.equal(found(x), model(x) * 2)

    model = nn.Linear(3, 2)
    model.weight.requires_grad_(False)
    model.bias.is_special = True  # type: ignore[attr-defined]
    model.twin = model.bias  # type: ignore[assignment]
    arena.share_modules([("model", model)])
    found = travel(model)
    assert [found.weight.requires_grad, found.bias.requires_grad] == [False, True]
    assert found.bias.is_special
    assert found.twin is found.bias
    assert type(found.weight) is nn.Parameter


def test_a_pickle_that_fails_or_grows_too_long_is_given_up_and_leaves_no_file():
    before = descriptors()
    with pytest.raises(pickling.TooCostly):
        pickling.prepare([str(i) * 100 for i in range(10_000)], Sender(), limit_bytes=MIB)
    # The limit does not count what travels beside.
    pickling.prepare(np.zeros(MIB), Sender(), limit_bytes=MIB).drop()
    with pytest.raises(TypeError, match="generator"):
        pickling.pack([np.zeros(MIB), (i for i in range(3))], Sender())
    assert descriptors() == before


class Local(Exception):
    pass


def test_what_is_pickled_by_name_and_for_a_childs_process():
    packed, fd = pickling.pack((Local("x"), torch.ones(3)), Sender(by_name=True))
    with memfd.closing_files(fd):
        error, ones = pickling.unpack(packed, fd, {})
    assert type(error) is Local
    assert ones.tolist() == [1, 1, 1]

    function, twin = (defined_in_a_cell() for _ in range(2))
    assert pickling.dumps_with_lines(function) == pickling.dumps_with_lines(twin)
    function.__module__ = "__main__"
    read = pickle.loads(pickling.dumps_with_lines(function))
    assert files_of(read.__code__) == {"<ipython-input-7>"}
    assert read()() == 1


CELL = "def outer():\n    def inner():\n        return 1\n    return inner\n"


def defined_in_a_cell() -> Any:
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(CELL, "<ipython-input-7>", "exec"), names)
    return names["outer"]


def files_of(code: types.CodeType) -> set[str]:
    inner = (constant for constant in code.co_consts if isinstance(constant, types.CodeType))
    return {code.co_filename}.union(*map(files_of, inner))
