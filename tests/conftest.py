"""For every test: nothing may leak out of it; without its hardware it is skipped, with a reason."""

from __future__ import annotations

import gc
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from tests import hardware, leak_police, selection
from tests.clock import Clock
from tests.needs import HAS_DEEPSPEED_ROW


def pytest_configure(config: pytest.Config) -> None:
    # A job in the background of a shell, or under nohup, is started with interrupts ignored, and so
    # would be every process that the tests start; those that press Stop need what a kernel has.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if HAS_DEEPSPEED_ROW:
        from tests.deepspeed import operations

        operations.use_those_of_the_environment()
    leak_police.start_session()
    config.pluginmanager.register(WiderFixtures(config))


def pytest_unconfigure(config: pytest.Config) -> None:
    leak_police.end_session()


def pytest_addoption(parser: pytest.Parser) -> None:
    selection.add_option(parser)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    return True if selection.is_ignored(collection_path, config) else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    selection.deselect(items, config)
    hardware.skip_what_cannot_run(items)
    # First, because they take longest, in one process: see `pytest_xdist_make_scheduler`.
    items.sort(key=lambda item: not item.nodeid.startswith("tests/hosts/"))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Files go to processes whole; those that start Ray clusters to one, as these wait in turn."""
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            return "tests/hosts" if file.startswith("tests/hosts/") else file

    return Scheduling(config, log)


# A machine that does something else at the same time makes no example wrong. The examples are the
# same in each run, so that none refuses a landing that has nothing to do with it: new ones are
# looked for by `make full`, with --hypothesis-profile=explore.
SETTINGS: dict[str, Any] = {
    "deadline": None,
    "suppress_health_check": [hypothesis.HealthCheck.too_slow],
}
hypothesis.settings.register_profile("explore", **SETTINGS)
hypothesis.settings.register_profile("nbaccel", derandomize=True, **SETTINGS)
hypothesis.settings.load_profile("nbaccel")
FEW_OBJECTS = 50_000
HAS_FROZEN = pytest.StashKey[bool]()
SEEN_LAST = pytest.StashKey["leak_police.World | None"]()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Take what there is out of the garbage collector's sight, so that it looks at a test's alone.

    With all packages imported that tests train beside, there are millions of objects: a second for
    each collection that nbaccel or a test asks for, and as much for those that Python makes.
    """
    selection.skip_if_late(item)
    if len(gc.get_objects()) > FEW_OBJECTS:
        # A launch that forks brings all of it back; what was made since is young.
        was_brought_back = gc.get_freeze_count() == 0 and item.config.stash.get(HAS_FROZEN, False)
        gc.collect(1 if was_brought_back else 2)
        gc.freeze()
        item.config.stash[HAS_FROZEN] = True


class WiderFixtures:
    """Between two tests only fixtures of a wider scope may bring something or take it away.

    A plugin, because pytest tells hooks in a `conftest.py` of a folder nothing of a session's.
    """

    def __init__(self, config: pytest.Config) -> None:
        self._config = config

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[Any]) -> Any:
        self._forget_what_was_seen(fixturedef)
        return (yield)

    def pytest_fixture_post_finalizer(self, fixturedef: pytest.FixtureDef[Any]) -> None:
        self._forget_what_was_seen(fixturedef)

    def _forget_what_was_seen(self, fixturedef: pytest.FixtureDef[Any]) -> None:
        if fixturedef.scope != "function":
            self._config.stash[SEEN_LAST] = None


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture(autouse=True)
def leaves_nothing_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail the test that leaves a process, thread, variable, port, segment or handler behind.

    It is set up before a test's own function-scoped fixtures and torn down after them, so what a
    fixture cleans up is no leak. What a module- or session-scoped fixture holds was there before.
    """
    # To look takes longer than many a test, so it is done once between two of them.
    before = request.config.stash.get(SEEN_LAST, None) or leak_police.observe()
    yield
    watched = {"memfds"} if request.node.get_closest_marker("no_memfd_growth") else set()
    found, now = leak_police.find_leaks(before, also=watched)
    request.config.stash[SEEN_LAST] = None if found else now
    if found:
        leak_police.clean_up(before)
        pytest.fail("the test left behind:\n  " + "\n  ".join(found), pytrace=False)
