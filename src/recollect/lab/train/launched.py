"""The processes that torchrun started, as each finds them in its environment, and which one warns. Imports no torch."""

import hashlib
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

# The variables that torchrun sets in each process, for `init_process_group`.
_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def num_launched() -> int:
    """How many processes torchrun started with this one; 1 without torchrun."""
    return int(os.environ["WORLD_SIZE"]) if all(name in os.environ for name in _VARIABLES) else 1


def is_first_launched() -> bool:
    """Whether this is the only process, or the one of those started by torchrun that prints."""
    return num_launched() == 1 or os.environ["RANK"] == "0"


@contextmanager
def shared_warnings() -> Iterator[None]:
    """Within the block, only the first process shows warnings: they concern the command line, which all share."""
    with warnings.catch_warnings():
        if not is_first_launched():
            warnings.simplefilter("ignore")
        yield


def is_shown_here(text: str) -> bool:
    """Whether this process shows a warning: none of those that it has joined has shown the same."""
    # Not imported by the commands that need no torch.
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return True
    from recollect._torch_parallel import meeting_place

    return is_first_in(meeting_place(), text)


def is_first_in(store: Any, text: str) -> bool:
    """Note a warning in the store of several processes, and return whether it is new; without the store, all are new."""
    key = f"recollect/warned/{hashlib.sha256(text.encode()).hexdigest()}"
    try:
        number: int = store.add(key, 1)
    except RuntimeError:
        return True
    return number == 1
