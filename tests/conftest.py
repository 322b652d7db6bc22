"""What all tests share."""

import gc
import os
import platform
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pytest

# Of modules that were loaded meanwhile: fewer than a library has.
_MANY_MODULES = 50

_LAST_PATH = pytest.StashKey[Path]()
_NUM_MODULES = pytest.StashKey[int]()


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
    """Leave what libraries and the tests of other files made out of garbage collections.

    The meter collects garbage before it measures and looks at every Python object that is there: with PyTorch and Transformers
    loaded, 0.3 s a measurement instead of 0.05 s. Tensors from before the test are out of sight too, which changes no growth;
    those that another file's caches still hold would count as alive beside a step.
    """
    stash = item.config.stash
    if item.path != stash.get(_LAST_PATH, None) or len(sys.modules) > stash[_NUM_MODULES] + _MANY_MODULES:
        stash[_LAST_PATH], stash[_NUM_MODULES] = item.path, len(sys.modules)
        gc.collect()
        gc.freeze()


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    """Let nothing that was compiled before a test, or in it, be found again, and count compilations from zero."""
    import torch._dynamo.utils  # Here: few tests need the compiler, which takes a second to import.

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()
