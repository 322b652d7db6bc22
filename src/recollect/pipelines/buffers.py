"""The buffers through which stages exchange what they make, where torch makes them when they are needed (since 2.15)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from recollect.pipelines.rank import Rank, RankStage
from recollect.pipelines.schedule import BACKWARD, FORWARD, INPUT, WEIGHT, Loop, PipelineAction
from recollect.profile import events
from recollect.profile.events import Event

__all__ = ["Buffers"]


class Buffers:
    """What stages exchange where it is there as needed; each buffer until the last of its holders lets go of it.

    A holder is a micro-batch in a stage, from forward to the end of its backward; the loss, of the last stage's input, to
    whose graph that belongs until the step ends; or the loop, of an output that it has sent and that has not arrived yet:
    GPipe's until all forwards are done, that of 1F1B until it sends the next, or goes backward.

    Args:
        log: of the rank, to write to.
        allocate: writes that a storage of so many bytes is made; returns its number.
        rank: whose buffers they are.
        kinds: the kind of backward of each stage and micro-batch: "B", or "I" for one in halves.
    """

    def __init__(
        self, log: list[Event], allocate: Callable[[int], int], rank: Rank, kinds: Mapping[tuple[int, int], str]
    ) -> None:
        self._log = log
        self._allocate = allocate
        self._rank = rank
        self._kinds = kinds
        self._early: dict[PipelineAction, list[PipelineAction]] = {}
        for needed, before in rank.receives:
            self._early.setdefault(before, []).append(needed)
        self._received: set[tuple[tuple[int, int], bool]] = set()
        # Loops that run lists of actions leave it to the micro-batch.
        self._is_single = rank.loop is not Loop.ACTIONS
        self._sends_all_first = rank.loop is Loop.GPIPE
        self._held: dict[object, list[int]] = {}
        self._num_holders: dict[int, int] = {}

    def receive(self, action: PipelineAction) -> None:
        """Make the buffer that an action needs, unless there is none, or it is there already."""
        stage = self._rank.stages[action.stage]
        is_forward = action.kind == FORWARD
        key = action.stage, action.micro_batch
        is_received = stage.receives_input if is_forward else stage.sends_output and action.kind != WEIGHT
        if not is_received or (key, is_forward) in self._received:
            return
        self._received.add((key, is_forward))
        stays = is_forward and self.stay_with_loss(action.stage) and self._kinds[key] == BACKWARD
        holder = "loss" if stays else (self._first_part(action.stage), action.micro_batch)
        self.make([holder], stage.recorded.whole.input_bytes if is_forward else stage.output_bytes)

    def _first_part(self, number: int) -> int:
        """Return the part of a stage that comes first, and is the last to go backward."""
        while self._rank.stages[number].previous_is_inside:
            number -= 1
        return number

    def stay_with_loss(self, number: int) -> bool:
        """Whether this part is one of the last stage, so that its inputs stay."""
        while self._rank.stages[number].next_is_inside:
            number += 1
        return self._rank.stages[number].is_last

    def make(self, holders: Sequence[object], nbytes: int) -> None:
        """Make a buffer."""
        storage = self._allocate(nbytes)
        self._num_holders[storage] = len(holders)
        for holder in holders:
            self._held.setdefault(holder, []).append(storage)

    def let_go(self, holder: object) -> None:
        """Free what nobody else holds."""
        for storage in self._held.pop(holder, ()):
            self._num_holders[storage] -= 1
            if not self._num_holders[storage]:
                self._log.append((events.FREE, storage))

    def after_forward(self, key: tuple[int, int], stage: RankStage) -> None:
        """Make the output, and let go of the one before if the loop has waited for it."""
        number, micro_batch = key
        arriving, own = ("sent", number), (self._first_part(number), micro_batch)
        if stage.next_is_here:
            self.make([own, (number + 1, micro_batch)], stage.output_bytes)
        elif not self._is_single:
            self.make([own], stage.output_bytes)
        else:
            before = [] if self._sends_all_first else self._held.pop(arriving, [])
            self.make([arriving], stage.output_bytes)
            self._held["before", number] = before
            self.let_go(("before", number))

    def before(self, action: PipelineAction) -> None:
        """Let go of outputs that have arrived, and make the buffers that this action and later ones receive into."""
        if action.kind in (BACKWARD, INPUT):
            self.let_go(("sent", action.stage))
        for needed in self._early.get(action, ()):
            self.receive(needed)
        self.receive(action)
