"""Say which process of a run failed or ended, in all the others.

When a process ends, the next exchange with it fails in the others with a message of gloo or NCCL that names an address. So each
process that fails leaves a note about why, in the store at which all met, and reads the notes of the others: a process that
failed independently is the cause, and one without a note has ended silently.
"""

import itertools
import json
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from recollect._torch_parallel import meeting_place
from recollect.errors import RecollectError, RecordError
from recollect.ranks.group import Ranks

_EVERY_S = 1.0
# A process that waits for an exchange over gloo soon raises by itself, with more detail.
_PATIENCE_S = 5.0
# All have met just before; only a very busy machine, or an end in between, delays one of them.
_LATEST_S = 20.0
_EXIT_ERROR = 2  # as the command line's
_PROC = Path("/proc")
# The others notice within a moment, unless they are in the middle of a long computation.
_ANSWER_S = 5.0
# Messages of a failed exchange from gloo, NCCL and `recollect.ranks`.
_LOST = ("gloo", "NCCL", "onnection closed", "onnection reset", "got no answer from the others")
_runs = itertools.count()


@contextmanager
def named_errors(ranks: Ranks) -> Iterator[None]:
    """Let an error in the block name the process where it began; each process of the run calls this. See `peer_watch`.

    It is a RecordError if a different process failed, or has ended, and else the error of this process itself.
    """
    last_words = LastWords(f"recollect/run/{next(_runs)}", ranks)
    try:
        with peer_watch(last_words):
            yield
    except Exception as error:
        own: BaseException = error
        # PyTorch's pipelines wrap an error of a stage in their own; an error of recollect is enough by itself.
        while own.__cause__ is not None and not isinstance(own, RecollectError):
            own = own.__cause__
        text = str(own) if isinstance(own, RecollectError) else f"{type(own).__name__}: {own}"
        is_lost = isinstance(own, dist.DistError) or any(word in str(own) for word in _LOST)
        cause = last_words.exchange(meeting_place(), text, is_lost=is_lost)
        if cause is None or not is_lost:
            raise
        raise RecordError(cause) from error


class LastWords:
    """Notes that processes leave for each other, at the store at which all met, when one of them fails."""

    def __init__(self, key: str, ranks: Ranks) -> None:
        self.key, self.ranks = key, ranks.ranks
        self._keys = {rank: f"{key}/last words/{rank}" for rank in ranks.ranks}
        self._heard_keys = {rank: f"{key}/heard/{rank}" for rank in ranks.ranks}
        self._alarm_key = f"{key}/alarm"
        self._rank = dist.get_rank()

    def exchange(self, store: Any, text: str, *, is_lost: bool) -> str | None:
        """Leave a note, have the others look, and return in words the process that failed or ended first; None if unknown."""
        cause = None
        # The process that holds the store may have ended, or one of the others.
        with suppress(dist.DistError):
            store.set(self._keys[self._rank], json.dumps({"is_lost": is_lost, "text": text}))
            cause = self._hear(store)
            # The store ends with the process that holds it, the first one unless torchrun has it.
            if self._rank == 0:
                there = [key for rank, key in self._heard_keys.items() if store.check([self._keys[rank]])]
                store.wait(there, timedelta(seconds=_ANSWER_S))
        return cause

    def hear(self, store: Any) -> str | None:
        """Leave a note that this process is still there, unless it has left one, and return the result of `exchange`."""
        store.compare_set(self._keys[self._rank], "", json.dumps({"is_lost": True, "text": "waits for the others"}))
        return self._hear(store)

    def _hear(self, store: Any) -> str | None:
        store.set(self._alarm_key, "")
        cause = self._cause(store)
        store.set(self._heard_keys[self._rank], "")
        return cause

    def is_alarm(self, store: Any) -> bool:
        return bool(store.check([self._alarm_key]))

    def _cause(self, store: Any) -> str | None:
        with suppress(dist.DistStoreError):
            store.wait(list(self._keys.values()), timedelta(seconds=_ANSWER_S))
        notes = {rank: json.loads(store.get(key)) if store.check([key]) else None for rank, key in self._keys.items()}
        for rank, note in notes.items():
            if note is not None and not note["is_lost"]:
                return f"rank {rank} of {len(notes)} failed, so none continues: {note['text']}"
        for rank, note in notes.items():
            if note is None:
                return (
                    f"rank {rank} of {len(notes)} has ended without a word, so none continues: it was killed, or crashed. "
                    "Look at the last lines of its output, and at what the system says (out of memory?)."
                )
        return None


@contextmanager
def peer_watch(last_words: LastWords) -> Iterator[None]:
    """In a with-block, end this process soon after any other of the block has failed or ended, unless it leaves the block.

    Over gloo a wait for a process that has failed or ended fails within a moment. On CUDA it does not: the device waits in a
    kernel of NCCL, and Python waits for the device, deaf to the others and to signals. So a thread
    listens in the background.
    """
    key, own, is_over, is_done = last_words.key, dist.get_rank(), threading.Event(), False
    entered_keys = {rank: f"{key}/entered/{rank}" for rank in last_words.ranks}
    # The other one may be waiting, too.
    store = _own_connection()
    if (place := _host()) is not None and store.has_extended_api():
        store.append(f"{key}/processes/{place}", f"{own} {os.getpid()} {_begin(os.getpid())}\n")
    store.set(entered_keys[own], "")
    thread = threading.Thread(target=_watch, args=(store, last_words, is_over), name="peer_watch", daemon=True)
    thread.start()
    try:
        yield
        is_done = True
    finally:
        is_over.set()
        thread.join(_EVERY_S)
        # The process that holds the store may have ended; then none asks.
        with suppress(dist.DistError):
            if is_done:
                meeting_place().set(f"{key}/done/{own}", "")
            # It ends with the first one, unless torchrun hosts it: not before the last one has arrived.
            if own == 0:
                meeting_place().wait(list(entered_keys.values()), timedelta(seconds=_LATEST_S))


def _watch(store: Any, last_words: LastWords, is_over: threading.Event) -> None:
    text = None
    try:
        while text is None:
            if is_over.wait(_EVERY_S):
                return
            if last_words.is_alarm(store) or _has_lost_one(store, last_words.key):
                # Those that ended because they lost a process may be heard before that one.
                text = last_words.hear(store)
    except RuntimeError:
        # The store is gone: with the process that held it, or at the end.
        return
    if not is_over.wait(_PATIENCE_S):
        sys.stderr.write(f"Error: {text}\n")
        sys.stderr.flush()
        os._exit(_EXIT_ERROR)


def _has_lost_one(store: Any, key: str) -> bool:
    """Whether a process of the block on this machine has ended within it."""
    here = f"{key}/processes/{_host()}"
    if not store.check([here]):
        return False
    for line in store.get(here).decode().splitlines():
        rank, pid, begin = line.split()
        if _begin(int(pid)) != begin and not store.check([f"{key}/done/{rank}"]):
            return True
    return False


def _own_connection() -> Any:
    """Return a new connection to the store, or fail soon.

    Where the store is gone, PyTorch tries for twice the timeout of an exchange, which is 30 minutes by default.
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
    """Return a name for the namespace of process ids; None where it cannot be looked up."""
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
