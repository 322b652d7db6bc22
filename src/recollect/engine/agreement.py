"""Has ranks find out that they drop different collectives before one waits for ever for the others to run one again.

A rank tells the others in forward which plan it runs, when it first meets a collective of a group; at the end of the model's
first forward, or at the latest before it runs one again in backward, it looks whether all of that group told the same. Both go
through the store that the ranks met at, not through a collective: a rank that has another plan may not come.

Every rank looks at the end of the first forward, also one that runs no collective again: it would wait in
backward for one that has raised. There, all have joined the collectives of that forward, and so have told; none is in one.
The tape sees the collectives of the units that it runs, which are others under another plan, and none where a plan drops
nothing. So the first forward runs under a mode that sees all of them.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, Final

import torch.distributed as dist
from torch import nn

from recollect._torch_parallel import RankNotes, name_of_group, notes_of_group
from recollect._torch_private import desugars, uncompiled
from recollect.engine.facts import facts_of
from recollect.engine.op_mode import OpMode
from recollect.engine.placed_forward import PlacedForward
from recollect.errors import PlanError

# A rank that has this plan tells so before it joins the group's first collective of the step, which the others have joined
# when they come to look; on CUDA they may be ahead of it by what the CPU does in a step.
_PATIENCE_S: Final = 60.0
# A rank that runs none again does not need the others' plans: some may have none.
_SHORT_PATIENCE_S: Final = 2.0
_NEEDS_ALL: Final = " needs all"

_REMEDY: Final = (
    "Make the plan on one rank and send it to the others. Ranks may have plans of their own if these run no collective again "
    '(collectives="keep") and hold no value as parts.'
)

# How many plans have met a group in this process: the same number in all of its ranks, if they apply the same ones.
_num_met: Counter[str] = Counter()


class Agreement:
    """What the ranks of each group tell each other about one plan, or one recording.

    Args:
        digest: the same in ranks that drop the same collectives.
        needs_all: whether this rank will run a collective again, or hold values as parts.
    """

    def __init__(self, digest: str, *, needs_all: bool = True) -> None:
        self.digest = digest
        self.needs_all = needs_all
        self._met: dict[str, RankNotes] = {}
        self._agreed: set[str] = set()

    def meet(self, group: str) -> None:
        """Tell the ranks of a group, the first time, what this one drops."""
        if group not in self._met:
            _num_met[group] += 1
            notes = self._met[group] = notes_of_group(group, f"recollect/{group}/{_num_met[group]}")
            notes.leave(self.digest + (_NEEDS_ALL if self.needs_all else ""))

    def compare(self) -> None:
        """Check, at the same point of the step in all ranks, that those of each group met run one plan, if they have to.

        Raises:
            PlanError: they have different plans, or some have none; with the same text in each that has one.
        """
        for group, notes in self._met.items():
            if group in self._agreed:
                continue
            found = notes.read(_PATIENCE_S if self.needs_all else _SHORT_PATIENCE_S)
            some_need_all = self.needs_all or any((text or "").endswith(_NEEDS_ALL) for text in found.values())
            digests = {rank: (text or "none").removesuffix(_NEEDS_ALL) for rank, text in found.items()}
            if len(set(digests.values())) == 1:
                self._agreed.add(group)
            elif some_need_all:
                shown = ", ".join(f"{digest} in rank {rank}" for rank, digest in digests.items())
                raise PlanError(
                    f"cannot run the plan: the ranks of one group have different ones ({shown}), of which some run "
                    f"collectives again or hold values as parts, which all ranks have to do together. {_REMEDY}"
                )

    def check(self, group: str, what: str) -> None:
        """Check, the first time, that all ranks of a group drop what this one drops, before it begins to do `what`.

        Raises:
            PlanError: a rank drops something else, or does not tell.
        """
        if group in self._agreed:
            return
        notes = self._met[group]
        for rank, found in notes.read(_PATIENCE_S).items():
            digest = "none" if found is None else found.removesuffix(_NEEDS_ALL)
            if digest != self.digest:
                raise PlanError(
                    f"cannot {what}: this rank ({notes.rank}) has plan {self.digest}, rank {rank} has {digest}, of ranks "
                    f"{', '.join(map(str, notes.ranks))}, which have to do so together. {_REMEDY}"
                )
        self._agreed.add(group)


def first_call_forwards(model: nn.Module, agreement: Agreement) -> list[PlacedForward]:
    """Return the forward that has the ranks compare, if several ranks may run the model's ops together.

    Args:
        model: with parameters that a device mesh spreads, as tensor parallelism does.
        agreement: of its ranks.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return []
    is_spread = any(getattr(parameter, "device_mesh", None) is not None for parameter in model.parameters())
    return [_FirstCall(model, agreement)] if is_spread else []


class _FirstCall(PlacedForward):
    """Runs a model's first call with gradients, compares the plans of its ranks, and takes itself off."""

    def __init__(self, module: nn.Module, agreement: Agreement) -> None:
        super().__init__(module)
        self.agreement = agreement

    @uncompiled
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model's own forward."""
        if not self.recomputes():
            return self.forward(*args, **kwargs)
        self.take_off()
        with _Meets(self.agreement):
            output = self.forward(*args, **kwargs)
        self.agreement.compare()
        return output


class _Meets(OpMode):
    """Tells the ranks of each group whose collective it sees."""

    def __init__(self, agreement: Agreement) -> None:
        super().__init__()
        self.agreement = agreement

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if types and any(desugars(kind) for kind in types):
            return NotImplemented
        if not self.is_foreign() and facts_of(func).may_replay:
            self.agreement.meet(name_of_group(args, kwargs))
        return func(*args, **kwargs)
