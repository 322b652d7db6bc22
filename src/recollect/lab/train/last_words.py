"""Notes that the processes of a run leave for each other, at the store at which all met, when one of them fails."""

from __future__ import annotations

import json
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
        self._alarm_key = f"{key}/alarm"
        self._rank = dist.get_rank()

    def leave(self, store: Any, text: str, *, is_lost: bool) -> None:
        """Leave a note, and have the others look.

        Args:
            store: where all met.
            text: why this process ends.
            is_lost: it ends because another one has.
        """
        store.set(self._keys[self._rank], _note(text, is_lost=is_lost))
        store.set(self._alarm_key, "")

    def leave_sign(self, store: Any) -> None:
        """Leave a note that this process is still there, unless it has left one, and have the others look."""
        store.compare_set(self._keys[self._rank], "", _note("waits for the others", is_lost=True))
        store.set(self._alarm_key, "")

    def is_alarm(self, store: Any) -> bool:
        """Whether some process has left a note."""
        return bool(store.check([self._alarm_key]))

    def cause(self, store: Any) -> str | None:
        """Wait a little for the notes of all, and return who failed or ended first, in words; None if that is not known."""
        keys = dict(self._keys)
        try:
            store.wait(list(keys.values()), timedelta(seconds=_PATIENCE_S))
        except RuntimeError:
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
