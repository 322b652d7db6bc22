"""Ranks that are threads of the test's own process, and talk over gloo as processes do: there within a tenth of a second.

Each has groups of its own, as in PyTorch's own tests. What a process has once, such as the global random generator, they share.
"""

import os
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Final, TypeVar
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed import multi_threaded_pg

from recollect.errors import RecollectError
from recollect.ranks.group import Group

__all__ = ["error_of", "run_on_threads"]

T = TypeVar("T")

_LONGEST_S: Final = 120


def run_on_threads(program: Callable[[Group], T], num_ranks: int = 2) -> list[T]:
    """Run a program on ranks, each with the group of all of them; return what each returned."""
    if not hasattr(multi_threaded_pg.ThreadLocalWorld, "comms"):
        pytest.skip("ranks in threads need a later PyTorch than 2.11")
    store = dist.HashStore()  # type: ignore[attr-defined]
    all_are_done = threading.Barrier(num_ranks, timeout=_LONGEST_S)

    def run(rank: int) -> T:
        longest = timedelta(seconds=_LONGEST_S)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks, timeout=longest)
        try:
            world = dist.group.WORLD
            assert world is not None
            result = program(Group(range(num_ranks), world))
            all_are_done.wait()
            return result
        except Exception:
            all_are_done.abort()
            raise
        finally:
            dist.destroy_process_group()

    with _groups_of_threads(), ThreadPoolExecutor(num_ranks) as threads:
        return list(threads.map(run, range(num_ranks)))


def error_of(action: Callable[[], object]) -> str:
    """Return the class and the text of the error that something raises; nothing if it raises none."""
    try:
        action()
    except RecollectError as error:
        return f"{type(error).__name__}: {error}"
    return ""


@contextmanager
def _groups_of_threads() -> Iterator[None]:
    c10d: Any = torch._C._distributed_c10d
    loopback = {"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {}
    with mock.patch.dict(os.environ, loopback):
        c10d._set_thread_isolation_mode(True)
        multi_threaded_pg._install_threaded_pg()
        try:
            yield
        finally:
            multi_threaded_pg._uninstall_threaded_pg()
            c10d._set_thread_isolation_mode(False)
