from __future__ import annotations

from typing import Any

import pytest
import torch

from nbaccel import PartialState, find_executable_batch_size, notebook_launcher, utils
from nbaccel.errors import ConfigError, NothingFits


def out_of_memory() -> None:
    """What torch raises on this machine, from its own mouth."""
    torch.empty(1 << 50, dtype=torch.uint8)


def test_batch_sizes_shrink_by_a_tenth_until_one_fits() -> None:
    tried: list[int] = []

    @find_executable_batch_size(starting_batch_size=100)
    def train(batch_size: int, name: str, *, rate: float) -> Any:
        tried.append(batch_size)
        if batch_size > 75:
            out_of_memory()
        return batch_size, name, rate

    assert train("me", rate=0.1) == (72, "me", 0.1)
    assert train("you", rate=0.2) == (72, "you", 0.2)  # begins anew
    assert tried == [100, 90, 81, 72] * 2


@pytest.mark.parametrize(
    "said",
    [
        "CUDA out of memory. Tried to allocate 2 GiB.",
        "MPS backend out of memory (MPS allocated: 1 GiB)",
        "XPU out of memory.",
        "CPU out of memory.",
        "NPU out of memory. Tried to allocate",
        "RESOURCE_EXHAUSTED: Out of memory allocating",
        "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED.",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes.",
    ],
)
def test_every_backends_words_are_understood(said: str) -> None:
    def train(batch_size: int) -> int:
        if batch_size > 90:
            raise RuntimeError(said)
        return batch_size

    assert find_executable_batch_size(train, starting_batch_size=100)() == 90


def test_the_next_size_may_be_chosen_and_the_decorator_be_bare() -> None:
    tried: list[int] = []

    def train(batch_size: int) -> int:
        tried.append(batch_size)
        if batch_size > 10:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.")
        return batch_size

    halve = find_executable_batch_size(
        train, starting_batch_size=40, reduce_batch_size_fn=lambda size: size // 2
    )
    assert halve() == 10
    assert tried == [40, 20, 10]
    assert find_executable_batch_size(train)() <= 10
    assert halve.__name__ == "train"


@pytest.mark.parametrize(
    ("start", "said", "error", "words", "expected"),
    [
        (3, "CPU out of memory.", NothingFits, "from 3 down to 1", [3, 2, 1]),
        (8, "shapes cannot be multiplied", RuntimeError, "shapes", [8]),
        (99, "CPU out of memory.", RuntimeError, "out of memory", [99]),  # it does not shrink
    ],
)
def test_where_nothing_fits_or_something_else_is_wrong_it_is_said(
    start: int, said: str, error: type[Exception], words: str, expected: list[int]
) -> None:
    tried: list[int] = []
    shrink = None if start < 99 else (lambda size: size)

    @find_executable_batch_size(starting_batch_size=start, reduce_batch_size_fn=shrink)
    def train(batch_size: int) -> None:
        tried.append(batch_size)
        raise RuntimeError(said)

    with pytest.raises(error, match=words):
        train()
    assert tried == expected


def test_a_batch_size_from_the_caller_or_nowhere_to_put_it_is_a_mistake() -> None:
    @find_executable_batch_size(starting_batch_size=4)
    def train(batch_size: int, name: str) -> None:
        raise AssertionError("it must not run")

    with pytest.raises(TypeError, match=r"Call it as train\(name\)"):
        train(128, "me")
    with pytest.raises(TypeError, match="batch_size"):
        train(name="me", batch_size=128)
    with pytest.raises(ConfigError, match="takes no argument"):
        find_executable_batch_size(lambda: None)

    @find_executable_batch_size(starting_batch_size=4)
    def free(batch_size: int, *more: Any) -> Any:
        return batch_size, more

    assert free(1, 2, 3) == (4, (1, 2, 3))


def test_memory_is_released_and_collectives_work_without_an_accelerator() -> None:
    assert [*utils.release_memory(torch.ones(3), torch.ones(3))] == [None, None]

    def body() -> Any:
        rank = PartialState().process_index
        generator = torch.Generator().manual_seed(rank)
        utils.synchronize_rng_states(["generator"], generator)
        objects = [rank, "x"] if rank == 0 else [None, None]
        utils.wait_for_everyone()
        return {
            "gather": utils.gather(torch.tensor([rank])).tolist(),
            "objects": utils.gather_object([f"p{rank}"]),
            "reduce": utils.reduce(torch.tensor([float(rank)])).tolist(),  # its default is the mean
            "broadcast": utils.broadcast(torch.tensor([rank + 5])).tolist(),
            "list": utils.broadcast_object_list(objects),
            "padded": utils.pad_across_processes(torch.ones(1 + rank)).tolist(),
            "random": int(torch.randint(1 << 30, (1,), generator=generator)),
        }

    first, second = notebook_launcher(body, num_processes=2)
    assert first.pop("padded") == [1.0, 0.0]
    assert second.pop("padded") == [1.0, 1.0]
    assert first == second
    assert first.pop("random") >= 0
    assert first == {
        "gather": [0, 1],
        "objects": ["p0", "p1"],
        "reduce": [0.5],
        "broadcast": [5],
        "list": [0, "x"],
    }
