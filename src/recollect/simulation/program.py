"""Compiles the events of a step into a program for many playbacks: parts that no plan changes are computed once.

A plan changes only when the values of units are made and freed. Between those moments, whole runs of events, such as
the gradients that a backward formula makes and releases, reduce to two numbers: how far memory rises meanwhile, and by
how much it has changed in the end (`BULK`).
"""

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import chain
from typing import Any, ClassVar, Final

from recollect.plans.action import EngineChoice
from recollect.profile import events
from recollect.profile.events import Event, Key
from recollect.profile.graph import OpRecord, UnitGraph
from recollect.profile.profile import Profile
from recollect.profile.variant import VariantRecord
from recollect.programs.unit import again_s, played_unit
from recollect.simulation.decisions import CallActions
from recollect.simulation.windows import Edge, Window

BULK: Final = -1
"""`(BULK, most_bytes, change_bytes, call)`: memory rises by `most_bytes` at most, and by `change_bytes` in the end, in a window
of this call; -1 in the optimizer's step."""
WINDOW: Final = -2
"""`(WINDOW,)`: the next window begins."""
EDGE: Final = -3
"""`(EDGE, phase, call)`: an edge, where offloaded values leave or come back."""
REPLACED: Final = -4
"""`(REPLACED,)`: graphs of the last step that no backward used up have been replaced by now."""

Instruction = tuple[int, tuple[Any, ...]]


@dataclass(frozen=True, slots=True)
class ProgramOp:
    """One op of a call. Values are named by the call that computed them: (call, value)."""

    op: OpRecord
    inputs: tuple[Key, ...]
    results: tuple[tuple[Key, int], ...]
    """The values that it computes, each with its bytes."""
    sizes: tuple[int, ...]


class Program:
    """The instructions to play back for one profile.

    Args:
        windows: the stretches of the step whose peaks are wanted.
        edges: the edges of the step, for plans that offload.

    Attributes:
        instructions: (code, operands) pairs: the events of `recollect.profile.events`, with a `ProgramOp` for each op,
            a `Key` for each value or storage, and one `BULK` for each run of events that no plan changes.
        lasting: for each call, the values whose bytes something other than the unit's ops may hold, under some plan.
        written: values whose bytes an op writes to later.
        read_by_others: values that calls read of others.
        replaced: where graphs of the last step are; -1 if no plan leaves one.
        bulk_codes: the events that no plan changes, unless they are of a storage that a unit reads.
    """

    bulk_codes: ClassVar[frozenset[int]] = frozenset({events.ALLOC, events.FREE, events.WORK})

    def __init__(self, profile: Profile, windows: Sequence[Window] = (), edges: Sequence[Edge] = ()) -> None:
        self.profile = profile
        self.windows = tuple(windows)
        self.edges = tuple(edges)
        self.lasting = _lasting(profile)
        self.written = frozenset(
            (index, i)
            for index, call in enumerate(profile.calls)
            for i, value in enumerate(profile.graph_of(call).values)
            if value.mutated_later
        )
        self.read_by_others = frozenset((source, value) for c in profile.calls for _, source, value in c.origins)
        self._engine_s = {
            index: _engine_s(graph, call.num_runs)
            for index, call in enumerate(profile.calls)
            if (graph := profile.graph_of(call)).variants
        }
        self._origins = [
            {value: (c, v) for value, c, v in call.origins} | {value: (-1, storage) for value, storage in call.outside}
            for call in profile.calls
        ]
        # Storages from outside the units that a plan may keep alive longer.
        self._borrowed = frozenset(storage for call in profile.calls for _, storage in call.outside)
        self._translations: dict[int, Callable[..., tuple[Any, ...]]] = {
            events.ALLOC: self._alloc,
            events.FREE: lambda storage: ((-1, storage),),
            events.DIES: lambda call, value: ((call, value),),
            events.SAVE: self._save,
            events.OP: self._op,
        }
        # Calls of one graph share the sizes of its values.
        self._sizes = cache(
            lambda graph, index: tuple(
                profile.block_bytes(profile.graphs[graph].values[value].nbytes)
                for value in profile.graphs[graph].ops[index].outputs
            )
        )
        self.instructions = list(self._instructions())
        places = list(enumerate(self.instructions))
        self.replaced = next((at for at, (code, _) in places if code == REPLACED), -1)
        self._begins = {operands[0]: at for at, (code, operands) in reversed(places) if code == events.OP}
        self._counted: dict[tuple[int, frozenset[int]], frozenset[int]] = {}
        self._watched_s = cache(lambda graph, dropped: profile.graphs[graph].watched_s(dropped))

    def forgets_at(self, on_tape: Collection[int]) -> int:
        """Return where the last step's recipes are forgotten: where the first call on the tape begins (`forget_last_step`)."""
        return min(self._begins.get(min(on_tape, default=-1), 0), max(0, self.replaced))

    def counted(self, call: int, dropped: frozenset[int]) -> frozenset[int]:
        """Return the values of a call that need only be counted: only the model's own code holds them."""
        key = (call, dropped)
        if key not in self._counted:
            graph = self.profile.graph_of(self.profile.calls[call])
            # An op that may run again holds what it reads, except values that are recipes themselves.
            read = {v for op in graph.ops if not dropped.isdisjoint(op.outputs) for v in op.inputs} - dropped
            self._counted[key] = frozenset(range(len(graph.values))) - self.lasting[call] - read
        return self._counted[key]

    def tape_s(self, call: int, dropped: frozenset[int]) -> float:
        """Return the seconds that the tape adds to a call's forward, in all the runs that the call represents."""
        record = self.profile.calls[call]
        return record.num_runs * float(self._watched_s(record.graph, dropped))

    @cached_property
    def _chained(self) -> frozenset[int]:
        """The calls that begin when their parameters have gradients, to which backward adds."""
        calls = self.profile.calls
        if self.profile.persistent.get("gradients"):
            return frozenset(range(len(calls)))
        found: set[int] = set()
        have_gradients: set[str] = set()
        for code, call, *_ in self.profile.log.events:
            if code == events.REACH:
                have_gradients.add(calls[call].path)
            elif code == events.OP and calls[call].path in have_gradients:
                found.add(call)
        return frozenset(found)

    def variant(self, call: int, decision: CallActions, *, is_retained: bool = False) -> VariantRecord:
        """Return the variant that a call runs as, which its engine plays in place of ops: the recorded one, or of its trace.

        `is_retained`: in a backward that keeps its graph.
        """
        graph = self.profile.graph_of(self.profile.calls[call])
        if decision.variant >= 0:
            return graph.variants[decision.variant]
        recomputed, is_chained = decision.values.recomputed, call in self._chained
        return played_unit(graph, recomputed, self.profile.device, is_chained=is_chained, is_retained=is_retained)

    def added_s(
        self,
        decisions: Mapping[int, CallActions] | Sequence[CallActions],
        on_tape: Collection[int],
        rerun_s: Iterable[float],
    ) -> float:
        """Return the seconds that a plan adds: the tape's overhead, the ops that run again, in any order, and other engines."""
        engines_s = (table[decisions[call].variant] for call, table in self._engine_s.items())
        pairs = decisions.items() if isinstance(decisions, Mapping) else enumerate(decisions)
        traced_s = (self._traced_s(call, one) for call, one in pairs if one.engine is EngineChoice.GRAPH)
        tape_s = (self.tape_s(call, decisions[call].watched) for call in on_tape)
        return math.fsum(chain(tape_s, rerun_s, engines_s, traced_s))

    def _traced_s(self, call: int, decision: CallActions) -> float:
        """Return the seconds of a traced unit beyond the plain one, in all the runs that the call represents."""
        record = self.profile.calls[call]
        host = self.profile.host
        unit_s = 0.0 if host is None else host.traced_unit_s
        return record.num_runs * (unit_s + again_s(self.profile.graph_of(record), decision.values.recomputed))

    def _instructions(self) -> Iterator[Instruction]:
        starts = iter([*(window.start for window in self.windows[1:]), -1])
        next_start = next(starts)
        places = iter(self.windows)
        window = next(places, None)
        edges: defaultdict[int, list[Edge]] = defaultdict(list)
        for edge in self.edges:
            edges[edge.start].append(edge)
        sizes: dict[int, int] = {}
        retained, replaced = set(_retained(self.profile)), _replaced(self.profile)
        change_bytes = most_bytes = 0
        for position, event in enumerate(self.profile.log.events):
            code = event[0]
            is_window = position == next_start
            is_bulk = code in self.bulk_codes and (code == events.WORK or event[1] not in self._borrowed)
            if (is_window or position in edges or not is_bulk) and (change_bytes or most_bytes):
                yield BULK, (most_bytes, change_bytes, _caller(window))
                change_bytes = most_bytes = 0
            if position == replaced:
                yield REPLACED, ()
            if is_window:
                yield WINDOW, ()
                next_start, window = next(starts), next(places)
            for edge in edges.get(position, ()):
                yield EDGE, (edge.phase, edge.call)
            if code == events.REACH:
                yield code, (event[1], position in retained)
            elif not is_bulk:
                yield code, self.operands(event)
            elif code == events.ALLOC:
                sizes[event[1]] = self.profile.block_bytes(event[2])
                change_bytes += sizes[event[1]]
                most_bytes = max(most_bytes, change_bytes)
            elif code == events.FREE:
                change_bytes -= sizes.pop(event[1])
            else:
                most_bytes = max(most_bytes, change_bytes + event[1])
        if change_bytes or most_bytes:
            yield BULK, (most_bytes, change_bytes, _caller(window))
        if replaced == len(self.profile.log.events):
            yield REPLACED, ()

    def operands(self, event: Event) -> tuple[Any, ...]:
        code, *numbers = event
        translate = self._translations.get(code)
        return tuple(numbers) if translate is None else translate(*numbers)

    def _alloc(self, storage: int, nbytes: int) -> tuple[Key, int]:
        return (-1, storage), self.profile.block_bytes(nbytes)

    def _save(self, call: int, value: int, handle: int, saver: int) -> tuple[int, Key, int, int]:
        return call, self.key(call, value), handle, saver

    def _op(self, call: int, index: int) -> tuple[int, ProgramOp]:
        graph = self.profile.calls[call].graph
        op, sizes = self.profile.graphs[graph].ops[index], self._sizes(graph, index)
        run = ProgramOp(
            op=op,
            inputs=tuple(self.key(call, value) for value in op.inputs),
            results=tuple(((call, value), nbytes) for value, nbytes in zip(op.outputs, sizes, strict=True)),
            sizes=sizes,
        )
        return call, run

    def key(self, call: int, value: int) -> Key:
        return self._origins[call].get(value, (call, value))


def _retained(profile: Profile) -> Iterator[int]:
    """Yield the positions of events in a backward that keeps its graph."""
    is_retained = False
    for position, (code, *_) in reversed(list(enumerate(profile.log.events))):
        is_retained = code == events.LET_GO or (is_retained and code != events.PHASE)
        if is_retained:
            yield position


def _replaced(profile: Profile) -> int:
    """Return the position before which what the last step left is replaced: the backward after all that this one leaves; or -1.

    A step leaves graphs that no backward uses up, and values that the loop holds on to. What a graph holds depends on the plan.
    """
    left: dict[tuple[int, ...], int] = {}
    for position, (code, *operands) in enumerate(profile.log.events):
        if code == events.SAVE:
            left[operands[2],] = position
        elif code == events.RELEASE:
            left.pop((operands[0],), None)
        elif code == events.OP:
            op = profile.graph_of(profile.calls[operands[0]]).ops[operands[1]]
            if op.mutates:
                left.pop((operands[0], op.inputs[0]), None)
            left.update(((operands[0], value), position) for value in op.outputs)
        elif code == events.DIES:
            left.pop((operands[0], operands[1]), None)
    last = max(left.values(), default=-1)
    ends = (
        at for at, event in enumerate(profile.log.events) if at > last and event[:2] == (events.PHASE, events.BACKWARD)
    )
    return next(ends, len(profile.log.events)) if left else -1


def _caller(window: Window | None) -> int:
    return -1 if window is None or window.phase == events.OPTIMIZER else window.call


def _engine_s(graph: UnitGraph, num_runs: int) -> tuple[float, ...]:
    """Return the seconds that each variant of a unit adds to PyTorch's own choice, and, last, that the eager unit adds."""
    return tuple(num_runs * graph.beyond_default_s(s) for s in (*[v.step_s for v in graph.variants], graph.eager_s))


def _lasting(profile: Profile) -> list[frozenset[int]]:
    """Return each call's values that are saved, returned, read by a different call, or share bytes with a different value."""
    found: list[set[int]] = [set() for _ in profile.calls]
    for index, call in enumerate(profile.calls):
        graph = profile.graph_of(call)
        found[index].update(i for i, value in enumerate(graph.values) if value.is_output or value.mutated_later)
        found[index].update(v for op in graph.ops if op.mutates for v in op.outputs)
        for _, source, value in call.origins:
            found[source].add(value)
    for saved_call, saved_value, *_ in profile.log.operands(events.SAVE):
        found[saved_call].add(saved_value)
    return [frozenset(values) for values in found]
