"""Lines of libraries that mean no harm: counted, folded, and never mistaken for others."""

from __future__ import annotations

import time

import pytest

from nbaccel import WorkerFailed, notebook_launcher
from nbaccel.output.panel.facts import LibraryMessages, SeenWarnings

HARMLESS = [
    "[Gloo] Rank 0 is connected to 1 peer ranks. Expected number of connected peer ranks is : 1",
    "[W1125 10:15:30.123456789 socket.cpp:767] [c10d] The hostname of the client socket cannot be "
    "retrieved. err=-3",
    "[W socket.cpp:663] [c10d] The remote address of the client socket cannot be retrieved. err=1",
    "[rank1]:[W1125 10:15:30.1 ProcessGroupNCCL.cpp:1250] Warning: WARNING: destroy_process_group()"
    " was not called before program exit, which can leak resources.",
    "[rank0]:[W1125 10:15:30.1 ProcessGroupNCCL.cpp:4718] [PG ID 0 PG GUID 0 Rank 0]  using GPU 0 "
    "as device used by this process is currently unknown. This can potentially cause a hang",
    "[W404 00:15:21.693690333 ProcessGroupNCCL.cpp:4561] [PG ID 0 PG GUID 0]  using GPU 0 to "
    "perform barrier as devices used by this process are currently unknown. This can potentially",
]
OTHERS = [
    "[Gloo] Rank 0 is connected to 0 peer ranks. Expected number of connected peer ranks is : 1",
    "[W1125 10:15:30.1 socket.cpp:767] [c10d] The client socket has failed to connect",
    "The hostname of the client socket cannot be retrieved. err=-3",
    "[1, 2, 3]",
    "",
    "loss 0.3",
]


@pytest.mark.parametrize("line", HARMLESS)
def test_a_harmless_line_is_taken(line):
    messages = LibraryMessages()
    assert list(messages.take_from(0, ["before", line, "after"])) == ["before", "after"]
    assert (messages.count, messages.lines()) == (1, [f"[0] {line}"])


def test_equal_messages_are_one_line_and_counted_each_and_what_is_kept_is_bounded():
    messages = LibraryMessages()
    assert list(messages.take_from(0, OTHERS)) == OTHERS
    assert (messages.count, messages.lines()) == (0, [])
    for rank in (2, 0, 1, 0):
        messages.take_from(rank, [HARMLESS[1]])
    assert messages.count == 4
    assert messages.lines() == [f"[0-2] {HARMLESS[1]}"]
    for number in range(10_000):
        messages.take_from(0, [f"{HARMLESS[1]}{number}{'x' * 100_000 if number < 3 else ''}"])
    assert messages.count == 10_004
    assert sum(map(len, messages.lines())) < 200_000


def test_what_fails_tells_them_in_full_and_what_does_well_does_not(capfd):
    def print_and_fail() -> None:
        print(HARMLESS[1], flush=True)
        raise ValueError("diverged")

    with pytest.raises(WorkerFailed, match="diverged") as caught:
        notebook_launcher(print_and_fail, (), 2)
    lines = str(caught.value).splitlines()
    place = lines.index("Messages of libraries:")
    assert lines[place + 1].endswith(f"] {HARMLESS[1]}")
    assert "c10d" not in capfd.readouterr().out
    notebook_launcher(print, (f"{HARMLESS[1]}\nmine",), 2)
    assert capfd.readouterr().out == "[0-1] mine\n"


def test_a_warning_is_found_wherever_it_stands_and_in_little_time():
    for line in (
        "/a/b.py:12: UserWarning: it is late",
        "UserWarning: it is late",
        "[W1125 reducer.cpp:1] UserWarning: it is late",
        "<ipython-input-3>:1: UserWarning: it is late",
    ):
        seen = SeenWarnings()
        seen.take_in(1, ["before", line, "  warnings.warn('it is late')"])
        assert list(seen.by_text) == ["UserWarning: it is late"], line
    seen = SeenWarnings()
    began = time.perf_counter()
    seen.take_in(0, ["Warning: x", "my_warning: 3", "UserWarning:", "no Warnings: 0"])
    seen.take_in(0, ["epoch 3, loss 0.27, all is well"] * 1_000_000)
    assert not seen.by_text
    assert time.perf_counter() - began < 2.0


OF_PACKAGES = [
    "/x/lib/python3.11/site-packages/torch/utils/data/dataloader.py:775: UserWarning: 'pin_memory' "
    "argument is set as true but no accelerator is found",
    "W1127 12:22:26.947000 3454 torch/utils/_pytree.py:630] <enum 'KernelPreference'> is an Enum",
    "[2026-11-27 12:22:29,727] [WARNING] [real_accelerator.py:213:get_accelerator] Setting "
    "accelerator to CPU.",
    "[rank0]:[W1127 13:30:58.917060584 reducer.cpp:1529] Warning: find_unused_parameters=True was "
    "specified in DDP constructor, but did not find any unused parameters",
    "[transformers] `loss_type=None` was set in the config but it is unrecognized.",
]


@pytest.mark.parametrize("line", OF_PACKAGES)
def test_what_packages_say_is_folded_where_there_is_a_panel(line):
    assert list(LibraryMessages().take_from(0, [line])) == [line]
    messages = LibraryMessages(has_panel=True)
    assert list(messages.take_from(0, ["before", line])) == ["before"]
    assert messages.lines() == [f"[0] {line}"]


def test_a_warning_goes_with_its_line_of_code_and_the_user_s_own_stays():
    messages = LibraryMessages(has_panel=True)
    own = ["/home/me/train.py:3: UserWarning: mine", "  warnings.warn('mine')"]
    assert list(messages.take_from(0, [*own, OF_PACKAGES[0]])) == own
    assert list(messages.take_from(1, ["  indented"])) == ["  indented"]
    assert list(messages.take_from(0, ["  mine"], "stdout")) == ["  mine"]
    assert list(messages.take_from(0, ["  warnings.warn(", "  result"])) == ["  result"]
    assert messages.count == 1
