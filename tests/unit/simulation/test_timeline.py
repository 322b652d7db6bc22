"""The memory of a step over time: it adds up to what the simulator predicts, to the byte, and says what the bytes are."""

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

import recollect
from blocks import Computes
from budgets import least_bytes
from every_plan import choices
from recollect.plans.plan import Plan
from recollect.plans.trip import Trip
from recollect.plans.unit_plan import UnitPlan
from recollect.profile.events import BACKWARD, FORWARD, WAIT, StepLog
from recollect.profile.graph import OpRecord, UnitGraph
from recollect.profile.host_times import HostTimes
from recollect.profile.profile import Profile
from recollect.simulation.clocks import has_two_clocks, priced, step_times
from recollect.simulation.decisions import CallActions, ValueActions, decide, recompute_all_unit
from recollect.simulation.lifetimes import LOSS, lifetimes
from recollect.simulation.playback import GENERATOR
from recollect.simulation.predicted import predicted_plan
from recollect.simulation.simulate import simulate
from recollect.simulation.timeline import AliveItem, PeakReport
from recorded_steps import random_plan
from small_llama import batch_of, llama
from synthetic_step import random_step
from tiers import long
from toy_profile import stack
from two_clocks import on_host


@pytest.fixture(scope="module")
def measured() -> Profile:
    model = llama()
    optimizer = torch.optim.AdamW(model.parameters())
    return recollect.record(model, batch_of(), optimizer=optimizer, holds_output=False, gradients="freed")


@pytest.fixture(scope="module")
def accumulating() -> Profile:
    return recollect.record(llama(), batch_of(), fake=True, gradients="accumulated")


@pytest.fixture(scope="module")
def random_ops() -> Profile:
    """Dropout, whose random generator's states have to be held, and an op that writes in place."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(functional.dropout(functional.relu(self.up(x), inplace=True), 0.1))

    model = nn.Sequential(*(Computes(forward, up=nn.Linear(32, 64), down=nn.Linear(64, 32)) for _ in range(3)))
    return recollect.record(model, torch.randn(256, 32), loss_fn=lambda output: output.square().mean())


def plans(profile: Profile) -> list[Plan]:
    least = recollect.plan(profile, least_bytes(profile))
    everything = Plan({call.path: recompute_all_unit(profile.graph_of(call)) for call in profile.calls})
    return [
        Plan({}),
        recollect.classic_plan(profile, "full"),
        recollect.classic_plan(profile, "every_nth", 2),
        recollect.plan(profile, "85%"),
        least,
        everything,
    ]


@pytest.mark.parametrize("name", ["measured", *long(["accumulating"]), "random_ops"])
def test_categories_add_up_to_the_predicted_peak(name: str, request: pytest.FixtureRequest) -> None:
    profile: Profile = request.getfixturevalue(name)
    for plan in plans(profile):
        simulation = simulate(profile, decide(profile, plan))
        found = recollect.timeline(profile, plan)
        assert int(found.total_bytes.max()) == simulation.peak_bytes
        assert int(found.total_bytes[found.peak]) == simulation.peak_bytes
        assert sum(item.nbytes for item in found.report.items) == simulation.peak_bytes == found.report.peak_bytes
        assert found.report.by_category == {
            category: int(nbytes[found.peak]) for category, nbytes in found.bytes_of.items() if nbytes[found.peak]
        }
        assert found.report.where == simulation.peak_note
        assert all(int(nbytes.min()) >= 0 for nbytes in found.bytes_of.values())


def test_random_steps_add_up() -> None:
    for seed in range(30):
        profile = random_step(seed, num_values=6, num_units=2, state_bytes=7)
        for number in range(4):
            plan = random_plan(profile, number)
            assert lifetimes(profile, decide(profile, plan)).simulation == simulate(profile, decide(profile, plan))
            found = recollect.timeline(profile, plan)
            assert int(found.total_bytes.max()) == simulate(profile, decide(profile, plan)).peak_bytes, seed
            assert sum(item.nbytes for item in found.report.items) == found.report.peak_bytes, seed


def test_gradients_and_optimizer_are_told_apart(measured: Profile, accumulating: Profile) -> None:
    found = recollect.timeline(measured, recollect.classic_plan(measured, "full"))
    parameters = sum(parameter.nbytes for parameter in llama().parameters())
    at_end = {category: int(nbytes[-1]) for category, nbytes in found.bytes_of.items()}
    assert at_end["gradients"] == at_end["parameters"] == parameters
    # Two moments of the size of the parameters, and a step counter for each.
    assert 2 * parameters <= at_end["optimizer state"] < 2.01 * parameters
    assert int(found.bytes_of["gradients"][0]) == 0
    assert not any(at_end[category] for category in ("kept values", "recomputed values", "working memory"))
    before = recollect.timeline(accumulating, Plan({})).bytes_of["gradients"]
    assert int(before[0]) == int(before[-1]) == parameters


def test_recomputed_and_kept_values_are_told_apart(measured: Profile) -> None:
    kept_all = recollect.timeline(measured, Plan({}))
    assert not kept_all.bytes_of["recomputed values"].any()
    full = recollect.timeline(measured, recollect.classic_plan(measured, "full"))
    assert full.bytes_of["recomputed values"].any()
    is_forward = (full.phases == FORWARD) | (full.phases == LOSS)
    assert not full.bytes_of["recomputed values"][is_forward].any()
    at_backward = int(np.argmax(full.phases == BACKWARD))
    assert full.bytes_of["kept values"][at_backward] < 0.3 * kept_all.bytes_of["kept values"][at_backward]
    assert any(item.name == "decoder.layers.0-3 linear_fc1" for item in kept_all.report.items)


def test_generator_states_are_kept_values(random_ops: Profile) -> None:
    """Dropped dropout masks leave the state that makes them again."""
    every = Plan({call.path: recompute_all_unit(random_ops.graph_of(call)) for call in random_ops.calls})
    states = [s for s in lifetimes(random_ops, decide(random_ops, every)).storages if s.owner[0] == GENERATOR]
    assert states
    kept_bytes = int(recollect.timeline(random_ops, every).bytes_of["kept values"].max())
    assert kept_bytes >= sum(state.nbytes for state in states if not state.recomputed)
    names = {item.name for item in recollect.explain_peak(random_ops, every).items}
    assert any(name.endswith("states of the random generator") for name in names), names


def test_moments_are_named_by_phase_and_unit() -> None:
    found = recollect.timeline(stack(2), Plan({}))
    inside = [f"layers.{number}" for number in (0, 1)]
    assert list(dict.fromkeys(map(found.where, range(len(found.calls))))) == [
        "forward",
        *(f"forward of {path}" for path in ("embed", *inside, "head")),
        *("loss", "backward"),
        *(f"backward of {path}" for path in ("head", *inside[::-1], "embed")),
        "optimizer step",
    ]
    # The loss is made outside of the units, in forward.
    assert found.bytes_of["outside of the units"].max() == 8


def test_report_is_a_table() -> None:
    items = (AliveItem("parameters", "parameters", 2048), AliveItem("kept values", "layers.0-1 up", 1024))
    assert str(PeakReport(3072, "forward of layers.1", items)).splitlines() == [
        "3.0 KiB alive at the peak: forward of layers.1",
        "   2.0 KiB  parameters",
        "   1.0 KiB  kept values",
        "               1.0 KiB  layers.0-1 up",
    ]


def test_gradients_of_the_last_step_are_gradients_until_backward_begins() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(3)))
    profile = recollect.record(model, torch.randn(4, 16), loss_fn=lambda out: out.square().mean(), gradients="held")
    shown = recollect.timeline(profile, Plan({}))
    in_forward = shown.phases == FORWARD
    held_bytes = sum(parameter.nbytes for parameter in model.parameters())
    # And the last step's loss, of four bytes, which is freed with them.
    assert max(shown.bytes_of["gradients"][in_forward]) == held_bytes + 4
    assert shown.bytes_of["gradients"][np.flatnonzero(shown.phases == BACKWARD)[0]] == 0
    freed = recollect.record(model, torch.randn(4, 16), loss_fn=lambda out: out.square().mean(), gradients="freed")
    shown = recollect.timeline(freed, Plan({}))
    assert max(shown.bytes_of["gradients"][shown.phases == FORWARD]) == 4


def test_what_is_offloaded_is_in_host_memory_and_comes_back() -> None:
    profile, name = stack(4), "mlp.up.mm"
    units = {call.path: UnitPlan({}) for call in profile.calls}
    kept, plan = Plan(units), Plan(units | {"layers.0": UnitPlan({name: "offload"}, trips={name: Trip(1, 1)})})
    before, found = recollect.timeline(profile, kept), recollect.timeline(profile, plan)
    nbytes = next(value.nbytes for value in profile.graphs[1].values if value.name == name)
    assert set(found.host_bytes.tolist()) == {0, nbytes} and not before.host_bytes.any()
    assert found.host_bytes[0] == found.host_bytes[-1] == 0
    assert found.bytes_of["returned values"].max() == nbytes and not before.bytes_of["returned values"].any()
    assert found.report.peak_bytes == before.report.peak_bytes - nbytes


def test_the_tenants_of_a_peak_are_named_by_layer_and_only_the_largest() -> None:
    items = (
        AliveItem("parameters", "parameters", 3000),
        AliveItem("kept values", "layers.0-1 up", 2000, "layers.*"),
        AliveItem("kept values", "layers.0 down", 2000, "layers.*"),
        AliveItem("passing values", "the loss, and what it saves", 20),
    )
    report = PeakReport(7020, "forward", items)
    assert report.tenants() == ["kept values of layers.* 3.9 KiB", "parameters 2.9 KiB"]


# The clocks that a timeline is made of.


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


def test_a_model_that_is_one_unit_has_a_name_where_memory_is_fullest() -> None:
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
    profile = recollect.record(model, torch.randn(64, 32), loss_fn=torch.sum)
    assert {call.path for call in profile.calls} == {""}
    peak = recollect.explain_peak(profile, recollect.classic_plan(profile, "full"))
    assert peak.where == "backward of the model"
