"""What all tests share."""

import os
import platform
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pytest

from set_aside import has_loaded_libraries, set_aside

_LAST_PATH = pytest.StashKey[Path]()


def pytest_configure(config: pytest.Config) -> None:
    # With `-s`, standard error is a terminal.
    os.environ["RECOLLECT_PROGRESS"] = "0"
    # Hypothesis asks the collector who holds a random number generator; of frozen objects it cannot know.
    config.addinivalue_line("filterwarnings", "ignore:It looks like `register_random` was passed")


def pytest_sessionstart(session: pytest.Session) -> None:
    """Note in the results, for `scripts/versions`, with which versions the tests ran."""
    for plugin in session.config.pluginmanager.get_plugins():
        if type(plugin).__name__ == "LogXML":
            plugin.add_global_property("version:Python", platform.python_version())
            for name in ("torch", "transformers", "numpy"):
                plugin.add_global_property(f"version:{name}", version(name).partition("+")[0])


def pytest_make_parametrize_id(val: object, argname: str) -> str | None:
    """Name bytes by their argument: compressed ones can hold the time, and all processes must collect the same names."""
    return argname if isinstance(val, bytes) else None


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Set aside what libraries and the tests of other files made: their caches would count as alive beside a step."""
    if item.path != item.config.stash.get(_LAST_PATH, None) or has_loaded_libraries():
        item.config.stash[_LAST_PATH] = item.path
        set_aside()


# These compare plans with the best that there are, or with pages.
_WHOLE_SEARCHES = ("planning", "test_bound.py", "test_stale.py", "house")


@pytest.fixture(scope="module", autouse=True)
def searches(request: pytest.FixtureRequest) -> Iterator[None]:
    """Have searches for plans try fewer options where no test asks how good plans are."""
    with pytest.MonkeyPatch.context() as patch:
        if not set(_WHOLE_SEARCHES) & set(request.path.parts):
            from short_searches import SETTINGS  # Here: to import the planner takes a second.

            for name, value in SETTINGS.items():
                patch.setattr(f"recollect.planning.chain_solver.{name}", value)
        yield


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    """Let nothing that was compiled before a test, or in it, be found again, and count compilations from zero."""
    import torch._dynamo.utils  # Here: few tests need the compiler, which takes a second to import.

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()
