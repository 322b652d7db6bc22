"""Plays a traced unit under a plan: the bytes that its two programs allocate and free.

They are those of the code that `recollect.engine.graph.code` writes: a tensor is let go of after its last reader, and memory is
freed with its last tensor; an op needs its workspace while it runs. After backward, autograd's engine adds up the gradients
of an input, into the first one if nothing else holds that.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from recollect.profile.graph import UnitGraph
from recollect.profile.joint import JointOp, JointRecord
from recollect.profile.variant import VariantRecord
from recollect.programs.cut import Cut
from recollect.programs.parts import parts, stretches

Blocks = Callable[[int], int]
"""Returns the bytes that an allocation takes."""


def play(
    graph: UnitGraph,
    cut: Cut,
    blocks: Blocks = int,
    step_s: float = 0.0,
    *,
    is_chained: bool = False,
    is_retained: bool = False,
) -> VariantRecord:
    """Return what a unit takes; `is_chained`: see `engine/graph/node.py`; `is_retained`: in a backward that keeps its graph."""
    joint = graph.joint
    if joint is None:
        raise ValueError("joint: got none, expected a unit that was traced")
    memory = joint.tensors
    outside = {memory[tensor] for tensor in (*joint.inputs, *joint.outputs)}
    own = dict.fromkeys(memory[tensor] for tensor in cut.saved if memory[tensor] not in outside)
    values = values_by_memory(graph, joint)
    values |= {memory[tensor]: value for tensor, value in zip(joint.inputs, joint.input_values, strict=True)}
    held = {values.get(memory[tensor], -1) for tensor in cut.saved if memory[tensor] in outside}
    states_bytes = sum(joint.ops[number].state_bytes for number in cut.draws)
    forward = _Memory(joint, blocks, dict.fromkeys((memory[tensor] for tensor in joint.inputs), -1))
    forward.run_forward(cut)
    backward = _Memory(joint, blocks, {one: values.get(one, -1) for one in outside})
    return VariantRecord(
        kept=tuple(sorted({values[storage] for storage in own if storage in values})),
        held=tuple(sorted(held - {-1})),
        own_bytes=sum(blocks(joint.storages[storage]) for storage in own) + states_bytes,
        forward_bytes=forward.most_bytes,
        backward=tuple(backward.run_backward(cut, is_chained=is_chained, is_retained=is_retained)),
        step_s=step_s,
        is_estimated=True,
    )


def made_values(graph: UnitGraph, joint: JointRecord) -> dict[int, int]:
    """Return the value that is made with each tensor of forward, by the names of ops."""
    outputs = {op.name: op.outputs for op in graph.ops}
    found: dict[int, int] = {}
    for op in joint.ops[: joint.num_forward]:
        found |= dict(zip(new_results(op, joint), outputs.get(op.name, ()), strict=False))
    return found


def values_by_memory(graph: UnitGraph, joint: JointRecord) -> dict[int, int]:
    """Return the value that each memory of forward holds in the end."""
    return {joint.tensors[tensor]: value for tensor, value in made_values(graph, joint).items()}


def new_results(op: JointOp, joint: JointRecord) -> list[int]:
    """Return the tensors that an op makes or writes to, without views."""
    read = {joint.tensors[tensor] for tensor in op.reads}
    results = [result for result in op.results if result >= 0]
    return [result for result in results if op.writes or joint.tensors[result] not in read]


@dataclass(eq=False, slots=True)
class _Block:
    """A piece of memory, and how many tensors are there; `value`: of memory that others hold, -1 if it has none."""

    nbytes: int
    is_outside: bool = False
    value: int = -1
    num_tensors: int = 0


class _Memory:
    """Memory as code uses it, above what there is when it begins.

    Attributes:
        most_bytes: the most so far, since the last stretch.
    """

    def __init__(self, joint: JointRecord, blocks: Blocks, outside: Mapping[int, int]) -> None:
        self.most_bytes = 0
        self._now_bytes = 0
        self._joint = joint
        self._blocks = blocks
        self._outside = outside
        # Of the tensors that the code has.
        self._block_of: dict[int, _Block] = {}

    def run_forward(self, cut: Cut) -> None:
        joint = self._joint
        states = {number: joint.ops[number].state_bytes for number in cut.draws}
        for _ in self._run(cut.forward, joint.inputs, {*joint.outputs, *cut.saved}, states=states):
            pass

    def run_backward(self, cut: Cut, *, is_chained: bool, is_retained: bool) -> Iterator[tuple[int, int, int]]:
        joint = self._joint
        retained = set(cut.saved) if is_retained else set[int]()
        given = [*joint.tangents, *cut.saved]
        results = {tensor for contributions in joint.gradients for tensor in contributions}
        lasting = {*results, *retained, *(joint.tangents if joint.holds_tangents else ())}
        states = {number: -joint.ops[number].state_bytes for number in cut.draws if not is_retained}
        handed_over = _parts(joint, cut) if is_chained else []
        for value in self._run(cut.backward, given, lasting, states=states, sums=cut.sums, parts=handed_over):
            yield self._stretch(value)
        rest = self._block_of.keys() - retained - (set() if is_chained else results)
        for value in self._let_go([tensor for tensor in self._block_of if tensor in rest]):
            yield self._stretch(value)
        if not is_chained:
            self._hand_over(range(len(joint.inputs)), [], frees=False)
        yield self._stretch(-1)

    def _stretch(self, value: int) -> tuple[int, int, int]:
        found = self.most_bytes, self._now_bytes, value
        self.most_bytes = self._now_bytes = 0
        return found

    def _run(
        self,
        numbers: Sequence[int],
        given: Sequence[int],
        results: Collection[int],
        *,
        states: Mapping[int, int],
        sums: Mapping[int, int] = MappingProxyType({}),
        parts: Sequence[tuple[int, Sequence[int]]] = (),
    ) -> Iterator[int]:
        """Run ops; yield the values of outside memory that is released.

        `states`: the bytes of the state of a generator that an op leaves; negative if it lets go of one. `sums`: see `Cut`.
        `parts`: inputs whose gradients are handed over, and the number of ops that have run then.
        """
        last = self._last_readers(numbers, given)
        yield from self._let_go([one for one, position in last.items() if position < 0 and one not in results])
        pending = list(reversed(parts))
        for position, number in enumerate(numbers):
            op = self._joint.ops[number]
            self._now_bytes += max(0, states.get(number, 0))
            made = self._made(op, sums.get(number))
            yield from self._let_go([one for one in made if one in self._block_of])
            for tensor, block in made.items():
                self._bind(tensor, block)
            # If there are other threads, the op draws from its own generator, whose state is then copied.
            self._takes(max(0, states.get(number, 0)))
            dying = [one for one in dict.fromkeys(op.reads) if last[one] == position and one not in results]
            yield from self._let_go([*dying, *(one for one in made if one not in last and one not in results)])
            self._now_bytes += min(0, states.get(number, 0))
            while pending and pending[-1][0] == position + 1:
                self._hand_over(pending.pop()[1], pending, frees=True)
        while pending:
            self._hand_over(pending.pop()[1], pending, frees=True)

    def _last_readers(self, numbers: Sequence[int], given: Iterable[int]) -> dict[int, int]:
        """Provide tensors; return the position of the last reader of each tensor, -1 for one without."""
        last = dict.fromkeys(given, -1)
        there: dict[int, _Block] = {}
        for tensor in last:
            storage = self._joint.tensors[tensor]
            if storage not in there:
                is_outside = storage in self._outside
                there[storage] = _Block(self._bytes(storage), is_outside, self._outside.get(storage, -1))
            self._bind(tensor, there[storage])
        for position, number in enumerate(numbers):
            last.update(dict.fromkeys(self._joint.ops[number].reads, position))
        return last

    def _made(self, op: JointOp, sums_into: int | None) -> dict[int, _Block]:
        """Run an op; return the memory of each result: of an argument, or new."""
        there = {self._joint.tensors[tensor]: self._block_of[tensor] for tensor in op.reads}
        results = [result for result in op.results if result >= 0]
        if sums_into is not None:
            return {results[0]: self._block_of[op.reads[sums_into]]}
        self._takes(op.working_bytes)
        for storage in map(self._joint.tensors.__getitem__, results):
            if storage not in there:
                there[storage] = _Block(self._bytes(storage))
                self._now_bytes += there[storage].nbytes
        self._takes(0)
        return {result: there[self._joint.tensors[result]] for result in results}

    def _bytes(self, storage: int) -> int:
        return self._blocks(self._joint.storages[storage])

    def _takes(self, nbytes: int) -> None:
        self.most_bytes = max(self.most_bytes, self._now_bytes + nbytes)

    def _bind(self, tensor: int, block: _Block) -> None:
        self._block_of[tensor] = block
        block.num_tensors += 1

    def _let_go(self, tensors: Iterable[int]) -> Iterator[int]:
        """Drop tensors; yield the values of memory from outside that nothing else here holds."""
        for tensor in tensors:
            block = self._block_of.pop(tensor)
            block.num_tensors -= 1
            if block.num_tensors:
                continue
            if not block.is_outside:
                self._now_bytes -= block.nbytes
            elif block.value >= 0:
                yield block.value

    def _hand_over(self, inputs: Iterable[int], later: Iterable[tuple[int, Sequence[int]]], *, frees: bool) -> None:
        """Let autograd's engine add up the gradients of inputs, each into its first one if nothing else holds that memory."""
        joint = self._joint
        gradients = {index: [self._block_of[one] for one in joint.gradients[index]] for index in inputs}
        needed = {one for _, others in later for index in others for one in joint.gradients[index]}
        for tensor in {one for index in gradients for one in joint.gradients[index]} - needed:
            self._block_of.pop(tensor).num_tensors -= 1
        users = Counter(block for blocks in gradients.values() for block in blocks)
        users.update({block: block.num_tensors for block in users})

        def leave(block: _Block) -> None:
            users[block] -= 1
            if not users[block] and not block.is_outside:
                self._now_bytes -= block.nbytes

        for index, (total, *others) in ((index, blocks) for index, blocks in gradients.items() if blocks):
            for block in others:
                if users[total] > 1 or total.is_outside:
                    self._now_bytes += block.nbytes
                    self._takes(0)
                    leave(total)
                    total = _Block(block.nbytes)
                    users[total] = 1
                leave(block)
            if frees and index in joint.parameters:
                leave(total)


def _parts(joint: JointRecord, cut: Cut) -> list[tuple[int, list[int]]]:
    inputs = stretches(joint, cut)
    return [(position, own) for (position, _), own in zip(parts(joint, cut, inputs), inputs, strict=True)]
