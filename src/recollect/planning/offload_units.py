"""Measure what the linear program of `planning/offload_mix.py` needs to know of a step, and make plans of its shares."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np

from recollect.planning.chain_solver import ChainSolver
from recollect.planning.offload_mix import OffloadUnit, offload_mix
from recollect.planning.option_table import OptionTable
from recollect.planning.trips import may_leave
from recollect.plans.plan import Plan
from recollect.profile.events import BACKWARD, FORWARD
from recollect.profile.profile import Profile
from recollect.simulation.copy_clock import Course, Link


@dataclass(frozen=True, slots=True)
class OffloadUnits:
    """The units of a step, in forward order.

    Attributes:
        table: their options.
        rows: the row of each.
        units: what the linear program knows of each.
    """

    table: OptionTable
    rows: tuple[int, ...]
    units: tuple[OffloadUnit, ...]

    def plan(self, link: Link, budget_bytes: int, host_bytes: int) -> Plan | None:
        """Return a plan with the option of each unit that has the largest share, and no trips; None if nothing fits."""
        shares = offload_mix(self.units, link, budget_bytes, host_bytes)
        if shares is None:
            return None
        choice = [0] * len(self.rows)
        for row, own in zip(self.rows, shares, strict=True):
            choice[row] = int(own.argmax())
        return self.table.plan(tuple(choice))


def measured_units(profile: Profile, course: Course, least_bytes: int) -> OffloadUnits | None:
    """Return the units of a step; None if units run several times.

    Args:
        profile: the recorded step.
        course: of the step that keeps everything.
        least_bytes: the smallest values to offload.
    """
    table, chain = ChainSolver(profile).measured()
    if len(table.rows) != len(profile.calls):
        return None
    seconds: defaultdict[tuple[int, int], float] = defaultdict(float)
    ends_s = [*course.edge_s[1:], course.end_s]
    for edge, begin_s, end_s in zip(course.edges, course.edge_s, ends_s, strict=True):
        seconds[edge.phase, edge.call] += end_s - begin_s
    units = []
    for number, forward, backward in zip(chain.order, chain.stages_of(FORWARD), chain.stages_of(BACKWARD), strict=True):
        row = table.rows[number]
        graph = profile.graphs[row.graph]
        leaving = [
            sum(graph.values[value].nbytes for value in option.stored.whole if may_leave(graph, value, least_bytes))
            for option in row.options
        ]
        units.append(
            OffloadUnit(
                kept_bytes=forward.kept_bytes,
                leaving_bytes=np.array(leaving, dtype=np.int64),
                recompute_s=forward.recompute_s,
                forward_bytes=forward.own_bytes,
                backward_bytes=backward.own_bytes,
                forward_s=seconds[FORWARD, row.calls[0]],
                backward_s=seconds[BACKWARD, row.calls[0]],
            )
        )
    return OffloadUnits(table, tuple(chain.order), tuple(units))
