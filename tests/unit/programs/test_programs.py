"""Programs of traced units: what they save, what runs again, and their bytes, against the meter to the byte."""

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import recollect
from blocks import Computes
from recollect.errors import ProfileFormatError
from recollect.planning.trace_planner import traced_where_known
from recollect.profile.events import StepLog
from recollect.profile.graph import OpRecord, UnitGraph, ValueRecord
from recollect.profile.joint import JointOp, JointRecord
from recollect.programs.cut import UntraceableError, cut
from recollect.programs.play import play
from recollect.programs.unit import cut_unit, played_unit
from recollect.recording import engines
from recollect.recording.engines import with_joints
from recollect.recording.unit_runs import trace_unit
from recollect.recording.unit_samples import UnitSample
from recollect.simulation.decisions import decide, decide_call, recompute_all_unit
from recollect.simulation.peak_sums import PeakSums
from recollect.simulation.predicted import predicted_plan

CPU = torch.device("cpu")
WIDTH = 16

# x -> exp -> sin, whose backward is cos of what exp made, times the gradient.
X, EXP, SIN, TANGENT, COS, OUT = range(6)
JOINT = JointRecord(
    storages=(64,) * 6,
    tensors=(0, 1, 2, 3, 4, 5),
    ops=(
        JointOp("aten.exp", "exp", reads=(X,), results=(EXP,)),
        JointOp("aten.sin", "sin", reads=(EXP,), results=(SIN,)),
        JointOp("aten.cos", reads=(EXP,), results=(COS,)),
        JointOp("aten.mul", reads=(TANGENT, COS), results=(OUT,)),
    ),
    num_forward=2,
    inputs=(X,),
    outputs=(SIN,),
    tangents=(TANGENT,),
    gradients=((OUT,),),
    input_values=(0,),
)
GRAPH = UnitGraph(
    (ValueRecord("x", 64, None), ValueRecord("exp", 64, 0), ValueRecord("sin", 64, 1, is_output=True)),
    (OpRecord("exp", (0,), (1,), 1e-6), OpRecord("sin", (1,), (2,), 1e-6)),
    joint=JOINT,
)


def test_what_is_kept_is_saved_and_what_is_dropped_runs_again_from_the_input() -> None:
    kept, dropped = cut_unit(GRAPH, frozenset()), cut_unit(GRAPH, frozenset({1}))
    assert kept is not None
    assert dropped is not None
    assert (kept.saved, kept.backward) == ((EXP,), (2, 3))
    assert (dropped.saved, dropped.backward) == ((X,), (0, 2, 3))


def test_what_reads_memory_before_it_is_written_to_runs_again_with_the_writes() -> None:
    """As activations in place do, which save a copy of what they write to."""
    written, copy = len(JOINT.tensors), len(JOINT.tensors) + 1
    ops = (
        JOINT.ops[0],
        JointOp("aten.clone", "clone", reads=(EXP,), results=(copy,)),
        JointOp("aten.relu_", "relu_", reads=(EXP,), results=(written,), writes=(EXP,)),
        JointOp("aten.sin", "sin", reads=(written,), results=(SIN,)),
        JointOp("aten.cos", reads=(TANGENT, written), results=(COS,)),
        JointOp("aten.mul", reads=(COS, copy), results=(OUT,)),
    )
    memory = {"storages": (64,) * 7, "tensors": (*JOINT.tensors, EXP, 6)}
    made = cut(replace(JOINT, **memory, ops=ops, num_forward=4), lambda number, index: False)
    assert (made.saved, made.backward) == ((X,), (0, 1, 2, 4, 5))


def test_what_cannot_run_again_with_the_writes_is_kept() -> None:
    """The sum reads what is written to afterwards, and what a different op makes of its old content."""
    read, derived, total, written = range(len(JOINT.tensors), len(JOINT.tensors) + 4)
    ops = (
        JOINT.ops[0],
        JointOp("aten.cos", "cos", reads=(EXP,), results=(read,)),
        JointOp("aten.neg", "neg", reads=(read,), results=(derived,)),
        JointOp("aten.add", "add", reads=(EXP, derived), results=(total,)),
        JointOp("aten.relu_", "relu_", reads=(EXP,), results=(written,), writes=(EXP,)),
        JointOp("aten.sin", "sin", reads=(written,), results=(SIN,)),
        JointOp("aten.mul", reads=(TANGENT, total), results=(OUT,)),
    )
    memory = {"storages": (64,) * 9, "tensors": (*JOINT.tensors, 6, 7, 8, EXP)}
    made = cut(replace(JOINT, **memory, ops=ops, num_forward=6), lambda number, index: False)
    assert (made.saved, made.backward) == ((total,), (6,))


def test_an_op_does_not_run_again_beside_a_kept_result_that_was_written_to() -> None:
    """Its second run would put the content from before the write in place of what is kept."""
    variance, mean, written = range(len(JOINT.tensors), len(JOINT.tensors) + 3)
    ops = (
        JOINT.ops[0],
        JointOp("aten.var_mean", "var_mean", reads=(EXP,), results=(variance, mean)),
        JointOp("aten.mul_", "mul_", reads=(mean,), results=(written,), writes=(7,)),
        JointOp("aten.sin", "sin", reads=(variance,), results=(SIN,)),
        JointOp("aten.cos", reads=(TANGENT, variance), results=(COS,)),
        JointOp("aten.mul", reads=(COS, written), results=(OUT,)),
    )
    joint = replace(JOINT, storages=(64,) * 8, tensors=(*JOINT.tensors, 6, 7, 7), ops=ops, num_forward=4)
    made = cut(joint, lambda number, index: number == 2)
    assert (made.saved, made.backward) == ((variance, written), (4, 5))


def test_an_op_that_writes_to_an_argument_and_returns_what_is_written_to_does_not_run_again() -> None:
    result, written = range(len(JOINT.tensors), len(JOINT.tensors) + 2)
    ops = (
        JOINT.ops[0],
        JointOp("own.fill", "fill", reads=(EXP,), results=(result,), writes=(EXP,)),
        JointOp("aten.mul_", "mul_", reads=(result,), results=(written,), writes=(6,)),
        JointOp("aten.sin", "sin", reads=(EXP,), results=(SIN,)),
        JointOp("aten.cos", reads=(TANGENT, EXP), results=(COS,)),
        JointOp("aten.mul", reads=(COS, written), results=(OUT,)),
    )
    joint = replace(JOINT, storages=(64,) * 7, tensors=(*JOINT.tensors, 6, 6), ops=ops, num_forward=4)
    with pytest.raises(UntraceableError, match="^own.fill reads what is written to afterwards, and would run again$"):
        cut(joint, lambda number, index: number == 2)


def test_bytes_of_both() -> None:
    kept, dropped = (played_unit(GRAPH, frozenset(values), "cpu", is_chained=False) for values in ((), (1,)))
    # Beside the gradient that comes in: cos beside exp, and the gradient beside cos; both are gone at the end.
    assert (kept.kept, kept.held, kept.own_bytes, kept.forward_bytes) == ((1,), (), 64, 128)
    assert kept.backward == ((64, -64, -1),)
    # The input is let go of once exp has run again.
    assert (dropped.held, dropped.own_bytes) == ((0,), 0)
    assert dropped.backward == ((64, 64, 0), (64, -64, -1))


def test_a_workspace_counts_while_its_op_runs() -> None:
    ops = (JOINT.ops[0], replace(JOINT.ops[1], working_bytes=500), *JOINT.ops[2:])
    graph = replace(GRAPH, joint=replace(JOINT, ops=ops))
    assert played_unit(graph, frozenset(), "cpu", is_chained=False).forward_bytes == 64 + 500


def test_a_chain_frees_what_it_hands_over() -> None:
    """The gradient of w is there first, and nothing reads w any more; x is then let go of."""
    x, w, product, tangent, grad_w, grad_x = range(6)
    ops = (
        JointOp("aten.mul", "mul", reads=(x, w), results=(product,)),
        JointOp("aten.mul", reads=(tangent, x), results=(grad_w,)),
        JointOp("aten.neg", reads=(tangent,), results=(grad_x,)),
    )
    gradients = ((grad_x,), (grad_w,))
    joint = replace(
        JOINT, ops=ops, num_forward=1, inputs=(x, w), outputs=(product,), gradients=gradients, parameters=(1,)
    )
    values = (ValueRecord("x", 64, None), ValueRecord("mul", 64, 0, is_output=True))
    joint = replace(joint, input_values=(0, -1))
    graph = UnitGraph(values, (OpRecord("mul", (0,), (1,), 1e-6),), joint=joint)
    whole, chained = (played_unit(graph, frozenset(), "cpu", is_chained=flag).backward for flag in (False, True))
    assert whole == ((64, 64, 0), (64, 0, -1))
    assert chained == ((64, 64, 0), (0, -64, -1))


def test_what_ranks_run_together_does_not_run_again() -> None:
    joint = replace(
        JOINT, ops=(replace(JOINT.ops[0], stays="it would run again, which ranks agree on"), *JOINT.ops[1:])
    )
    with pytest.raises(UntraceableError, match="^it would run again, which ranks agree on$"):
        cut(joint, lambda number, index: False)
    assert cut_unit(replace(GRAPH, joint=joint), frozenset({1})) is None


def test_a_unit_without_a_trace_is_not_played() -> None:
    graph = replace(GRAPH, joint=None)
    assert cut_unit(graph, frozenset()) is None
    with pytest.raises(ValueError, match="^the unit has no trace that can be cut so, expected one$"):
        played_unit(graph, frozenset(), "cpu", is_chained=False)
    made = cut_unit(GRAPH, frozenset())
    assert made is not None
    with pytest.raises(ValueError, match="^joint: got none, expected a unit that was traced$"):
        play(graph, made)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"inputs": (7,)}, "joint: tensor 7, expected 0 to 5"),
        ({"tensors": (0, 1, 2, 3, 4, 9)}, "joint: memory 9, expected 0 to 5"),
        ({"num_forward": 5}, "joint: 5 ops of forward, expected 0 to 4"),
    ],
)
def test_a_joint_record_refers_to_what_is_there(change: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}$"):
        replace(JOINT, **change)


def layer(read: Callable[[Tensor], Tensor] = lambda hidden: hidden) -> Computes:
    """Attention and a product, with dropout, and the input read twice. [8, 16] -> [8, 16]."""

    def run(self: Any, hidden: Tensor) -> Tensor:
        hidden = read(hidden)
        query, key, value = self.mixed(self.norm(hidden)).view(1, 8, 6, 8).transpose(1, 2).split(2, 1)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2)
        hidden = hidden + attended.reshape(8, WIDTH)
        return hidden + F.dropout(self.narrow(F.gelu(self.wide(hidden))), 0.1)

    parts = {"norm": nn.LayerNorm(WIDTH), "mixed": nn.Linear(WIDTH, 3 * WIDTH), "wide": nn.Linear(WIDTH, 32)}
    return Computes(run, **parts, narrow=nn.Linear(32, WIDTH, bias=False))


class Layers(nn.Module):
    def __init__(self, make: Callable[[], nn.Module] = layer) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(make() for _ in range(2))

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = self.stem(hidden)
        for one in self.layers:
            hidden = one(hidden)
        return hidden.square().mean()


Recorded = tuple[recollect.Profile, dict[int, UnitSample]]


@pytest.fixture(scope="module")
def recorded() -> Recorded:
    """A step on the graph engine, and samples of its units."""
    samples: dict[int, UnitSample] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            engines, "with_joints", lambda p, found, *rest: samples.update(found) or with_joints(p, found, *rest)
        )
        return recollect.record(Layers(), torch.randn(8, WIDTH), engine="graph"), samples


def test_each_program_takes_what_the_meter_says(recorded: Recorded) -> None:
    profile, samples = recorded
    assert recollect.Profile.from_json(profile.to_json()) == profile
    index = next(call.graph for call in profile.calls if call.repeated)
    graph, sample = profile.graphs[index], samples[index]
    lean = recompute_all_unit(graph).actions
    every_other = {name: action if number % 2 else "keep" for number, (name, action) in enumerate(lean.items())}
    for actions in (every_other, lean):
        unit = recollect.UnitPlan(actions, engine="graph")
        played = played_unit(graph, decide_call(graph, unit).values.recomputed, "cpu", is_chained=False)
        module = sample.copied_module()
        with recollect.apply(module, recollect.Plan({"": unit})):
            for _ in range(3):
                found = trace_unit(sample, lambda *args, module=module, **kwargs: module(*args, **kwargs), CPU)
                module.zero_grad()
        assert (found.held, found.own_bytes, found.backward) == (played.held, played.own_bytes, played.backward)
        # Room for the state that is copied beside other threads.
        assert found.forward_bytes <= played.forward_bytes <= found.forward_bytes + 5056


@pytest.mark.parametrize("gradients", ["freed", "accumulated"])
def test_the_peak_of_a_step(gradients: Any) -> None:
    """Gradients that are there already are handed over by a chain of nodes, and freed."""
    model, data = Layers(), torch.randn(8, WIDTH)
    profile = recollect.record(model, data, engine="graph", gradients=gradients, holds_output=False)
    lean = {call.path: recompute_all_unit(profile.graph_of(call)) for call in profile.calls if call.repeated}
    plan = predicted_plan(profile, traced_where_known(profile, recollect.Plan(lean)))
    with recollect.apply(model, plan):
        for _ in range(3):
            if gradients == "freed":
                model.zero_grad()
            found = recollect.measure_peak(lambda: model(data).backward(), device="cpu")
    measured = profile.persistent_bytes + found.peak_growth_bytes
    assert measured <= (plan.predicted_peak_bytes or 0) <= measured + 2048


@pytest.mark.parametrize("accumulates", [False, True], ids=["into none", "into gradients"])
@pytest.mark.parametrize("is_lean", [True, False], ids=["lean", "every other"])
def test_the_peak_of_a_backward_that_keeps_its_graph(is_lean: bool, accumulates: bool) -> None:
    """What a trace saved stays until the last backward, and each runs all of it; what it begins with does not stay."""
    model, data = Layers(), torch.randn(8, WIDTH)

    def step() -> None:
        loss = model(data)
        loss.backward(retain_graph=True)
        loss.backward()
        model.zero_grad(set_to_none=not accumulates)

    step()
    profile = recollect.record(model, step=step, engine="graph")
    units = {call.path: recompute_all_unit(profile.graph_of(call)) for call in profile.calls if call.repeated}
    if not is_lean:
        actions = units["layers.0"].actions
        mixed = {name: action if number % 2 else "keep" for number, (name, action) in enumerate(actions.items())}
        units = dict.fromkeys(units, recollect.UnitPlan(mixed))
    plan = predicted_plan(profile, traced_where_known(profile, recollect.Plan(units)))
    with recollect.apply(model, plan):
        for _ in range(3):
            found = recollect.measure_peak(step, device="cpu")
    measured = profile.persistent_bytes + found.peak_growth_bytes
    assert measured <= (plan.predicted_peak_bytes or 0) <= measured + 2048
    assert PeakSums.of(profile).peaks(decide(profile, plan)).peak_bytes == plan.predicted_peak_bytes


def test_attached_steps_hold_what_their_programs_take() -> None:
    def waves() -> Computes:
        return Computes(lambda self, x: x + self.linear(x.sin()).exp().cos(), linear=nn.Linear(WIDTH, WIDTH))

    model = Layers(waves)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    attached = recollect.attach(model, optimizer, "85%", engine="graph", measure=True, log=lambda line: None)
    for _ in range(5):
        model(torch.randn(256, WIDTH)).backward()
        optimizer.step()
        optimizer.zero_grad()
    plan = attached.plan
    assert plan is not None
    assert {str(plan.units[f"layers.{index}"].engine) for index in range(2)} == {"graph"}
    measured = attached.numbers["measured_peak_bytes"]
    assert measured <= (plan.predicted_peak_bytes or 0) <= measured + 2048


def test_a_traced_unit_takes_time_of_its_own(recorded: Recorded) -> None:
    profile, _ = recorded
    lean = {call.path: recompute_all_unit(profile.graph_of(call)) for call in profile.calls if call.repeated}
    plan = traced_where_known(profile, recollect.Plan(lean))
    host = profile.host
    assert host is not None

    def slowdown(unit_s: float) -> float:
        known = replace(profile, host=replace(host, traced_unit_s=unit_s))
        return predicted_plan(known, plan).predicted_slowdown or 0.0

    assert (slowdown(10.0) - slowdown(0.0)) * profile.step_s == pytest.approx(10 * len(lean))


def test_a_planner_of_traces_stays_within_its_budget(recorded: Recorded) -> None:
    profile, _ = recorded
    plan = recollect.plan(profile, "90%", engine="graph")
    assert {str(plan.units[f"layers.{index}"].engine) for index in range(2)} == {"graph"}
    assert (plan.predicted_peak_bytes or 0) <= (plan.budget_bytes or 0)


def test_a_unit_that_gets_hooks_while_its_model_runs_is_not_traced() -> None:
    class Hooked(Layers):
        def forward(self, hidden: Tensor) -> Tensor:
            handle = self.layers[0].get_submodule("norm").register_forward_hook(lambda *_: None)
            hidden = super().forward(hidden)
            handle.remove()
            return hidden

    profile = recollect.record(Hooked(), torch.randn(8, WIDTH), engine="graph")
    why = next(profile.graph_of(call).why_not_traced for call in profile.calls if call.path == "layers.0")
    assert why == "it gets hooks while its model runs"


def test_layers_alike_are_traced_each_where_they_run_different_ops() -> None:
    """As in Swin, where every second layer shifts its windows."""
    shifts = iter((0, 1))

    def shifting() -> Computes:
        def run(self: Any, hidden: Tensor) -> Tensor:
            return torch.tanh(self.linear(hidden.roll(1) if self.shift else hidden))

        return Computes(run, linear=nn.Linear(WIDTH, WIDTH), shift=next(shifts))

    profile = recollect.record(Layers(shifting), torch.randn(8, WIDTH), engine="graph")
    assert {graph.why_not_traced for graph in profile.graphs} == {""}
    assert len({graph.joint for graph in profile.graphs if graph.joint}) == 2


def test_layers_alike_are_traced_each_on_the_strides_that_they_get() -> None:
    """A linear layer adds its bias apart if its input is not contiguous."""

    def transposing() -> Computes:
        def run(self: Any, hidden: Tensor) -> Tensor:
            return torch.tanh(self.linear(hidden)).transpose(0, 1)

        return Computes(run, linear=nn.Linear(WIDTH, WIDTH))

    profile = recollect.record(Layers(transposing), torch.randn(8, 8, WIDTH), engine="graph")
    assert {graph.why_not_traced for graph in profile.graphs} == {""}


@pytest.mark.parametrize("make", [lambda: SimpleNamespace(keys=[]), lambda: {"keys": []}], ids=["an object", "a dict"])
def test_a_unit_that_adds_to_what_others_computed_is_traced(make: Callable[[], Any]) -> None:
    """As a layer with adapters gets the keys of those before it, in a cache; their own input needs no gradient."""

    class Caching(Layers):
        def forward(self, hidden: Tensor) -> Tensor:
            cache = make()
            for unit in self.layers:
                hidden = unit(hidden, cache)
            return hidden.square().mean()

    def caches() -> Computes:
        def run(self: Any, hidden: Tensor, cache: Any) -> Tensor:
            keys = cache["keys"] if isinstance(cache, dict) else cache.keys
            keys.append(self.linear(hidden))
            return torch.tanh(hidden + keys[-1])

        return Computes(run, linear=nn.Linear(WIDTH, WIDTH))

    profile = recollect.record(Caching(caches), torch.randn(8, WIDTH), engine="graph")
    assert {graph.why_not_traced for graph in profile.graphs} == {""}


def test_a_unit_that_cannot_be_traced_stays_on_the_tape() -> None:
    def branches() -> Computes:
        return layer(lambda hidden: hidden if hidden.sum() > 1e9 else hidden.clone())

    profile = recollect.record(Layers(branches), torch.randn(8, WIDTH), engine="graph")
    graph = next(profile.graph_of(call) for call in profile.calls if call.repeated)
    assert graph.joint is None
    assert graph.why_not_traced.startswith("Data-dependent branching")
    plan = recollect.plan(profile, "90%", engine="graph")
    assert {str(unit.engine) for unit in plan.units.values()} == {"tape"}


def test_a_document_with_an_impossible_joint_record_says_where() -> None:
    profile = recollect.Profile((GRAPH,), (), StepLog(), step_s=0.0)
    text = profile.to_json().replace('"num_forward":2', '"num_forward":9')
    with pytest.raises(ProfileFormatError, match=r"^graphs\[0\].joint: joint: 9 ops of forward, expected 0 to 4$"):
        recollect.Profile.from_json(text)
