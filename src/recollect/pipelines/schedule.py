"""Describe the work of each rank of a pipeline, in order, and play it: forward and backward of stages and micro-batches."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from itertools import chain
from typing import Any, Final

from recollect.errors import ConfigError, ScheduleError

FORWARD: Final = "F"
BACKWARD: Final = "B"
# The two halves of a backward: gradients of the stage's input, then of its parameters.
INPUT: Final = "I"
WEIGHT: Final = "W"
# Actions that torch.distributed.pipelining adds: communication, and FSDP's gathers and reductions.
_NOT_COMPUTED: Final = re.compile(r"\d+(UNSHARD|RESHARD|(WAIT_)?(REDUCE_GRAD|SEND_F|SEND_B)|RECV_F|RECV_B)\d*")
_RECEIVED: Final = re.compile(r"(\d+)RECV_([FB])(\d+)")
_COMPUTED: Final = re.compile(r"(\d+)([FBIW])(\d+)")


class Loop(Enum):
    """The runtime of a rank's actions, and how long it holds the tensors it sent."""

    ONE_F_ONE_B = "1F1B"
    """A gradient until it sends the next one."""
    GPIPE = "GPipe"
    """All gradients until the step ends."""
    ACTIONS = "actions"
    """The same, for any list of actions, such as several stages' actions."""

    @property
    def holds_sent(self) -> bool:
        """Whether all sent gradients are held until the step ends; outputs, too, unless received as needed."""
        return self is not Loop.ONE_F_ONE_B


@dataclass(frozen=True, slots=True)
class PipelineAction:
    """A stage's forward ("F"), backward ("B"), or half of a backward ("I", then "W") of one micro-batch."""

    stage: int
    kind: str
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro_batch}"


@dataclass(frozen=True)
class PipelineSchedule:
    """The actions of each rank, in order.

    Attributes:
        ranks: the actions of each rank.
        loop: which of torch's loops runs them, or one that holds as much.
        as_needed: whether a rank receives into buffers that it makes when it needs them, and releases an output that
            has arrived, as torch does since 2.15; before, it has buffers for all micro-batches from the beginning.
        receives: of each rank: receives earlier than right before their action, as (the action, the one before which the
            buffer is made); only with `as_needed`.
        return_outputs: whether a step returns the last stage's outputs of all micro-batches, as torch's does by default; it
            then holds the outputs of all of them, and puts them together at the end.

    Raises:
        ScheduleError: a stage on two ranks, or missing; an action missing, repeated, or before what it follows.
        ConfigError: a count below 1; or, with several stages a rank, micro-batches that are not a multiple of the ranks.

    Example:
        >>> schedule = PipelineSchedule.one_f_one_b(num_stages=2, num_micro_batches=3)
        >>> [" ".join(map(str, actions)) for actions in schedule.ranks]
        ['0F0 0F1 0B0 0F2 0B1 0B2', '1F0 1B0 1F1 1B1 1F2 1B2']
        >>> schedule.most_in_flight(0), schedule.most_in_flight(1)
        (2, 1)
    """

    ranks: tuple[tuple[PipelineAction, ...], ...]
    loop: Loop = Loop.ONE_F_ONE_B
    as_needed: bool = False
    receives: tuple[tuple[tuple[PipelineAction, PipelineAction], ...], ...] = ()
    return_outputs: bool = True

    def __post_init__(self) -> None:
        rank_of: dict[int, int] = {}
        for rank, actions in enumerate(self.ranks):
            for action in actions:
                if rank_of.setdefault(action.stage, rank) != rank:
                    raise ScheduleError(
                        f"stage {action.stage} runs on ranks {rank_of[action.stage]} and {rank}, expected one"
                    )
            _check_pairs(rank, actions)
        if sorted(rank_of) != list(range(len(rank_of))) or not rank_of:
            raise ScheduleError(
                f"the schedule has stages {sorted(rank_of)}, expected 0, 1, 2 and so on, each at least once"
            )
        batches = {
            stage: {action.micro_batch for action in self.ranks[rank] if action.stage == stage}
            for stage, rank in rank_of.items()
        }
        for stage, found in batches.items():
            if found != batches[0]:
                raise ScheduleError(
                    f"stage {stage} runs micro-batches {sorted(found)}, and stage 0 {sorted(batches[0])}, expected the same"
                )

    @property
    def num_stages(self) -> int:
        """Number of stages, those of all ranks together."""
        return 1 + max(action.stage for action in chain(*self.ranks))

    @property
    def num_micro_batches(self) -> int:
        """Number of micro-batches of a step."""
        return len({action.micro_batch for action in self.ranks[0]})

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Return the stages that a rank runs, in order."""
        return tuple(sorted({action.stage for action in self.ranks[rank]}))

    def most_in_flight(self, stage: int) -> int:
        """Return the most micro-batches whose forward ran and whose backward did not end."""
        alive = most = 0
        for action in chain(*self.ranks):
            if action.stage == stage:
                alive += {FORWARD: 1, INPUT: 0, BACKWARD: -1, WEIGHT: -1}[action.kind]
                most = max(most, alive)
        return most

    def backwards_of(self, stage: int) -> frozenset[str]:
        """Return the kinds of backward that a stage runs: "B" for a whole one, "I" for one in halves."""
        return frozenset(action.kind for action in chain(*self.ranks) if action.stage == stage) & {BACKWARD, INPUT}

    @classmethod
    def gpipe(cls, *, num_stages: int, num_micro_batches: int) -> PipelineSchedule:
        """Return the schedule that runs all forwards, then all backwards (Huang et al. 2019)."""
        _check_counts(num_stages=num_stages, num_micro_batches=num_micro_batches)
        batches = range(num_micro_batches)
        ranks = (
            tuple(PipelineAction(stage, kind, batch) for kind in (FORWARD, BACKWARD) for batch in batches)
            for stage in range(num_stages)
        )
        return cls(tuple(ranks), loop=Loop.GPIPE)

    @classmethod
    def one_f_one_b(cls, *, num_stages: int, num_micro_batches: int) -> PipelineSchedule:
        """Return the schedule that alternates forward and backward once the pipeline is full (Narayanan et al. 2021)."""
        _check_counts(num_stages=num_stages, num_micro_batches=num_micro_batches)
        return cls.interleaved_1f1b(num_ranks=num_stages, stages_per_rank=1, num_micro_batches=num_micro_batches)

    @classmethod
    def interleaved_1f1b(cls, *, num_ranks: int, stages_per_rank: int, num_micro_batches: int) -> PipelineSchedule:
        """Return 1F1B with several stages on each rank: stage s on rank s mod `num_ranks` (Narayanan et al. 2021)."""
        _check_counts(num_ranks=num_ranks, stages_per_rank=stages_per_rank, num_micro_batches=num_micro_batches)
        if stages_per_rank > 1 and num_micro_batches % num_ranks:
            raise ConfigError(
                settings={"num_micro_batches": num_micro_batches, "num_ranks": num_ranks},
                reason="interleaved 1F1B runs micro-batches in groups of one a rank",
                advice=f"Use a multiple of {num_ranks}.",
            )
        total = num_micro_batches * stages_per_rank
        ranks = []
        for rank in range(num_ranks):
            warmup = num_ranks - rank - 1
            if stages_per_rank > 1:
                warmup = 2 * warmup + (stages_per_rank - 1) * num_ranks
            warmup = min(warmup, total)
            forwards = [_chunk(i, rank, num_ranks, stages_per_rank, FORWARD) for i in range(total)]
            backwards = [_chunk(i, rank, num_ranks, stages_per_rank, BACKWARD) for i in range(total)]
            steady = [action for i in range(total - warmup) for action in (forwards[warmup + i], backwards[i])]
            ranks.append((*forwards[:warmup], *steady, *backwards[total - warmup :]))
        return cls(tuple(ranks), loop=Loop.ACTIONS if stages_per_rank > 1 else Loop.ONE_F_ONE_B)


def _chunk(number: int, rank: int, num_ranks: int, stages_per_rank: int, kind: str) -> PipelineAction:
    """Return a rank's forward or backward of that number: groups of `num_ranks` micro-batches go through all its stages."""
    chunk = number // num_ranks % stages_per_rank
    if kind == BACKWARD:
        chunk = stages_per_rank - 1 - chunk
    batch = number // (num_ranks * stages_per_rank) * num_ranks + number % num_ranks
    return PipelineAction(chunk * num_ranks + rank, kind, batch)


def schedule_of(schedule: Any) -> PipelineSchedule:
    """Return a schedule from any of its forms.

    That is a `PipelineSchedule`; a schedule object of `torch.distributed.pipelining`; or the actions of each rank, as a list or
    as a dict by rank, each written as torch does: "0F2" is stage 0's forward of micro-batch 2, "0B2" its backward, "0I2" and
    "0W2" the halves of one. Empty entries and communication are skipped.
    """
    if isinstance(schedule, PipelineSchedule):
        return schedule
    kind = type(schedule).__name__
    # The order of these two is written in their loops; in their lists, made for drawing, the last rank's warm-up is too long.
    single = {"ScheduleGPipe": PipelineSchedule.gpipe, "Schedule1F1B": PipelineSchedule.one_f_one_b}.get(kind)
    is_torch = single is not None or hasattr(schedule, "pipeline_order")
    as_needed = False
    if is_torch:
        # Here: it takes a second to import, and only torch's own schedules need it, which have already imported it.
        from recollect._torch_parallel import receives_as_needed

        as_needed = receives_as_needed()
    if single is not None:
        found = single(num_stages=schedule._num_stages, num_micro_batches=schedule._n_microbatches)
        return replace(found, as_needed=as_needed)
    rows = schedule.pipeline_order if is_torch else schedule
    if isinstance(rows, Mapping):
        rows = [rows[rank] for rank in sorted(rows)]
    if not isinstance(rows, Sequence) or isinstance(rows, str):
        raise ScheduleError(
            f"got an object of class {kind} as schedule, expected a PipelineSchedule, one of torch.distributed.pipelining, "
            "or the list of each rank's actions, such as [['0F0', '0B0']]"
        )
    actions = tuple(tuple(_read(row)) for row in rows)
    if not is_torch:
        return PipelineSchedule(actions)
    sent = schedule.pipeline_order_with_comms if as_needed else {}
    return PipelineSchedule(
        actions, Loop.ACTIONS, as_needed, tuple(tuple(_receives(sent[rank])) for rank in sorted(sent))
    )


def _parts(row: Iterable[Any]) -> Iterable[str]:
    for entry in row:
        text = "" if entry is None else str(entry).strip()
        # Two overlapped actions: they share the device, in this order.
        inner = re.fullmatch(r"\((.*)\)OVERLAP_F_B", text)
        yield from filter(None, inner[1].split(";") if inner else [text])


def _read(row: Iterable[Any]) -> Iterable[PipelineAction]:
    for part in _parts(row):
        if _NOT_COMPUTED.fullmatch(part):
            continue
        found = _COMPUTED.fullmatch(part)
        if found is None:
            raise ScheduleError(
                f"got the action {part!r}, expected stage, F, B, I or W, and micro-batch, such as '0F2'"
            )
        yield PipelineAction(int(found[1]), found[2], int(found[3]))


def _receives(row: Iterable[Any]) -> Iterable[tuple[PipelineAction, PipelineAction]]:
    """Return the tensors that a rank receives before the last moment, from its actions and communication."""
    early: dict[tuple[int, bool, int], PipelineAction | None] = {}
    for part in _parts(row):
        received, computed = _RECEIVED.fullmatch(part), _COMPUTED.fullmatch(part)
        if received is not None:
            early[int(received[1]), received[2] == "F", int(received[3])] = None
        if computed is None:
            continue
        action = PipelineAction(int(computed[1]), computed[2], int(computed[3]))
        early.update({key: action for key, first in early.items() if first is None})
        if action.kind != WEIGHT:
            before = early.pop((action.stage, action.kind == FORWARD, action.micro_batch), None)
            if before not in (None, action):
                yield action, before


def _check_pairs(rank: int, actions: Iterable[PipelineAction]) -> None:
    seen: Counter[PipelineAction] = Counter()
    for action in actions:
        seen[action] += 1
        if seen[action] > 1:
            raise ScheduleError(f"rank {rank} runs {action} twice, expected once")
        first = {BACKWARD: FORWARD, INPUT: FORWARD, WEIGHT: INPUT}.get(action.kind)
        if first is not None and not seen[replace(action, kind=first)]:
            raise ScheduleError(f"rank {rank} runs {action} before {replace(action, kind=first)}")
    for action in list(seen):
        later = [kind for kind in (BACKWARD, INPUT, WEIGHT) if seen[replace(action, kind=kind)]]
        if action.kind == FORWARD and later not in ([BACKWARD], [INPUT, WEIGHT]):
            found = " and ".join(str(replace(action, kind=kind)) for kind in later) or "no backward of it"
            raise ScheduleError(
                f"rank {rank} runs {action} and {found}, expected {replace(action, kind=BACKWARD)}, or "
                f"{replace(action, kind=INPUT)} and {replace(action, kind=WEIGHT)}"
            )


def _check_counts(**counts: int) -> None:
    for name, number in counts.items():
        if number < 1:
            raise ConfigError(
                settings={name: number}, reason="it counts what there must be one of", advice="Pass 1 or more."
            )


def played_s(schedule: PipelineSchedule, lasts: Callable[[PipelineAction], float], *, send_s: float = 0.0) -> float:
    """Return the seconds from the first forward to the last backward.

    Each rank runs its actions in order, each as soon as its input is there: a forward waits for the stage before, a backward,
    or the first half of one, for the stage behind.
    """
    rank_of = {stage: rank for rank in range(len(schedule.ranks)) for stage in schedule.stages_of(rank)}
    # The time when the output of a stage, or the gradient of its input, is ready: (is it the gradient, stage, micro-batch).
    made: dict[tuple[bool, int, int], float] = {}
    clocks = [0.0] * len(schedule.ranks)
    position = [0] * len(schedule.ranks)
    while waiting := [r for r, actions in enumerate(schedule.ranks) if position[r] < len(actions)]:
        ran = False
        for rank in waiting:
            actions = schedule.ranks[rank]
            while position[rank] < len(actions):
                action = actions[position[rank]]
                is_gradient = action.kind != FORWARD
                source = is_gradient, action.stage + (1 if is_gradient else -1), action.micro_batch
                if action.kind != WEIGHT and source[1] in rank_of:
                    if source not in made:
                        break
                    clocks[rank] = max(clocks[rank], made[source] + (send_s if rank_of[source[1]] != rank else 0.0))
                clocks[rank] += lasts(action)
                if action.kind != WEIGHT:
                    made[is_gradient, action.stage, action.micro_batch] = clocks[rank]
                position[rank] += 1
                ran = True
        if not ran:
            stuck = ", ".join(f"rank {rank} at {schedule.ranks[rank][position[rank]]}" for rank in waiting)
            raise ScheduleError(f"the ranks wait for each other: {stuck}")
    return max(clocks)
