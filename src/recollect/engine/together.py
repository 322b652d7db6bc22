"""Joint work of ranks under a plan: run collectives again, hold values as parts, and gather parameters.

`Agreement` detects that ranks drop different collectives before one deadlocks, waiting for the others to run one again. In
forward, a rank tells the others which plan it runs when it first meets a collective of a group; at the end of the model's
first forward, or at the latest before it runs one again in backward, it checks that all ranks of that group run the same plan.
Both use the store that the ranks met at, not a collective, since a rank with a different plan may not take part.

Every rank checks at the end of the first forward, even without collectives to run again: it would wait in
backward for one that has raised. By then, all have joined that forward's collectives, so all have told, and none is in one.
The tape sees only the collectives of the units that it runs: others under a different plan, and none where a plan drops
nothing. So the first forward runs under a mode that sees all of them.

`Shards` hold a value that is the same on all ranks of a group as each rank's part of it, which is gathered when backward asks.
It is cut by bytes, so any size and type works: the last ranks' parts may be padded, or nothing but padding.

Parameters may be partitioned, too, as under DeepSpeed's ZeRO-3: each rank has a part, and they are whole only while a
module runs. Ops that run again in backward, in between, gather them into separate memory: DeepSpeed may be
about to gather the same ones for a module, and relies on their state.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any, Final, TypeGuard

import torch
import torch.distributed as dist
from torch import nn

from recollect._torch_parallel import RankNotes, gathered, has_process_group, name_of_group, notes_of_group
from recollect._torch_private import disable_torch_dispatch, is_capturing
from recollect.arguments import check_kind
from recollect.engine.captured import not_warmed_up
from recollect.engine.content import checksums
from recollect.engine.facts import OpMode, facts_of
from recollect.engine.placed_forward import PlacedForward, placed_call
from recollect.engine.values import Layout, TapeValue, bytes_of, laid_out, layout_of
from recollect.errors import PlanError
from recollect.plans.paths import unit_words
from recollect.weak_map import WeakMap

# A rank that has this plan tells so before it joins the group's first collective of the step, which the others have
# joined by the time they look; on CUDA they may be ahead of it by the CPU's work of a step.
_PATIENCE_S: Final = 60.0
# A rank that runs none again does not need the others' plans: some may have none.
_SHORT_PATIENCE_S: Final = 2.0
_NEEDS_ALL: Final = " needs all"

_REMEDY: Final = (
    "Make the plan on one rank and send it to the others. Ranks may have their own plans if these run no collective again "
    '(collectives="keep") and hold no value as parts.'
)

# Number of plans that have met a group in this process: the same in all of its ranks, if they apply the same plans.
_num_met: Counter[str] = Counter()


class Agreement:
    """The messages of each group's ranks about one plan, or one recording.

    Args:
        digest: the same in ranks that drop the same collectives.
        needs_all: whether this rank will run a collective again, or hold values as parts.
        is_alone: no other rank takes part, as on fake tensors: this one leaves no note, and does not count the plan.
    """

    def __init__(self, digest: str, *, needs_all: bool = True, is_alone: bool = False) -> None:
        self.digest = digest
        self.needs_all = needs_all
        self._is_alone = is_alone
        self._met: dict[str, RankNotes] = {}
        self._agreed: set[str] = set()

    def meet(self, group: str) -> None:
        """On first use, tell the ranks of a group which values this one drops."""
        if group not in self._met and not self._is_alone:
            _num_met[group] += 1
            notes = self._met[group] = notes_of_group(group, f"recollect/{group}/{_num_met[group]}")
            notes.leave(self.digest + (_NEEDS_ALL if self.needs_all else ""))

    def compare(self) -> None:
        """Check, at the same point of the step in all ranks, that the ranks of each group met run one plan, if they must.

        The error has the same text in each rank that has a plan.
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
        """Check, the first time, that all ranks of a group drop the same as this one, before it begins to do `what`."""
        if group in self._agreed or self._is_alone:
            return
        if is_capturing():
            raise not_warmed_up(f"{what} on all ranks", "they compare their plans before that, by messages")
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
    """Return the forward that makes ranks compare, if the model's ops may span several ranks."""
    if not has_process_group():
        return []
    is_spread = any(getattr(parameter, "device_mesh", None) is not None for parameter in model.parameters())
    return [_FirstCall(model, agreement)] if is_spread else []


class _FirstCall(PlacedForward):
    """Runs a model's first call with gradients, compares the plans of its ranks, and removes itself."""

    def __init__(self, module: nn.Module, agreement: Agreement) -> None:
        super().__init__(module)
        self.agreement = agreement
        self._has_run = False

    def put(self) -> None:
        if not self._has_run:  # Else the plan was suspended, and goes on.
            super().put()

    @placed_call
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.recomputes():
            return self.forward(*args, **kwargs)
        self._has_run = True
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

    def run_op(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if not self.is_foreign() and facts_of(func).may_replay:
            self.agreement.meet(name_of_group(args, kwargs))
        return func(*args, **kwargs)


_groups = WeakMap[Any]()


def distribute_saved_activations(model: nn.Module, group: dist.ProcessGroup | None = None) -> nn.Module:
    """Let plans of a model hold values that are the same on all ranks of a group as parts, one on each rank.

    Such a value has the action "shard" in a plan; it is gathered when backward asks for it. Call this before `record` and
    `apply`, on all ranks, which have to apply one plan. The first step under a plan compares each such value over the group.

    Args:
        model: the model, before or after it is parallelised.
        group: ranks that compute the same values, as tensor-parallel ranks compute each layer's input; all ranks by
            default.

    Returns:
        The model itself.

    Raises:
        ArgumentError: the model is not a module.
        PlanError: there is no process group.

    Example:
        >>> import torch, recollect
        >>> torch.distributed.init_process_group("fake", rank=0, world_size=4)
        >>> model = torch.nn.Sequential(*(torch.nn.Linear(6, 6) for _ in range(3)))
        >>> model = recollect.distribute_saved_activations(model)
        >>> profile = recollect.record(model, torch.randn(5, 6), loss_fn=torch.sum)
        >>> profile.shard_ranks
        4
        >>> torch.distributed.destroy_process_group()
    """
    check_kind("distribute_saved_activations(model)", "model", model, nn.Module, "a torch.nn.Module")
    if not has_process_group():
        raise PlanError(
            "distribute_saved_activations: got no process group, expected torch.distributed to be set up, whose ranks hold "
            "the parts. Call torch.distributed.init_process_group first."
        )
    _groups[model] = dist.group.WORLD if group is None else group
    return model


def shards_of(model: nn.Module) -> Shards | None:
    """Return how values of a model are held as parts; None if they are not."""
    group = _groups.get(model)
    return None if group is None else Shards(group)


class Shards:
    """Cuts values into the parts of a group's ranks."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.name: str = group.group_name
        self.size = dist.get_world_size(group)
        self.ranks = tuple(dist.get_process_group_ranks(group))
        self._rank = dist.get_rank(group)
        self._num_seen: Counter[tuple[str, str]] = Counter()

    def part_bytes(self, nbytes: int) -> int:
        return -(-nbytes // self.size)

    def call(self, tensor: torch.Tensor, agreement: Agreement, unit: str, name: str) -> tuple[Gather, TapeValue]:
        """Return the function that gathers a tensor, and its argument: this rank's part; errors are raised on all ranks."""
        agreement.meet(self.name)
        agreement.check(self.name, "hold values as parts")
        self._check(tensor, unit, name)
        content = bytes_of(tensor)
        size = self.part_bytes(len(content))
        part = content[self._rank * size : (self._rank + 1) * size].clone()
        if len(part) < size:
            part = nn.functional.pad(part, (0, size - len(part)))
        return Gather(self, layout_of(tensor)), TapeValue(part)

    def _check(self, tensor: torch.Tensor, unit: str, name: str) -> None:
        """Compare a value over the group, less and less often: all ranks hold the same values in the same order.

        In the first step, the second, the fourth and so on, as values that start as zeros on all ranks may differ later.
        """
        if is_capturing():
            return  # The ranks agree, so there were steps in which it was compared.
        self._num_seen[unit, name] += 1
        if self._num_seen[unit, name].bit_count() > 1:
            return
        found = torch.tensor([tensor.untyped_storage().nbytes(), *checksums([tensor])], device=tensor.device)
        everywhere = gathered(found, self.size, self.name).view(self.size, 2)
        if not bool((everywhere == found).all()):
            raise PlanError(
                f"cannot hold {name!r} of {unit_words(unit)} as parts: it is not the same on the {self.size} ranks of the "
                'group, as a value with the action "shard" has to be. Give it "keep" or "recompute" in the plan.'
            )


@dataclass(slots=True, eq=False)
class Gather:
    """Makes a tensor of the parts of all ranks."""

    shards: Shards
    layout: Layout

    def __call__(self, tensors: list[Any], may_overwrite_first: bool) -> tuple[torch.Tensor]:
        return (laid_out(gathered(tensors[0], self.shards.size, self.shards.name), self.layout),)


def content_of(tensor: torch.Tensor) -> int | None:
    """Return a number for the content of a tensor that may be held as a part; None for one that may not.

    A constant tensor, such as zeros, proves nothing: it may be the same on all ranks in one step but not in the next.
    """
    if tensor.layout is not torch.strided or tensor.storage_offset() or not tensor.numel():
        return None
    with disable_torch_dispatch(), torch.no_grad():
        content = bytes_of(tensor)
        if len(content) % tensor.element_size():
            return None
        elements = content.view(-1, tensor.element_size())
        if bool((elements == elements[0]).all()):
            return None
    return checksums([tensor])[0]


def is_partitioned(tensor: Any) -> TypeGuard[nn.Parameter]:
    return isinstance(tensor, nn.Parameter) and hasattr(tensor, "ds_tensor")


def can_be_gathered(parameter: Any) -> bool:
    """Whether the parts add up to the parameter: not offloaded to the host, quantized or of a different type."""
    part = parameter.ds_tensor
    is_plain = not hasattr(part, "ds_quant_scale") and getattr(part, "final_location", None) is None
    return bool(is_plain and part.device == parameter.device and part.dtype == parameter.dtype)


def group_of(parameter: Any) -> str:
    """Return the name of the group of ranks that have the parts; empty if this one has all."""
    group = parameter.ds_process_group
    return "" if torch.distributed.get_world_size(group) == 1 else str(group.group_name)


def gathered_parameter(parameter: Any) -> torch.Tensor:
    """Return the whole parameter: its own tensor if it is whole now, else a copy, which all ranks have to gather."""
    held: torch.Tensor = parameter.detach()
    if parameter.ds_status.name == "AVAILABLE":
        return held
    part: torch.Tensor = parameter.ds_tensor.detach()
    size = torch.distributed.get_world_size(parameter.ds_process_group)
    whole = part.new_empty(size * part.numel())
    torch.distributed.all_gather_into_tensor(whole, part, group=parameter.ds_process_group)
    return whole[: parameter.ds_numel].view(parameter.ds_shape)
