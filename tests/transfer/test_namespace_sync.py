from __future__ import annotations

import datetime as dt
import functools
import gc
import threading
import types
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from nbaccel.errors import NotSendable
from nbaccel.transfer.free_names import Names, names_of
from tests.transfer.worker_pair import Pair

pytestmark = pytest.mark.no_memfd_growth


@pytest.fixture
def pair() -> Any:
    made = Pair(2)
    made.ns |= {"torch": torch, "nn": nn, "np": np, "types": types}
    yield made
    made.close()


VALUES: list[Any] = [
    3, 2.5, float("nan"), True, None, "text", b"bytes", 1j, (1, (2, "x")), ..., torch.float32,
    torch.Size([1, 2]), torch.device("cpu"), types, functools.partial, len, np.add,
    "long" * 50_000, [1, [2]], {"a": {1}}, np.arange(5.0), np.float32(3), np.array("2020", "M8[D]"),
    np.array([object()] * 0), np.zeros((2, 3), order="F"), torch.arange(4), torch.ones(2, 3).t(),
    torch.ones(2, dtype=torch.bfloat16), torch.tensor(1.5), torch.empty(0),
    torch.ones(2).to_sparse(),
    nn.Parameter(torch.ones(2)), dt.date(2020, 1, 1), range(3), slice(1, 2), frozenset("a"),
]  # fmt: skip


@pytest.mark.parametrize("value", VALUES, ids=lambda v: type(v).__name__)
def test_a_value_is_sent_once(pair, value):
    pair.ns["value"] = value
    assert pair.need("value") == ("value",)
    assert pair.flow.prepare(Names(frozenset({"value"})), [0, 1]) is None
    assert pair.need("value", force=True) == ("value",)
    found = pair.worker["value"]
    assert type(found) is type(value)
    assert repr(found) == repr(value)


@pytest.mark.parametrize(
    ("value", "change"),
    [
        ("[1, 2]", "value.append(3)"),
        ("{'a': [1]}", "value['a'][0] = True"),
        ("np.zeros(3)", "value[1] = 1"),
        ("np.zeros(3)", "value = np.zeros(3, np.float32)"),
        ("np.zeros(4)", "value = np.zeros((2, 2))"),
        ("np.zeros((3, 3))[:, 0]", "value[1] = 1"),
        ("torch.zeros(3)", "value.numpy()[1] = 1"),
        ("torch.zeros(3)", "value = torch.zeros(3, dtype=torch.int32)"),
        ("nn.Parameter(torch.zeros(3))", "value.data[0] = 1"),
        ("1", "value = True"),
        ("0.0", "value = -0.0"),
        ("(1, 2)", "value = (1, 2.0)"),
        ("(1, [2])", "value[1].append(3)"),
        ("lambda: 1", "value = lambda: 2"),
        ("lambda a=1: a", "value.__defaults__ = (2,)"),
        ("type('A', (), {})()", "value.x = 1"),
    ],
)
def test_a_change_of_content_or_kind_is_sent(pair, value, change):
    pair.notebook(f"value = {value}")
    pair.need("value")
    assert pair.need("value") == ()
    pair.notebook(change)
    assert pair.need("value") == ("value",)
    found, own = pair.worker["value"], pair.ns["value"]
    if not callable(own) and "A" not in repr(own):
        assert repr(found) == repr(own)


def test_only_the_users_names_are_sent_and_equal_content_is_not(pair):
    pair.ns |= {"_": 1, "In": [], "get_ipython": 3, "_mine": 4}
    assert pair.need("_", "In", "get_ipython", "__name__", "print", "absent", "_mine") == ("_mine",)
    pair.notebook("rows = [1.5, 'a']; array = np.arange(9)")
    first = pair.flow.prepare(names_of("rows"), [0])
    assert first is not None
    first.close()
    assert first.fds == []
    assert set(pair.need("rows", "array")) == {"rows", "array"}, "not taken, it is sent again"
    pair.notebook("rows = [1.5, 'a']; array = np.arange(9)")
    assert pair.need("rows", "array") == ()


def test_each_rank_gets_what_it_lacks(pair):
    pair.ns |= {"a": [1], "b": [2], "model": nn.Linear(2, 2)}
    pair.send(Names(frozenset({"a", "model"})), 1)
    shipment = pair.send(Names(frozenset({"a", "b", "model"})))
    assert shipment is not None
    assert [(part.ranks, tuple(part.tokens)) for part in shipment.parts] == [
        ((0,), ("a", "b", "model")),
        ((1,), ("b",)),
    ]
    assert all(torch.equal(w.ns["model"].weight, pair.ns["model"].weight) for w in pair.workers)


def test_what_a_worker_bound_is_its_own_until_the_notebook_changes_it(pair):
    pair.ns["lr"] = 0.1
    pair.cell("lr = lr / 2", 0)
    assert pair.cell("lr") is not None, "rank 1 never had it"
    assert [w.ns["lr"] for w in pair.workers] == [0.05, 0.1]
    assert pair.cell("lr") is None
    pair.ns["lr"] = 0.2
    pair.cell("lr")
    assert [w.ns["lr"] for w in pair.workers] == [0.2, 0.2]
    pair.cell("made = 1")
    assert pair.cell("made") is None
    pair.ns["made"] = 2
    pair.cell("made")
    assert pair.worker["made"] == 2
    pair.cell("rows = [1, {2: 3}]")
    pair.ns |= pair.workers[0].pull("rows", into=pair.ns)
    for rank in (0, 1):
        pair.flow.bound(rank, ["rows"])
    assert pair.cell("rows") is None, "what was pulled"
    pair.ns["lock"] = threading.Lock()
    pair.cell("lock = 'mine'")
    with pytest.raises(NotSendable):
        pair.need("lock")


def test_what_the_worker_replaced_or_changed_in_its_module_is_left_alone(pair):
    pair.ns["model"] = nn.Linear(2, 2)
    pair.cell("model = nn.Sequential(model)")
    assert pair.cell("model.eval()") is None
    assert isinstance(pair.worker["model"], nn.Sequential)
    pair.ns["model"].train(mode=False)
    pair.cell("model")
    assert pair.worker["model"][0].training is False, "what it wraps is still the notebook's"

    pair.ns["model"] = Net()
    pair.cell("model.eval(); model.options['p'] = 0.9; del model.hidden")
    pair.ns["model"].norm.momentum = 0.5
    pair.cell("model")
    model = pair.worker["model"]
    assert (model.training, model.options, model.norm.momentum) == (False, {"p": 0.9}, 0.5)


FUNCTIONS = """
import functools

scale = 2
def double(x): return x * scale
def use(x): return double(x) + 1
def factorial(n): return 1 if n == 0 else n * factorial(n - 1)

def counter():
    count = 0
    def increase():
        nonlocal count
        count += 1
        return count
    def read(): return count
    return increase, read
increase, read = counter()

def maker():
    def even(n): return n == 0 or odd(n - 1)
    def odd(n): return n != 0 and even(n - 1)
    return even
even = maker()

def noted(function):
    @functools.wraps(function)
    def wrapper(*args): return function(*args)
    wrapper.note = 'noted'
    return wrapper

@noted
def decorated(x, *, by=5): return use(x) + by

def late():
    if False:
        unset = 1
    return lambda: unset
half_closed = late()
held = {'of': [functools.partial(use, 4), lambda: [double(i) for i in range(3)]]}
"""


def test_functions_see_the_worker_s_names(pair):
    pair.notebook(FUNCTIONS)
    pair.cell("y = use(3)")
    assert pair.worker["y"] == 7
    assert pair.worker["use"].__globals__ is pair.worker
    pair.cell("scale = 10; y = use(3)")
    assert pair.worker["y"] == 31
    pair.notebook("scale = 100")
    shipment = pair.cell("y = use(3)")
    assert shipment is not None
    assert tuple(shipment.parts[0].tokens) == ("scale",)
    assert pair.worker["y"] == 301
    pair.notebook("def double(x): return -x")
    assert pair.need("use") == ("double",)
    assert pair.worker["use"](3) == -2


def test_functions_keep_what_they_are(pair):
    pair.notebook(FUNCTIONS)
    pair.cell("""
    f = factorial(5)
    increase(); increase()
    counted = read()
    ev = even(10), even(7)
    d = decorated(3), decorated.note, decorated.__wrapped__(3, by=0), decorated.__name__
    h = held['of'][0](), held['of'][1]()
    try:
        half_closed()
    except NameError as error:
        message = str(error)
    """)
    worker = pair.worker
    assert worker["f"] == 120
    assert worker["counted"] == 2, "the two share their variable"
    assert pair.ns["read"]() == 0
    assert worker["ev"] == (True, False)
    assert worker["d"] == (12, "noted", 7, "decorated")
    assert worker["h"] == (9, [0, 2, 4])
    assert "unset" in worker["message"]


class Net(nn.Module):
    """Tied weights, a buffer, a plain attribute and a list of modules that torch does not know."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(8, 8)
        self.head = nn.Linear(8, 8)
        self.head.weight = self.base.weight
        self.norm = nn.BatchNorm1d(8)
        self.options = {"p": 0.5}
        self.hidden = [nn.Linear(2, 2)]


def test_a_module_travels_by_the_arena_and_once(pair):
    pair.ns["model"] = nn.Linear(512, 512)
    first = pair.send(names_of("model"))
    assert first is not None
    assert first.nbytes > 2**20
    assert first.parts[0].message.payload.nbytes < 2**12
    assert [key for key, _ in first.parts[0].message.arenas]
    pair.notebook("again = {'m': model, 'w': model.weight}")
    second = pair.send(names_of("again"))
    assert second is not None
    assert second.parts[0].message.arenas == ()
    assert second.nbytes < 2**10
    assert pair.worker["again"]["m"] is pair.worker["model"]
    assert pair.worker["again"]["w"] is pair.worker["model"].weight


@pytest.mark.parametrize("order", ["together", "optimizer first", "model first"])
def test_an_optimizer_steps_the_worker_s_model(pair, order):
    pair.ns["model"] = Net()
    pair.notebook("optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)")
    names = ["optimizer", "model"] if order == "optimizer first" else ["model", "optimizer"]
    for step in [names] if order == "together" else [[name] for name in names]:
        pair.need(*step)
    model, optimizer = pair.worker["model"], pair.worker["optimizer"]
    expected = list(map(id, model.parameters()))
    assert [id(p) for group in optimizer.param_groups for p in group["params"]] == expected
    assert pair.need(*names) == ()
    pair.notebook("optimizer.param_groups[0]['lr'] = 0.2")
    assert pair.need(*names) == ("optimizer",)
    optimizer = pair.worker["optimizer"]
    assert [id(p) for group in optimizer.param_groups for p in group["params"]] == expected
    assert optimizer.param_groups[0]["lr"] == 0.2
    # Within an object that holds both; and neither is kept alive.
    pair.notebook("trainer = types.SimpleNamespace(optimizer=optimizer, model=model)")
    assert pair.need("trainer") == ("trainer",)
    trainer = pair.worker["trainer"]
    assert list(map(id, trainer.optimizer.param_groups[0]["params"])) == expected
    assert trainer.model is model
    assert pair.need("trainer") == ()
    known = weakref.ref(pair.ns["model"])
    del pair.ns["model"], pair.ns["optimizer"], pair.ns["trainer"]
    gc.collect()
    assert known() is None


def test_a_submodule_under_another_name_is_the_same_object(pair):
    pair.ns["model"] = Net()
    pair.notebook("base = model.base; closure = (lambda m: lambda: m)(model.norm)")
    pair.need("base")
    pair.need("model")
    pair.need("closure")
    assert pair.worker["base"] is pair.worker["model"].base
    assert pair.worker["closure"]() is pair.worker["model"].norm
    assert pair.worker["model"].head.weight is pair.worker["model"].base.weight
    assert pair.need("base", "model", "closure") == ()


@pytest.mark.parametrize(
    ("change", "check"),
    [
        ("model.eval()", "not model.norm.training"),
        ("model.norm.eval()", "model.training and not model.norm.training"),
        ("model.base.requires_grad_(False)", "not model.base.bias.requires_grad"),
        ("model.options['p'] = 0.1", "model.options['p'] == 0.1"),
        ("model.norm.momentum = None", "model.norm.momentum is None"),
        ("model.added = [1]", "model.added == [1]"),
        ("del model.options", "not hasattr(model, 'options')"),
        ("model.hidden.append(nn.Linear(3, 3))", "model.hidden[1].in_features == 3"),
        ("model.hidden[0].eval()", "not model.hidden[0].training"),
        ("model.to_come = model.base", "model.to_come is model.base"),
        ("nn.init.ones_(model.base.weight)", "(model.head.weight == 1).all()"),
    ],
)
def test_what_changed_in_a_module_is_carried_over_in_place(pair, change, check):
    pair.ns["model"] = Net()
    pair.cell("kept, parameters = model, list(map(id, model.parameters()))")
    hidden = pair.worker["model"].hidden[0]
    assert pair.cell("model") is None
    pair.notebook(change)
    assert pair.cell(f"fine = {check}") is not None
    assert pair.worker["fine"], check
    assert pair.cell("model") is None
    if "to_come" in change:
        return  # another submodule: another structure, another object
    assert pair.worker["model"] is pair.worker["kept"]
    assert pair.worker["model"].hidden[0] is hidden or "hidden" in change
    assert list(map(id, pair.worker["model"].parameters())) == pair.worker["parameters"]


def test_a_module_with_another_structure_comes_whole_and_one_that_died_is_forgotten(pair):
    pair.ns["model"] = nn.Linear(64, 64)
    pair.need("model")
    old = pair.workers[0].mappings()
    pair.ns["model"] = nn.Linear(64, 64)
    gc.collect()
    pair.need("model")
    assert len(pair.workers[0].mappings()) == 1
    assert pair.workers[0].mappings()[0] is not old[0]

    pair.ns["model"] = Net()
    pair.notebook("held = [model]")
    pair.need("model", "held")
    pair.notebook("model.head = nn.Linear(8, 3)")
    assert pair.need("model") == ("model",)
    assert pair.worker["model"].head.out_features == 3
    assert pair.need("held") == ("held",)
    assert pair.worker["held"][0] is pair.worker["model"]
    pair.notebook("model.double()")
    assert pair.need("model") == ("model",)
    assert pair.worker["model"].base.weight.dtype is torch.float64


def test_a_needed_value_that_does_not_pickle_is_named_and_an_attribute_stays(pair):
    pair.ns["settings"] = {"deep": [threading.Lock()]}
    with pytest.raises(NotSendable, match=r"settings\['deep'\]\[0\] \(a _thread.lock\)") as caught:
        pair.need("settings")
    assert caught.value.path.startswith("settings['deep']")
    assert "%%accelerate" in str(caught.value)
    pair.ns["model"] = nn.Linear(2, 2)
    pair.need("model")
    pair.ns["model"].lock = threading.Lock()
    pair.ns["model"].other = 1
    pair.need("model")
    assert pair.worker["model"].other == 1
    assert not hasattr(pair.worker["model"], "lock")


def test_a_value_that_only_may_be_needed_is_left_out_with_a_reason(pair):
    pair.notebook("""
    import threading
    lock = threading.Lock()
    model = nn.Linear(2, 2, device='meta')
    locked = nn.Linear(2, 2); locked.lock = lock
    fine = 1
    def f(): return lock, model, locked, fine
    """)
    shipment = pair.cell("f")
    assert shipment is not None
    assert set(shipment.parts[0].tokens) == {"f", "fine"}
    assert "cannot pickle" in pair.flow.reasons["lock"]
    assert "meta device" in pair.flow.reasons["model"]
    assert "cannot pickle" in pair.flow.reasons["locked"]
    pair.notebook("lock = 2")
    pair.cell("lock")
    assert "lock" not in pair.flow.reasons
