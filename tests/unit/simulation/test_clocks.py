"""A step on two clocks: what the host issues, a device runs behind it."""

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import recollect
from blocks import Computes
from every_plan import choices
from recollect.plans.plan import Plan
from recollect.profile.events import WAIT, StepLog
from recollect.profile.graph import OpRecord, UnitGraph
from recollect.profile.host_times import HostTimes
from recollect.profile.profile import Profile
from recollect.simulation.clocks import has_two_clocks, priced, step_times
from recollect.simulation.decisions import CallActions, ValueActions
from recollect.simulation.predicted import predicted_plan
from recollect.simulation.simulate import simulate
from synthetic_step import random_step
from toy_profile import stack
from two_clocks import on_host

QUICK = HostTimes(forward_op_s=1e-4, backward_op_s=1e-4, unit_s=1e-4, again_op_s=1e-4)
SLOW = HostTimes(forward_op_s=1.0, backward_op_s=1.0, unit_s=1.0, again_op_s=1.0)


def recomputing(profile: Profile) -> list[CallActions]:
    """Each layer drops what is between its ops."""
    return [CallActions(ValueActions.recomputing([2, 3])) if call.repeated else CallActions() for call in profile.calls]


def test_a_cpu_has_one_clock() -> None:
    profile = stack(3)
    assert not has_two_clocks(profile) and not has_two_clocks(replace(profile, host=HostTimes(unit_s=1e-4)))
    assert has_two_clocks(replace(profile, host=QUICK))


def test_kernels_hide_a_quick_host() -> None:
    profile = on_host(stack(3), QUICK)
    plain, plan = (step_times(profile, d) for d in ([CallActions()] * len(profile.calls), recomputing(profile)))
    # Only the first op waits for the host.
    assert plain.step_s == pytest.approx(plain.device_s + QUICK.forward_op_s)
    again_s = sum(0.2 + 0.02 for call in profile.calls if call.repeated)
    assert plan.step_s - plain.step_s == pytest.approx(again_s)


def test_a_slow_host_hides_kernels() -> None:
    profile = on_host(stack(3), SLOW)
    plain, plan = (step_times(profile, d) for d in ([CallActions()] * len(profile.calls), recomputing(profile)))
    assert plain.host_s < plain.step_s < plain.host_s + 1.0
    # A unit on the tape, and two ops that run again, each a second.
    num_layers = sum(call.repeated for call in profile.calls)
    assert plan.host_s - plain.host_s == pytest.approx(3 * num_layers)
    assert plan.step_s - plain.step_s == pytest.approx(3 * num_layers)


def test_the_host_waits_for_an_op_whose_result_it_reads() -> None:
    profile = on_host(stack(3), QUICK)

    def with_item(graph: UnitGraph) -> UnitGraph:
        return replace(graph, ops=tuple(replace(op, name=f"{op.name}.nonzero") for op in graph.ops))

    waiting = replace(profile, graphs=tuple(map(with_item, profile.graphs)))
    plain = [CallActions()] * len(profile.calls)
    without, waits = step_times(profile, plain), step_times(waiting, plain)
    assert waits.device_s == without.device_s
    assert waits.step_s > without.step_s and waits.host_s > 0.4


def test_the_host_waits_for_a_number_that_a_unit_reads() -> None:
    def gated(self: Any, x: torch.Tensor) -> torch.Tensor:
        hidden = self.linear(x).relu()
        return x + (hidden * 2 if hidden.sum().item() > 1e9 else hidden)

    units = (Computes(gated, linear=nn.Linear(16, 16)) for _ in range(3))
    model = nn.Sequential(*units, nn.Linear(16, 16))
    recorded = recollect.record(model, torch.randn(4, 16), loss_fn=lambda output: output.sum())
    recorded = recollect.Profile.from_json(recorded.to_json())
    assert [recorded.calls[call].path for (call,) in recorded.log.operands(WAIT)] == ["0", "1", "2"]
    graphs = tuple(replace(g, ops=tuple(replace(op, time_s=0.1) for op in g.ops)) for g in recorded.graphs)
    waiting = on_host(replace(recorded, graphs=graphs), QUICK)
    without = replace(waiting, log=StepLog(tuple(event for event in waiting.log.events if event[0] != WAIT)))
    plain = [CallActions()] * len(waiting.calls)
    times, others = step_times(waiting, plain), step_times(without, plain)
    assert times.device_s == others.device_s and times.host_s > others.host_s + 0.1
    note = recollect.plan(waiting, "95%").note
    assert note.endswith("the host waits for the device in 0-2, whose code reads numbers (.item())")
    assert "waits" not in recollect.plan(without, "95%").note


def test_slowdowns_do_not_depend_on_the_recorded_seconds() -> None:
    """As of a group of processes, whose medians need not add up."""
    profile = on_host(stack(3), SLOW)
    longer = replace(profile, step_s=2 * profile.step_s)
    assert predicted_plan(longer, Plan({})).predicted_slowdown == 0
    assert repr(recollect.frontier(longer)) == repr(recollect.frontier(profile))


def test_calls_that_stand_for_several_count_as_often() -> None:
    profile = on_host(stack(3), SLOW)
    twice = replace(profile, calls=tuple(replace(call, num_runs=2) for call in profile.calls))
    once, both = (step_times(p, recomputing(p)).host_s for p in (profile, twice))
    assert both > 1.5 * once


@pytest.mark.parametrize("seed", range(6))
def test_no_plan_takes_less_than_a_mean_of_both_clocks(seed: int) -> None:
    step = random_step(seed, num_values=4, num_units=2)
    longest_s = max(op.time_s for graph in step.graphs for op in graph.ops)
    host = HostTimes(*(longest_s * (0.2, 0.5, 1.0)[(seed + n) % 3] for n in range(7)))
    profile = on_host(step, host)
    plain = step_times(profile, [CallActions()] * len(profile.calls))
    plans = itertools.product(*(list(choices(profile.graph_of(call))) for call in profile.calls))
    for decisions, price in itertools.product(itertools.islice(plans, 60), (0.0, 0.3, 1.0)):
        mean_s = price * plain.host_s + (1 - price) * plain.device_s
        added_s = simulate(priced(profile, price), decisions).recompute_s
        assert step_times(profile, decisions).step_s >= mean_s + added_s - 1e-9


def test_an_op_takes_no_time_on_the_clock_that_does_not_bind() -> None:
    profile = on_host(stack(3), SLOW)
    host, device = priced(profile, 1.0), priced(profile, 0.0)
    assert {op.time_s for graph in host.graphs for op in graph.ops} == {0.0}
    assert all(graph.tape_s == graph.again_op_s == 0.0 for graph in device.graphs)
    assert OpRecord("mlp.up.mm", (1,), (2,), 0.2) in [op for graph in device.graphs for op in graph.ops]
