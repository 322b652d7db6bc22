"""Measure what the repeated units of a recorded step take on engines besides the tape, and agree on it with other processes.

Dynamo traces a unit on the arguments of a recorded call; nothing of it runs. A unit has a joint record only if the trace has
the ops that were recorded.
"""

import math
import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, Final, get_args

import torch
from torch import nn

from recollect._torch_dtensor import local_part
from recollect._torch_fsdp import as_not_sharded
from recollect._torch_private import tree_leaves
from recollect.costs.hardware import Hardware
from recollect.engine.eager_forward import expect_compiler
from recollect.engine.graph.traced_op import TracedOp
from recollect.engine.own_checkpoints import running_unit
from recollect.errors import NotYetError, RecordError
from recollect.planning.planners import Engine
from recollect.profile.events import PEEK
from recollect.profile.graph import UnitGraph
from recollect.profile.joint import JointRecord
from recollect.profile.profile import Profile
from recollect.profile.variant import VariantRecord
from recollect.programs.cut import other_ops
from recollect.programs.play import new_results, values_by_memory
from recollect.progress import stage
from recollect.quantities import parse_bytes
from recollect.ranks.group import ALONE, Place, Ranks
from recollect.ranks.members import with_common_times
from recollect.recording.fake_model import fake_run
from recollect.recording.step_recorder import Costs
from recollect.recording.unit_runs import ModelledRuns, UnitRuns
from recollect.recording.unit_samples import FailedKinds, UnitSample, num_hooks
from recollect.recording.variants import with_variants


def with_joints(
    profile: Profile, samples: Mapping[int, UnitSample], device: torch.device, costs: Costs | None
) -> Profile:
    """Return a profile whose repeated units have joint records, or say why not.

    One that says so already is not traced. `samples`: for each graph, a call of a unit that has it, or has the same ops on as
    many bytes. Without the costs of the step's ops none has a workspace.
    """
    graphs = list(profile.graphs)
    repeated = sorted({c.graph for c in profile.calls if c.repeated and not graphs[c.graph].why_not_traced})
    found: dict[int, JointRecord | str] = {}
    failed = FailedKinds()
    with stage("tracing units", total=len({id(samples.get(index)) for index in repeated})) as done:
        for index in repeated:
            sample = samples.get(index)
            if id(sample) not in found:
                joint = (sample and failed.reason(sample)) or _traced(sample, graphs[index], profile, device, costs)
                if sample is not None and isinstance(joint, str):
                    failed.note(sample, joint)
                found[id(sample)] = joint
                done()
            graphs[index] = _with_joint(graphs[index], found[id(sample)])
    return replace(profile, graphs=tuple(graphs))


class _TracedError(Exception):
    """Ends the call that was traced, before any of it runs."""


def _traced(
    sample: UnitSample | None, graph: UnitGraph, profile: Profile, device: torch.device, costs: Costs | None
) -> JointRecord | str:
    """Trace a unit; or return why it cannot be traced."""
    # Here: it imports Dynamo.
    from recollect import _torch_dynamo as dynamo

    if sample is None:
        return "it cannot run outside its model"
    if sample.num_hooks != num_hooks(sample.module):
        return "it gets hooks while its model runs"
    found: list[JointRecord | str] = []
    # Where tracing fails, Dynamo may hold the backend, and must not hold tensors with it, nor code: that names classes, of
    # which those of parametrized modules hold their module.
    asked: list[tuple[UnitSample, UnitGraph, list[Any], Costs | None]] = []
    codes: list[Any] = []

    def backend(code: Any, _: Any) -> Any:
        codes.append(code)

        def run(*inputs: Any) -> None:
            try:
                found.append(_joint(*asked.pop(), codes.pop(), inputs))
            except Exception as error:  # noqa: BLE001 - the engine leaves the unit to the tape after any, too
                found.append(dynamo.first_line(error))
            raise _TracedError

        return run

    arguments: AbstractContextManager[tuple[Any, Any]]
    if profile.fake:
        arguments = fake_run(sample.module, (sample.args, sample.kwargs), device, kernels=profile.kernels)
    else:
        whole = sample.whole()
        arguments = nullcontext((whole.args, whole.kwargs))
    with (
        as_not_sharded(sample.module, sample.parameters),
        arguments as given,
        warnings.catch_warnings(),
        torch.enable_grad(),
        torch.autocast(device.type, dtype=sample.autocast, enabled=sample.autocast is not None),
        dynamo.tracing_as_eager(),
        running_unit(),
    ):
        warnings.simplefilter("ignore")
        args, kwargs = replace(sample, args=given[0], kwargs=given[1]).inputs([])
        asked.append((sample, graph, tree_leaves((args, kwargs)), costs))
        traced = dynamo.TracedWhole(_call, backend)
        try:
            traced.trace(sample.module.forward, args, kwargs)
        except _TracedError:
            return found[0]
        except Exception as error:
            if not dynamo.raised_by_tracing(error):
                raise
            return dynamo.first_line(error)
        finally:
            traced.release()
            asked.clear()
            codes.clear()
    return "nothing in it can be traced"


def _call(forward: Any, args: Any, kwargs: Any) -> Any:
    return forward(*args, **kwargs)


def _joint(
    sample: UnitSample, graph: UnitGraph, leaves: list[Any], costs: Costs | None, code: Any, inputs: Any
) -> JointRecord:
    from recollect._torch_dynamo import paths_around
    from recollect.engine.graph.code_names import check_code
    from recollect.engine.graph.joint import Joint, key_of
    from recollect.engine.graph.trace import Trace

    check_code(sample.module)
    trace = Trace(code, inputs, paths_around(code.graph, sample.module))

    def working_bytes(op: TracedOp) -> int:
        return 0 if costs is None or op.facts.changes_nothing else costs.working_bytes_of(key_of(op))

    joint = Joint(trace, trace.backward(trace.usual_tangents), working_bytes).record
    made = values_by_memory(graph, joint)
    # What it only leaves behind, as keys and values in a cache, gets no gradient.
    memory = {one: joint.tensors[one] for one in joint.outputs}
    left = {one for one, its in memory.items() if its in made and not graph.values[made[its]].is_output}
    if left:
        *strides, autocast = trace.usual_tangents
        kind = (None if one in left else its for one, its in zip(joint.outputs, strides, strict=True))
        joint = Joint(trace, trace.backward((*kind, autocast)), working_bytes).record
    values = {
        local_part(leaf).untyped_storage()._cdata: value
        for leaf, value in zip(leaves, sample.input_values, strict=True)
        if isinstance(leaf, torch.Tensor)
    }
    parts = map(local_part, trace.tensors_of(inputs))
    return replace(joint, input_values=tuple(values.get(part.untyped_storage()._cdata, -1) for part in parts))


def _with_joint(graph: UnitGraph, joint: JointRecord | str) -> UnitGraph:
    if isinstance(joint, str):
        return replace(graph, why_not_traced=joint)
    recorded = {op.name: op for op in graph.ops}
    named = [op for op in joint.ops[: joint.num_forward] if op.name]
    sizes = [(op.name, [] if op.writes else [joint.bytes_of(t) for t in new_results(op, joint)]) for op in named]
    found = [f"{name} of {made} bytes" for name, made in sizes if made or name in recorded]
    expected = [
        f"{op.name} of {[] if op.mutates else [graph.values[value].nbytes for value in op.outputs]} bytes"
        for op in graph.ops
    ]
    if found != expected:
        return replace(graph, why_not_traced=other_ops(found, expected))
    states = {name: op.state_bytes for name, op in recorded.items()}
    ops = (replace(op, state_bytes=states.get(op.name, 0)) for op in joint.ops)
    return replace(graph, joint=replace(joint, ops=tuple(ops)))


def check_engine(engine: str, model: nn.Module, *, split_backward: bool) -> None:
    """Check that units can be measured on an engine in a step, and let a model be compiled that is for the compiler."""
    if engine not in get_args(Engine):
        raise RecordError(f"engine: got {engine!r}, expected {', '.join(map(repr, get_args(Engine)))}")
    if engine != "compile":
        return
    if split_backward:
        raise _not_yet(
            engine, "split_backward", True, "units that find the two halves of the gradients apart", "Leave it out"
        )
    expect_compiler(model)


def with_engine(
    engine: Engine,
    profile: Profile,
    samples: Mapping[int, UnitSample],
    device: torch.device,
    *,
    hardware: Hardware | None = None,
    costs: Costs | None = None,
    ranks: Ranks = ALONE,
    place: Place = Place.START,
    compiled: Callable[[str, float], object] = lambda path, compile_s: None,
) -> Profile:
    """Return a profile with common times, whose repeated units have an engine's costs besides the tape's in all processes.

    With units inside `torch.compile`, the step is that in which they run as PyTorch chooses.
    """
    profile = with_common_times(profile, ranks, place)
    if engine in ("auto", "graph") and samples:
        return ranks.together(lambda: with_joints(profile, samples, device, costs), place)
    if engine != "compile":
        return profile

    def measured() -> Profile:
        for name, is_set in {
            "retain_graph": any(True for _ in profile.log.operands(PEEK)),
            "create_graph": any(graph.why_not_traced for graph in profile.graphs),
        }.items():
            if is_set:
                needs = "compiled code that runs backward twice"
                raise _not_yet("compile", name, True, needs, f"Make the step's backward without {name}")
        runs = UnitRuns(device) if hardware is None else ModelledRuns(device, hardware, profile.kernels)
        return with_variants(profile, samples, runs, compiled=compiled)

    return _compiled_step(with_common_times(_in_all(ranks.together(measured, place), ranks, place), ranks, place))


def check_host_engine(engine: str, host_budget: int | str) -> None:
    if engine not in ("tape", "auto") and parse_bytes(host_budget):
        raise _not_yet(engine, "host_budget", host_budget, "copies to host memory", "Leave out host_budget")


def _not_yet(engine: str, name: str, value: object, needs: str, advice: str) -> NotYetError:
    advice = f"{advice}; or leave the engine at 'tape', on which plans then recompute."
    return NotYetError(settings={"engine": engine, name: value}, needs=needs, advice=advice)


def _in_all(profile: Profile, ranks: Ranks, place: Place) -> Profile:
    """Return a profile whose units have only the variants that they have in all processes.

    Batches may differ, and give a unit different graphs in different processes: its path and the names of its values count.
    """
    paths: dict[int, list[str]] = {}
    for call in profile.calls:
        paths.setdefault(call.graph, []).append(call.path)
    own = {(path, key) for index, its in paths.items() for path in its for key in _measured_of(profile.graphs[index])}
    common = own.intersection(*ranks.gather(own, place))

    def left(index: int, graph: UnitGraph) -> UnitGraph:
        keys = {key for key in _measured_of(graph) if all((path, key) in common for path in paths[index])}
        kept = [variant for variant in graph.variants if _key_of(variant, graph) in keys]
        return replace(
            graph,
            eager_s=graph.eager_s if _DEFAULT in keys else 0.0,
            variants=tuple(kept) if _DEFAULT in keys else (),
        )

    return replace(profile, graphs=tuple(left(index, graph) for index, graph in enumerate(profile.graphs)))


# Variants go by the names of the values that they keep, but for this one.
_DEFAULT: Final = "PyTorch's choice"


def _measured_of(graph: UnitGraph) -> set[str | frozenset[str]]:
    return {_key_of(variant, graph) for variant in graph.variants}


def _key_of(variant: VariantRecord, graph: UnitGraph) -> str | frozenset[str]:
    return _DEFAULT if variant.is_default else frozenset(graph.values[index].name for index in variant.kept)


def _compiled_step(profile: Profile) -> Profile:
    """Return the profile of the step in which all units with variants run compiled, as PyTorch chooses."""
    graphs = profile.graphs
    compiled = [(call.num_runs, graphs[call.graph]) for call in profile.calls if graphs[call.graph].variants]
    saved_s = math.fsum(number * graph.beyond_default_s(graph.eager_s) for number, graph in compiled)
    units_s = math.fsum(number * graph.variants[0].step_s for number, graph in compiled)
    return replace(profile, step_s=max(units_s, profile.step_s - saved_s))
