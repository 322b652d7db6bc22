"""Say which process of a run failed or ended, in all the others.

When a process ends, the next exchange with it fails in the others with a message of gloo or NCCL that names an address. So each
process that fails leaves a note about why, in the store at which all met, and reads the notes of the others: who failed
by itself is the cause, and who leaves no note has ended without a word.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from recollect._torch_parallel import meeting_place
from recollect.errors import RecollectError, RecordError
from recollect.lab.train.last_words import LastWords
from recollect.lab.train.peer_watch import PeerWatch
from recollect.ranks.group import Ranks

__all__ = ["named_errors"]

# Of an exchange that fails, in the words of gloo, NCCL and `recollect.ranks`.
_LOST = ("gloo", "NCCL", "onnection closed", "onnection reset", "got no answer from the others")

_runs = itertools.count()


@contextmanager
def named_errors(ranks: Ranks) -> Iterator[None]:
    """Let an error in the block name the process that it began in; see `PeerWatch` for one that hears of no error.

    Args:
        ranks: the processes of the run, in each of which this is called.

    Raises:
        RecordError: another process failed, or has ended.
        Exception: the error of this process itself.
    """
    key = f"recollect/run/{next(_runs)}"
    last_words = LastWords(key, ranks)
    try:
        with PeerWatch(key, last_words, ranks):
            yield
    except Exception as error:
        own = _first_cause(error)
        cause = last_words.exchange(meeting_place(), _text(own), is_lost=_is_lost(own))
        if cause is None or not _is_lost(own):
            raise
        raise RecordError(cause) from error


def _first_cause(error: BaseException) -> BaseException:
    """Return what an error of PyTorch was raised from, as pipelines do with what a stage raises; one of recollect says all."""
    while error.__cause__ is not None and not isinstance(error, RecollectError):
        error = error.__cause__
    return error


def _is_lost(error: BaseException) -> bool:
    return isinstance(error, dist.DistError) or any(word in str(error) for word in _LOST)


def _text(error: BaseException) -> str:
    return str(error) if isinstance(error, RecollectError) else f"{type(error).__name__}: {error}"
