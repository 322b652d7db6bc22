"""Has ranks find out that they drop different collectives before one waits for ever for the others to run one again.

A rank tells the others in forward which plan it runs, when it first meets a collective of a group; before it runs one again,
in backward, it looks whether all of that group told the same. Both go through the store that the ranks met at, not through a
collective: a rank that has another plan may not come.
"""

from __future__ import annotations

from collections import Counter
from typing import Final

from recollect._torch_parallel import RankNotes, notes_of_group
from recollect.errors import PlanError

__all__ = ["Agreement"]

# A rank that has this plan tells so before it joins the group's first collective of the step, which the others have joined
# when they come to look; on CUDA they may be ahead of it by what the CPU does in a step.
_PATIENCE_S: Final = 60.0

# How many plans have met a group in this process: the same number in all of its ranks, if they apply the same ones.
_num_met: Counter[str] = Counter()


class Agreement:
    """What the ranks of each group tell each other about one plan, or one recording.

    Args:
        digest: the same in ranks that drop the same collectives.
    """

    def __init__(self, digest: str) -> None:
        self.digest = digest
        self._met: dict[str, RankNotes] = {}
        self._agreed: set[str] = set()

    def meet(self, group: str) -> None:
        """Tell the ranks of a group, the first time, what this one drops."""
        if group not in self._met:
            _num_met[group] += 1
            notes = self._met[group] = notes_of_group(group, f"recollect/{group}/{_num_met[group]}")
            notes.leave(self.digest)

    def check(self, group: str, what: str) -> None:
        """Check, the first time, that all ranks of a group drop what this one drops, before it begins to do `what`.

        Raises:
            PlanError: a rank drops something else, or does not tell.
        """
        if group in self._agreed:
            return
        notes = self._met[group]
        for rank, found in notes.read(_PATIENCE_S).items():
            if found != self.digest:
                said = f"rank {rank} has none" if found is None else f"rank {rank} has {found}"
                raise PlanError(
                    f"cannot {what}: this rank ({notes.rank}) has plan {self.digest}, {said}, of ranks "
                    f"{', '.join(map(str, notes.ranks))}, which have to do so together. Make the plan on one rank and send "
                    "it to the others. Ranks may have plans of their own if these run no collective again "
                    '(collectives="keep") and hold no value as parts.'
                )
        self._agreed.add(group)
