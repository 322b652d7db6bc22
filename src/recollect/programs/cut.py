"""Cuts a traced unit by a plan: the values that forward saves, and the ops of backward, including those that run again.

Only values that the plan keeps and backward reads are saved; every other value is computed again from that and from the
unit's inputs, arguments first, before its first reader: the order in which the tape computes it. Gradients are summed in place
if one of the two is no longer needed.

NOTE [ Memory that is written to ]
Writes in place run again too, each group of them in the order of forward, on memory made again, and so does whatever reads that
memory between two of them. Where it cannot, what it makes of memory that is written to afterwards is kept, whatever the plan
says.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Final

from recollect.profile.joint import JointRecord

IsKept = Callable[[int, int], bool]
"""Whether a plan keeps a result of an op of forward, given the op and the position among its results."""

OTHER_OPS: Final = "traced, it runs other ops than in eager mode"


class UntraceableError(Exception):
    """A unit cannot run from a trace; the text says why."""


def other_ops(found: Sequence[object], expected: Sequence[object]) -> str:
    """Say that a trace has other ops than were recorded: the first one that differs."""
    pairs = zip_longest(found, expected, fillvalue="nothing")
    one, other = next(pair for pair in pairs if pair[0] != pair[1])
    return f"{OTHER_OPS}: {one} in place of {other}"


@dataclass(frozen=True, slots=True)
class Cut:
    """Which ops run when, and which values are held in between, as numbers in a `JointRecord`.

    Attributes:
        forward: the ops of forward, without views that nothing reads.
        saved: tensors that forward saves and backward reads.
        draws: ops of forward that draw random numbers and run again.
        backward: the ops of backward, with those of forward that run again.
        sums: for each sum that is made in place, the position of the addend whose memory takes it.
    """

    forward: tuple[int, ...]
    saved: tuple[int, ...]
    draws: tuple[int, ...]
    backward: tuple[int, ...]
    sums: Mapping[int, int]


def cut(joint: JointRecord, is_kept: IsKept) -> Cut:
    """Cut a traced unit; raise `UntraceableError` if something would have to run again that cannot."""
    run_between: dict[int, None] = {}  # In the order in which they were found.
    must_keep: set[int] = set()
    while True:
        try:
            schedule = _scheduled(joint, _Forward(joint, is_kept, must_keep, run_between))
            break
        except _ReadsOldContentError as error:
            if error.number in must_keep:  # It writes to memory that is none of its results.
                func = joint.ops[error.number].func
                raise UntraceableError(f"{func} reads what is written to afterwards, and would run again") from None
            if error.number in run_between:
                must_keep.add(error.number)
            run_between[error.number] = None
        except UntraceableError:
            rest = [number for number in run_between if number not in must_keep]
            if not rest:
                raise
            must_keep.add(rest[-1])
    saved, backward = tuple(sorted(schedule.saved)), tuple(schedule.ops)
    draws = tuple(number for number in backward if number < joint.num_forward and joint.ops[number].is_random)
    return Cut(_forward(joint, saved), saved, draws, backward, _sums(joint, saved, backward))


class _ReadsOldContentError(Exception):
    """An op that would run again reads memory that is written to after it has run.

    It has to run between the writes when they run again, or its results have to be kept.
    """

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def _scheduled(joint: JointRecord, forward: _Forward) -> _Schedule:
    schedule = _Schedule(joint, forward)
    for number in _needed(joint):
        op = joint.ops[number]
        if not forward.storages.isdisjoint(op.writes):
            raise UntraceableError(f"its backward writes to memory of forward, in {op.func}")
        for tensor in op.reads:
            schedule.provide(tensor)
        schedule.ops.append(number)
    for contributions in joint.gradients:
        for tensor in contributions:
            schedule.provide(tensor)
    return schedule


def _forward(joint: JointRecord, saved: tuple[int, ...]) -> tuple[int, ...]:
    read = {*joint.outputs, *saved}
    found = []
    for number in reversed(range(joint.num_forward)):
        op = joint.ops[number]
        if not op.is_view or not read.isdisjoint(op.results):
            read.update(op.reads)
            found.append(number)
    return tuple(found[::-1])


def _needed(joint: JointRecord) -> list[int]:
    """Return the ops of backward that gradients depend on: sums made by autograd's engine are left to it."""
    needed = {tensor for contributions in joint.gradients for tensor in contributions}
    storages = {joint.tensors[tensor] for tensor in needed}
    found = []
    for number in reversed(range(joint.num_forward, len(joint.ops))):
        op = joint.ops[number]
        if not needed.isdisjoint(op.results) or not storages.isdisjoint(op.writes) or op.runs_anyway:
            found.append(number)
            needed.update(op.reads)
            storages.update(joint.tensors[tensor] for tensor in op.reads)
    return found[::-1]


def _sums(joint: JointRecord, saved: tuple[int, ...], backward: tuple[int, ...]) -> dict[int, int]:
    """Find the sums of backward that may be made in place: into memory of backward that nothing reads any more."""
    memory = joint.tensors
    last: dict[int, int] = {}
    makes: set[int] = set()
    for position, number in enumerate(backward):
        last.update({memory[tensor]: position for tensor in joint.ops[number].reads})
        if number >= joint.num_forward:
            makes.update(joint.ops[number].results)
    results = (tensor for contributions in joint.gradients for tensor in contributions)
    outside = {memory[tensor] for tensor in (*joint.tangents, *saved, *results)}
    found: dict[int, int] = {}
    moved: dict[int, int] = {}
    for position, number in enumerate(backward):
        op = joint.ops[number]
        for index in op.sums_into if number >= joint.num_forward else ():
            target = memory[op.reads[index]]
            root = moved.get(target, target)
            if (
                op.reads[index] in makes
                and not outside & {target, root}
                and last[target] == position
                and last.get(root, position) <= position
            ):
                found[number] = index
                (result,) = op.results
                moved[memory[result]] = root
                last[root] = max(last.get(memory[result], position), position)
                break
    return found


class _Forward:
    """The known facts about forward's memory.

    Attributes:
        storages: all memory of forward, inputs included.
        available: memory that is there in backward: of inputs, of outputs of the unit, and of kept values.
        writes: for each memory that ops write to, the ops.
        groups: for new memory that is written to, the ops that create its contents, in order; with those that read it between
            the writes and make what is written, and those among `run_between` that read it there.
        blocks: for each op of a group, the ops that run again with it: those of all groups that share ops with its own.
        maker: for each tensor of forward, the op that made it; -1 for an input.
    """

    def __init__(
        self, joint: JointRecord, is_kept: IsKept, must_keep: Iterable[int], run_between: Container[int]
    ) -> None:
        self._joint = joint
        memory = joint.tensors
        inputs = {memory[tensor] for tensor in joint.inputs}
        kept: dict[int, bool] = {}
        self.writes: defaultdict[int, list[int]] = defaultdict(list)
        self.groups: dict[int, list[int]] = {}
        self.maker: dict[int, int] = dict.fromkeys(joint.inputs, -1)
        made_by: dict[int, list[int]] = defaultdict(list)
        updated: set[int] = set()
        for number, op in enumerate(joint.ops[: joint.num_forward]):
            touched = {memory[result]: index for index, result in enumerate(op.results) if result >= 0}
            self.maker.update((result, number) for result in op.results if result >= 0)
            for storage in op.writes:
                self.writes[storage].append(number)
                touched.setdefault(storage, 0)  # It need not be among the results.
            for storage in op.updates:
                self.writes[storage].append(number)
                updated.add(storage)
            for storage, index in touched.items():
                if storage in inputs:
                    continue
                if storage not in kept or storage in op.writes:
                    kept[storage] = is_kept(number, index)
                made_by[storage].append(number)
        for number in must_keep:
            results = (memory[result] for result in joint.ops[number].results if result >= 0)
            kept.update((storage, True) for storage in results if storage in kept)
        outputs = {memory[tensor] for tensor in joint.outputs}
        self.available = inputs | {storage for storage, is_there in kept.items() if is_there} | outputs | updated
        for storage in self.writes:
            if storage not in self.available:
                self.groups[storage] = made_by[storage]
        are_between: set[int] = set()
        for storage, ops in self.groups.items():
            between, others = self._between(storage, ops)
            for number in between:
                if number in are_between or self._is_written_to(number):
                    func = joint.ops[number].func
                    raise UntraceableError(f"{func} reads memory between the writes to it, for several writes")
            others = [one for one in others if one in run_between and one not in are_between]
            between += [one for one in others if not self._is_written_to(one)]
            self.groups[storage] = sorted({*ops, *between})
            are_between.update(between)
        self.blocks: dict[int, list[int]] = {}
        for ops in self.groups.values():
            # Those of an op with several results that are written to.
            block = sorted({*ops, *(one for number in ops for one in self.blocks.get(number, ()))})
            self.blocks.update(dict.fromkeys(block, block))
        self.storages = inputs | kept.keys()

    def _is_written_to(self, number: int) -> bool:
        """Whether an op's results are in memory that is written to again."""
        op = self._joint.ops[number]
        return any(self._joint.tensors[result] in self.groups for result in op.results if result >= 0)

    def _between(self, storage: int, ops: list[int]) -> tuple[list[int], list[int]]:
        """Return the ops that read some memory between the writes to it: those that compute the values written, and others."""
        memory, all_ops = self._joint.tensors, self._joint.ops
        derived, readers = {storage}, []
        for number in range(ops[0], ops[-1]):
            makes = {memory[result] for result in all_ops[number].results if result >= 0}
            if number not in ops and not makes & self.available:
                if any(memory[read] in derived for read in all_ops[number].reads):
                    derived |= makes
                    readers.append(number)
        needed, found = {memory[read] for number in ops for read in all_ops[number].reads} - {storage}, []
        for number in reversed(readers):
            op = all_ops[number]
            if any(result >= 0 and memory[result] in needed for result in op.results) and not op.writes:
                needed.update(memory[read] for read in op.reads)
                found.append(number)
        return found, [number for number in readers if number not in found]

    def check(self, number: int) -> None:
        """Check that an op of forward may run again, and then reads what it read in forward."""
        op = self._joint.ops[number]
        if op.stays:
            raise UntraceableError(op.stays)
        if not self.available.isdisjoint(op.writes):
            raise UntraceableError(f"{op.func} would run again, and write to what is kept once more")
        memory = self._joint.tensors
        again = {memory[result] for result in op.results if result >= 0} - {memory[tensor] for tensor in op.reads}
        if not again.isdisjoint(self.available & self.writes.keys()):
            # Beside the results that are needed, it would make the content from before the writes.
            raise _ReadsOldContentError(number)
        # Readers of views are checked.
        for storage in () if op.is_view else {memory[tensor] for tensor in op.reads}.difference(op.updates):
            is_late = any(write > number for write in self.writes.get(storage, ()))
            if is_late and number not in self.groups.get(storage, ()):
                if self.available.issuperset(memory[result] for result in op.results if result >= 0):
                    raise UntraceableError(f"{op.func} reads what is written to afterwards, and would run again")
                raise _ReadsOldContentError(number)


class _Schedule:
    """Puts the ops of forward that run again in front of their first readers."""

    def __init__(self, joint: JointRecord, forward: _Forward) -> None:
        self.ops: list[int] = []
        self.saved: dict[int, None] = {}
        self._joint = joint
        self._forward = forward
        # The first op of each block that has run, or waits for others.
        self._made: set[int] = set()
        self._waiting: set[int] = set()

    def provide(self, tensor: int) -> None:
        """Provide a tensor: saved, or made by rerun ops; in a loop, since chains can be thousands long."""
        pending = [self._block(tensor)]
        while pending:
            block = pending[-1]
            if not block or block[0] in self._made:
                pending.pop()
                continue
            before = [self._block(read) for number in block for read in self._joint.ops[number].reads]
            missing = [one for one in before if one and one[0] not in self._made and one[0] != block[0]]
            if any(one[0] in self._waiting for one in missing):
                func = self._joint.ops[block[0]].func
                raise UntraceableError(f"{func} makes memory that is read between the writes to it")
            if missing:
                self._waiting.add(block[0])
                pending += reversed(missing)
                continue
            self._waiting.discard(block[0])
            self._made.add(block[0])
            for number in block:
                self._forward.check(number)
                self.ops.append(number)

    def _block(self, tensor: int) -> list[int]:
        """Return the ops that make a tensor, which run one after the other; none if it is there."""
        if tensor not in self._forward.maker:
            return []
        storage = self._joint.tensors[tensor]
        if storage in self._forward.available:
            self.saved[tensor] = None
            return []
        maker = self._forward.maker[tensor]
        return self._forward.blocks.get(maker, [maker])
