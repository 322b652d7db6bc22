"""The bound of a step as one linear program, from its formulation (`planning/cheapest_step.py`), without prices and cuts.

A minimum cut's program has whole numbers for its solution at any prices, and so the highest bound of all prices is what the
program costs whose rows are the budget at each moment.
"""

import math
from collections import defaultdict

import numpy as np
from scipy.optimize import linprog
from scipy.sparse import csr_array

from recollect.planning.checkpoint_times import CheckpointTimes
from recollect.plans.value_names import module_of
from recollect.profile.profile import Profile


class StepProgram:
    """Whether an op runs again after a stage, and a value is available, in memory, or there as a part: from 0 to 1."""

    def __init__(self, profile: Profile, times: CheckpointTimes) -> None:
        self.times = times
        self.numbers: dict[tuple[object, ...], int] = {}
        self.costs_s = defaultdict[int, float](float)
        self.rows: list[tuple[dict[int, float], float]] = []
        self.sizes: list[int] = []
        self.part_sizes: list[int] = []
        self.makers: list[int | None] = []
        stages = sorted(set(times.stages.tolist()))
        for call, (unit, first_op) in enumerate(zip(profile.calls, times.first_op, strict=False)):
            graph = profile.graph_of(unit)
            watching_s = dict(graph.module_tape_s)
            parts = {part.value: part for part in graph.parts}
            for value in graph.values:
                is_made = value.producer is not None and not value.must_keep
                self.makers.append(first_op + value.producer if is_made else None)  # type: ignore[operator]
                part = parts.get(len(self.sizes) - times.first_value[call])
                if part is not None:
                    self.costs_s[self.variable("part", len(self.sizes))] = part.gather_s
                self.sizes.append(value.nbytes)
                self.part_sizes.append(value.nbytes if part is None else min(part.nbytes, value.nbytes))
            for op, record in enumerate(graph.ops, first_op):
                runs = self.variable("runs", op, stages[0])
                self.costs_s[runs] = graph.again_s(record)
                module = module_of(record.name)
                for watched, cost_s in (("unit", graph.tape_s), (module, watching_s.get(module, 0.0))):
                    watching = self.variable("watches", call, watched, cost_s)
                    self.costs_s[watching] = cost_s
                    self.at_most(0, {runs: 1, watching: -1})
        for stage, later in zip(stages, stages[1:], strict=False):
            for op in range(times.first_op[-1]):
                self.at_most(0, {self.variable("runs", op, later): 1, self.variable("runs", op, stage): -1})
        for stage in stages:
            self.add_stage(stage)

    def variable(self, *name: object) -> int:
        return self.numbers.setdefault(name, len(self.numbers))

    def at_most(self, limit: float, terms: dict[int, float]) -> None:
        self.rows.append((terms, limit))

    def runs_again(self, value: int, stage: int) -> dict[int, float]:
        """Of the op that computes a value again, which does not where backward has asked for it: it stays."""
        op = self.makers[value]
        return {} if op is None or self.times.first_use[value] <= stage else {self.variable("runs", op, stage): -1}

    def add_stage(self, stage: int) -> None:
        for op, value in self.times.reads.tolist():
            self.at_most(0, {self.variable("runs", op, stage): 1, self.variable("available", value, stage): -1})
        for op, value in self.times.writes.tolist():
            self.at_most(0, {self.variable("runs", op, stage): 1, **self.runs_again(value, stage)})
        for value, size in enumerate(self.sizes):
            terms = {self.variable("available", value, stage): 1, self.variable("kept", value, stage): -1}
            if stage == 0 and self.part_sizes[value] < size:
                terms[self.variable("part", value)] = -1
            self.at_most(0, {**terms, **self.runs_again(value, stage)})

    def least_s(self, budget_bytes: int) -> float:
        """The seconds that any mix of choices adds at least that is within the budget at each moment."""
        if (self.times.fixed_bytes > budget_bytes).any():
            return math.inf
        rows = list(self.rows)
        for moment, stage in enumerate(self.times.stages.tolist()):
            rows += [
                ({self.variable("available", v, stage): -1}, -1) for v in np.flatnonzero(self.times.needed[moment])
            ]
            alive: dict[int, float] = {}
            for value in np.flatnonzero(self.times.can_cost[moment]).tolist():
                size, part_size = self.sizes[value], self.part_sizes[value]
                alive[self.variable("kept", value, stage)] = size if stage == 0 else part_size
                if stage == 0 and part_size < size:
                    alive[self.variable("part", value)] = part_size
            rows.append((alive, budget_bytes - int(self.times.fixed_bytes[moment])))
        table = [(row, variable, factor) for row, (terms, _) in enumerate(rows) for variable, factor in terms.items()]
        row_of, variable_of, factors = zip(*table, strict=True)
        result = linprog(
            [self.costs_s[number] for number in range(len(self.numbers))],
            A_ub=csr_array((factors, (row_of, variable_of)), shape=(len(rows), len(self.numbers))),
            b_ub=[limit for _, limit in rows],
            bounds=(0, 1),
            method="highs",
        )
        assert result.status in (0, 2), result.message
        return float(result.fun) if result.status == 0 else math.inf
