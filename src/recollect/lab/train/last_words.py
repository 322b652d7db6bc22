"""Notes that the processes of a run leave for each other, at the store at which all met, when one of them fails."""

from __future__ import annotations

import json
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from recollect.ranks.group import Ranks

__all__ = ["LastWords"]

# The others notice within a moment, unless they are in the middle of a long computation.
_PATIENCE_S = 5.0


class LastWords:
    """What each of some processes says at last.

    Args:
        key: under which they meet.
        ranks: the processes.
    """

    def __init__(self, key: str, ranks: Ranks) -> None:
        self._keys = {rank: f"{key}/last words/{rank}" for rank in ranks.ranks}
        self._heard_keys = {rank: f"{key}/heard/{rank}" for rank in ranks.ranks}
        self._alarm_key = f"{key}/alarm"
        self._rank = dist.get_rank()

    def exchange(self, store: Any, text: str, *, is_lost: bool) -> str | None:
        """Leave a note, have the others look, and return who failed or ended first, in words; None if that is not known.

        Args:
            store: where all met.
            text: why this process ends.
            is_lost: it ends because another one has.
        """
        cause = None
        # The process that holds the store may have ended, or one of the others.
        with suppress(dist.DistError):
            store.set(self._keys[self._rank], _note(text, is_lost=is_lost))
            cause = self._hear(store)
            # The store ends with the process that holds it, the first one unless torchrun has it.
            if self._rank == 0:
                there = [key for rank, key in self._heard_keys.items() if store.check([self._keys[rank]])]
                store.wait(there, timedelta(seconds=_PATIENCE_S))
        return cause

    def hear(self, store: Any) -> str | None:
        """Leave a note that this process is still there, unless it has left one, and return what `exchange` does."""
        store.compare_set(self._keys[self._rank], "", _note("waits for the others", is_lost=True))
        return self._hear(store)

    def _hear(self, store: Any) -> str | None:
        store.set(self._alarm_key, "")
        cause = self._cause(store)
        store.set(self._heard_keys[self._rank], "")
        return cause

    def is_alarm(self, store: Any) -> bool:
        """Whether some process has left a note."""
        return bool(store.check([self._alarm_key]))

    def _cause(self, store: Any) -> str | None:
        """Wait a little for the notes of all, and read them."""
        keys = dict(self._keys)
        try:
            store.wait(list(keys.values()), timedelta(seconds=_PATIENCE_S))
        except dist.DistStoreError:
            keys = {rank: key if store.check([key]) else "" for rank, key in keys.items()}
        notes = {rank: json.loads(store.get(key)) if key else None for rank, key in keys.items()}
        for rank, note in notes.items():
            if note is not None and not note["is_lost"]:
                return f"rank {rank} of {len(notes)} failed, so that none goes on: {note['text']}"
        for rank, note in notes.items():
            if note is None:
                return (
                    f"rank {rank} of {len(notes)} has ended without a word, so that none goes on: it was killed, or crashed. "
                    "Look at the last lines of its output, and at what the system says (out of memory?)."
                )
        return None


def _note(text: str, *, is_lost: bool) -> str:
    return json.dumps({"is_lost": is_lost, "text": text})
