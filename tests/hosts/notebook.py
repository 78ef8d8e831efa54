"""What tests run in the place of a notebook: `notebook.py CELL+CELL PLACE ...`.

The place is a hostfile or `slurm`.
"""

from __future__ import annotations

import itertools
import json
import os
import socket
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from nbaccel import Pool, RunConfig, notebook_launcher
from nbaccel.output.panel.display import Dashboard


def tell(**facts):
    print("TOLD " + json.dumps(facts), flush=True)


def on(place):
    """The settings of a launch there."""
    return {"engine": "slurm", "num_processes": 4} if place == "slurm" else {"hostfile": place}


def host_name():
    """Nodes of the tests' SLURM are one host, which calls them so."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def make_model(width=64):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, width), nn.Tanh(), nn.Linear(width, 1))


def train(model, steps):
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    parallel = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.05)
    losses = []
    for step in range(steps):
        torch.manual_seed(100 * step + rank)
        loss = parallel(torch.randn(16, 8)).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    print(f"rank {rank} trained on {host_name()}")
    return losses, os.environ["LOCAL_RANK"], host_name(), str(Path.cwd())


def weights_of(model):
    return [
        round(value, 7)
        for tensor in model.state_dict().values()
        for value in tensor.flatten().tolist()
    ]


def cell_train(place):
    model, alone = make_model(), make_model()
    results = notebook_launcher(train, (model, 5), **on(place))
    local = notebook_launcher(train, (alone, 5), 4)
    tell(
        losses=[result[0] for result in results],
        places=[result[1:3] for result in results],
        folders=sorted({result[3] for result in results}),
        local_losses=[result[0] for result in local],
        weights=weights_of(model),
        local_weights=weights_of(alone),
        start=weights_of(make_model()),
    )


def train_sharded(model, steps):
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo")
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    for step in range(steps):
        torch.manual_seed(100 * step + dist.get_rank())
        optimizer.zero_grad()
        model(torch.randn(16, 8)).pow(2).mean().backward()
        optimizer.step()
    return model[0].weight.to_local().shape[0]


def cell_sharded(hostfile):
    """Every rank has a part of the model, and gives back exactly that."""
    # 30 rows: the parts of four ranks are not equal, and end within a page.
    model, alone = make_model(width=30), make_model(width=30)
    results = notebook_launcher(train_sharded, (model, 3), hostfile=hostfile)
    notebook_launcher(train_sharded, (alone, 3), 4)
    models = (model, alone, make_model(width=30))
    tell(rows=list(results), sharded=[weights_of(one) for one in models])


def print_a_lot():
    rank = int(os.environ["RANK"])
    for number in range(8000):
        print(f"rank {rank} has line {number} of its many lines, each of some length")
    return rank


def cell_print(hostfile):
    tell(printed=list(notebook_launcher(print_a_lot, (), hostfile=hostfile)))


def fail(model):
    dist.init_process_group("gloo")
    if dist.get_rank() == 3:
        raise ValueError(f"no luck on {socket.gethostname()}")
    dist.barrier()


def cell_fail(hostfile):
    model = make_model()
    try:
        notebook_launcher(fail, (model,), hostfile=hostfile)
    except ValueError as error:
        tell(kinds=[kind.__name__ for kind in type(error).__mro__], text=str(error))
    tell(untouched=weights_of(model) == weights_of(make_model()))


def hang():
    dist.init_process_group("gloo")
    dist.barrier()
    try:
        print(f"rank {dist.get_rank()} hangs", flush=True)
        time.sleep(600)
    finally:
        print(f"rank {dist.get_rank()} tidies up", flush=True)


def cell_hang(place):
    try:
        notebook_launcher(hang, (), **on(place))
    except BaseException as error:
        tell(kind=type(error).__name__, text=str(error), at=time.time())
    if place != "slurm":  # where a launch takes half a minute
        # The notebook goes on: nothing of the hosts is left in the way.
        tell(again=list(notebook_launcher(host_name, (), **on(place))))


def train_on(model):
    """Train until somebody ends it."""
    dist.init_process_group("gloo")
    parallel = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.05)
    for step in itertools.count():
        optimizer.zero_grad()
        parallel(torch.randn(16, 8)).pow(2).mean().backward()
        optimizer.step()
        if step == 20:
            print(f"rank {dist.get_rank()} is pid {os.getpid()}", flush=True)


def cell_train_on(hostfile):
    model = make_model()
    try:
        notebook_launcher(train_on, (model,), hostfile=hostfile)
    except BaseException as error:
        tell(kind=type(error).__name__, text=str(error), at=time.time())
    tell(
        untouched=weights_of(model) == weights_of(make_model()),
        again=list(notebook_launcher(socket.gethostname, (), num_processes=2)),
    )


def survive(model, folder):
    """Fails with the host beta in the first attempt, and goes on from a checkpoint afterwards."""
    dist.init_process_group("gloo")
    checkpoint = Path(folder) / "checkpoint.pt"
    step = torch.load(checkpoint)["step"] if checkpoint.exists() else 0
    # Until all have looked: a slow rank would find what this attempt saves.
    dist.barrier()
    if dist.get_rank() == 0 and not step:
        torch.save({"step": 3}, checkpoint)
    dist.barrier()
    if not step:
        print(f"rank {dist.get_rank()} hangs", flush=True)
        time.sleep(600)
    return step, dist.get_world_size(), os.environ["TORCHELASTIC_RESTART_COUNT"]


def cell_survive(hostfile, folder):
    results = notebook_launcher(survive, (make_model(), folder), hostfile=hostfile, max_restarts=1)
    tell(results=list(results))


STEP = """
import os, socket, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
if not dist.is_initialized():
    dist.init_process_group("gloo")
    parallel = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.05)
torch.manual_seed(dist.get_rank())
optimizer.zero_grad()
loss = parallel(scale * torch.randn(16, 8)).pow(2).mean()
loss.backward()
optimizer.step()
host, value = socket.gethostname(), loss.item()
print("rank", dist.get_rank(), "on", host)
"""


def three_cells(pool, model, names):
    """Train, write to the weights in the notebook, train again; what is seen after each cell."""
    seen = []
    pool.run(STEP)
    seen.append((weights_of(model), pool.pull("value")))
    with torch.no_grad():
        model[0].weight.mul_(0.5)
    names["scale"] = 2.0
    pool.run(STEP)
    seen.append((weights_of(model), pool.pull("value")))
    pool.run("value = float(sum(p.double().sum() for p in model.parameters()))")
    seen.append((weights_of(model), pool.pull("value")))
    return seen


def cell_live(hostfile):
    seen = []
    for settings in ({"hostfile": hostfile}, {"num_processes": 4}):
        model = make_model()
        names = {"model": model, "scale": 1.0}
        with Pool(namespace=names, **settings) as pool:
            seen.append(three_cells(pool, model, names))
            if "hostfile" not in settings:
                continue
            hosts = pool.pull("host")["host"]
            # On the same cluster: a process can be connected to one alone.
            beside = list(notebook_launcher(socket.gethostname, (), hostfile=hostfile))
            try:
                pool.run("if dist.get_rank() == 2: raise KeyError(host)")
            except KeyError as error:
                failed = str(error)
            pool.run("dist.get_rank() * 10")
            status = str(pool.status())
    tell(hosts=hosts, remote=seen[0], local=seen[1], failed=failed, status=status, beside=beside)


def cell_filtered(hostfile, include):
    def visible():
        return socket.gethostname(), os.environ.get("CUDA_VISIBLE_DEVICES")

    # Set in the notebook, it reaches the hosts; the named slots are stronger.
    os.environ["CUDA_VISIBLE_DEVICES"] = "7"
    config = RunConfig(hostfile=hostfile, include=include, device="cpu")
    launched = notebook_launcher(visible, (), config=config)
    with Pool(config=config) as pool:
        pool.run("import os\nvisible = os.environ.get('CUDA_VISIBLE_DEVICES')")
        tell(launched=list(launched), pool=pool.pull("visible")["visible"])


def hold_and_wait(seen):
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    held = b"x" * (rank * 100 << 20)
    deadline = time.monotonic() + 90
    # Rank 2 computes until the notebook has seen all; the others wait for it.
    while rank == 2 and not Path(seen).exists() and time.monotonic() < deadline:
        sum(range(10_000))
    dist.barrier()
    return len(held)


def cell_weighed(hostfile, folder):
    seen, boards, doings = Path(folder, "seen"), [], {rank: set() for rank in range(4)}
    look = Dashboard.poll

    def noting_look(updater, watched):
        # As where somebody looks at the output: in a notebook, or at a terminal.
        updater._is_wanted = True
        look(updater, watched)
        ranks = updater.board.ranks
        for rank, rank_doings in doings.items():
            rank_doings.add(ranks[rank].doing)
        waiting = "barrier" in ranks[3].doing and "barrier" in ranks[1].doing
        if waiting and all(ranks[rank].memory.rss for rank in range(4)):
            boards.append([ranks[rank].memory.rss for rank in range(4)])
            seen.touch()

    Dashboard.poll = noting_look
    held = list(notebook_launcher(hold_and_wait, (str(seen),), hostfile=hostfile))
    tell(held=held, bytes=boards[0], doings=sorted(doings[2]))


def cell_refused(place):
    started = time.monotonic()
    try:
        notebook_launcher(hang, (), **on(place))
    except Exception as error:
        tell(kind=type(error).__name__, text=str(error), seconds=time.monotonic() - started)


if __name__ == "__main__":
    for name in sys.argv[1].split("+"):
        globals()[f"cell_{name}"](*sys.argv[2:])
