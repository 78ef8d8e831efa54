from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from nbaccel.base import spent_time
from nbaccel.base.spent_time import SpentTime, TimeAccount
from tests.clock import Clock


@pytest.fixture
def account(clock: Clock) -> TimeAccount:
    return TimeAccount(clock)


@pytest.fixture
def no_account() -> Iterator[None]:
    before = spent_time.present_account()
    spent_time.use_account(None)
    yield
    spent_time.use_account(before)


@pytest.fixture
def process_account(no_account: None) -> TimeAccount:
    return spent_time.open_account()


def test_time_is_counted_once(account, clock):
    account.begin()
    clock.now += 1  # computing
    account.enter("data")
    clock.now += 2
    account.enter("communication")  # the loader waits for another rank
    clock.now += 4
    account.exit()
    clock.now += 8
    account.exit()
    clock.now += 16
    spent = account.spent()
    assert spent == SpentTime(31.0, 10.0, 4.0)
    assert spent.computing_s == 17.0


def test_what_the_first_step_takes_more_than_the_second_is_a_start(account, clock):
    account.begin()
    for computing_s in (7.0, 2.0, 30.0):
        account.enter("data")
        clock.now += 1
        account.exit()
        clock.now += computing_s
        account.end_step()
    spent = account.spent()
    assert spent == SpentTime(42.0, 3.0, 0.0, starting_s=5.0)
    assert spent.computing_s == 34.0


def test_what_a_library_measures_is_counted_from_the_account_on(account, clock):
    seconds: list[float | None] = [7.0]
    account.add_exchange(lambda: seconds[-1])
    account.begin()
    clock.now += 10
    seconds.append(9.5)
    assert account.spent() == SpentTime(10.0, 0.0, 2.5)
    seconds.append(9.0)  # a mean of samples may fall
    assert account.spent() == SpentTime(10.0, 0.0, 2.5)
    seconds.append(None)
    assert account.spent() == SpentTime(10.0, 0.0, 2.5, is_partial=True)


def test_blocks_count_for_the_thread_that_opened_the_account(process_account):
    process_account.begin()

    def wait() -> None:
        with spent_time.communicating:
            time.sleep(0.05)

    waiting = threading.Thread(target=wait)
    waiting.start()
    waiting.join()
    spent = process_account.spent()
    assert spent.communication_s == 0.0
    wait()
    spent = process_account.spent()
    assert 0.05 <= spent.communication_s < spent.total_s


def test_a_block_that_raises_is_left(process_account):
    process_account.begin()
    with pytest.raises(ZeroDivisionError), spent_time.reading_data:
        _ = 1 / 0
    time.sleep(0.02)
    spent = process_account.spent()
    assert spent.data_s < 0.02
