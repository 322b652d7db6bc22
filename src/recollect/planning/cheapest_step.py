"""The cheapest choice for a whole step when bytes have a price at certain times: one minimum cut.

Each checkpoint time e of a step (`planning/checkpoint_times.py`) has a price lambda_e, in seconds per byte. Times between
which nothing can run again, such as all of forward, form a class k:

    r_{o,k} = 1   op o runs again after k           r_{o,k+1} <= r_{o,k}
    a_{v,k} = 1   value v is available after k      a_{v,k} = 1 if backward asks for v after k
                                                    a_{v,k} >= r_{o,k} if o reads v
                                                    r_{p,k} >= r_{o,k} if o writes over a result of p
    m_j = 1       the tape watches module j         m_unit >= m_module(o) >= r_{o,first}
    cost          price of v in k                   if a_{v,k} = 1 and v's op does not run again after k: v is in memory
                  time of o                         if r_{o,first} = 1
                  tape overhead in forward          if m_j = 1

The price of v in k is bytes(v) times the sum of lambda_e over the times of k at which v has been made and a plan can be
without it. Values that overwrite each other share bytes; only the last that backward needs has a price: to
save them, it has to be computed again, and with it all values below. Where ranks may hold parts of v, it is the price of a
part; in the first class, before backward asks for anything, with the time to gather v, or the price of the whole,
whichever is less. Every term is a capacity between two nodes (source side = 1), so the least cost is a minimum cut.

A plan's memory at each moment, and its ops that run again after it, form such a choice, so no plan costs less. All
else is left out, in favour of the bound: other working memory of recomputing, saved generator states, values that are
written to later (taken to be keepable), and that calls of one module share a decision. Layers are not taken apart: an
op that runs again needs its arguments, whichever unit computed them.

SciPy's flows are 32-bit integers. Capacities are rounded down, so the flow is below the least cost, by about 1e-6 of it. A
second flow, in the capacities that the first one leaves, makes up for that: both together are exact to about 1e-15.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import coo_array, csr_array
from scipy.sparse.csgraph import breadth_first_order, maximum_flow

from recollect.planning.checkpoint_times import CheckpointTimes
from recollect.plans.value_names import module_of
from recollect.profile.profile import Profile

# A capacity and the flow against it then stay below 2**31 together.
_MOST: Final = 2**30 - 1
_NEVER: Final = np.iinfo(np.int64).max


@dataclass(frozen=True, slots=True, eq=False)
class StepChoice:
    """Which ops of a step run again, and when."""

    runs_until: NDArray[np.int64]
    """For each op (columns as in `CheckpointTimes`), it runs again after the stages before this one; 0: never."""
    recompute_s: float
    """Seconds of the ops that run again, and of the tape in forward."""
    kept_bytes: NDArray[np.int64]
    """For each moment, the bytes in memory besides those of every plan."""


@dataclass(frozen=True, slots=True, eq=False)
class StepCut:
    """The cheapest choice at some prices."""

    cost_s: float
    """Recompute plus price times kept bytes, summed over the times. No plan has less: a proven bound."""
    choice: StepChoice


class CheapestStep:
    """The cheapest choices of one step, at any prices.

    Complexity: a maximum flow among a node for each op and value of the step at each priced moment. 80 layers: 15 ms for one
        priced moment, 60 ms for twelve.
    """

    def __init__(self, profile: Profile, times: CheckpointTimes) -> None:
        self._times = times
        graphs = [profile.graph_of(call) for call in profile.calls]
        self._nbytes = np.array([profile.block_bytes(v.nbytes) for g in graphs for v in g.values], dtype=np.int64)
        self._op_s = np.array(
            [
                c.num_runs * graph.again_s(op)
                for c, graph in zip(profile.calls, graphs, strict=True)
                for op in graph.ops
            ],
            dtype=float,
        )
        # The op that can compute a value again, or -1.
        self._maker = np.array(
            [
                -1 if value.producer is None or value.must_keep else first + value.producer
                for graph, first in zip(graphs, times.first_op, strict=False)
                for value in graph.values
            ],
            dtype=np.int64,
        )
        self._part_bytes = self._nbytes.copy()
        self._gather_s = np.zeros(len(self._nbytes))
        for call, graph, first_value in zip(profile.calls, graphs, times.first_value, strict=False):
            for part in graph.parts:
                column = first_value + part.value
                self._part_bytes[column] = min(self._nbytes[column], profile.block_bytes(part.nbytes))
                self._gather_s[column] = call.num_runs * part.gather_s
        self._readers, self._read = times.reads[:, 0], times.reads[:, 1]
        self._writers, self._written = times.writes[:, 0], times.writes[:, 1]
        self._charges = _Charges(profile, times.first_op)
        self._first_need = self._first_needs()

    @property
    def most_s(self) -> float:
        """Seconds of recompute if everything runs again, the most of any plan: nothing reruns, or is gathered, twice."""
        return math.fsum((*self._op_s, *self._charges.all_s, *self._gather_s))

    def everything_kept(self) -> StepChoice:
        return self._choice(np.zeros(len(self._op_s), dtype=np.int64), np.zeros(len(self._nbytes), dtype=bool))

    def at(self, prices: NDArray[np.float64], *, missing_s: float = 0.0) -> StepCut:
        """Return the cheapest choice at some prices.

        Prices are of each moment, in seconds per byte; the bound may be too low by `missing_s`, in favour of time.
        """
        times = self._times
        priced = np.flatnonzero(prices > 0)
        stages, first = np.unique(times.stages[priced], return_index=True)
        num_classes, num_ops, num_values = len(stages), len(self._op_s), len(self._nbytes)
        edges = _Edges(num_classes * (num_ops + num_values))
        fixed_s = 0.0
        is_part = np.zeros(num_values, dtype=bool)
        for number, members in enumerate(np.split(priced, first[1:]) if num_classes else ()):
            price = prices[members] @ times.can_cost[members]
            # The memory cost of each value.
            cost_s = price * self._part_bytes
            if stages[number] == 0:
                cost_s = np.minimum(price * self._nbytes, cost_s + self._gather_s)
                is_part = price * (self._nbytes - self._part_bytes) > self._gather_s
            # No value is computed twice: once requested by backward, it stays as long as needed.
            maker = np.where(times.first_use <= stages[number], -1, self._maker)
            nodes = (number * num_ops, num_classes * num_ops + number * num_values)
            fixed_s += self._add_values(edges, nodes, cost_s, times.needed[members[-1]], maker)
            below = maker[self._written]
            edges.add(nodes[0] + self._writers, np.where(below < 0, edges.sink, nodes[0] + below), np.inf)
            if number:
                later = number * num_ops + np.arange(num_ops)
                edges.add(later, later - num_ops, np.inf)
        if num_classes:
            edges.add(np.arange(num_ops), edges.sink, self._op_s)
            self._charges.add_to(edges)
        cut_s, is_run = edges.cut(missing_s)
        num_run = is_run[: num_classes * num_ops].reshape(num_classes, num_ops).sum(axis=0)
        # Between two priced classes, an op runs again where the backward of its unit needs it.
        lowest = np.array([0, *(stages + 1)])[num_run]
        highest = np.array([0, *stages[1:], _NEVER])[num_run] if num_classes else lowest
        runs_until = np.clip(self._first_need, lowest, highest)
        return StepCut(float(fixed_s + cut_s), self._choice(runs_until, is_part))

    def _add_values(
        self,
        edges: _Edges,
        nodes: tuple[int, int],
        cost_s: NDArray[np.float64],
        needed: NDArray[np.bool_],
        maker: NDArray[np.int64],
    ) -> float:
        """Add the cost of values in one class, given its first op's and value's nodes; return the fixed cost."""
        first_op, first_value = nodes
        asked = np.flatnonzero(needed & (cost_s > 0))
        is_fixed = maker[asked] < 0
        edges.add(edges.source, first_op + maker[asked[~is_fixed]], cost_s[asked[~is_fixed]])
        is_read = ((cost_s > 0) & ~needed)[self._read]
        edges.add(first_op + self._readers[is_read], first_value + self._read[is_read], np.inf)
        # A value costs once, however many ops read it.
        read = np.unique(self._read[is_read])
        edges.add(first_value + read, np.where(maker[read] < 0, edges.sink, first_op + maker[read]), cost_s[read])
        return float(cost_s[asked[is_fixed]].sum())

    def _choice(self, runs_until: NDArray[np.int64], is_part: NDArray[np.bool_]) -> StepChoice:
        """Return the cost of rerunning ops after the stages before these, with these values starting as parts."""
        times = self._times
        needed_until = np.zeros(len(self._nbytes), dtype=np.int64)
        np.maximum.at(needed_until, self._read, runs_until[self._readers])
        made_again = np.minimum(np.append(runs_until, 0)[self._maker], times.first_use)
        stages = times.stages[:, None]
        in_memory = times.can_cost & (times.needed | (stages < needed_until)) & (stages >= made_again)
        runs = np.flatnonzero(runs_until)
        is_first = times.stages == 0
        is_gathered = is_part & in_memory[is_first].any(axis=0)
        recompute_s = math.fsum((*self._op_s[runs], *self._charges.seconds(runs), *self._gather_s[is_gathered]))
        kept_bytes = in_memory @ self._part_bytes
        kept_bytes[is_first] += in_memory[is_first] @ np.where(is_part, 0, self._nbytes - self._part_bytes)
        return StepChoice(runs_until, recompute_s, kept_bytes)

    def _first_needs(self) -> NDArray[np.int64]:
        """Return, for each op, the stage that first needs it if all of its unit runs again."""
        found = np.full(len(self._op_s), _NEVER)
        can_run = self._maker >= 0
        np.minimum.at(found, self._maker[can_run], self._times.first_use[can_run])
        first_op = self._times.first_op
        call_of_op = np.repeat(np.arange(len(first_op) - 1), np.diff(first_op))
        makers = self._maker[self._read]
        is_inside = (makers >= 0) & (call_of_op[self._readers] == call_of_op[makers])
        # The readers of a value follow its op.
        for reader, maker in zip(self._readers[is_inside][::-1], makers[is_inside][::-1], strict=True):
            found[maker] = min(found[maker], found[reader])
        for writer, maker in zip(self._writers, self._maker[self._written], strict=True):
            found[writer] = min(found[writer], found[maker]) if maker >= 0 else found[writer]
        return found


class _Charges:
    """The tape's overhead in forward, for each unit call with an op that runs again and each such module in it."""

    def __init__(self, profile: Profile, first_op: tuple[int, ...]) -> None:
        # (op, its charge), and (a module's charge, its unit's).
        ops: list[tuple[int, int]] = []
        units: list[tuple[int, int]] = []
        self.all_s: list[float] = []
        for call, first in zip(profile.calls, first_op, strict=False):
            graph = profile.graph_of(call)
            if not graph.tape_s and not graph.module_tape_s:
                continue
            unit = len(self.all_s)
            # The path of a module can be empty: its charge is not the unit's.
            number_of = {module: unit + 1 + number for number, (module, _) in enumerate(graph.module_tape_s)}
            seconds = (graph.tape_s, *(module_s for _, module_s in graph.module_tape_s))
            self.all_s += [call.num_runs * charge_s for charge_s in seconds]
            units += [(number, unit) for number in number_of.values()]
            ops += [(first + index, number_of.get(module_of(op.name), unit)) for index, op in enumerate(graph.ops)]
        self._ops, self._units = (np.array(pairs, dtype=np.int64).reshape(-1, 2) for pairs in (ops, units))
        self._seconds = np.array(self.all_s)

    def add_to(self, edges: _Edges) -> None:
        first = edges.num_nodes
        edges.num_nodes += len(self._seconds)
        edges.add(self._ops[:, 0], first + self._ops[:, 1], np.inf)
        edges.add(first + self._units[:, 0], first + self._units[:, 1], np.inf)
        edges.add(first + np.arange(len(self._seconds)), edges.sink, self._seconds)

    def seconds(self, runs: NDArray[np.int64]) -> NDArray[np.float64]:
        is_due = np.zeros(len(self._seconds), dtype=bool)
        is_due[self._ops[np.isin(self._ops[:, 0], runs), 1]] = True
        is_due[self._units[is_due[self._units[:, 0]], 1]] = True
        return self._seconds[is_due]


class _Edges:
    """A network of capacities, and its minimum cut."""

    source: Final = -1
    sink: Final = -2

    def __init__(self, num_nodes: int) -> None:
        self.num_nodes = num_nodes
        self._parts: list[tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float64]]] = []

    def add(
        self, start: NDArray[np.int64] | int, end: NDArray[np.int64] | int, capacity: NDArray[np.float64] | float
    ) -> None:
        """Add edges; those between the same two nodes add up."""
        starts, ends, capacities = np.broadcast_arrays(start, end, capacity)
        self._parts.append((starts, ends, capacities))

    def cut(self, most_missing: float) -> tuple[float, NDArray[np.bool_]]:
        """Return the capacity of a minimum cut, too low by `most_missing` at most, and the nodes on its source side."""
        if not self._parts:
            return 0.0, np.zeros(self.num_nodes, dtype=bool)
        start, end, capacity = (np.concatenate(column) for column in zip(*self._parts, strict=True))
        most = min(float(capacity[start == self.source].sum()), float(capacity[end == self.sink].sum()))
        if most <= 0:
            return 0.0, np.zeros(self.num_nodes, dtype=bool)
        source, sink = self.num_nodes, self.num_nodes + 1
        start, end = np.where(start == self.source, source, start), np.where(end == self.sink, sink, end)
        # Entries of the same place add up.
        capacities = csr_array(coo_array((capacity, (start, end)), shape=(sink + 1, sink + 1)))
        total, left, is_reached = _flow(capacities, most, source, sink)
        missing = float(left[is_reached][:, ~is_reached].sum())
        if missing > most_missing:
            more, _, is_reached = _flow(left, missing, source, sink)
            total += more
        return total, is_reached[:-2]


def _flow(capacities: csr_array, most: float, source: int, sink: int) -> tuple[float, csr_array, NDArray[np.bool_]]:
    """Return a flow up to this limit, the capacities left, and the source's side of its cut."""
    scale = _MOST / most
    integers = np.floor(np.minimum(capacities.data * scale, _MOST + 1)).astype(np.int32)
    indices, indptr = capacities.indices.astype(np.int32), capacities.indptr.astype(np.int32)
    network = csr_array((integers, indices, indptr), shape=capacities.shape)
    found = maximum_flow(network, source, sink)
    residual = csr_array(network - found.flow)
    residual.eliminate_zeros()
    is_reached = np.zeros(sink + 1, dtype=bool)
    is_reached[breadth_first_order(residual, source, return_predecessors=False)] = True
    left = csr_array(capacities - found.flow / scale)
    left.data = np.maximum(left.data, 0.0)
    return found.flow_value / scale, left, is_reached
