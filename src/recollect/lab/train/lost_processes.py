"""Say which process of a run failed or ended, in all the others.

When a process ends, the next exchange with it fails in the others with a message of gloo or NCCL that names an address. So each
process that fails leaves a note about why, in the store at which all met, and reads the notes of the others: who failed
by itself is the cause, and who leaves no note has ended without a word.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from recollect._torch_parallel import meeting_place
from recollect.errors import RecollectError, RecordError
from recollect.ranks.group import Ranks

__all__ = ["named_errors"]

# Of an exchange that fails, in the words of gloo, NCCL and `recollect.ranks`.
_LOST = ("gloo", "NCCL", "onnection closed", "onnection reset", "got no answer from the others")
# The others notice within a moment, unless they are in the middle of a long computation.
_PATIENCE_S = 5.0

_runs = itertools.count()


@contextmanager
def named_errors(ranks: Ranks) -> Iterator[None]:
    """Let an error in the block name the process that it began in.

    Args:
        ranks: the processes of the run, in each of which this is called.

    Raises:
        RecordError: another process failed, or has ended.
        Exception: the error of this process itself.
    """
    number = next(_runs)
    try:
        yield
    except Exception as error:
        notes = _exchanged(f"recollect/last words/{number}", {"is_lost": _is_lost(error), "text": _text(error)}, ranks)
        if not _is_lost(error):
            raise
        of = f"of {len(ranks.ranks)}"
        for rank, note in notes.items():
            if note is not None and not note["is_lost"]:
                raise RecordError(f"rank {rank} {of} failed, so that none goes on: {note['text']}") from error
        for rank, note in notes.items():
            if note is None:
                raise RecordError(
                    f"rank {rank} {of} has ended without a word, so that none goes on: it was killed, or crashed. "
                    "Look at the last lines of its output, and at what the system says (out of memory?)."
                ) from error
        raise


def _exchanged(key: str, note: dict[str, Any], ranks: Ranks) -> dict[int, dict[str, Any] | None]:
    """Leave a note and return those of all processes; None for one that leaves none."""
    store = meeting_place()
    keys = {rank: f"{key}/{rank}" for rank in ranks.ranks}
    store.set(keys[dist.get_rank()], json.dumps(note))
    try:
        store.wait(list(keys.values()), timedelta(seconds=_PATIENCE_S))
    except RuntimeError:
        keys = {rank: key if store.check([key]) else "" for rank, key in keys.items()}
    return {rank: json.loads(store.get(key)) if key else None for rank, key in keys.items()}


def _is_lost(error: Exception) -> bool:
    return isinstance(error, dist.DistError) or any(word in str(error) for word in _LOST)


def _text(error: Exception) -> str:
    return str(error) if isinstance(error, RecollectError) else f"{type(error).__name__}: {error}"
