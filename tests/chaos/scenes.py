"""What a notebook does while something is killed: the code of its cells.

The model's weights are all `OLD` or all `NEW` in each element (a checkpoint's: all one mark), so
that every mixture can be told bit by bit.
"""

from __future__ import annotations

from dataclasses import dataclass

SETUP = """
import json, os, warnings
from pathlib import Path
import torch, xxhash
from safetensors.torch import load_file
from torch import nn
import nbaccel
from nbaccel import Accelerator, notebook_launcher
%load_ext nbaccel
OLD, NEW = 1.0, 0.5
model = nn.Sequential(*[nn.Linear(1024, 1024) for _ in range({layers})])
folder = {folder!r}

def put(value):
    with torch.no_grad():
        for p in model.parameters(): p.fill_(value)

def marks(tensors):
    "The least and the greatest: one value alone only where all are the same."
    return sorted({{v.item() for t in tensors for v in t.detach().aminmax()}})

def digest(m):
    data = (p.detach().numpy().tobytes() for p in m.parameters())
    return xxhash.xxh3_64(b''.join(data)).hexdigest()

def train(m, by_hand=False):
    for p in m.parameters(): p.grad = torch.ones_like(p)
    if by_hand:
        with torch.no_grad():
            for p in m.parameters(): p.sub_(0.5)
    else:
        torch.optim.SGD(m.parameters(), lr=0.5).step()

def by_hand(m):
    train(m, by_hand=True)

def prepared(m, value):
    accelerator = Accelerator()
    optimizer = torch.optim.SGD(m.parameters(), lr=value)
    m, optimizer = accelerator.prepare(m, optimizer)
    return accelerator, m, optimizer

def save(m, value):
    accelerator, m, optimizer = prepared(m, value)
    with torch.no_grad():
        for p in m.parameters(): p.fill_(value)
    accelerator.save_state(folder)

def load(m):
    accelerator, m, optimizer = prepared(m, 9.0)
    accelerator.load_state(folder)

def saved():
    "What the checkpoint holds: the marks of its weights and the optimizer's rate."
    found = {{}}
    weights, optimizer = Path(folder, 'model.safetensors'), Path(folder, 'optimizer.bin')
    if Path(folder).exists():
        found['weights'] = marks(load_file(weights).values())
        state = torch.load(optimizer, weights_only=True)
        found['rate'] = state['param_groups'][0]['lr']
        found['files'] = sorted(p.name for p in Path(folder).iterdir())
    return found

def target_of(fd):
    try:
        return os.readlink(f'/proc/self/fd/{{fd}}')
    except FileNotFoundError:  # another thread has closed it meanwhile
        return ''

def tell():
    fds = [target_of(fd) for fd in os.listdir('/proc/self/fd')]
    print('TOLD ' + json.dumps({{
        'digest': digest(model), 'marks': marks(model.parameters()), 'saved': saved(),
        'staging': sum('nbaccel-staging' in fd for fd in fds)}}))

put(OLD)
"""


@dataclass(frozen=True)
class Scene:
    """Something that is done again and again while processes are killed."""

    name: str  # what the tables call it
    code: str  # the cell; `{mark}` is the number of the moment
    changes: str = "weights"  # or the `checkpoint`
    in_pool: bool = False  # whether it runs in live workers
    prepare: str = "put(OLD)"  # a cell that runs before each moment
    new: float | None = 0.5  # the value of all weights when it went well; None: the mark


_LAUNCH = "_ = notebook_launcher({function}, ({args}), num_processes=2)"

SCENES = (
    Scene("launch", _LAUNCH.format(function="train", args="model,")),
    Scene("launch, weights written by hand", _LAUNCH.format(function="by_hand", args="model,")),
    Scene(
        "save_state",
        _LAUNCH.format(function="save", args="model, {mark}"),
        changes="checkpoint",
        new=None,
    ),
    Scene("load_state", _LAUNCH.format(function="load", args="model,"), new=None),
    Scene("cell", "%%accelerate -n 2\ntrain(model)", in_pool=True),
    Scene("cell, weights written by hand", "%%accelerate -n 2\nby_hand(model)", in_pool=True),
    Scene(
        "cell with --out", "%%accelerate -n 2 --out found\ntrain(model)\nfound = 1", in_pool=True
    ),
)
