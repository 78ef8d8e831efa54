"""Classes and functions of cells in workers, pickled by name as libraries do it."""

from __future__ import annotations

import pytest

CLASSES = """
import dataclasses, enum, functools, io, multiprocessing, pickle, tempfile
import torch.utils.data
from nbaccel import Accelerator, Pool

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)
    def forward(self, x):
        return self.layer(x)

@dataclasses.dataclass
class Config:
    width: int = 3

class Outer:
    class Inner:
        value = 4

class Colour(enum.Enum):
    RED = 1

class Steps:
    count = 0
    def state_dict(self):
        return {"config": Config(self.count)}
    def load_state_dict(self, state):
        self.count = state["config"].width

class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 4
    def __getitem__(self, i):
        return Config(i)

def helper():
    return 7

def as_list(items):
    return items

folder = tempfile.mkdtemp()
inner = Outer.Inner()
"""
PICKLERS = """
def pickle_all(net, folder):
    accelerator = Accelerator()
    rank = accelerator.process_index
    made = [Config(rank), inner, Colour.RED, helper, Net]
    there = [pickle.loads(pickle.dumps(x)) for x in made]
    assert there[0] == Config(rank) and there[2] is Colour.RED and there[3:] == [helper, Net]
    assert type(there[1]) is type(inner)

    gathered = [None] * 2
    dist.all_gather_object(gathered, Config(rank))
    assert gathered == [Config(0), Config(1)], gathered
    sent = [Config(9) if rank == 0 else None]
    dist.broadcast_object_list(sent)
    assert sent == [Config(9)]
    assert accelerator.gather_for_metrics([Config(rank)], use_gather_object=True) == gathered

    steps = Steps()
    steps.count = 5
    prepared = accelerator.prepare(net)
    accelerator.register_for_checkpointing(steps)
    accelerator.save_state(folder + "/state")
    steps.count = 0
    accelerator.load_state(folder + "/state")
    assert steps.count == 5

    accelerator.save({"config": Config(8), "function": helper}, folder + "/accelerator.bin")
    loader = torch.utils.data.DataLoader(Rows(), num_workers=2, collate_fn=as_list)
    assert [type(x) is Config for [x] in loader] == [True] * 4
    if rank == 0:
        torch.save(net, folder + "/net.bin")
        torch.save({"config": Config(6)}, folder + "/config.bin")
        with torch.serialization.safe_globals([Config]):
            assert torch.load(folder + "/config.bin", weights_only=True) == {"config": Config(6)}
    return Config(rank), Net
"""
LOADED = """
assert [config for config, _ in results] == [Config(0), Config(1)]
assert all(found is Net for _, found in results)
loaded = torch.load(folder + "/net.bin", weights_only=False)
assert type(loaded) is Net
assert torch.equal(loaded.layer.weight, model.layer.weight)
assert torch.load(folder + "/config.bin", weights_only=False) == {"config": Config(6)}
saved = torch.load(folder + "/accelerator.bin", weights_only=False)
assert saved["config"] == Config(8) and saved["function"] is helper
print(results.plan.start_method)
"""


# Nothing has run in the kernel that a fork could not live with.
@pytest.mark.parametrize("method", [pytest.param("template", marks=pytest.mark.slow), "fork"])
def test_what_cells_define_is_pickled_by_name_in_workers(kernel, method):
    kernel.run(CLASSES).check()
    kernel.run(PICKLERS).check()
    code = f"(pickle_all, (model, folder), 2, start_method={method!r})"
    kernel.run(f"model = Net()\nresults = notebook_launcher{code}").check()
    assert kernel.run(LOADED).check().stdout == f"{method}\n"


def test_live_workers_do_the_same(kernel):
    kernel.run(CLASSES).check()
    kernel.run(PICKLERS).check()
    kernel.run("model = Net()\nlive = Pool(num_processes=2)").check()
    try:
        kernel.run("results = live.call(pickle_all, model, folder)").check()
        kernel.run(LOADED.replace("results.plan.start_method", "'live'")).check()
        # In a cell, of which only the model is needed.
        kernel.run("live.run('import io; torch.save(model, io.BytesIO())');").check()
        # The class that is defined anew is the one that the name stands for, in workers, too.
        kernel.run("class Net(nn.Linear):\n    pass\nmodel = Net(2, 2)").check()
        by_name = "lambda: type(pickle.loads(pickle.dumps(model))) is type(model)"
        assert kernel.run(f"print(live.call({by_name}))").check().stdout == "[True, True]\n"
    finally:
        kernel.run("live.stop()").check()


def test_of_two_classes_of_one_name_the_notebooks_is_known(kernel):
    kernel.run("class Part(nn.Linear):\n    pass\nmodel = nn.Sequential(Part(2, 2))").check()
    code = "lambda model: torch.save(model, io.BytesIO())"  # only the model brings the class
    kernel.run(f"import io\nnotebook_launcher({code}, (model,), 2);").check()
    kernel.run("class Twice:\n    number = 1\nold = Twice()").check()
    kernel.run("class Twice:\n    number = 2\nnew = Twice()").check()
    tries = """
    import pickle
    def try_both(old, new):
        def number_of(x):
            try:
                return pickle.loads(pickle.dumps(x)).number
            except pickle.PicklingError as error:
                return str(error)
        return [number_of(old), number_of(new)]
    old_words, number = notebook_launcher(try_both, (old, new), 2)[0]
    print(number, "not the same object as __main__.Twice" in old_words)
    """
    assert kernel.run(tries).check().stdout == "2 True\n"
