"""Trace the repeated units of a recorded step, so that plans can be predicted under which they run from traces.

Dynamo traces a unit on the arguments of a recorded call; nothing of it runs. A unit has a joint record only if the trace has
the ops that were recorded.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from recollect._torch_fsdp import as_not_sharded
from recollect._torch_private import tree_leaves
from recollect.engine.own_checkpoints import running_unit
from recollect.profile.graph import UnitGraph
from recollect.profile.joint import JointRecord
from recollect.profile.profile import Profile
from recollect.programs.cut import other_ops
from recollect.programs.play import new_results, values_by_memory
from recollect.progress import stage
from recollect.recording.fake_model import fake_run
from recollect.recording.step_recorder import Costs
from recollect.recording.unit_samples import UnitSample, num_hooks

if TYPE_CHECKING:
    from recollect.engine.graph.traced_op import TracedOp


def with_joints(
    profile: Profile, samples: Mapping[int, UnitSample], device: torch.device, costs: Costs | None
) -> Profile:
    """Return a profile whose repeated units have joint records, or say why not.

    Args:
        profile: of a step.
        samples: for each graph, a call of a unit that has it, or has the same ops on as many bytes.
        device: where they run.
        costs: of the ops of the step; without it no op has a workspace.
    """
    repeated = sorted({call.graph for call in profile.calls if call.repeated})
    graphs = list(profile.graphs)
    found: dict[int, JointRecord | str] = {}
    with stage("tracing units", total=len({id(samples.get(index)) for index in repeated})) as done:
        for index in repeated:
            sample = samples.get(index)
            if id(sample) not in found:
                found[id(sample)] = _traced(sample, graphs[index], profile, device, costs)
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
    # Dynamo holds the backend for good, and must not hold tensors with it.
    asked: list[tuple[UnitSample, UnitGraph, list[Any], Costs | None]] = []

    def backend(code: Any, _: Any) -> Any:
        def run(*inputs: Any) -> None:
            try:
                found.append(_joint(*asked.pop(), code, inputs))
            except Exception as error:  # noqa: BLE001 - the engine leaves the unit to the tape after any, too
                found.append(dynamo.first_line(error))
            raise _TracedError

        return run

    fakes = fake_run(sample.module, (sample.args, sample.kwargs), device, kernels=profile.kernels)
    with (
        as_not_sharded(sample.module, sample.parameters),
        fakes if profile.fake else nullcontext((sample.whole().args, sample.whole().kwargs)) as given,
        warnings.catch_warnings(),
        torch.enable_grad(),
        torch.autocast(device.type, dtype=sample.autocast, enabled=sample.autocast is not None),
        dynamo.tracing_as_eager(),
        running_unit(),
    ):
        warnings.simplefilter("ignore")
        args, kwargs = replace(sample, args=given[0], kwargs=given[1]).inputs([])
        asked.append((sample, graph, tree_leaves((args, kwargs)), costs))
        try:
            dynamo.TracedWhole(_call, backend).trace(sample.module.forward, args, kwargs)  # type: ignore[arg-type]
        except _TracedError:
            return found[0]
        except Exception as error:
            if not dynamo.raised_by_tracing(error):
                raise
            return dynamo.first_line(error)
        finally:
            asked.clear()
    return "nothing in it can be traced"


def _call(forward: Any, args: Any, kwargs: Any) -> Any:
    return forward(*args, **kwargs)


def _joint(
    sample: UnitSample, graph: UnitGraph, leaves: list[Any], costs: Costs | None, code: Any, inputs: Any
) -> JointRecord:
    from recollect._torch_dynamo import module_path
    from recollect.engine.graph.code_names import check_code
    from recollect.engine.graph.joint import Joint, key_of
    from recollect.engine.graph.trace import Trace

    check_code(sample.module)
    names = {id(module): path for path, module in reversed(list(sample.module.named_modules(remove_duplicate=False)))}
    paths = {node.name: names[id(sample.module.get_submodule(module_path(node)))] for node in code.graph.nodes}
    trace = Trace(code, inputs, paths)

    def working_bytes(op: TracedOp) -> int:
        return 0 if costs is None or op.facts.changes_nothing else costs.known_working_bytes(key_of(op))

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
        leaf.untyped_storage()._cdata: value
        for leaf, value in zip(leaves, sample.input_values, strict=True)
        if isinstance(leaf, torch.Tensor)
    }
    return replace(joint, input_values=tuple(values.get(one.untyped_storage()._cdata, -1) for one in inputs))


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
