"""Let the processes that train one model exchange answers, and fail together.

Each exchange says where in its loop a process is. If processes are at different places, one would wait for an answer that
the other never gives, so all of them raise an error that says where each is.
"""

import hashlib
from collections.abc import Callable, Sequence
from datetime import timedelta
from enum import Enum
from typing import Any, Final, TypeVar

import torch
import torch.distributed as dist

from recollect._torch_parallel import meeting_place
from recollect.errors import RecollectError, RecordError
from recollect.progress import stage

T = TypeVar("T")

# In one exchange.
_MOST_FLAGS: Final = 248
# Building a model, or loading data, may take one process a little longer than the others.
_LONGEST_WAIT_S: Final = 120


class Place(Enum):
    """Where in its loop a process is, as what one or several did last."""

    START = "called recollect"
    PLANNED = "made a plan"
    FIRST_CALL = "began a step"
    LATER_CALL = "called the model once more in a step"
    STEP_END = "ended a step that was recorded"
    MEASURED = "measured a step"
    NEXT_STEP = "went on to the next step"


class Ranks:
    """One process on its own; `Group` is several."""

    is_alone = True
    ranks: tuple[int, ...] = (0,)
    is_first = True

    def all_of(self, flags: Sequence[bool], place: Place) -> list[bool]:
        return list(flags)

    def gather(self, value: Any, place: Place) -> list[Any]:
        """Return the objects given by each process, which may be anything picklable."""
        return [value]

    def together(self, action: Callable[[], T], place: Place, *, undo: Callable[[T], object] | None = None) -> T:
        """Run a function that must succeed in all processes; if it fails in one, `undo` it where it succeeded.

        Raises:
            Exception: the function's error, if it failed in all of them.
            RecollectError: the error of the first process that failed, in all of them.
        """
        return action()


ALONE = Ranks()


class Group(Ranks):
    """Several processes that all make the same exchanges in the same places.

    They communicate by gloo, on the CPU: numbers on a GPU would wait for all its queued work.
    """

    is_alone = False

    def __init__(self, ranks: Sequence[int], group: dist.ProcessGroup) -> None:
        self.ranks = tuple(ranks)
        self.is_first = dist.get_rank() == self.ranks[0]
        self._group = group

    def all_of(self, flags: Sequence[bool], place: Place) -> list[bool]:
        """See `Ranks`; of very many flags, the first ones count as not set."""
        left_out = max(0, len(flags) - _MOST_FLAGS)
        return [False] * left_out + self._common(flags[left_out:], place)

    def gather(self, value: Any, place: Place) -> list[Any]:
        self._common([], place)
        return self._gathered(value)

    def together(self, action: Callable[[], T], place: Place, *, undo: Callable[[T], object] | None = None) -> T:
        try:
            result, problem = action(), None
        except Exception as error:
            result, problem = None, error
        is_own = problem is None or isinstance(problem, RecollectError)
        found = self.gather(problem if is_own else f"{type(problem).__name__}: {problem}", place)
        failed = [number for number, its in zip(self.ranks, found, strict=True) if its is not None]
        if not failed:
            return result  # type: ignore[return-value]
        if problem is None and undo is not None:
            undo(result)  # type: ignore[arg-type]
        first = next(its for its in found if its is not None)
        if problem is not None and all(str(its) == str(found[0]) for its in found):
            raise problem
        where = f"{_ranks(failed)} of {len(self.ranks)} failed, so none continues"
        if isinstance(first, RecollectError):
            raise first from RecordError(where)
        raise RecordError(f"{where}: {first}") from problem

    def _common(self, flags: Sequence[bool], place: Place) -> list[bool]:
        """Return for each flag whether it is set in all processes; raise if they are not all at this place."""
        asked = [*(place is other for other in Place), *flags]
        common = torch.zeros(len(Place) + _MOST_FLAGS, dtype=torch.uint8)
        common[: len(asked)] = torch.tensor(asked)
        try:
            dist.all_reduce(common, op=dist.ReduceOp.MIN, group=self._group)
        except RuntimeError as error:
            raise RecordError(
                f"a process that {place.value} got no answer from the others of {_ranks(self.ranks)}: one of them has "
                f"ended, hangs, or does not do the same ({error}). Look for the first error in their output; if only some "
                'processes call the model here, pass group="alone".'
            ) from error
        is_place, answers = common[: len(Place)], common[len(Place) : len(asked)]
        if is_place.any():
            return [bool(answer) for answer in answers]
        found: list[Place] = self._gathered(place)
        where = {its: [r for r, other in zip(self.ranks, found, strict=True) if other is its] for its in found}
        raise RecordError(
            f"{', '.join(f'{_ranks(numbers)} {its.value}' for its, numbers in where.items())}: processes that train a model "
            "together have to call it equally often in each step, since they run one plan. "
            'Pass group="alone" to have each plan for itself.'
        )

    def _gathered(self, value: Any) -> list[Any]:
        found: list[Any] = [None] * len(self.ranks)
        dist.all_gather_object(found, value, group=self._group)
        return found


def group_of(ranks: Sequence[int], call: str) -> Ranks:
    """Return some processes as a group, once all of them have called this."""
    # PyTorch's fake group has no other processes.
    if len(ranks) == 1 or dist.get_backend() == "fake":
        return ALONE
    ranks = tuple(sorted(ranks))
    met = _meetings.setdefault(ranks, _Meeting(ranks))
    with stage("waiting for the other processes"):
        missing = met.wait(_LONGEST_WAIT_S)
    if missing:
        raise RecordError(
            f"recollect.{call}: {_ranks(missing)} of {len(ranks)} did not call it within {_LONGEST_WAIT_S} s, expected a call "
            "in every process that trains the model, since they run one plan. "
            'Call it in all of them; or pass group="alone" to have each plan for itself.'
        )
    group = Group(ranks, met.group())
    group.all_of([], Place.START)
    met.clear()
    return group


class _Meeting:
    """A place where some processes wait for each other, as often as they like."""

    def __init__(self, ranks: tuple[int, ...]) -> None:
        self._ranks = ranks
        self._key = f"recollect/{hashlib.sha256(repr(ranks).encode()).hexdigest()[:16]}"
        self._number = 0
        self._world: dist.ProcessGroup | None = None
        self._group: Any = None

    def wait(self, seconds: float) -> list[int]:
        if self._world is not dist.group.WORLD:
            # PyTorch's groups were recreated, and the connections are gone.
            self._world, self._group, self._number = dist.group.WORLD, None, 0
        self._number += 1
        store = meeting_place()
        keys = {rank: self._key_of(rank) for rank in self._ranks}
        store.set(keys[dist.get_rank()], "here")
        try:
            store.wait(list(keys.values()), timedelta(seconds=seconds))
        except RuntimeError:
            missing = [rank for rank, key in keys.items() if not store.check([key])]
            # As if this process had not arrived: the next time it waits for the same.
            self.clear()
            self._number -= 1
            return missing
        return []

    def clear(self) -> None:
        """Remove the sign of this process, once all have seen it: torchrun's restarted processes meet at the same store."""
        meeting_place().delete_key(self._key_of(dist.get_rank()))

    def _key_of(self, rank: int) -> str:
        return f"{self._key}/{self._number}/{rank}"

    def group(self) -> dist.ProcessGroup:
        if self._group is None:
            # A separate group: this does not interfere with the loop's own exchanges.
            try:
                self._group = dist.new_group(
                    list(self._ranks), backend="gloo", use_local_synchronization=True, group_desc="recollect"
                )
            except RuntimeError as error:
                raise RecordError(
                    f"{_ranks(self._ranks)} could not connect over gloo, to agree on one plan ({error}). If torchrun "
                    "has restarted them, they may have met the addresses of the processes before them: start it with "
                    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1. Otherwise set GLOO_SOCKET_IFNAME to a network interface that all "
                    'of them can use; or pass group="alone" to have each plan for itself.'
                ) from error
        return self._group


_meetings: dict[tuple[int, ...], _Meeting] = {}


def _ranks(numbers: Sequence[int]) -> str:
    """Name processes: "rank 1", "ranks 0, 2 and 3"."""
    *first, last = map(str, numbers)
    return f"ranks {', '.join(first)} and {last}" if first else f"rank {last}"
