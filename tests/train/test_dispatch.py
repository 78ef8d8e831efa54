"""Process 0 reads and the others get their part; what cannot be parted is refused everywhere."""

from __future__ import annotations

import re

import pytest
import torch
from torch.utils.data import DataLoader

from nbaccel import notebook_launcher
from nbaccel.train.gradient import GradientState
from tests.train.data import Numbers, here, lists


def rows(length, size, settings):
    data = Numbers(length)
    drop = settings.pop("drop_last", False)
    state = GradientState()
    loader = here(DataLoader(data, batch_size=size, drop_last=drop), state=state, **settings)
    found = [(batch.tolist(), state.remainder) for batch in loader]
    return [batch for batch, _ in found], [r for _, r in found], len(loader), len(data.read)


DISPATCH = {"dispatch_batches": True}
TABLE = [
    ((10, 3, {}), ([[0, 1, 2], [6, 7]], [[3, 4, 5], [8, 9]]), [4, 4]),
    ((10, 3, {"drop_last": True}), ([[0, 1, 2]], [[3, 4, 5]]), [6]),
    ((10, 4, {"split_batches": True}), ([[0, 1], [4, 5], [8]], [[2, 3], [6, 7], [9]]), [2, 2, 2]),
    ((9, 4, {"split_batches": True}), ([[0, 1], [4, 5], [8]], [[2, 3], [6, 7], [0]]), [1, 1, 1]),
    ((7, 3, {}), ([[0, 1, 2], [6]], [[3, 4, 5], [0]]), [1, 1]),
    ((1, 3, {}), ([[0]], [[0]]), [1]),
    ((0, 3, {}), ([], []), []),
]


def test_rows_are_shared_as_the_table_says():
    def several():
        return [rows(length, size, DISPATCH | how) for (length, size, how), _, _ in TABLE]

    first, second = notebook_launcher(several, (), 2)
    for number, (case, expected, remainders) in enumerate(TABLE):
        one, other = first[number], second[number]
        assert (one[0], other[0]) == expected, case
        assert one[1] == other[1] == remainders, case
        assert one[2] == other[2] == len(remainders), case
        assert other[3] == 0, "only process 0 reads"


class Texts(Numbers):
    def __getitem__(self, index):
        return {"number": index, "text": str(index)}


def collate(batch):
    return {
        "number": torch.tensor([b["number"] for b in batch]),
        "texts": [b["text"] for b in batch],
    }


def cut(batch, rows, *, process_index, num_processes):
    return {"number": batch["number"][rows], "who": (process_index, num_processes)}


def cut_by_hand():
    data = DataLoader(Texts(4), batch_size=4, collate_fn=collate)
    loader = here(data, dispatch_batches=True, split_batches=True, slice_fn=cut)
    return [(batch["number"].tolist(), batch["who"]) for batch in loader]


def test_a_function_of_the_users_own_cuts_batches():
    assert notebook_launcher(cut_by_hand, (), 2) == [[([0, 1], (0, 2))], [([2, 3], (1, 2))]]


def nested():
    class Both(Numbers):
        def __getitem__(self, index):
            return {"pair": (torch.tensor(index), torch.tensor([index, 0.5])), "none": None}

    def joined(batch):
        pair = tuple(
            torch.stack(column) for column in zip(*(b["pair"] for b in batch), strict=True)
        )
        return {"pair": pair, "scale": 2.0, "none": None}

    loader = here(DataLoader(Both(6), batch_size=2, collate_fn=joined), dispatch_batches=True)
    return [
        (b["pair"][0].tolist(), b["pair"][1].shape, b["scale"], b["none"], type(b["pair"]))
        for b in loader
    ]


def test_batches_of_any_structure_arrive_as_they_were():
    found = notebook_launcher(nested, (), 2)
    for rank, batches in enumerate(found):
        first, last = batches
        assert first == ([2 * rank, 2 * rank + 1], (2, 2), 2.0, None, tuple)
        assert last == ([4 + rank], (1, 2), 2.0, None, tuple)


class Growing(Numbers):
    def __getitem__(self, index):
        return torch.zeros(index)


class Broken(Numbers):
    def __getitem__(self, index):
        if index == 5:
            raise LookupError(f"no sample {index} on this disk")
        return torch.tensor(index)


class Uneven:
    drop_last = False

    def __iter__(self):
        return iter([[0, 1, 2], [3, 4]])

    def __len__(self):
        return 2


def telling(make, split=False):
    """The error that this rank gets."""
    try:
        lists(here(make(), dispatch_batches=True, split_batches=split))
    except Exception as error:  # the parent looks at whatever it is
        return type(error).__name__, str(error)
    return None


def short_in_the_middle():
    data = DataLoader(Numbers(8), batch_sampler=Uneven())
    data.batch_sampler.batch_size = 4
    return data


@pytest.mark.parametrize(
    ("make", "split", "message"),
    [
        (lambda: DataLoader(Growing(4)), False, r"do not fit together.*dispatch_batches=False"),
        (lambda: DataLoader(Texts(4), 2, collate_fn=collate), False, r"'0' \(str\).*collate_fn"),
        (short_in_the_middle, True, "^A batch of 3 samples does not divide equally between 2 proc"),
    ],
)
def test_what_cannot_be_cut_is_refused_on_every_process(make, split, message):
    found = notebook_launcher(telling, (make, split), 2)
    assert found[0] == found[1]
    assert found[0][0] == "ConfigError"
    assert re.search(message, found[0][1])


def test_when_process_0_cannot_read_the_others_hear_why():
    first, second = notebook_launcher(telling, (lambda: DataLoader(Broken(8), 2),), 2)
    assert first == ("LookupError", "no sample 5 on this disk")
    assert second[0] == "CollectiveMismatch"
    assert "LookupError: no sample 5 on this disk" in second[1]
