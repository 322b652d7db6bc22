"""End a process that waits for ever for one that has failed or ended.

Over gloo such a wait fails within a moment. On CUDA it does not: the device waits in a kernel of NCCL, and Python waits for the
device, where it hears neither of the others nor of signals. So a thread listens beside it.
"""

from __future__ import annotations

import os
import sys
import threading
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any

import torch.distributed as dist

from recollect._torch_parallel import meeting_place
from recollect.lab.train.last_words import LastWords
from recollect.ranks.group import Ranks

__all__ = ["PeerWatch"]

_EVERY_S = 1.0
# What waits for an exchange over gloo raises within a moment, and says more.
_PATIENCE_S = 5.0
# All have met just before; only a machine that is very busy, or an end in between, makes one of them late.
_LATEST_S = 20.0
_EXIT_ERROR = 2  # as the command line's
_PROC = Path("/proc")


class PeerWatch:
    """In a with-block, ends this process soon after another one of the block has failed or ended, unless it leaves the block.

    Args:
        key: under which all processes of the block meet at their store.
        last_words: theirs.
        ranks: the processes.
    """

    def __init__(self, key: str, last_words: LastWords, ranks: Ranks) -> None:
        self._key, self._last_words = key, last_words
        self._rank = dist.get_rank()
        self._entered_keys = {rank: f"{key}/entered/{rank}" for rank in ranks.ranks}
        # The other one may be waiting, too.
        self._store = _own_connection()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="PeerWatch", daemon=True)

    def __enter__(self) -> PeerWatch:
        if (place := _host()) is not None and self._store.has_extended_api():
            self._store.append(f"{self._key}/processes/{place}", f"{self._rank} {os.getpid()} {_begin(os.getpid())}\n")
        self._store.set(self._entered_keys[self._rank], "")
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_over.set()
        self._thread.join(_EVERY_S)
        # The process that holds the store may have ended; then none asks.
        with suppress(dist.DistError):
            if kind is None:
                meeting_place().set(f"{self._key}/done/{self._rank}", "")
            # It ends with the first one, unless torchrun has it: not before the last one has come to it.
            if self._rank == 0:
                meeting_place().wait(list(self._entered_keys.values()), timedelta(seconds=_LATEST_S))

    def _watch(self) -> None:
        text = None
        try:
            while text is None:
                if self._is_over.wait(_EVERY_S):
                    return
                if self._last_words.is_alarm(self._store) or self._has_lost_one():
                    # Those that ended because they lost another may be heard before that one.
                    text = self._last_words.hear(self._store)
        except RuntimeError:
            # The store is gone: with the process that held it, or at the end.
            return
        if not self._is_over.wait(_PATIENCE_S):
            sys.stderr.write(f"Error: {text}\n")
            sys.stderr.flush()
            os._exit(_EXIT_ERROR)

    def _has_lost_one(self) -> bool:
        """Whether a process of the block on this machine has ended within it."""
        here = f"{self._key}/processes/{_host()}"
        if not self._store.check([here]):
            return False
        for line in self._store.get(here).decode().splitlines():
            rank, pid, begin = line.split()
            if _begin(int(pid)) != begin and not self._store.check([f"{self._key}/done/{rank}"]):
                return True
        return False


def _own_connection() -> Any:
    """Return another connection to the store, or fail soon.

    Where the store is gone, PyTorch tries twice for as long as an exchange may take, which is 30 minutes unless told.
    """
    store = meeting_place()
    usual = store.timeout
    store.set_timeout(timedelta(seconds=_LATEST_S))
    try:
        own = store.clone()
    finally:
        store.set_timeout(usual)
    own.set_timeout(usual)
    return own


def _host() -> str | None:
    """Return a name for what has process ids of its own; None where they cannot be looked up."""
    try:
        boot = (_PROC / "sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {(_PROC / 'self/ns/pid').readlink()}"
    except OSError:
        return None


def _begin(pid: int) -> str:
    """Return when a process began, which tells it from a later one of its number; "" if it has ended."""
    try:
        # The name, in parentheses, may have spaces.
        state, *fields = (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if state in "ZX" else fields[18]
