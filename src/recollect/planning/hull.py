"""Trade kept bytes for recompute seconds inside one unit: find all options on the convex hull, by minimum cuts.

At a price `lambda` (seconds per kept byte), choosing the values to keep and the ops to recompute is a minimum cut:

    a_v = 1   value v is available in backward          a_v = 1 for saved values
    r_o = 1   op o runs again                           r_o <= a_u for each argument u of o
    m_j = 1   the tape watches module j                 r_o <= m_module(o) <= m_unit
    cost      lambda * bytes(v)  if a_v = 1 and r_producer(v) = 0: v is kept; or, if that is less and all ranks of a group
                                 have the same v, lambda * bytes of its part + time to gather it
              time(o)            if r_o = 1, and the overhead of the tape in forward if m_j = 1

Every term is a capacity between two nodes (source side = 1), so one cut gives the best option at that price. The
outputs of one op share its r. Leaves are free, and so is the unit's output where the plan keeps it. Each line between
two known options is tested at its own slope: the cut there is either on the line, which is then an edge of the hull, or
a new option below it. So n options take about 2 n cuts.

Flow or LP: SciPy's Dinic takes 0.2 ms for a unit of 100 ops and 0.6 ms for 1000, the same LP under HiGHS 2 and 10 ms
(2 cores, SciPy 1.17). The flow is in 32-bit integers, with capacities scaled to add up to 2**30, so an option that is
better by less than about 1e-8 of the unit's cost can be missed; every option returned is consistent.

References:
    M. J. Eisner, D. G. Severance, "Mathematical techniques for efficient record segmentation in large shared
    databases", JACM 23(4), 1976, for the sweep over the price.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import NamedTuple

import numpy as np
from scipy.sparse import coo_array, csr_array
from scipy.sparse.csgraph import breadth_first_order, maximum_flow

from recollect.plans.action import EngineChoice
from recollect.plans.value_names import module_of
from recollect.profile.graph import UnitGraph

_INFINITE = 2**31 - 1
# The sum of the finite capacities: no flow reaches _INFINITE.
_TOTAL_CAPACITY = 2**30
_TOLERANCE = 1e-9
# Nodes of the networks of all cuts together: seconds. Only units of over a thousand ops have more options than this allows.
_NODES_OF_ALL_CUTS = 250_000
_FEWEST_CUTS = 24


class Stored(NamedTuple):
    """The stored values of a unit, as one set of values for each way to store one; values in no set are not stored."""

    whole: frozenset[int] = frozenset()
    """Values that are kept in memory."""
    parts: frozenset[int] = frozenset()
    """Values of which this rank keeps only its part."""

    @classmethod
    def whole_values(cls, values: Iterable[int]) -> Stored:
        return cls(frozenset(values))

    @property
    def values(self) -> frozenset[int]:
        return self.whole | self.parts if self.parts else self.whole

    def toggled(self, value: int) -> Stored:
        return Stored(self.whole ^ {value}, self.parts)

    def toggled_part(self, value: int) -> Stored:
        return Stored(self.whole, self.parts ^ {value})

    def with_whole(self, values: Iterable[int]) -> Stored:
        return Stored(self.whole.union(values), self.parts)

    def without(self, values: Iterable[int]) -> Stored:
        return Stored(self.whole.difference(values), self.parts.difference(values))

    def has_more_than(self, other: Stored) -> bool:
        return self != other and self.whole >= other.whole and self.parts >= other.parts

    @property
    def order(self) -> tuple[list[int], list[int]]:
        """A key to sort by that is the same in every run."""
        return sorted(self.whole), sorted(self.parts)


@dataclass(frozen=True, slots=True)
class Option:
    """One way to keep and recompute the values of one unit, with its costs."""

    stored: Stored
    """The values that are stored, by index; every saved value is among them or can be computed from them."""
    recompute_ops: frozenset[int]
    """Indices of the ops that run again in backward."""
    kept_bytes: int
    """Bytes of stored values, including the unit's output if kept, and of generator states to rerun random ops."""
    recompute_s: float
    """Seconds of `recompute_ops` and to gather parts, plus the overhead of the tape in forward for their modules."""
    keeps_output: bool = True
    engine: EngineChoice = EngineChoice.TAPE
    variant: int = -1
    """Of a compiled unit, the index in `UnitGraph.variants`; -1 on other engines."""

    @property
    def key(self) -> tuple[Stored, bool, EngineChoice, int]:
        return self.stored, self.keeps_output, self.engine, self.variant


def unit_hull(graph: UnitGraph, *, keeps_output: bool = True) -> tuple[Option, ...]:
    """Return the lower convex hull of (kept bytes, recompute seconds) over all options for one unit.

    Args:
        graph: the unit. Ops with a `must_keep` output, or that read a leaf that is `mutated_later`, never run again. A
            produced value that is `mutated_later` is kept only if autograd itself saved it.
        keeps_output: whether the unit's output stays in memory anyway, because the next unit starts from it.

    Returns:
        Options from the leanest (fewest bytes) to the fattest, which keeps exactly the saved values and recomputes
        nothing. Bytes rise and seconds fall from one to the next (the last may save no time, if ops take none).

    Complexity: two minimum cuts per option, but at most `_NODES_OF_ALL_CUTS`: of large units with very many options, those
        that leave the smallest gaps. 0.05 s for 100 ops, 1 s for 1000 ops with all times and sizes different.
    """
    network = _Network(graph, keeps_output=keeps_output)
    fattest = network.evaluator.option(graph.saved_values)
    leanest = network.cut(byte_price=1.0, second_price=0.0)
    found = {_point(fattest): fattest, _point(leanest): leanest}
    # Lines between two options below which there may be others: those with most room below first, so a limit on the work
    # leaves out the least important.
    lines: list[tuple[float, int, Option, Option]] = []
    numbers = count()

    def add(lean: Option, fat: Option) -> None:
        delta_bytes, delta_s = fat.kept_bytes - lean.kept_bytes, lean.recompute_s - fat.recompute_s
        if delta_bytes > 0 and delta_s > 0:
            heapq.heappush(lines, (-delta_bytes * delta_s, next(numbers), lean, fat))

    add(leanest, fattest)
    most_cuts = max(_FEWEST_CUTS, _NODES_OF_ALL_CUTS // (len(graph.values) + len(graph.ops) + 1))
    for _ in range(most_cuts):
        if not lines:
            break
        *_, lean, fat = heapq.heappop(lines)
        price = (lean.recompute_s - fat.recompute_s) / (fat.kept_bytes - lean.kept_bytes)
        middle = network.cut(byte_price=price, second_price=1.0)
        chord_s = price * lean.kept_bytes + lean.recompute_s
        below = price * middle.kept_bytes + middle.recompute_s < chord_s * (1 - _TOLERANCE)
        if below and _point(middle) not in found:
            found[_point(middle)] = middle
            add(lean, middle)
            add(middle, fat)
    return _descending(found.values(), fattest)


def spread(options: Sequence[Option], most: int) -> Sequence[Option]:
    """Return at most so many of the options, evenly spread."""
    return options if len(options) <= most else [options[len(options) * i // most] for i in range(most)]


class Evaluator:
    """Evaluates sets of kept values for one unit."""

    def __init__(self, graph: UnitGraph, *, keeps_output: bool = True) -> None:
        values = graph.values
        self._graph = graph
        self._keeps_output = keeps_output
        self._saved = graph.saved_values
        self._fixed_ops = _fixed_ops(graph)
        self._outputs = {i for i, v in graph.made if keeps_output and v.is_output}
        self._free = {i for i in self._outputs if values[i].saved or not values[i].mutated_later}
        self._modules = [module_of(op.name) for op in graph.ops]
        self._module_tape_s = dict(graph.module_tape_s)
        self._nbytes = [value.nbytes for value in values]
        self._parts = {part.value: part for part in graph.parts}
        self._op_s = [graph.again_s(op) for op in graph.ops]
        self._state_bytes = [op.state_bytes for op in graph.ops]
        self._has_states = any(self._state_bytes)
        # For each op, last first: its index, its results, and its arguments that ops produced.
        self._rows = [
            (index, op.outputs, [v for v in op.inputs if values[v].producer is not None])
            for index, op in enumerate(graph.ops)
        ][::-1]

    def option(self, whole: Iterable[int], parts: Collection[int] = ()) -> Option:
        """Return the option that stores these values: find the ops that must run again, and leave out values of no use.

        Needed values that cannot be recomputed are kept even if not among these, as in the engine.
        Of values in both, only the part is kept.
        """
        # One byte per value, for speed: this runs hundreds of times per unit.
        wanted = {*whole, *parts}
        available, needed = bytearray(len(self._nbytes)), bytearray(len(self._nbytes))
        for value in (*self._free, *wanted):
            available[value] = 1
        for value in self._saved:
            needed[value] = 1
        recompute_ops = []
        for index, outputs, inputs in self._rows:
            missing = [value for value in outputs if needed[value] and not available[value]]
            if not missing:
                continue
            if index in self._fixed_ops:
                wanted.update(missing)
            else:
                recompute_ops.append(index)
                for value in inputs:
                    needed[value] = 1
        kept = self._outputs.union(value for value in wanted if needed[value])
        held = [self._parts[value] for value in parts if value in kept]
        part_values = frozenset([part.value for part in held])
        whole = frozenset(kept - part_values if held else kept)
        makers = [op for part in held if (op := self._graph.values[part.value].producer) is not None]
        seconds = [*map(self._op_s.__getitem__, recompute_ops), *[part.gather_s for part in held]]
        state_bytes = sum(map(self._state_bytes.__getitem__, recompute_ops)) if self._has_states else 0
        return Option(
            stored=Stored(whole, part_values),
            recompute_ops=frozenset(recompute_ops),
            kept_bytes=sum(map(self._nbytes.__getitem__, whole)) + sum([part.nbytes for part in held]) + state_bytes,
            recompute_s=math.fsum((*seconds, *self._tape_s([*recompute_ops, *makers]))),
            keeps_output=self._keeps_output,
        )

    def _tape_s(self, recompute_ops: Collection[int]) -> Iterator[float]:
        """Yield the overheads, in seconds, of the tape in forward that let these ops run again."""
        if recompute_ops:
            yield self._graph.tape_s
        for module in self._module_tape_s.keys() & set(map(self._modules.__getitem__, recompute_ops)):
            yield self._module_tape_s[module]


def _fixed_ops(graph: UnitGraph) -> set[int]:
    """Return the ops that can never run again: a result must be kept, or a leaf that they read is mutated later."""
    fixed = {value.producer for value in graph.values if value.must_keep and value.producer is not None}
    lost = {i for i, value in enumerate(graph.values) if value.producer is None and value.mutated_later}
    return fixed | {index for index, op in enumerate(graph.ops) if not lost.isdisjoint(op.inputs)}


def _point(option: Option) -> tuple[int, float]:
    return option.kept_bytes, option.recompute_s


def _descending(options: Iterable[Option], fattest: Option) -> tuple[Option, ...]:
    """Sort options by bytes and drop dominated ones; the fattest always stays."""
    result: list[Option] = []
    for option in sorted(options, key=_point):
        if not result or option.recompute_s < result[-1].recompute_s:
            result.append(option)
    if result[-1].stored != fattest.stored:
        result.append(fattest)
    return tuple(result)


class _Network:
    """The flow network of one unit. Nodes: v for value v, num_values + o for op o, then source, sink, unit, modules."""

    def __init__(self, graph: UnitGraph, *, keeps_output: bool) -> None:
        self._graph = graph
        self.evaluator = Evaluator(graph, keeps_output=keeps_output)
        self._num_values = len(graph.values)
        self._source = self._num_values + len(graph.ops)
        self._sink = self._source + 1
        # Each edge: (from, to, kept bytes, seconds); -1 bytes marks an infinite capacity.
        edges = [*self._value_edges(keeps_output), *self._op_edges(), *self._tape_edges()]
        num_nodes = 1 + max((max(start, end) for start, end, *_ in edges), default=self._sink)
        self._shape = (max(num_nodes, self._sink + 1),) * 2
        start, end, nbytes, seconds = (np.array(column) for column in zip(*edges, strict=True)) if edges else [[]] * 4
        order = coo_array((np.arange(1, len(edges) + 1), (start, end)), shape=self._shape).tocsr()
        # Store the edges in the order of the sparse matrix: each cut then only replaces its numbers.
        self._indices, self._indptr = order.indices.astype(np.int32), order.indptr.astype(np.int32)
        position = order.data - 1
        self._nbytes = np.asarray(nbytes, dtype=float)[position]
        self._seconds = np.asarray(seconds, dtype=float)[position]
        self._is_infinite = self._nbytes < 0
        # The cost of each edge if the value is kept as a part; the same where there is none.
        part_of = {part.value: part for part in graph.parts}
        parts = [part_of.get(start) if nbytes > 0 else None for start, _, nbytes, _ in edges]
        in_order = [parts[at] for at in position] if graph.parts else []
        self._part_bytes = np.array([-1 if part is None else part.nbytes for part in in_order], dtype=float)
        self._gather_s = np.array([0.0 if part is None else part.gather_s for part in in_order], dtype=float)

    def _value_edges(self, keeps_output: bool) -> Iterable[tuple[int, int, int, float]]:
        fixed_ops = _fixed_ops(self._graph)
        for index, value in enumerate(self._graph.values):
            can_keep = value.saved or not value.mutated_later
            if value.producer is None or (value.is_output and keeps_output and can_keep):
                continue
            if value.saved:
                yield self._source, index, -1, 0.0
            end = self._sink if value.producer in fixed_ops else self._num_values + value.producer
            yield index, end, value.nbytes if can_keep else -1, 0.0

    def _op_edges(self) -> Iterable[tuple[int, int, int, float]]:
        for index, op in enumerate(self._graph.ops):
            node = self._num_values + index
            # A random op can run again only if its generator's state is held until then.
            yield node, self._sink, op.state_bytes, self._graph.again_s(op)
            for value in set(op.inputs):
                yield node, value, -1, 0.0

    def _tape_edges(self) -> Iterable[tuple[int, int, int, float]]:
        unit = self._sink + 1
        if self._graph.tape_s:
            yield unit, self._sink, 0, self._graph.tape_s
        node_of: dict[str, int] = {}
        for node, (module, seconds) in enumerate(self._graph.module_tape_s, start=unit + 1):
            node_of[module] = node
            yield node, self._sink, 0, seconds
            yield node, unit, -1, 0.0
        if self._graph.tape_s or node_of:
            for index, op in enumerate(self._graph.ops):
                yield self._num_values + index, node_of.get(module_of(op.name), unit), -1, 0.0

    def cut(self, *, byte_price: float, second_price: float) -> Option:
        """Return the cheapest option at these prices of a kept byte and a recomputed second."""
        price = np.where(self._is_infinite, 0.0, byte_price * self._nbytes + second_price * self._seconds)
        if len(self._part_bytes):
            as_parts = byte_price * self._part_bytes + second_price * self._gather_s
            price = np.where(self._part_bytes >= 0, np.minimum(price, as_parts), price)
        total = float(price.sum())
        scale = _TOTAL_CAPACITY / total if total > 0 else 0.0
        capacity = np.where(self._is_infinite, _INFINITE, np.maximum(np.rint(price * scale), price > 0))
        network = csr_array((capacity.astype(np.int32), self._indices, self._indptr), shape=self._shape)
        flow = maximum_flow(network, self._source, self._sink).flow
        residual = csr_array(network - flow)
        residual.eliminate_zeros()
        reached = breadth_first_order(residual, self._source, return_predecessors=False)
        available = {int(node) for node in reached if node < self._num_values}
        run = {int(node) - self._num_values for node in reached if self._num_values <= node < self._source}
        keep = {v for v in available if self._graph.values[v].producer not in run}
        parts = {
            part.value
            for part in self._graph.parts
            if (part.value in keep or self._graph.values[part.value].is_output)
            and byte_price * part.nbytes + second_price * part.gather_s
            < byte_price * self._graph.values[part.value].nbytes
        }
        return self.evaluator.option(keep, parts)
