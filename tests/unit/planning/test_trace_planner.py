"""Plans for units that run from traces: where they stay on the tape, and what a plan says of it."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import recollect
from blocks import Block
from budgets import least_bytes
from recollect.planning import trace_planner
from recollect.planning.planners import Engine
from recollect.planning.trace_planner import traced_where_known
from recollect.plans.action import EngineChoice
from recollect.profile.profile import Profile
from recollect.simulation.decisions import recompute_all_unit


def recorded(*, split_backward: bool = False, engine: Engine = "tape") -> Profile:
    model, x = nn.Sequential(*(Block(16, 0.0) for _ in range(16))), torch.randn(32, 16, requires_grad=True)
    of_step = {"gradients": "accumulated", "holds_output": False, "split_backward": split_backward, "engine": engine}
    return known_times(recollect.record(model, x, loss_fn=torch.sum, **of_step))  # type: ignore[arg-type]


def known_times(profile: Profile) -> Profile:
    """On a busy machine a trace may seem to take longer than the tape."""
    return replace(profile, host=replace(profile.host, traced_unit_s=profile.host.unit_s))


@pytest.fixture(scope="module")
def profile() -> Profile:
    return recorded()


def engines(plan: recollect.Plan) -> set[str]:
    return {str(unit.engine) for unit in plan.units.values() if unit.recomputes_anything}


def test_a_plan_says_why_layers_stay_on_the_tape(profile: Profile) -> None:
    least = least_bytes(profile)
    plan, auto = recollect.plan(profile, least, engine="graph"), recollect.plan(profile, least, engine="auto")
    assert "tape" in engines(plan) & engines(auto)
    assert plan.note.endswith(" of 16 layers run on the tape: no plan found with all from traces fits the budget")
    graphs = tuple(replace(graph, why_not_traced="it reads the clock") for graph in profile.graphs)
    plan = recollect.plan(replace(profile, graphs=graphs), least, engine="graph")
    assert plan.note.endswith("16 of 16 layers run on the tape: it reads the clock")
    assert "layers" not in auto.note + recollect.plan(profile, "70%", engine="graph").note


def test_only_the_layer_whose_trace_does_not_fit_stays_on_the_tape() -> None:
    profile = recorded(engine="graph")
    first, *calls = profile.calls
    joint = profile.graph_of(first).joint
    assert joint is not None
    ops = (replace(joint.ops[0], working_bytes=1 << 30), *joint.ops[1:])
    graph = replace(profile.graph_of(first), joint=replace(joint, ops=ops))
    calls = [replace(first, graph=len(profile.graphs)), *calls]
    plan = recollect.plan(replace(profile, graphs=(*profile.graphs, graph), calls=tuple(calls)), "70%", engine="graph")
    assert {path for path, unit in plan.units.items() if unit.engine is EngineChoice.TAPE} == {first.path}
    assert (plan.predicted_peak_bytes or 0) <= (plan.budget_bytes or 0)


def test_a_layer_that_cannot_run_again_from_its_trace_stays_on_the_tape() -> None:
    """What dropout in place draws is made of memory that is written to; when it ran, it said so in a warning."""

    def layer() -> nn.Sequential:
        parts = nn.Linear(16, 16), nn.SiLU(inplace=True), nn.Dropout(0.5, inplace=True), nn.Linear(16, 16)
        return nn.Sequential(*parts)

    model, x = nn.Sequential(*(layer() for _ in range(4))), torch.randn(256, 16)
    profile = known_times(recollect.record(model, x, loss_fn=torch.sum, engine="graph"))
    plan = recollect.plan(profile, least_bytes(profile), engine="graph")
    assert "3 of 4 layers run on the tape: a trace cannot run again all that the plan drops" in plan.note
    with recollect.apply(model, plan):
        for _ in range(2):
            model(x).sum().backward()


def test_layers_that_loop_as_often_as_an_argument_says_are_traced() -> None:
    class Loops(nn.Linear):
        def forward(self, x: torch.Tensor, times: int) -> torch.Tensor:  # type: ignore[override]
            for _ in range(times):
                x = super().forward(x).sin()
            return x

    layers = nn.ModuleList(Loops(16, 16) for _ in range(3))

    def run(x: torch.Tensor) -> torch.Tensor:
        for i, layer in enumerate(layers):
            x = layer(x, i + 1)
        return x.sum()

    profile = recollect.record(layers, step=lambda: run(torch.randn(8, 16)).backward(), engine="graph")
    assert [graph.why_not_traced for graph in profile.graphs] == ["", "", ""]


def test_what_reads_a_dropped_output_stays_on_the_tape(profile: Profile) -> None:
    """It runs there, and so it has to be predicted."""
    paths = [call.path for call in profile.calls]
    units = {call.path: recompute_all_unit(profile.graph_of(call)) for call in profile.calls}
    units[paths[3]] = recompute_all_unit(profile.graph_of(profile.calls[3]), keeps_output=False)
    made = traced_where_known(profile, recollect.Plan(units))
    on_tape = [path for path, unit in made.units.items() if unit.engine is EngineChoice.TAPE]
    assert on_tape == paths[3:5]


def test_what_traces_need_more_is_taken_from_what_a_plan_takes(
    profile: Profile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its budget may be so much larger that a little less of that makes the same plan again and again."""
    more: list[int] = []

    def played(_: Profile, plan: recollect.Plan) -> recollect.Plan:
        taken = plan.predicted_peak_bytes or 0
        more.append((plan.budget_bytes or 0) - taken + 1)
        return replace(plan, predicted_peak_bytes=taken + more[0], predicted_slowdown=0.1)

    monkeypatch.setattr(trace_planner, "predicted_plan", played)
    assert engines(recollect.plan(profile, "70%", engine="graph")) == {"graph"}
    assert more[0] > 64, "or any way of taking it would do"


def test_the_choice_of_an_engine(profile: Profile) -> None:
    """A trace runs all of backward in each half; otherwise the tape's own work shows in layers as small as these."""
    assert engines(recollect.plan(profile, "70%", engine="auto")) == {"graph"}
    assert engines(recollect.plan(recorded(split_backward=True), "70%", engine="auto")) == {"tape"}


@pytest.mark.parametrize("engine", ["auto", "graph"])
def test_layers_with_second_derivatives_stay_on_the_tape(engine: Any) -> None:
    """A trace has none: the first step under the plan would end in an error."""
    derived, plain = (nn.Sequential(*(Block(16, 0.0) for _ in range(8))) for _ in range(2))
    model, x = nn.ModuleDict({"derived": derived, "plain": plain}), torch.randn(32, 16, requires_grad=True)

    def step() -> None:
        (slope,) = torch.autograd.grad(derived(x).sum(), x, create_graph=True)
        (slope.square().sum() + plain(x).sum()).backward()

    profile = known_times(recollect.record(model, step=step, engine=engine))
    plan = recollect.plan(profile, "93%", engine=engine)
    chosen = {(path.split(".")[0], str(unit.engine)) for path, unit in plan.units.items() if unit.recomputes_anything}
    assert chosen == {("derived", "tape"), ("plain", "graph")}
    with recollect.apply(model, plan):
        step()
