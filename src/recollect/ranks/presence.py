"""Have the processes of one training find out that some of them run without a memory budget, before they wait for those.

A process without one never asks the others for a plan: it goes on to its first collective, where it waits for ever. So each
process that has one leaves a note at the store where all of them met, before it does anything that needs the others.
"""

from __future__ import annotations

from collections import Counter
from typing import Final

import torch.distributed as dist

from recollect._torch_parallel import RankNotes, meeting_place
from recollect.errors import RecordError

__all__ = ["Presence"]

# Where nothing made the processes wait for each other just before, loading data may take one of them longer.
_PATIENCE_S: Final = 60.0
_PATIENCE_AFTER_BARRIER_S: Final = 10.0

# How often something was told in this process: the same number in all of a training.
_num_told: Counter[str] = Counter()


class Presence:
    """What the processes of a training tell each other of one thing that all of them need.

    Args:
        what: they need, for errors: "MemoryBudget".
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._notes: RankNotes | None = None

    def tell(self) -> None:
        """Tell the others, the first time; do nothing where there are none."""
        if self._notes is not None or not _has_others():
            return
        _num_told[self._what] += 1
        key = f"recollect/{self._what}/{_num_told[self._what]}"
        self._notes = RankNotes(key, list(range(dist.get_world_size())), meeting_place())
        self._notes.leave("here")

    def check(self, *, is_after_barrier: bool) -> None:
        """Check that all processes have told.

        Args:
            is_after_barrier: those that tell have done so before something for which all of them waited.

        Raises:
            RecordError: some have not.
        """
        self.tell()
        if self._notes is None:
            return
        found = self._notes.read(_PATIENCE_AFTER_BARRIER_S if is_after_barrier else _PATIENCE_S)
        missing = next((rank for rank, text in found.items() if text is None), None)
        if missing is not None:
            _num_told[self._what] -= 1
            self._notes = None
            raise RecordError(
                f"{self._what}: rank {missing} of {dist.get_world_size()} trains without it, expected it in every process of "
                "the training, since they run one plan. Pass it in all of them, or in none."
            )


def _has_others() -> bool:
    if not (dist.is_available() and dist.is_initialized()):
        return False
    return dist.get_world_size() > 1 and dist.get_backend() != "fake"
